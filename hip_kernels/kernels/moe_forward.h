// moe_forward: the tables of roles, in BF16 and in MXFP8.
#pragma once
#include "../schedule/moe_forward.h"  // defines: MoeParams, MoeSchedule
#include "../work/moe_mxfp8.h"
#include "../work/sum.h"
#include "mx_operands.h"

struct MoeForward {
  using Schedule = MoeSchedule;
  using Params = MoeParams;
  static constexpr bool WIDE = true;
  static constexpr u32 ASKS_AHEAD = 10;  // tiles of few steps are common, and an answer takes several microseconds

  DEVICE static u32 least(u32 a, u32 b) { return a < b ? a : b; }

  // Rows a of width K times rows b: `rows` from tile row t of a matrix on, columns of the tile from all `columns`.
  DEVICE static TileOperands product(const Params& p, const Work& w, const Vec16* a, const Vec16* b, u32 rows, u32 columns, u32 K) {
    const u32 col = w.part * p.tile_n;
    return {a, b + (u64)col * (K / 8), rows, least(columns - col, p.tile_n), K, K, K};
  }
  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const MoeLayout& l = p.layout;
    const MoeWeights& m = p.weights;
    const u64 row = (u64)w.row * l.tile_m;
    if (w.kind == GEMM1 || w.kind == GEMM2) {
      const u32 local = l.expert_of(w.row) - l.first_expert(p.g.rank), rows = l.rows_in(w.row);
      if (w.kind == GEMM1) {
        const Vec16* b = m.gate_up + (u64)local * 2 * p.I * (p.H / 8);
        return product(p, w, MoeRows(p).ring_x(p.g.rank, w.row), b, rows, 2 * p.I, p.H);
      }
      return product(p, w, p.h + ring_row(p, w) * (p.I / 8), m.down + (u64)local * p.H * (p.I / 8), rows, p.H, p.I);
    }
    const u32 rows = least(l.tile_m, p.tokens - w.row * l.tile_m);
    if (w.kind == ROUTE) return product(p, w, p.x + row * (p.H / 8), m.router, rows, p.router_rows * p.router_parts, p.H);
    if (w.kind == SHARED1) return product(p, w, p.x + row * (p.H / 8), m.shared_gate_up, rows, 2 * p.S, p.H);
    return product(p, w, p.shared_h + row * (p.S / 8), m.shared_down, rows, p.H, p.S);
  }
  DEVICE static u64 ring_row(const Params& p, const Work& w) { return (u64)(w.row % p.h_slots) * p.layout.tile_m; }

  DEVICE static Epilogue epilogue(const Work& w) {
    if (w.kind == ROUTE) return SUMS;
    return w.kind == GEMM1 || w.kind == SHARED1 ? GATED_SUMS : ROWS;
  }
  DEVICE static TileResult result(const Params& p, const Work& w) {
    const u32 words = p.H / 8;
    Vec16* y = w.kind == GEMM2 ? MoeRows(p).ring_y(w.row) : p.shared_y + (u64)w.row * p.layout.tile_m * words;
    return {(u64*)y + (u64)w.part * p.tile_n / 4, p.H};
  }
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
  DEVICE static FloatsTo sums_to(const Params& p, const Work& w) {
    return {p.logits, (u64)w.row * p.layout.tile_m * p.logit_ld + (u64)w.part * p.tile_n, p.logit_ld};
  }
  DEVICE static SwigluTo gated_to(const Params& p, const Work& w) {
    const u32 column = w.part * p.tile_n / 2;
    if (w.kind == GEMM1) return {p.pre, p.h, ring_row(p, w), p.I, column, p.clamp};
    return {p.shared_pre, p.shared_h, (u64)w.row * p.layout.tile_m, p.S, column, float_of(FP32_INFINITY)};
  }

  // Every kind that is no tile. GATE is all waiting.
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    switch (w.kind) {
      case TOPK: return Router(p).block(w.row);
      case SCAN: return Router(p).scan(w.part, s.blocks());
      case PLAN: return MoePlanner(p).plan();
      case SORT: return Router(p).sort(w.row);
      case PUSH: case PULL: return MoeRows(p).dispatch(w);
      case SEND: return MoeRows(p).send(w);
      case FOLD: return MoeRows(p).fold(w.row);
      default: return;
    }
  }
};

// Rows of x are quantised by who moves them, those of h by who makes them. All else is as in BF16.
struct MoeForwardMxfp8 : MoeForward {
  using Params = MoeMxfp8Params;

  DEVICE static constexpr Element element(Kind k) { return k == GEMM1 || k == GEMM2 ? MX_ELEMENT : BF16; }
  DEVICE static TileOperands operands(const MoeParams& of_schedule, const Work& w) {
    if (w.kind != GEMM1 && w.kind != GEMM2) return MoeForward::operands(of_schedule, w);
    const Params& p = static_cast<const Params&>(of_schedule);  // what a schedule has of them
    const MoeLayout& l = p.layout;
    const u32 local = l.expert_of(w.row) - l.first_expert(p.g.rank), col = w.part * p.tile_n, rows = l.rows_in(w.row);
    const bool first = w.kind == GEMM1;
    const MxCopy &a = first ? MoeMxfp8Rows(p, p.mx).ring_x(p.g.rank) : p.mx.h, &b = first ? p.mx.gate_up : p.mx.down;
    const u64 line = first ? (u64)(w.row % p.x_slots) * l.tile_m : ring_row(p, w);
    const u64 of_expert = (u64)local * (first ? 2 * p.I : p.mx.depth);
    return mx_operands(mx_side(a, line), rows, mx_side(b, of_expert + col), least((first ? 2 * p.I : p.H) - col, p.tile_n), a.depth,
                       a.depth);
  }
  DEVICE static bool makes_copies(const Work& w) { return w.kind == GEMM1; }
  DEVICE static void make_copies(const Params& p, const Work& w) { MoeMxfp8Rows(p, p.mx).quantize_h(w, ring_row(p, w)); }

  DEVICE static void move(const Schedule& s, const Work& w) {
    if (w.kind != PUSH && w.kind != PULL) return MoeForward::move(s, w);
    MoeMxfp8Rows(s.p, static_cast<const Params&>(s.p).mx).dispatch(w);
  }
};
