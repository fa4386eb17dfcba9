// The forced target's GEMM tile: tiny, and exact for small integers.
#pragma once
#include "../kernels/tile_operands.h"
#include "../work/bf16.h"

namespace target {
constexpr u32 TILE_M = 4, TILE_N = 16, MAX_K = 16;  // the most; a launch's own tile comes in its params, and see most_k

// What an operator contracts over at most.
template <class Op> constexpr u32 most_k() {
  if constexpr (requires { Op::MOST_K; }) return Op::MOST_K;
  else return MAX_K;
}

template <u32 MOST> struct Lines {
  float at[16][MOST] = {};
};

// Elements begin .. end of each line.
template <u32 MOST> void read_lines(Lines<MOST>& to, const Vec16* from, u32 lines, u32 begin, u32 end, u32 ld) {
  if (lines > 16 || end > MOST) abort();
  for (u32 i = 0; i < lines; i++)
    for (u32 k = begin; k < end; k += 8) {
      const Vec16 v = read(from + (i * ld + k) / 8);
      for (u32 j = 0; j < 8; j++) to.at[i][k + j] = from_bf16((j < 4 ? v.lo : v.hi) >> j % 4 * 16 & 0xffff);
    }
}

template <class Op> struct Tile {
  static constexpr bool A_BY_K = layout<Op>() == NT, B_BY_K = layout<Op>() != TN;  // lines are k
  const typename Op::Params& p;
  const Work w;
  const TileOperands t;
  Lines<most_k<Op>()> a, b;
  struct Four {
    float at[4] = {};
  };
  Tile(const typename Op::Params& p, const Work& w) : p(p), w(w), t(Op::operands(p, w)) {}

  // `step` columns of A, from k on.
  void read_a(u32 k, u32 step) {
    if (A_BY_K) return read_lines(a, t.a, t.K, 0, t.rows, t.lda);
    read_lines(a, t.a, t.rows, k, k + step < t.K ? k + step : t.K, t.lda);
  }
  void read_b() { read_lines(b, t.b, B_BY_K ? t.K : t.cols, 0, B_BY_K ? t.cols : t.K, t.ldb); }
  Four sums(u32 r, u32 c) const {
    Four sum;
    for (u32 j = 0; j < 4 && c + j < t.cols; j++)
      for (u32 k = 0; k < t.K; k++)
        sum.at[j] += (A_BY_K ? a.at[k][r] : a.at[r][k]) * (B_BY_K ? b.at[k][c + j] : b.at[c + j][k]);
    return sum;
  }
  void store() const {
    const Epilogue how = epilogue<Op>(w);
    for (u32 r = 0; r < t.rows; r++)
      for (u32 c = 0; c < t.cols; c += 4) {
        const Four sum = sums(r, c);
        if constexpr (requires { Op::store_gated(p, w, r, c, sum.at, sum.at); })
          if (how == GATED_SUMS) {
            const u32 block = c / (2 * GATED) * GATED, in = c % (2 * GATED);
            if (in < GATED) Op::store_gated(p, w, r, block + in, sum.at, sums(r, c + GATED).at);
            continue;
          }
        if constexpr (requires { Op::store_f32(p, w, r, c, sum.at); })
          if (how == SUMS) {
            Op::store_f32(p, w, r, c, sum.at);
            continue;
          }
        if constexpr (requires { Op::store(p, w, r, c, 0); })
          Op::store(p, w, r, c, pack_bf16(sum.at[0], sum.at[1], sum.at[2], sum.at[3]));
      }
  }
};

template <class Op> void gemm_tile(const typename Op::Params& p, const Work& w) {
  Tile<Op> tile(p, w);
  tile.read_a(0, tile.t.K);
  tile.read_b();
  tile.store();
}
}  // namespace target
