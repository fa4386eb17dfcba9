// gfx950: from a tile's FP32 sums to where the operator wants them.
#pragma once
#include "../schedule/group.h"
#include "../work/sum.h"
#include "gfx950_tile.h"

namespace target {
// Stores that every wave surely issues for a tile, whatever its rows and columns: the stream counts on them (Tile::step).
// Where the operator stores by itself nobody knows, and the next tile's first step waits for all of them.
template <class Op> constexpr u32 sure_stores() {
  return requires(const typename Op::Params& p, const Work& w) { Op::result(p, w); } &&
                 !requires(const Work& w) { Op::epilogue(w); }
             ? 16
             : 0;
}

// The instruction's rounding: to nearest even; a NaN stays one, and is quiet.
DEVICE inline U32x2 pack(float x, float y, float z, float t) {
  return __builtin_bit_cast(U32x2, __builtin_convertvector(vec<float, 4>{x, y, z, t}, Bf16x4));
}
// Lanes that hold four columns each of the same row change halves, so that both hold eight in a row.
template <u32 ROWS> DEVICE inline auto swap_halves(u32 x, u32 y) {
  if constexpr (ROWS == 16) return __builtin_amdgcn_permlane16_swap(x, y, false, false);
  else return __builtin_amdgcn_permlane32_swap(x, y, false, false);
}

// Plain rows of BF16, 16 bytes a lane. Rows and columns past the end get an offset past the buffer's end, which stores
// nothing; offsets of row and column add up, and even two such are past it. No branch, so the count of stores is exact.
// Row i is line(i) of what `to` tells of. THROUGH: sc0 sc1, past every cache.
template <bool THROUGH, class T, class Line>
DEVICE inline void store_rows(const T& tile, const TileResult& to, u32 rows, u32 cols, Line line) {
  constexpr u32 ROWS = T::ROWS, PIECES = ROWS / 16, OUTSIDE = NOWHERE / 2;
  const I32x4 b = buffer(to.c, OUTSIDE);
  const auto out = __builtin_amdgcn_make_buffer_rsrc((void*)((u64)(u32)b[1] << 32 | (u32)b[0]), 0, b[2], b[3]);
  const u32 l = rare(tile.l), group = l / ROWS;
  u32 column_bytes[2][PIECES];
#pragma unroll
  for (u32 h = 0; h < 2; h++)
#pragma unroll
    for (u32 i = 0; i < PIECES; i++) {
      const u32 c = tile.b.row_of(h, tile.slice_b, 0) + (ROWS == 16 ? group % 2 * 16 + group / 2 * 8 : i * 16 + group * 8);
      column_bytes[h][i] = c < cols ? c * 2 : OUTSIDE;
    }
#pragma unroll
  for (u32 half = 0; half < 2; half++)
#pragma unroll
    for (u32 m = 0; m < T::BLOCKS_M; m++) {
      const u32 row = tile.a.row_of(half, tile.slice_a, m * ROWS + l % ROWS);
      const u32 row_bytes = row < rows ? line(row) * to.ldc * 2 : OUTSIDE;
#pragma unroll
      for (u32 h = 0; h < 2; h++)
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
          // 16 rows: the same four columns of two neighbouring blocks. 32: columns 8 apart in one block.
          const auto& c = tile.sums[half][h][m][0];
          const auto& d = tile.sums[half][h][m][T::BLOCKS_N - 1];
          constexpr u32 NEXT = ROWS == 16 ? 0 : 4;
          const u32 x = i * 8, y = x + NEXT;
          const U32x2 p = pack(c[x], c[x + 1], c[x + 2], c[x + 3]);
          const U32x2 q = pack(d[y], d[y + 1], d[y + 2], d[y + 3]);
          const auto lo = swap_halves<ROWS>(p[0], q[0]), hi = swap_halves<ROWS>(p[1], q[1]);
          const U32x4 eight = {lo[0], hi[0], lo[1], hi[1]};
          __builtin_amdgcn_raw_buffer_store_b128(eight, out, row_bytes + column_bytes[h][i], 0, THROUGH ? 17 : 0);
        }
    }
}

// Calls each(row, column, four sums) for every four columns of a row that a lane holds.
template <class T, class Each> DEVICE inline void each_four(const T& tile, u32 rows, u32 cols, Each each) {
  constexpr u32 ROWS = T::ROWS;
  const u32 l = rare(tile.l), group = l / ROWS;
#pragma unroll
  for (u32 half = 0; half < 2; half++)
#pragma unroll
    for (u32 m = 0; m < T::BLOCKS_M; m++) {
      const u32 row = tile.a.row_of(half, tile.slice_a, m * ROWS + l % ROWS);
#pragma unroll
      for (u32 h = 0; h < 2; h++)
#pragma unroll
        for (u32 n = 0; n < T::BLOCKS_N; n++)
#pragma unroll
          for (u32 i = 0; i < ROWS * ROWS / 64; i += 4) {
            const auto& c = tile.sums[half][h][m][n];
            const u32 column = tile.b.row_of(h, tile.slice_b, n * ROWS) + 2 * i + 4 * group;
            const float four[4] = {c[i], c[i + 1], c[i + 2], c[i + 3]};
            if (row < rows && column < cols) each(row, column, four);
          }
    }
}

// Four sums, number F of those that a lane holds, by a number that is known when it runs: registers have none. Not to be
// speculated, or all of them are looked at for each.
template <u32 F, class T> DEVICE inline void pick_four(const T& tile, u32 which, float (&four)[4]) {
  constexpr u32 FOURS = T::ROWS * T::ROWS / 256, BLOCKS = T::BLOCKS_M * 2 * T::BLOCKS_N;
  constexpr u32 ALL = 2 * BLOCKS * FOURS;
  if constexpr (F < ALL) {
    if (which != F) return pick_four<F + 1>(tile, which, four);
    constexpr u32 i = F % FOURS * 4, n = F / FOURS % T::BLOCKS_N, h = F / FOURS / T::BLOCKS_N % 2;
    constexpr u32 m = F / FOURS / T::BLOCKS_N / 2 % T::BLOCKS_M, half = F / FOURS / BLOCKS;
    const auto& c = tile.sums[half][h][m][n];
    for (u32 j = 0; j < 4; j++) four[j] = c[i + j];
    asm volatile("" : "+v"(four[0]), "+v"(four[1]), "+v"(four[2]), "+v"(four[3]));
  }
}
// The same as each_four, with the code of `each` there once: where that is much.
template <class T, class Each> DEVICE inline void each_four_in_turn(const T& tile, u32 rows, u32 cols, Each each) {
  constexpr u32 ROWS = T::ROWS, FOURS = ROWS * ROWS / 256, BLOCKS = T::BLOCKS_M * 2 * T::BLOCKS_N;
  const u32 l = rare(tile.l), group = l / ROWS;
#pragma unroll 1
  for (u32 f = 0; f < 2 * BLOCKS * FOURS; f++) {
    const u32 i = f % FOURS * 4, n = f / FOURS % T::BLOCKS_N, h = f / FOURS / T::BLOCKS_N % 2;
    const u32 m = f / FOURS / T::BLOCKS_N / 2 % T::BLOCKS_M, half = f / FOURS / BLOCKS;
    const u32 row = tile.a.row_of(half, tile.slice_a, m * ROWS + l % ROWS);
    const u32 column = tile.b.row_of(h, tile.slice_b, n * ROWS) + 2 * i + 4 * group;
    float four[4];
    pick_four<0>(tile, f, four);
    if (row < rows && column < cols) each(row, column, four);
  }
}

// Calls each(row, column, four sums of gate, four of up); column is that of one of both. A wave's 32 columns are a block of
// gate and one of up, and a lane has the same four columns of either.
template <class T, class Each> DEVICE inline void each_gated(const T& tile, u32 rows, u32 cols, Each each) {
  constexpr u32 ROWS = T::ROWS;
  static_assert(T::BLOCKS_N * ROWS == 2 * GATED);
  const u32 l = rare(tile.l), group = l / ROWS;
#pragma unroll
  for (u32 half = 0; half < 2; half++)
#pragma unroll
    for (u32 m = 0; m < T::BLOCKS_M; m++) {
      const u32 row = tile.a.row_of(half, tile.slice_a, m * ROWS + l % ROWS);
#pragma unroll
      for (u32 h = 0; h < 2; h++)
#pragma unroll
        for (u32 i = 0; i < ROWS * ROWS / 64; i += ROWS == 16 ? 4 : 16) {
#pragma unroll
          for (u32 j = i; j < (ROWS == 16 ? 4 : 8); j += 4) {
            const auto& g = tile.sums[half][h][m][0];
            const auto& u = tile.sums[half][h][m][T::BLOCKS_N - 1];
            const u32 x = ROWS == 16 ? 0 : j + 8, first = tile.b.row_of(h, tile.slice_b, 0);
            const float gate[4] = {g[j], g[j + 1], g[j + 2], g[j + 3]}, up[4] = {u[x], u[x + 1], u[x + 2], u[x + 3]};
            if (row < rows && first < cols) each(row, first / 2 + 2 * j + 4 * group, gate, up);
          }
        }
    }
}

// Sums that are rounded and stored are rows like others. Of the rest each kind has a loop of its own: in one for all, what may be
// read of memory is waited for before each four, and with it all stores before.
template <class Op, class T, class To>
DEVICE inline void hand_sums_over_as(const T& tile, u32 rows, u32 cols, const To& to) {
  const auto put = [&](u32 row, u32 column, const float (&four)[4])
                       __attribute__((always_inline)) { to.put(row, column, four, to.was(row, column)); };
  if constexpr (__is_same(To, SumsInto<SET_BF16>)) {
    const SumsTo& all = to.to;
    store_rows<false>(tile, {(u64*)all.c + all.first / 4, all.ld}, rows, cols, [&](u32 row) { return all.line(row); });
  } else if constexpr (many_layouts<Op>()) each_four_in_turn(tile, rows, cols, put);
  else each_four(tile, rows, cols, put);
}
template <class Op, class T>
DEVICE inline void hand_sums_over(const typename Op::Params& p, const Work& w, const T& tile, u32 rows, u32 cols) {
  Op::sums_to(p, w).visit([&](const auto& to) __attribute__((always_inline)) { hand_sums_over_as<Op>(tile, rows, cols, to); });
}
template <class Op, class T>
DEVICE inline void hand_over_any(const typename Op::Params& p, const Work& w, const T& tile, u32 rows, u32 cols) {
  const Epilogue how = Op::epilogue(w);
  if (how == ROWS) store_rows<through<Op>()>(tile, Op::result(p, w), rows, cols, same_line);
  else if (how == SUMS) hand_sums_over<Op>(p, w, tile, rows, cols);
  else if constexpr (requires { Op::gated_to(p, w); }) {
    const auto to = Op::gated_to(p, w);
    each_gated(tile, rows, cols, [&](u32 row, u32 column, const float (&gate)[4], const float (&up)[4])
                                     __attribute__((always_inline)) { to.put(row, column, gate, up); });
  }
}

template <class Op, class T>
DEVICE inline void hand_over(const typename Op::Params& p, const Work& w, const T& tile, u32 rows, u32 cols) {
  if constexpr (requires { Op::epilogue(w); }) hand_over_any<Op>(p, w, tile, rows, cols);
  else if constexpr (sure_stores<Op>() > 0)
    store_rows<through<Op>()>(tile, Op::result(p, w), rows, cols, same_line);
  else if constexpr (requires { Op::sums_to(p, w); }) hand_sums_over<Op>(p, w, tile, rows, cols);
  else
    each_four(tile, rows, cols, [&](u32 row, u32 column, const float (&four)[4]) __attribute__((always_inline)) {
      const U32x2 packed = pack(four[0], four[1], four[2], four[3]);
      Op::store(p, w, row, column, (u64)packed[1] << 32 | packed[0]);
    });
}
}  // namespace target
