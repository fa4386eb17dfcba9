// DOING IT, sums of a split contraction, and where an FP32 result goes.
#pragma once
#include "../schedule/split.h"
#include "bf16.h"
#include "scalar.h"

// What is done with four sums of a result: stored, or added to what is there; as BF16 or FP32.
enum Into : u32 { SET_BF16, ADD_BF16, SET_F32, ADD_F32 };

DEVICE inline bool is_f32(Into into) { return into == SET_F32 || into == ADD_F32; }

// What lies at element `at`, if it is added to.
DEVICE inline Vec16 read_four(const void* c, u64 at, Into into) {
  if (into == ADD_F32) return target::read((const Vec16*)c + at / 4);
  if (into == ADD_BF16) return {target::read((const u64*)c + at / 4), 0};
  return {};
}
DEVICE inline void put_four(void* c, u64 at, Into into, const float (&four)[4], const Vec16& was) {
  float x[4] = {four[0], four[1], four[2], four[3]};
  for (u32 j = 0; j < 4 && into == ADD_F32; j++) x[j] += float_of_four(was, j);
  for (u32 j = 0; j < 4 && into == ADD_BF16; j++) x[j] += bf16_at(was, j);
  if (!is_f32(into)) return target::write((u64*)c + at / 4, pack_bf16(x[0], x[1], x[2], x[3]));
  // four_floats(x), but for the order of its halves, with which a kernel of gfx950 that has no register left spills.
  const auto bits = [&](u32 j) { return (u64)__builtin_bit_cast(u32, x[j]); };
  target::write((Vec16*)c + at / 4, Vec16{bits(0) | bits(1) << 32, bits(2) | bits(3) << 32});
}

// Row i of two matrices of `width` rows each, which alternate in blocks of GATED: where they follow each other.
DEVICE inline u32 separated_at(u32 i, u32 width) {
  return i / target::GATED % 2 * width + i / (2 * target::GATED) * target::GATED + i % target::GATED;
}

// Where the sums of a tile go (kernels/tile_operands.h, sums_to).
struct SumsTo {
  void* c;
  u64 first;  // element of line 0 of c and of the tile's first column
  u32 ld;     // elements from line to line
  Into into;
  u32 row = 0, separated = 0;  // the line of the tile's first row; the width, where lines of c are separated_at their rows
  DEVICE u32 line(u32 row_in) const { return separated ? separated_at(row + row_in, separated) : row + row_in; }
  DEVICE u64 at(u32 row_in, u32 column) const { return first + (u64)line(row_in) * ld + column; }
  DEVICE Vec16 was(u32 row_in, u32 column) const { return read_four(c, at(row_in, column), into); }
  DEVICE void put(u32 row_in, u32 column, const float (&four)[4], const Vec16& was) const {
    put_four(c, at(row_in, column), into, four, was);
  }
  // Calls f with what does the same and needs not ask into what, for targets that rather have their loop four times.
  template <class F> DEVICE void visit(F f) const;
};
template <Into INTO> struct SumsInto {
  const SumsTo& to;
  DEVICE Vec16 was(u32 row, u32 column) const { return read_four(to.c, to.at(row, column), INTO); }
  DEVICE void put(u32 row, u32 column, const float (&four)[4], const Vec16& was) const {
    put_four(to.c, to.at(row, column), INTO, four, was);
  }
};
template <class F> DEVICE inline void SumsTo::visit(F f) const {
  switch (into) {
    case SET_BF16: return f(SumsInto<SET_BF16>{*this});
    case ADD_BF16: return f(SumsInto<ADD_BF16>{*this});
    case SET_F32: return f(SumsInto<SET_F32>{*this});
    default: return f(SumsInto<ADD_F32>{*this});
  }
}
// Rows of BF16, said from the tile's first element on: c is that. Where lines are separated, the tile's first row begins a pair of
// blocks.
DEVICE inline SumsTo begun_at_zero(const SumsTo& to) {
  return {(u64*)to.c + (to.first + (u64)to.line(0) * to.ld) / 4, 0, to.ld, SET_BF16, 0, to.separated};
}
// FP32 that is set, in all launches.
struct FloatsTo : SumsTo {
  DEVICE FloatsTo(void* c, u64 first, u32 ld) : SumsTo{c, first, ld, SET_F32} {}
  template <class F> DEVICE void visit(F f) const { f(SumsInto<SET_F32>{*this}); }
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
