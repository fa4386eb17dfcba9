// A contraction cut in parts, so that an output of few tiles has work for all WGs. Each part of a tile is work of its own
// and leaves FP32 sums; when all parts of a tile are there, one WG adds them in the order of the parts (SUM).
#pragma once
#include "../target/target.h"

struct Split {
  float* sums;  // [parts][rows][ld]; unused where parts is 1
  u32 parts;
  u32 step;     // k of a part, a multiple of the target's K step; the last one may be short
  DEVICE u32 begin(u32 part) const { return part * step; }
  DEVICE u32 k(u32 part, u32 K) const { return part + 1 < parts ? step : K - part * step; }
};
static_assert(sizeof(Split) == 16);
