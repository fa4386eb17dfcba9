// moe_backward that multiplies copies, as in MXFP8 (hip_kernels/work/moe_backward_mxfp8.h), but of BF16 as it is: sums stay
// exact and tiles tiny, and what a copy is made of, by whom and when shows in values. A tile row has tile_k lines in every
// copy: behind its rows are zeros, which products add. Without `quants` it is moe_backward.
#pragma once
#include "../../hip_kernels/kernels/moe_backward.h"

struct CopyParams : MoeBackwardParams {
  u64 x_copy_at;           // offset in every rank's arena, as dy_at: ring of x that WGRAD1 reads, pushed in every round
  Vec16 *dy_copy, *h_copy, *dpre_copy;  // rings: [x_slots * tile_k] [H], [I], [2 I]
  u32 tile_k, zero;
};

struct MoeCopies {
  const CopyParams& p;
  const MoeGradients g;
  explicit MoeCopies(const CopyParams& p) : p(p), g(p) {}

  u64 line(u32 v) const { return v % p.x_slots * p.tile_k; }  // where its rows begin in copies
  Vec16* x_copy(u32 q) const { return p.arena_of[q] + p.x_copy_at; }
  Vec16* x_copy(u32 q, u32 v) const { return x_copy(q) + line(v) * (p.H / 8); }
  u32 zeros() const { return p.tile_k - p.layout.tile_m; }
  u32 depth(const MoePiece& x) const {  // lines of a piece; only the last tile row may be short
    return x.blocks ? x.rows + x.blocks * zeros() : 0;
  }

  // Columns [begin, end) of rows of `fours` times four, and zeros behind those rows.
  void put_zeros(Vec16* to, u32 rows, u32 fours, u32 begin, u32 end) const {
    for (u32 row = rows; row < rows + zeros(); row++)
      for (u32 i = begin; i < end; i++) target::write((u64*)to + row * fours + i, (u64)0);
  }
  void copy(Vec16* to, const Vec16* from, u32 rows, u32 fours, u32 begin, u32 end) const {
    for (u32 row = 0; row < rows; row++)
      for (u32 i = begin; i < end; i++) target::write((u64*)to + row * fours + i, target::read((const u64*)from + row * fours + i));
    put_zeros(to, rows, fours, begin, end);
  }

  void push_x(const Work& w) const {
    g.rows.dispatch(p.g.rank, w.row, w.part, p.x, p.list, x_copy(w.chunk, w.row), p.routing.weigh_inputs);
  }
  void quant(const Work& w) const {
    const u32 me = p.g.rank, v = w.row, fours = p.H / 4, begin = w.part * fours / p.quants, end = (w.part + 1) * fours / p.quants;
    copy(p.dy_copy + line(v) * (p.H / 8), g.ring_dy(me, v), p.layout.rows_in(v), fours, begin, end);
    put_zeros(x_copy(me, v), p.layout.rows_in(v), fours, begin, end);
  }
  void of_dgrad2(const Work& w) const {
    const u32 v = w.row, begin = w.part * p.tile_n / 4, end = MoeBackward::least(begin + p.tile_n / 4, p.I / 4);
    copy(p.h_copy + line(v) * (p.I / 8), p.h + g.slot_row(v) * (p.I / 8), p.layout.rows_in(v), p.I / 4, begin, end);
    copy(p.dpre_copy + line(v) * (p.I / 4), p.dpre + g.slot_row(v) * (p.I / 4), p.layout.rows_in(v), p.I / 2, 2 * begin, 2 * end);
  }
};

struct CopyingMoeBackward : MoeBackward {
  using Params = CopyParams;
  static const Params& params(const Schedule& s) { return static_cast<const Params&>(s.p); }  // what a schedule has of them

  static TileOperands operands(const Params& p, const Work& w) {
    TileOperands t = MoeBackward::operands(p, w);
    if (!p.quants) return t;
    const MoeCopies c(p);
    const At at = tile_at(p, w);
    const MoePiece x = w.kind == WGRAD2 || w.kind == WGRAD1 ? MoeBackwardQueue(p).piece(w.row) : MoePiece{};
    switch (w.kind) {
      case DGRAD2: t.a = p.dy_copy + c.line(w.row) * (p.H / 8); return t;
      case DGRAD1: t.a = p.dpre_copy + c.line(w.row) * (p.I / 4); return t;
      case WGRAD2: return weights_of(p, p.dy_copy, p.H, p.H, p.h_copy, p.I, c.line(x.first), c.depth(x), at);
      case WGRAD1: return weights_of(p, p.dpre_copy, 2 * p.I, 2 * p.I, c.x_copy(p.g.rank), p.H, c.line(x.first), c.depth(x), at);
      default: return t;
    }
  }

  static bool makes_copies(const Work& w) { return w.kind == DGRAD2; }
  static void make_copies(const Params& p, const Work& w) {
    if (p.quants) MoeCopies(p).of_dgrad2(w);
  }

  static void move(const Schedule& s, const Work& w) {
    const MoeCopies c(params(s));
    if (w.kind == QUANT) return c.quant(w);
    if (w.kind == PUSH && s.p.quants) c.push_x(w);
    MoeBackward::move(s, w);
  }
};
