// What params of operators in MXFP8 have beside those in BF16 (work/mxfp8.h says how such matrices lie): where scales are.
// Where a target cannot multiply MXFP8, factors and `values` are BF16, and scales of factors are not looked at.
#pragma once
#include "gather.h"

// Scales of a factor of this rank's own product.
struct MxScales {
  const u32* words;  // [K / 128, ld]
  u32 ld, zero;
};
static_assert(sizeof(MxScales) == 16);

// A copy of a matrix. Lines are the source's rows, or its columns: a copy of columns is transposed.
struct MxCopy {
  Vec16* elements;  // [lines, depth]; null: not wanted
  u32* scales;      // [depth / 128, ld_scales], four bytes each
  u32 depth;        // a multiple of 128; blocks past the source's end are zero
  u32 ld_scales;    // at least the lines
};
static_assert(sizeof(MxCopy) == 24);

// Scales of what is gathered, beside its elements in shard_of and gathered.
struct MxGathered {
  const Vec16* scales_of[MAX_RANKS];  // every rank's, of its shard
  Vec16* scales;                      // of all; own ones are not written
  Vec16* values;                      // where a target cannot multiply MXFP8: all of it as BF16, the own part made before
};
static_assert(sizeof(MxGathered) == 80);

// Copies of columns, gathered: of every rank `lines` lines along its own rows, which are padded to 128 and lie behind those of
// the ranks before it. No block of 32 has rows of two ranks.
struct MxColumns {
  const Vec16* of[MAX_RANKS];  // elements, [lines, depth(q)]
  Vec16* gathered;             // [lines, depth of all]; the own columns are there
  MxGathered mx;               // scales [depth(q) / 128, ld] and [depth of all / 128, ld]
  u32 first[MAX_RANKS + 1];    // rank q's part of a gathered line is first[q] .. first[q + 1]
  u32 ld;                      // lines rounded up to 4
  DEVICE u32 depth(u32 q) const { return first[q + 1] - first[q]; }
  DEVICE u32 depth() const { return first[MAX_RANKS]; }
};
static_assert(sizeof(MxColumns) == 192);
