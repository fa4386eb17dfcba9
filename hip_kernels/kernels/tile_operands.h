// What a table of roles tells the target about one output tile: where its operands lie, and where its result goes. The
// target multiplies; accumulators are FP32 until the result is handed over.
#pragma once
#include "../schedule/group.h"

// Which side of each operand is contiguous in memory, in BLAS's column-major words. Nothing is ever transposed in memory.
enum Layout : u32 {
  TN,  // A[M, K], B[N, K]: fprop
  NN,  // A[M, K], B[K, N]: dgrad
  NT,  // A[K, M], B[K, N]: wgrad
};

// What elements are. MXFP8 (work/mxfp8.h) is for TN alone: its matrices are quantised along the contraction, and lie so.
enum Element : u32 { BF16, MXFP8 };

struct TileOperands {
  const Vec16 *a, *b;  // the tile's first row (TN, and A of NN) or column (else)
  u32 rows, cols;      // at most the target's tile
  u32 K;               // BF16: a multiple of 8; any number in NT. MXFP8: a multiple of 128
  u32 lda, ldb;        // elements from line to line, multiples of 8 below 2^22. A line is read to the next multiple of 8
  // MXFP8: the word of the tile's first line and K step, and words from K step to K step
  const u32 *scales_a = nullptr, *scales_b = nullptr;
  u32 ld_scales_a = 0, ld_scales_b = 0;
  u32 note = 0;  // of the operator, for its sums_to
};

// An operator may tell where the result goes, if that is plain rows of BF16: then the target stores in its own way.
struct TileResult {
  u64* c;   // [rows, ldc] bf16, the tile's first element
  u32 ldc;  // elements: a multiple of 8 below 2^21, and at least the columns rounded up to 8: all of those are written
};

DEVICE inline u32 same_line(u32 row) { return row; }  // of a result whose rows follow each other

// What is handed over of a tile: by store or result, to sums_to, or to gated_to.
enum Epilogue : u32 { ROWS, SUMS, GATED_SUMS };

// An operator Op offers LAYOUT (TN if it does not; where kinds of work differ, layout(kind)), ELEMENT (BF16 if it does not; where
// kinds differ, element(kind)), operands(p, w) -> TileOperands, and store, which every target can use:
//   store(p, w, row, column, four)       four columns of a row of the tile, as BF16; column is a multiple of 4
// Optional, and taken by targets that know them instead of it, the first before the second:
//   result(p, w) -> TileResult           where store would put all of them
//   sums_to(p, w)                        where sums go that are not rounded yet, an object that is asked for once a tile:
//     put(row, column, four, was)        takes four columns of a row as float (&)[4]
//     was(row, column)                   reads what put needs of memory, so that a target can read for several at a time
//     visit(f)                           calls f with one of its kind (as SumsInto<SET_F32>) that asks nothing more
//   sums_to(p, w, note)                  the same for targets that hand on the note of operands: what was looked up is known then
// What takes sums may have a type Plain, for targets that rather have their loop twice: where to.is_plain(), Plain{to} does the same
// and asks less, for weights and a limit that are not there. Putting is long then, and worth code of its own for whole tiles.
// An operator whose tiles differ says which it is, epilogue(w) -> Epilogue. GATED_SUMS: B holds rows of two matrices that
// alternate in blocks of target::GATED, and their sums meet: gated_to(p, w) has put(row, column, gate, up), four of each, where
// column is that of one matrix alone.
// An operator may read again what a tile of its has stored, all lanes, before that is published: where makes_copies(w), the
// target calls make_copies(p, w).
// WIDE (optional): of a target that multiplies in two ways, that which loads less, at the price that nothing is multiplied while
// sums are handed over.
// ASKS_AHEAD (optional): K steps before the last one of a tile at which the next work may be asked for, where a target does so
// while it multiplies.
// With THROUGH = true (optional), what result tells of is stored past every cache. NaNs that are handed over are quiet.
template <class Op> DEVICE constexpr bool through() {
  if constexpr (requires { Op::THROUGH; }) return Op::THROUGH;
  else return false;
}
template <class Op, class Work> DEVICE constexpr Epilogue epilogue(const Work& w) {
  if constexpr (requires { Op::epilogue(w); }) return Op::epilogue(w);
  else if constexpr (requires(const typename Op::Params& p) { Op::sums_to(p, w); })
    return SUMS;
  else return ROWS;
}
template <class Op> DEVICE constexpr Layout layout() {
  if constexpr (requires { Op::LAYOUT; }) return Op::LAYOUT;
  else return TN;
}
template <class Op> DEVICE constexpr bool many_layouts() { return requires { Op::layout(TILE); }; }
template <class Op> DEVICE constexpr Layout layout_of(Kind kind) {
  if constexpr (many_layouts<Op>()) return Op::layout(kind);
  else return layout<Op>();
}
template <class Op> DEVICE constexpr Element element() {
  if constexpr (requires { Op::ELEMENT; }) return Op::ELEMENT;
  else return BF16;
}
template <class Op> DEVICE constexpr bool many_elements() { return requires { Op::element(TILE); }; }
template <class Op> DEVICE constexpr Element element_of(Kind kind) {
  if constexpr (many_elements<Op>()) return Op::element(kind);
  else return element<Op>();
}
template <class Op> DEVICE constexpr bool has_copies() { return requires(const Work& w) { Op::makes_copies(w); }; }
