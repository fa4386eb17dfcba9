// DOING IT, quantisation: a matrix of BF16 to MXFP8, row by row, column by column, or both in one pass over it.
//
// A tile of 128 x 128 goes through memory of the WG: read line by line, quantised by blocks of either direction, each by one
// lane, and written in lines again, those of the columns' copy too. No lane needs to know of another's numbers.
#pragma once
#include "../schedule/mx.h"
#include "mx_copy.h"

struct QuantizeParams {  // mirrored by kosmos_raw/build/params.py
  const Vec16* x;        // [rows, ld] bf16
  MxCopy by_row, by_column;
  Chunks m;              // groups of rows: none shares a block of a column with another. tile_m is 128
  u32 columns, ld;       // ld is a multiple of 8; what lies between is zero
  u32 rule;              // a ScaleRule
  u32 wgs;
};
static_assert(sizeof(QuantizeParams) == 120);

constexpr u32 MX_TILE = MX_STEP;

// The tile in the WG's memory, and its columns' copy. Places of words are swizzled so that lanes meet on no bank, whether
// they read rows, columns, or whole lines.
struct MxScratch {
  static constexpr u32 WORDS = MX_TILE / 8, PITCH = MX_TILE / 16 + 1;  // 16-byte words of a line
  static constexpr u32 COPY_AT = MX_TILE * WORDS * 16, SCALES_AT = COPY_AT + MX_TILE * PITCH * 16;
  static constexpr u32 BYTES = SCALES_AT + MX_TILE * 4;
  unsigned char* at;

  DEVICE Vec16* word(u32 row, u32 i) const { return (Vec16*)at + row * WORDS + (i ^ i >> 3 ^ (row & 1) << 1); }
  DEVICE const u16* element(u32 row, u32 column) const { return (const u16*)word(row, column / 8) + column % 8; }
  DEVICE Vec16* copy(u32 line, u32 i) const { return (Vec16*)(at + COPY_AT) + line * PITCH + i; }
  DEVICE unsigned char* scale(u32 line, u32 block) const { return at + SCALES_AT + line * 4 + block; }
};

struct Eight { u16 of[8]; };

// Rows and columns of the source that a tile has: fewer at its ends, where the rest counts as zeros.
struct MxTile { u32 row, column, rows, columns; };

DEVICE inline void read_tile(const QuantizeParams& p, const MxTile& t, const MxScratch& s) {
  constexpr u32 BATCH = 8, WORDS = MxScratch::WORDS;
  const Vec16* from = p.x + ((u64)t.row * p.ld + t.column) / 8;
  for (u32 first = target::lane(); first < MX_TILE * WORDS; first += BATCH * target::lanes()) {
    Vec16 v[BATCH];
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      const u32 i = first + j * target::lanes(), row = i / WORDS, word = i % WORDS;
      v[j] = {};
      if (row < t.rows && word * 8 < t.columns) v[j] = target::read(from + (u64)row * (p.ld / 8) + word);
    }
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      const u32 i = first + j * target::lanes();
      if (i < MX_TILE * WORDS) *s.word(i / WORDS, i % WORDS) = v[j];
    }
  }
}

DEVICE inline void quantize_rows(const QuantizeParams& p, const MxTile& t, const MxScratch& s) {
  const MxCopy& to = p.by_row;
  for (u32 i = target::lane(); i < MX_TILE * 4; i += target::lanes()) {
    const u32 row = i / 4, block = i % 4;
    u32 x[MX_BLOCK], elements[MX_BLOCK / 4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      const Eight v = __builtin_bit_cast(Eight, *s.word(row, block * 4 + j));
#pragma unroll
      for (u32 k = 0; k < 8; k++) x[j * 8 + k] = (u32)v.of[k] << 16;
    }
    const u32 byte = quantize_block(x, (ScaleRule)p.rule, elements);
    if (row < t.rows) put_mxfp8(to, t.row + row, t.column + block * MX_BLOCK, elements, byte);
  }
}

// `first`: where in a line of the copy the tile begins.
DEVICE inline void quantize_columns(const QuantizeParams& p, const MxTile& t, u32 first, const MxScratch& s) {
  const MxCopy& to = p.by_column;
  for (u32 i = target::lane(); i < MX_TILE * 4; i += target::lanes()) {
    const u32 line = i % MX_TILE, block = i / MX_TILE;
    u32 x[MX_BLOCK], elements[MX_BLOCK / 4];
#pragma unroll
    for (u32 j = 0; j < MX_BLOCK; j++) x[j] = (u32)*s.element(block * MX_BLOCK + j, line) << 16;
    *s.scale(line, block) = (unsigned char)quantize_block(x, (ScaleRule)p.rule, elements);
    *s.copy(line, block * 2) = word_of(elements);
    *s.copy(line, block * 2 + 1) = word_of(elements + 4);
  }
  target::barrier();
  for (u32 i = target::lane(); i < t.columns * 8; i += target::lanes())
    target::write(to.elements + ((u64)(t.column + i / 8) * to.depth + first) / 16 + i % 8, *s.copy(i / 8, i % 8));
  for (u32 i = target::lane(); i < t.columns; i += target::lanes())
    target::write(to.scales + (u64)(first / MX_STEP) * to.ld_scales + t.column + i, *(const u32*)s.scale(i, 0));
}

// All tiles, dealt to WGs in turn: along rows first, so that what is written together lies together.
DEVICE inline void quantize(const QuantizeParams& p, unsigned char* scratch) {
  const MxScratch s{scratch};
  const u32 across = (p.columns + MX_TILE - 1) / MX_TILE;
  u32 i = target::wg(), first = 0;  // first: of the group in a line of the columns' copy
  for (u32 q = 0; q < MAX_RANKS; q++) {
    for (; i < p.m.tile_rows(q) * across; i += p.wgs) {
      const u32 row = i / across, column = i % across * MX_TILE, left = p.columns - column;
      const MxTile t = {p.m.first[q] + row * MX_TILE, column, p.m.rows_in(q, row), left < MX_TILE ? left : MX_TILE};
      read_tile(p, t, s);
      target::barrier();
      if (p.by_row.elements) quantize_rows(p, t, s);
      if (p.by_column.elements) quantize_columns(p, t, first + row * MX_TILE, s);
      target::barrier();  // all have read: the next tile may come
    }
    i -= p.m.tile_rows(q) * across;
    first += padded_to_step(p.m.rows(q));
  }
}
