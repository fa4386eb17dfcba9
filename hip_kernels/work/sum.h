// DOING IT, sums of a split contraction, and where an FP32 result goes.
#pragma once
#include "../schedule/split.h"
#include "bf16.h"

// What is done with four sums of a result: stored, or added to what is there; as BF16 or FP32.
enum Into : u32 { SET_BF16, ADD_BF16, SET_F32, ADD_F32 };

DEVICE inline bool is_f32(Into into) { return into == SET_F32 || into == ADD_F32; }
DEVICE inline float float_of_four(const Vec16& v, u32 j) {
  return __builtin_bit_cast(float, (u32)((j < 2 ? v.lo : v.hi) >> 32 * (j % 2)));
}

// What lies at element `at`, if it is added to.
DEVICE inline Vec16 read_four(const void* c, u64 at, Into into) {
  if (into == ADD_F32) return target::read((const Vec16*)c + at / 4);
  if (into == ADD_BF16) return {target::read((const u64*)c + at / 4), 0};
  return {};
}
DEVICE inline void put_four(void* c, u64 at, Into into, const float (&four)[4], const Vec16& was) {
  float x[4] = {four[0], four[1], four[2], four[3]};
  for (u32 j = 0; j < 4 && into == ADD_F32; j++) x[j] += float_of_four(was, j);
  for (u32 j = 0; j < 4 && into == ADD_BF16; j++) x[j] += from_bf16(was.lo >> 16 * j & 0xffff);
  if (!is_f32(into)) return target::write((u64*)c + at / 4, pack_bf16(x[0], x[1], x[2], x[3]));
  const auto bits = [&](u32 j) { return (u64)__builtin_bit_cast(u32, x[j]); };
  target::write((Vec16*)c + at / 4, Vec16{bits(0) | bits(1) << 32, bits(2) | bits(3) << 32});
}

// Where the sums of a tile go: its first element in c, which has lines of ld (kernels/tile_operands.h, sums_to).
struct SumsTo {
  void* c;
  u64 first;
  u32 ld;
  Into into;
  DEVICE u64 at(u32 row, u32 column) const { return first + (u64)row * ld + column; }
  DEVICE Vec16 was(u32 row, u32 column) const { return read_four(c, at(row, column), into); }
  DEVICE void put(u32 row, u32 column, const float (&four)[4], const Vec16& was) const { put_four(c, at(row, column), into, four, was); }
};

// The sums of all parts of `rows` x `cols` of a result, from its element `first` on; part p of it lies p * stride behind.
DEVICE inline void sum_parts(const Split& s, u64 stride, void* c, Into into, u64 first, u32 ld, u32 rows, u32 cols) {
  const u32 fours = (cols + 3) / 4;
  for (u32 i = target::lane(); i < rows * fours; i += target::lanes()) {
    const u64 at = first + (u64)(i / fours) * ld + i % fours * 4;
    float x[4] = {};
    for (u32 part = 0; part < s.parts; part++) {
      const Vec16 v = target::read((const Vec16*)s.sums + (part * stride + at) / 4);
      for (u32 j = 0; j < 4; j++) x[j] += float_of_four(v, j);
    }
    put_four(c, at, into, x, read_four(c, at, into));
  }
}
