// ag_gemm_dgrad, WHAT NEXT: dX[M, N] = gather_rows(dY)[M, K] @ W[K, N], one launch a rank (paper section 3.2.1, "AG+NN").
//
// As ag_gemm, with a contraction that may be cut in parts (split.h). Then each queue holds every part of its tiles, after
// them a SUM for each tile. A SUM waits for parts that lie before it in its queue, so resident WGs of this rank have claimed
// them, and who holds a TILE waits for PULLs alone: so it adds no way to deadlock.
#pragma once
#include "ag_gemm.h"

struct AgGemmDgradSchedule : AgGemmQueue<AgGemmDgradSchedule> {
  using AgGemmQueue::AgGemmQueue;

  // Counter words: ag_gemm's, then parts done of each tile.
  DEVICE u32* parts_done(u32 chunk, u32 row, u32 column) const {
    return after_queues() + (chunk * p.m.tile_rows_max + row) * columns() + column;
  }

  DEVICE u32 entries(u32 queue) const {
    return p.split.parts == 1 ? halves(queue).all() : tiles_in(queue) * (p.split.parts + 1);
  }
  DEVICE Work entry_at(u32 queue, u32 i) const {
    const u32 parts = p.split.parts, tiles = tiles_in(queue);
    if (parts == 1) {
      const Halves h = halves(queue);
      return h.of(i, tile_at(queue, h.entry(i)), p.N, p.tile_n);
    }
    const bool sum = i >= tiles * parts;
    const Work w = tile_at(queue, sum ? i - tiles * parts : i / parts);
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
