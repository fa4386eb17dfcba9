// Where the operands of one output tile lie. The target multiplies; Op::store takes the result, four columns at a time.
#pragma once
#include "../target/target.h"

struct TileOperands {
  const Vec16 *a, *b;  // [rows, K] and [cols, K] bf16, K contiguous ("TN")
  u32 rows, cols, K;   // at most the target's tile; K is a multiple of 8
};
