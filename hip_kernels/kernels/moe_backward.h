// moe_backward: the tables of roles, in BF16 and in MXFP8. What it computes and why it ends: schedule/moe_backward.h.
// Oracle: kosmos_raw/numerics/moe/layer.py.
#pragma once
#include "../work/moe_backward_mxfp8.h"
#include "mx_operands.h"

struct MoeBackward {
  using Schedule = MoeBackwardSchedule;
  using Params = MoeBackwardParams;
  static constexpr bool WIDE = true;
  static constexpr u32 ASKS_AHEAD = 10;  // tiles of few steps are common, and an answer takes several microseconds

  DEVICE static Layout layout(Kind k) {
    switch (k) {
      case GEMM1: return TN;
      case DGRAD2: case DGRAD1: case SHARED_D2: case OWN_DX: return NN;
      default: return NT;
    }
  }
  DEVICE static u32 least(u32 a, u32 b) { return a < b ? a : b; }

  // Where a tile lies in its result: of rows, a tile row of a ring or of tokens; of weights, a tile of the matrix.
  struct At {
    u32 row, column;
  };
  DEVICE static At tile_at(const Params& p, const Work& w) {
    switch (w.kind) {
      case WGRAD2: return {w.part / p.cols_i * p.tile_m, w.part % p.cols_i * p.tile_n};
      case SHARED_W2: return {w.part / p.cols_s * p.tile_m, w.part % p.cols_s * p.tile_n};
      case WGRAD1: case SHARED_W1: case ROUTER_DW:
        return {w.part / p.cols_h * p.tile_m, w.part % p.cols_h * p.tile_n};
      default: return {0, w.part * p.tile_n};
    }
  }

  // A [rows, K], from row `first` of a matrix on, times B [K, N] (or [N, K], TN), from column `at.column` on.
  DEVICE static TileOperands rows_times(const Vec16* a, u64 first, u32 lda, u32 rows, const Vec16* b, u32 K, u32 N, const At& at, u32 tile_n) {
    return {a + first * (lda / 8), b + at.column / 8, rows, least(N - at.column, tile_n), K, lda, N};
  }
  // A [K, M] and B [K, N], both from line `first` on.
  DEVICE static TileOperands weights_of(const Params& p, const Vec16* a, u32 lda, u32 M, const Vec16* b, u32 N, u64 first, u32 K, const At& at) {
    return {a + first * (lda / 8) + at.row / 8, b + first * (N / 8) + at.column / 8, least(M - at.row, p.tile_m),
            least(N - at.column, p.tile_n), K, lda, N};
  }

  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const MoeLayout& l = p.layout;
    const MoeWeights& m = p.weights;
    const At at = tile_at(p, w);
    const MoeGradients g(p);
    const u32 H = p.H, I2 = 2 * p.I, S2 = 2 * p.S;
    switch (w.kind) {
      case GEMM1: case DGRAD2: case DGRAD1: {
        const u32 rows = l.rows_in(w.row);
        const u64 local = l.expert_of(w.row) - l.first_expert(p.g.rank), row = g.slot_row(w.row);
        const Vec16 *gate_up = m.gate_up + local * I2 * (H / 8), *down = m.down + local * H * (p.I / 8);
        if (w.kind == DGRAD2) return rows_times(p.arena_of[p.g.rank] + p.dy_at, row, H, rows, down, H, p.I, at, p.tile_n);
        if (w.kind == DGRAD1) return rows_times(p.dpre, row, I2, rows, gate_up, I2, H, at, p.tile_n);
        const Vec16* x = p.arena_of[p.g.rank] + p.x_at + row * (H / 8);
        return {x, gate_up + (u64)at.column * (H / 8), rows, least(I2 - at.column, p.tile_n), H, H, H};
      }
      case WGRAD2: case WGRAD1: {
        const MoePiece x = MoeBackwardQueue(p).piece(w.row);
        const u64 first = g.slot_row(x.first);
        const Vec16* arena = p.arena_of[p.g.rank];
        TileOperands t = w.kind == WGRAD2 ? weights_of(p, arena + p.dy_at, H, H, p.h, p.I, first, x.rows, at)
                                          : weights_of(p, p.dpre, I2, I2, arena + p.x_at, H, first, x.rows, at);
        t.note = note_of(x);
        return t;
      }
      case SHARED_D2: return rows_times(p.dout, (u64)w.row * l.tile_m, H, tokens_in(p, w), m.shared_down, H, p.S, at, p.tile_n);
      case OWN_DX:
        return rows_times(p.own_left, (u64)w.row * l.tile_m, p.own_ld, tokens_in(p, w), p.own_right, p.own_ld, H, at, p.tile_n);
      case SHARED_W2: return weights_of(p, p.dout, H, H, p.shared_h, p.S, 0, p.tokens, at);
      case SHARED_W1: return weights_of(p, p.own_left + p.router_copies * p.router_ld / 8, p.own_ld, S2, p.x, H, 0, p.tokens, at);
      default:  // ROUTER_DW: of the nearest BF16, then of what that lacks
        return weights_of(p, p.own_left + w.row * p.router_ld / 8, p.own_ld, p.router_rows, p.x, H, 0, p.tokens, at);
    }
  }
  DEVICE static u32 tokens_in(const Params& p, const Work& w) { return least(p.layout.tile_m, p.tokens - w.row * p.layout.tile_m); }

  DEVICE static Epilogue epilogue(const Work& w) { return w.kind == GEMM1 || w.kind == DGRAD1 ? ROWS : SUMS; }
  DEVICE static TileResult result(const Params& p, const Work& w) {
    const u32 width = w.kind == GEMM1 ? 2 * p.I : p.H;
    Vec16* to = (w.kind == GEMM1 ? p.pre : p.dx_rows) + MoeGradients(p).slot_row(w.row) * (width / 8);
    return {(u64*)to + (u64)w.part * p.tile_n / 4, width};
  }
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
  // Of a weight gradient's piece, what sums_to needs: its expert, and whether it begins and ends the expert's.
  DEVICE static u32 note_of(const MoePiece& x) { return x.expert | x.begins << 30 | x.ends << 31; }
  DEVICE static MoeSumsTo sums_to(const Params& p, const Work& w) {
    const bool weights = w.kind == WGRAD2 || w.kind == WGRAD1;
    return sums_to(p, w, weights ? note_of(MoeBackwardQueue(p).piece(w.row)) : 0);
  }
  DEVICE static MoeSumsTo sums_to(const Params& p, const Work& w, u32 note) {
    if (w.kind == DGRAD2 || w.kind == SHARED_D2) return MoeSumsTo(dh_to(p, w));
    return MoeSumsTo(gradient_to(p, w, note));
  }
  DEVICE static DSwigluTo dh_to(const Params& p, const Work& w) {
    const u32 column = tile_at(p, w).column, I2 = 2 * p.I, S2 = 2 * p.S;
    if (w.kind == DGRAD2) {
      const u64 row = MoeGradients(p).slot_row(w.row);
      return {(const u64*)p.pre + row * (I2 / 4), (u64*)p.dpre + row * (I2 / 4), (u64*)p.h + row * (p.I / 4),
              I2 / 4, I2 / 4, p.I / 4, column, nullptr, 0, 0, p.clamp};
    }
    const u64 t = (u64)w.row * p.layout.tile_m;
    u64* dpre = (u64*)p.own_left + (t * p.own_ld + p.router_copies * p.router_ld) / 4;
    return {(const u64*)p.shared_pre + t * (S2 / 4), dpre, (u64*)p.shared_h + t * (p.S / 4), S2 / 4, p.own_ld / 4, p.S / 4, column,
            p.gate_column == NOBODY ? nullptr : p.logits, t * p.logit_ld + p.gate_column, p.logit_ld, float_of(FP32_INFINITY)};
  }
  DEVICE static GradientTo gradient_to(const Params& p, const Work& w, u32 note) {
    const At at = tile_at(p, w);
    const u32 H = p.H;
    switch (w.kind) {
      case OWN_DX: return {{p.own_dx, nullptr, SET_F32, 0}, 0, H, w.row * p.layout.tile_m, at.column, 0, true, true};
      case WGRAD2: case WGRAD1: {
        const u64 expert = note & 0x3fffffff;
        const bool begins = note >> 30 & 1, ends = note >> 31;
        if (w.kind == WGRAD2) return {p.d_down, expert * H * p.I, p.I, at.row, at.column, 0, begins, ends};
        return {p.d_gate_up, expert * 2 * p.I * H, H, at.row, at.column, p.I, begins, ends};
      }
      case SHARED_W2: return {p.d_shared_down, 0, p.S, at.row, at.column, 0, true, true};
      case SHARED_W1: return {p.d_shared_gate_up, 0, H, at.row, at.column, p.S, true, true};
      default: return {p.d_router, 0, H, at.row, at.column, 0, w.row == 0, w.row == 1};
    }
  }

  // Every kind that is no tile. GATE is all waiting.
  DEVICE static void move(const Schedule& s, const Work& w) {
    const MoeGradients g(s.p);
    switch (w.kind) {
      case PLAN: return MoeBackwardPlanner(s.p).plan();
      case PUSH: return g.push(w, s.replays(w.chunk, s.round_of(w.row)));
      case DWEIGHT: return g.dweight(w.row);
      case SEND: return g.send(w);
      case FOLD: return g.fold(w.row);
      default: return;
    }
  }
};

// Experts' products are all TN: of copies along or across rows, and of weights quantised along either side. All else is as in
// BF16.
struct MoeBackwardMxfp8 : MoeBackward {
  using Params = MoeBackwardMxfp8Params;

  DEVICE static constexpr bool of_experts(Kind k) {
    return k == GEMM1 || k == DGRAD2 || k == DGRAD1 || k == WGRAD2 || k == WGRAD1;
  }
  DEVICE static constexpr Layout layout(Kind k) { return of_experts(k) ? TN : MoeBackward::layout(k); }
  DEVICE static constexpr Element element(Kind k) { return of_experts(k) ? MX_ELEMENT : BF16; }

  DEVICE static TileOperands operands(const MoeBackwardParams& of_schedule, const Work& w) {
    if (!of_experts(w.kind)) return MoeBackward::operands(of_schedule, w);
    const Params& p = static_cast<const Params&>(of_schedule);  // what a schedule has of them
    const MoeMxfp8Gradients g(p);
    const At at = tile_at(p, w);
    if (w.kind == WGRAD2 || w.kind == WGRAD1) {
      const MoePiece x = MoeBackwardQueue(p).piece(w.row);
      const bool second = w.kind == WGRAD2;
      const MxCopy &a = second ? p.dy_columns_copy : p.dpre_columns_copy, b = second ? p.h_columns_copy : g.x_columns(p.g.rank);
      const u32 k = g.slot_k(x.first), M = second ? p.H : 2 * p.I, N = second ? p.I : p.H;
      TileOperands t = mx_operands(mx_side(a, at.row, k), least(M - at.row, p.tile_m), mx_side(b, at.column, k),
                                   least(N - at.column, p.tile_n), g.depth(x), a.depth);
      t.note = note_of(x);
      return t;
    }
    const u32 local = p.layout.expert_of(w.row) - p.layout.first_expert(p.g.rank), rows = p.layout.rows_in(w.row), I2 = 2 * p.I;
    const u64 row = g.g.slot_row(w.row);
    const bool again = w.kind == GEMM1, second = w.kind == DGRAD2;
    const MxCopy a = again ? MoeMxfp8Rows(p, p.mx).ring_x(p.g.rank) : second ? p.dy_copy : p.dpre_copy;
    const MxCopy& b = again ? p.mx.gate_up : second ? p.down_columns : p.gate_up_columns;
    const u32 N = again ? I2 : second ? p.I : p.H;
    const u32 k = again ? 0 : local * (second ? p.mx.depth : I2);
    const u64 line = (again ? (u64)local * I2 : 0) + at.column;
    return mx_operands(mx_side(a, row), rows, mx_side(b, line, k), least(N - at.column, p.tile_n), a.depth, a.depth, b.depth);
  }

  DEVICE static bool makes_copies(const Work& w) { return w.kind == DGRAD2; }
  DEVICE static void make_copies(const Params& p, const Work& w) { MoeMxfp8Gradients(p).make_copies(w); }

  DEVICE static void move(const Schedule& s, const Work& w) {
    const MoeMxfp8Gradients g(static_cast<const Params&>(s.p));
    if (w.kind == PUSH) return g.push(w, s.replays(w.chunk, s.round_of(w.row)));
    if (w.kind == QUANT) return g.quantize_dy(w);
    MoeBackward::move(s, w);
  }
};
