// What the sum over ranks of their products must be, and buffers of that size.
#pragma once
#include "player.h"

constexpr u32 MAX_N = (MAX_COLS + 7) / 8 * 8;

// Every element of the rows of `me`, against the sum of the plain products.
inline void check_reduced(u32 me, u32 launch, const u64* c, const Chunks& m, u32 N, u32 K) {
  i32 sums[MAX_ROWS][MAX_N] = {};
  for (u32 q = 0; q < H.s.ranks; q++) {
    i32 a[MAX_ROWS][target::MAX_K] = {}, b[MAX_N][target::MAX_K] = {};
    unpack_input(a, 'a', q, launch, m.first[me + 1], K);
    unpack_input(b, 'b', q, launch, N, K);
    for (u32 row = 0; row < m.rows(me); row++)
      for (u32 col = 0; col < N; col++)
        for (u32 k = 0; k < K; k++) sums[row][col] += a[m.first[me] + row][k] * b[col][k];
  }
  check_matrix(me, launch, c, m.rows(me), N, N, [&](u32 row, u32 col) { return sums[row][col]; });
}
