// bulk_ag, WHAT NEXT: gathers the rows of X from all ranks beside a product that needs none of them, C[M, N] = A[M, K] @
// B[K, N] (paper section 3.2.3): X is for the weight gradient that follows.
//
// Movers pull (gather.h), builders build, in independent queues. A mover whose share is moved becomes a builder (ONE_WAY) or
// leaves (FIXED). A TILE waits for nothing, and the rest is as in ag_gemm, so it cannot deadlock.
#pragma once
#include "gather.h"
#include "halves.h"

struct BulkAgParams {
  Group g;
  Counters counters;               // words: see gather.h
  const Vec16* shard_of[MAX_RANKS];  // every rank's rows of X, [rows(q), width] bf16
  Vec16* gathered;                 // [rows of all, width] bf16; own rows are not written
  const Vec16* a;                  // [M, K] bf16
  const Vec16* b;                  // [K, ldc] bf16
  u64* c;                          // [M, ldc] bf16
  Chunks m;                        // rows of X
  u32 width;                       // of X, a multiple of 8
  u32 M, N, K;                     // K is a multiple of 8
  u32 ldc;                         // N rounded up to 8
  u32 tile_n;
  u32 movers;                      // WGs that begin as movers; 1 .. WGs - 1 when there are peers
  u32 policy;
  Pulls pulls;
  u32 halved, zero;                // tiles, the last of the queue, that are taken in halves
};
static_assert(sizeof(BulkAgParams) == 344);

struct BulkAgSchedule : Gather<BulkAgParams> {
  using Gather::Gather;

  DEVICE u32 tile_rows() const { return (p.M + p.m.tile_m - 1) / p.m.tile_m; }
  DEVICE u32 columns() const { return (p.N + p.tile_n - 1) / p.tile_n; }

  DEVICE Work next_work() {
    if (aborted(p.g)) return {};
    if (mover) {
      const Work w = next_pull();
      if (w.kind != LEAVE || p.policy == FIXED) return w;
      mover = false;
    }
    for (const Halves halves(tile_rows() * columns(), p.halved);;) {
      const u32 i = target::add(head(), 1, DEVICE_SCOPE), height = p.m.side_by_side ? p.m.side_by_side : 1;
      if (i == halves.all()) return {DRAIN, p.g.rank};
      if (i > halves.all()) return {};
      const TileAt t = tile_in_groups(halves.entry(i), tile_rows(), columns(), height);
      if (const Work w = halves.of(i, {TILE, p.g.rank, t.row, t.column}, p.N, p.tile_n); w.kind != LEAVE) return w;
    }
  }
  DEVICE bool wait_inputs(const Work& w) const {
    if (w.kind == PULL) return wait_pull(w);
    return w.kind != DRAIN || wait_drain(w);
  }
  DEVICE bool ready(const Work& w) const { return is_tile(w.kind); }  // which waits for nothing
  DEVICE void finish(const Work& w) const {
    if (w.kind == PULL) finish_pull(w);
  }
};
