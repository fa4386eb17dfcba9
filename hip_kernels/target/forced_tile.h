// The forced target's GEMM tile: tiny, and exact for small integers.
#pragma once
#include "../kernels/tile_operands.h"
#include "../work/bf16.h"

namespace target {
constexpr u32 TILE_M = 4, TILE_N = 16, MAX_K = 16;  // the most; a launch's own tile comes in its params

struct Lines {
  static constexpr u32 ROOM = 3072;
  float at[ROOM];
  u32 width;
  float get(u32 line, u32 k) const { return at[line * width + k]; }
};

// Elements begin .. end of each line. Lines are `width` long, up to a multiple of 8.
inline void read_lines(Lines& to, const Vec16* from, u32 lines, u32 begin, u32 end, u32 ld, u32 width) {
  to.width = (width + 7) / 8 * 8;
  if ((u64)lines * to.width > Lines::ROOM) give_up_history(CRASH, "a tile without bounds");
  for (u32 i = 0; i < lines; i++)
    for (u32 k = begin; k < end; k += 8) {
      const Vec16 v = read(from + (i * (u64)ld + k) / 8);
      for (u32 j = 0; j < 8; j++) to.at[i * to.width + k + j] = from_bf16((j < 4 ? v.lo : v.hi) >> j % 4 * 16 & 0xffff);
    }
}

template <class Op> struct Tile {
  const typename Op::Params& p;
  const Work w;
  const bool a_by_k, b_by_k;  // lines are k
  const TileOperands t;
  Lines a, b;
  struct Four {
    float at[4] = {};
  };
  Tile(const typename Op::Params& p, const Work& w)
      : p(p), w(w), a_by_k(layout_of<Op>(w.kind) == NT), b_by_k(layout_of<Op>(w.kind) != TN), t(Op::operands(p, w)) {}

  // `step` columns of A, from k on.
  void read_a(u32 k, u32 step) {
    if (a_by_k) return read_lines(a, t.a, t.K, 0, t.rows, t.lda, t.rows);
    read_lines(a, t.a, t.rows, k, k + step < t.K ? k + step : t.K, t.lda, t.K);
  }
  void read_b() { read_lines(b, t.b, b_by_k ? t.K : t.cols, 0, b_by_k ? t.cols : t.K, t.ldb, b_by_k ? t.cols : t.K); }
  Four sums(u32 r, u32 c) const {
    Four sum;
    for (u32 j = 0; j < 4 && c + j < t.cols; j++)
      for (u32 k = 0; k < t.K; k++)
        sum.at[j] += (a_by_k ? a.get(k, r) : a.get(r, k)) * (b_by_k ? b.get(k, c + j) : b.get(c + j, k));
    return sum;
  }
  void store() const {
    const Epilogue how = epilogue<Op>(w);
    for (u32 r = 0; r < t.rows; r++)
      for (u32 c = 0; c < t.cols; c += 4) {
        const Four sum = sums(r, c);
        if constexpr (requires { Op::gated_to(p, w); })
          if (how == GATED_SUMS) {
            const u32 block = c / (2 * GATED) * GATED, in = c % (2 * GATED);
            if (in < GATED) Op::gated_to(p, w).put(r, block + in, sum.at, sums(r, c + GATED).at);
            continue;
          }
        if constexpr (requires { Op::sums_to(p, w); })
          if (how == SUMS) {
            const auto to = Op::sums_to(p, w);
            to.put(r, c, sum.at, to.was(r, c));
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
