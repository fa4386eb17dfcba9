// What a launch of moe_backward is told, and its counters. Its signals are those of moe_forward, for rows move alike.
#pragma once
#include "moe_params.h"

// A gradient of weights. FP32 sums of it may be stored and added to in turn, round by round; BF16 is rounded once, so of what
// is made in several turns the sums lie elsewhere until the last.
struct MoeGradient {
  void* to;
  void* sums;  // FP32, as many as `to` has; null: `to` is FP32 itself, or nothing is made in turns
  u32 into;    // an Into (work/sum.h)
  u32 zero;
};

// Everything that the layer's forward was told and has left, and besides:
struct MoeBackwardParams : MoeParams {
  // Offsets in every rank's arena, in words of 16 bytes.
  u64 dy_at;               // [x_slots * tile_m][H] bf16, ring of received rows of dOut
  u64 dx_at;               // [tokens * top_k][H] bf16: rows of dX that come back, in the order of the rank's send list
  const Vec16* dout;       // [tokens][H] bf16
  Vec16* dx;               // [tokens][H] bf16: the result
  Vec16 *dpre, *dx_rows;   // rings: [x_slots * tile_m] [2 I], [H] bf16
  u64* dweights;           // [tokens * top_k]: of choices' weights, fp32 << 32; below, of their scores
  Vec16* dlogits;          // [tokens][router_rows] fp32
  u64* partials;           // [tokens * (top_k + 1)][TEAM]: parts of inner products
  // One product makes what router and shared expert give to dX: left [tokens][own_ld] bf16, columns of copies of dlogits
  // first (work/moe_backward.h), of the shared expert's dpre behind; right [own_ld][H], the same of their weights.
  Vec16* own_left;
  const Vec16* own_right;
  Vec16* own_dx;           // [tokens][H] fp32: the product
  u64* pieces;             // [MoeBackwardQueue::words()] written by PLAN
  MoeGradient d_router, d_gate_up, d_down, d_shared_gate_up, d_shared_down;
  float aux_grad;          // dL / d(auxiliary loss)
  u32 round_rows;          // tile rows that a ring gives up together; divides x_slots, and step_rows divides it
  u32 replays_all;         // the forward has kept neither x nor pre
  u32 router_copies;       // of dlogits in own_left, of router_ld columns each
  u32 router_ld;           // router_rows, up to a multiple of 8
  u32 own_ld;              // router_copies * router_ld + 2 S
  u32 piece_cap;
  // Tiles: columns across H, I, 2 I, S; rows across H, 2 I, 2 S, router_rows.
  u32 cols_h, cols_i, cols_2i, cols_s, rows_h, rows_2i, rows_2s, rows_r;
  u32 tile_m;              // of weights' tiles, a multiple of 8; on all targets layout.tile_m
  u32 quants;              // parts in which copies of a tile row of dOut are made; 0: products take it as it comes (BF16)
  u32 lead;                // entries of DGRAD2 behind those of a piece before its WGRAD2 comes: as many as WGs
};
static_assert(sizeof(MoeGradient) == 24 && sizeof(MoeBackwardParams) == sizeof(MoeParams) + 296);

// In MXFP8. Copies along rows have a tile row where the rings have it, copies of columns as elements slot * tile_k and on of
// their lines: a tile row's K there is tile_k, tile_m up to a multiple of 128, with zeros behind its rows.
struct MoeBackwardMxfp8Params : MoeBackwardParams {
  MoeMxfp8 mx;             // h of it is the forward's alone
  u64 x_columns_at, x_column_scales_at;  // offsets in every rank's arena: ring of x's columns, [H, x_slots * tile_k]
  MxCopy dy_copy;          // [x_slots * tile_m, depth]
  MxCopy dy_columns_copy;  // [H, x_slots * tile_k]
  MxCopy h_columns_copy;   // [I, x_slots * tile_k]
  MxCopy dpre_copy;        // [x_slots * tile_m, 2 I]
  MxCopy dpre_columns_copy;  // [2 I, x_slots * tile_k]
  MxCopy gate_up_columns;  // [H, experts of this rank * 2 I]
  MxCopy down_columns;     // [I, experts of this rank * depth]
  u32 quant_width;         // of H in a part of QUANT, a multiple of 128
  u32 tile_k;
};
static_assert(sizeof(MoeBackwardMxfp8Params) == sizeof(MoeBackwardParams) + sizeof(MoeMxfp8) + 192);

// Counters of one set, by name.
struct MoeBackwardWords : MoeWords {
  const MoeBackwardParams& p;
  DEVICE explicit MoeBackwardWords(const MoeBackwardParams& p) : MoeWords(p), p(p) {}

  enum Head : u32 { FRONT, MAIN, MOVES, SENDS, SHARED, DWEIGHTS, PLAN_DONE, DWEIGHTS_DONE, SHARED_DONE, ROUTER_DONE, HEADS };
  DEVICE u32* head(u32 i) const { return p.counters.current(p.g) + i; }
  DEVICE u32* sent_to(u32 d) const { return head(HEADS + d); }
  DEVICE u32* dlogits_done(u32 t) const { return head(HEADS + MAX_RANKS + t); }           // of a row of tokens
  DEVICE u32* shared_done(u32 t) const { return dlogits_done(token_rows() + t); }
  DEVICE u32* own_done(u32 t) const { return dlogits_done(2 * token_rows() + t); }
  DEVICE u32* by_row(u32 array, u32 v) const { return dlogits_done(3 * token_rows() + array * p.layout.row_cap + v); }
  DEVICE u32* replayed(u32 v) const { return by_row(0, v); }  // tiles of tile row v
  DEVICE u32* dgrad2_done(u32 v) const { return by_row(1, v); }
  DEVICE u32* dgrad1_done(u32 v) const { return by_row(2, v); }
  DEVICE u32* sent(u32 v) const { return by_row(3, v); }
  DEVICE u32* piece_done(u32 v) const { return by_row(4, v); }   // DGRAD2 tiles of the piece that begins with v
  DEVICE u32* wgrad2_done(u32 v) const { return by_row(5, v); }  // tiles of that piece
  DEVICE u32* wgrad1_done(u32 v) const { return by_row(6, v); }
  DEVICE u32* round_done(u32 r) const { return by_row(7, r); }   // tile rows that are through, three times each
  DEVICE u32* quantised(u32 v) const { return by_row(8, v); }    // parts of tile row v
};
