// ag_gemm_grads, WHAT NEXT: both gradients of a row-parallel layer in one launch a rank (paper section 3.2.1, "AG+NN+NT" of
// MXFP8): dX[M, N] = gather(dY)[M, K] @ W[K, N], and dW[K, gradient_N] = gather(dY)[M, K]^T @ X[M, gradient_N].
//
// dY is gathered twice, for MXFP8 is quantised along the contraction: its rows for dX, its columns for dW. Movers pull all
// rows before any columns, and builders take all tiles of dX (as ag_gemm) before those of dW (WGRAD), row by row of dW: so
// columns come while dX is built, and a WGRAD waits for one tile row of them, from all peers.
//
// Why it cannot deadlock: as ag_gemm. A WGRAD waits only for PULL_COLUMNS of this rank's movers, which wait only for their
// source to have started. With TWO_WAY a WG waits for a tile of either kind only when all pulls are claimed.
#pragma once
#include "ag_gemm.h"
#include "mx.h"

struct AgGemmGradsParams : AgGemmParams {  // pulls and column_pulls have one slab, the cut one part, halved is 0
  MxGathered mx;                 // of dY's rows
  MxScales b_scales;             // b: the columns of W, [N, K]
  Chunks column_m;               // of each rank that has rows, all lines of its columns of dY
  Pulls column_pulls;
  MxColumns columns;             // of dY
  const Vec16* x;                // [gradient_N, depth]: the columns of X
  void* gradient;                // [features, gradient_ld] bf16 or fp32
  MxScales x_scales;
  u32 features;                  // of dY: K without its padding
  u32 gradient_N, gradient_ld;   // ld: a multiple of 8, at least N
  u32 into;                      // an Into
};
static_assert(sizeof(AgGemmGradsParams) == sizeof(AgGemmParams) + 400);

struct AgGemmGradsSchedule : AgGemmQueue<AgGemmGradsSchedule, AgGemmGradsParams> {
  using AgGemmQueue::AgGemmQueue;

  DEVICE u32 gradient_rows() const { return (p.features + p.m.tile_m - 1) / p.m.tile_m; }
  DEVICE u32 gradient_columns() const { return (p.gradient_N + p.tile_n - 1) / p.tile_n; }
  DEVICE u32 first_gradient_column(u32 queue) const { return gradient_columns() * queue / p.queues; }
  DEVICE u32 gradient_columns_in(u32 queue) const { return first_gradient_column(queue + 1) - first_gradient_column(queue); }

  DEVICE u32 entries(u32 queue) const { return tiles_in(queue) + gradient_rows() * gradient_columns_in(queue); }
  DEVICE Work entry_at(u32 queue, u32 i) const {
    if (i < tiles_in(queue)) return tile_at(queue, i);
    const u32 height = p.m.side_by_side ? p.m.side_by_side : 1;
    const TileAt t = tile_in_groups(i - tiles_in(queue), gradient_rows(), gradient_columns_in(queue), height);
    return {WGRAD, p.g.rank, t.row, first_gradient_column(queue) + t.column};
  }

  DEVICE bool wait_inputs(const Work& w) const {
    if (w.kind == PULL_COLUMNS) return wait_pull(w);
    return w.kind == WGRAD ? wait_columns(w) : AgGemmQueue::wait_inputs(w);
  }
  DEVICE bool wait_part(const Work& w, u32 part) const {
    return w.kind == WGRAD ? wait_columns(w) : AgGemmQueue::wait_part(w, part);
  }
  DEVICE bool ready(const Work& w) const { return w.kind == WGRAD ? columns_have_landed(w.row) : AgGemmQueue::ready(w); }
  DEVICE void finish(const Work& w) const {
    if (w.kind == PULL || w.kind == PULL_COLUMNS) finish_pull(w);
  }
};
