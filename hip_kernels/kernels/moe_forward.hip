// moe_forward: the table of roles, and the entry point. What it computes and why it ends: schedule/moe_forward.h.
// Oracle: kosmos_raw/numerics/moe.py.
#include "../schedule/moe_forward.h"  // defines: MoeParams, MoeSchedule
#include "../work/moe.h"
#include "tile_operands.h"

struct MoeForward {
  using Schedule = MoeSchedule;
  using Params = MoeParams;

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
      const u32 e = l.expert_of(w.row), local = e - l.first_expert(p.g.rank);
      const u32 rows = least(l.tile_m, l.expert_rows(e) - l.tile_of(e, w.row) * l.tile_m);
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
  DEVICE static void store_f32(const Params& p, const Work& w, u32 row, u32 column, const float (&four)[4]) {
    const u64 at = ((u64)w.row * p.layout.tile_m + row) * p.logit_ld + (u64)w.part * p.tile_n + column;
    target::write(p.logits + at / 4, four_floats(four));
  }
  DEVICE static void store_gated(const Params& p, const Work& w, u32 row, u32 column, const float (&gate)[4],
                                 const float (&up)[4]) {
    const bool routed = w.kind == GEMM1;
    store_swiglu(routed ? p.pre : p.shared_pre, routed ? p.h : p.shared_h,
                 (routed ? ring_row(p, w) : (u64)w.row * p.layout.tile_m) + row, routed ? p.I : p.S,
                 w.part * p.tile_n / 2 + column, gate, up, routed ? p.clamp : float_of(FP32_INFINITY));
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

#include "../target/run.h"
KOSMOS_KERNEL(moe_forward, MoeForward)
