// DOING IT, MXFP8 as it is made: blocks of a copy (schedule/mx.h), from BF16 along its rows or across them. Where a target
// cannot multiply MXFP8, a copy is BF16 that lies alike, of what the blocks stand for, and has no scales.
#pragma once
#include "../schedule/mx.h"
#include "bf16.h"
#include "mxfp8.h"

constexpr u32 MX_WORD = target::MULTIPLIES_MXFP8 ? 16 : 8;  // elements of a 16-byte word of what tiles multiply

DEVICE inline Vec16 word_of(const u32* four) { return {four[0] | (u64)four[1] << 32, four[2] | (u64)four[3] << 32}; }
// Eight elements as BF16 of what they stand for. Exact, but for scales of extreme blocks: below byte 3 the smallest elements
// round, and past byte 246 the largest are infinite.
DEVICE inline Vec16 dequantized(u64 eight, float scale) {
  float x[8];
#pragma unroll
  for (u32 i = 0; i < 8; i++) x[i] = from_e4m3((u32)(eight >> 8 * i) & 255) * scale;
  return eight_bf16(x);
}

// Elements k .. k + 31 of a line, and their scale.
DEVICE inline void put_mxfp8(const MxCopy& to, u64 line, u32 k, const u32 (&elements)[MX_BLOCK / 4], u32 byte) {
  Vec16* at = to.elements + (line * to.depth + k) / 16;
  target::write(at, word_of(elements));
  target::write(at + 1, word_of(elements + 4));
  const u32* scales = to.scales + (u64)(k / MX_STEP) * to.ld_scales + line;
  target::write((unsigned char*)scales + k % MX_STEP / MX_BLOCK, (unsigned char)byte);
}
// The same, of what tiles multiply.
DEVICE inline void put_block(const MxCopy& to, u64 line, u32 k, const u32 (&x)[MX_BLOCK]) {
  u32 elements[MX_BLOCK / 4];
  const u32 byte = quantize_block(x, SCALE_UP, elements);
  if constexpr (target::MULTIPLIES_MXFP8) return put_mxfp8(to, line, k, elements, byte);
  const float scale = scale_value(byte);
#pragma unroll
  for (u32 i = 0; i < MX_BLOCK / 8; i++) {
    const u64 eight = elements[2 * i] | (u64)elements[2 * i + 1] << 32;
    target::write(to.elements + (line * to.depth + k) / 8 + i, dequantized(eight, scale));
  }
}

// Lines from `line` on, one of each of `rows` rows, elements from k on, `blocks` blocks. get(row, block, four): four words of
// eight BF16.
template <class Get> DEVICE inline void quantize_along(const MxCopy& to, u64 line, u32 k, u32 rows, u32 blocks, Get get) {
  for (u32 i = target::lane(); i < rows * blocks; i += target::lanes()) {
    const u32 row = i / blocks, block = i % blocks;
    Vec16 four[4];
    get(row, block, four);
    u32 x[MX_BLOCK];
#pragma unroll
    for (u32 j = 0; j < MX_BLOCK; j++) x[j] = bf16_in(four[j / 8], j % 8) << 16;
    put_block(to, line + row, k + block * MX_BLOCK, x);
  }
}
// Lines from `line` on, four of each of `fours` times four columns; elements from k on, of `blocks` times 32 rows.
// get(row, four): four BF16.
template <class Get> DEVICE inline void quantize_across(const MxCopy& to, u64 line, u32 k, u32 blocks, u32 fours, Get get) {
  for (u32 i = target::lane(); i < blocks * fours; i += target::lanes()) {
    const u32 block = i / fours, four = i % fours;
    u64 rows[MX_BLOCK];
#pragma unroll
    for (u32 j = 0; j < MX_BLOCK; j++) rows[j] = get(block * MX_BLOCK + j, four);
#pragma unroll 1
    for (u32 c = 0; c < 4; c++) {
      u32 x[MX_BLOCK];
#pragma unroll
      for (u32 j = 0; j < MX_BLOCK; j++) x[j] = (u32)(rows[j] >> 16 * c & 0xffff) << 16;
      put_block(to, line + 4 * four + c, k + block * MX_BLOCK, x);
    }
  }
}
// Rows of `words` words, zeros behind the first `rows`: as quantize_across wants them.
struct FoursOf {
  const Vec16* from;
  u32 words, rows;
  DEVICE u64 operator()(u32 row, u32 four) const {
    return row < rows ? target::read((const u64*)(from + (u64)row * words) + four) : 0;
  }
};
