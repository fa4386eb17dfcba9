// ag_gemm_dgrad, WHAT NEXT: dX[M, N] = gather_rows(dY)[M, K] @ W[K, N], one launch a rank (paper section 3.2.1, "AG+NN").
//
// As ag_gemm, with a contraction that may be cut in parts (split.h). Then the tile queue holds every part of every tile,
// after them a SUM for each tile, then DRAIN. A SUM waits for parts that resident WGs of this rank have claimed, and after a SUM
// only SUM, DRAIN or LEAVE is claimed, or with TWO_WAY a PULL, which waits for no work: so it adds no way to deadlock.
#pragma once
#include "ag_gemm.h"

struct AgGemmDgradSchedule : AgGemmQueue<AgGemmDgradSchedule> {
  using AgGemmQueue::AgGemmQueue;

  // Counter words: Gather's, then parts done of each tile.
  DEVICE u32* parts_done(u32 chunk, u32 row, u32 column) const {
    return after_gather() + (chunk * p.m.tile_rows_max + row) * columns() + column;
  }

  DEVICE u32 entries() const { return all_tiles() * (p.split.parts == 1 ? 1 : p.split.parts + 1); }
  DEVICE Work entry_at(u32 i) const {
    const u32 parts = p.split.parts, tiles = all_tiles();
    if (parts == 1) return tile_at(i);
    const bool sum = i >= tiles * parts;
    const Work w = tile_at(sum ? i - tiles * parts : i / parts);
    if (w.kind == LEAVE) return w;
    return {sum ? SUM : TILE, w.chunk, w.row, sum ? w.part : w.part * parts + i % parts};
  }

  DEVICE bool wait_inputs(const Work& w) const {
    if (w.kind != SUM) return AgGemmQueue::wait_inputs(w);
    if (!wait_at_least(p.g, w, parts_done(w.chunk, w.row, w.part), p.split.parts, DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // pairs with the release in finish
    return true;
  }
  DEVICE void finish(const Work& w) const {
    if (w.kind == PULL) finish_pull(w);
    if (w.kind != TILE || p.split.parts == 1) return;
    target::release(DEVICE_SCOPE);  // sums first, then the count
    target::add(parts_done(w.chunk, w.row, w.part / p.split.parts), 1, DEVICE_SCOPE);
  }
};
