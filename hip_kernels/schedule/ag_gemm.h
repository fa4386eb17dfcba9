// ag_gemm, WHAT NEXT: C[M, N] = gather_rows(A)[M, K] @ B[N, K]^T, one launch a rank (paper section 3.2.1).
//
// Movers pull peers' tile rows of A (gather.h) in the order in which builders want them.
// Builders take the own shard's tiles first, which wait for nothing, then peers' tile rows. A mover whose share is moved
// becomes a builder (ONE_WAY) or leaves (FIXED); with TWO_WAY, builders pull while their next tile is not there.
//
// Why it cannot deadlock: a PULL waits only for its source rank to have started, which that rank's first WG does before it
// waits for anything. A TILE waits only for PULLs of this rank's movers, which never wait for tiles and are all resident.
// DRAIN waits for peers to start, and for their PULLs of the own shard. By induction over epochs all of them end.
#pragma once
#include "gather.h"
#include "split.h"

struct AgGemmParams {
  Group g;
  Counters counters;               // words: see gather.h
  const Vec16* shard_of[MAX_RANKS];  // every rank's A shard, [rows(q), K] bf16
  Vec16* gathered;                 // [M, K] bf16, peers' rows only; own rows are read from the shard
  const Vec16* b;                  // [N, K] bf16
  u64* c;                          // [M, ldc] bf16
  Chunks m;
  u32 N, K;                        // K is a multiple of 8
  u32 ldc;                         // elements from row to row of C, a multiple of 8, at least N
  u32 tile_n;
  u32 movers;                      // WGs that begin as movers; 1 .. WGs - 1 when there are peers
  u32 policy;
  u32 order;
  u32 zero;
  Split split;                     // of ag_gemm_dgrad alone
};
static_assert(sizeof(AgGemmParams) == 328);

// The queue of tiles beside that of pulls. Self says what it holds: entries() and entry_at(i), the last of which is DRAIN.
template <class Self> struct AgGemmQueue : Gather<AgGemmParams> {
  using Gather::Gather;
  DEVICE const Self& self() const { return static_cast<const Self&>(*this); }

  DEVICE u32 columns() const { return (p.N + p.tile_n - 1) / p.tile_n; }
  DEVICE u32 own_tiles() const { return p.m.tile_rows(p.g.rank) * columns(); }
  DEVICE bool own_first() const { return p.order == AS_CONSUMED || p.order == CHUNK_MAJOR; }
  DEVICE u32 all_tiles() const {
    if (!own_first()) return p.g.ranks * p.m.tile_rows_max * columns();
    return own_tiles() + peers() * p.m.tile_rows_max * columns();
  }

  DEVICE Work next_work() {
    if (aborted(p.g)) return {};
    if (p.policy == TWO_WAY) return next_two_way();
    if (mover) {
      const Work w = next_pull();
      if (w.kind != LEAVE || p.policy == FIXED) return w;
      mover = false;
    }
    return next_tile();
  }

  // A builder whose next tile is not there yet pulls meanwhile. It waits for a tile only when all pulls are claimed, by WGs
  // that do not wait for tiles.
  DEVICE Work next_two_way() {
    if (mover) {
      const Work w = next_shared_pull();
      if (w.kind != LEAVE) return w;
      mover = false;
    }
    for (;;) {
      const u32 i = target::load(head(), DEVICE_SCOPE);
      if (i >= self().entries()) break;
      const Work w = self().entry_at(i);
      if (w.kind == TILE && !self().ready(w)) break;
      if (target::swap_if(head(), i, i + 1, DEVICE_SCOPE) && w.kind != LEAVE) return w;
    }
    const Work w = next_shared_pull();
    return w.kind != LEAVE ? w : next_tile();
  }

  // Own chunk first, in groups, then peers' tile rows interleaved as movers pull them. LEAVE: past a short chunk's end.
  DEVICE Work tile_at(u32 i) const {
    const u32 cols = columns(), own = own_first() ? own_tiles() : 0, most = p.m.tile_rows_max;
    if (i < own) {
      const TileAt t = tile_in_groups(i, p.m.tile_rows(p.g.rank), cols, p.m.side_by_side ? p.m.side_by_side : 1);
      return {TILE, p.g.rank, t.row, t.column};
    }
    const u32 j = (i - own) / cols, among = own_first() ? peers() : p.g.ranks;  // the own chunk is the last in the round
    const bool by_chunk = p.order == CHUNK_MAJOR || p.order == RANK_ORDER;
    const u32 turn = by_chunk ? j / most : j % among, row = by_chunk ? j % most : j / among;
    const u32 q = p.order == RANK_ORDER ? turn : peer_at(turn);
    if (row < p.m.tile_rows(q)) return {TILE, q, row, (i - own) % cols};
    return {};
  }

  // The last entry is DRAIN, so exactly one WG draws it.
  DEVICE Work next_tile() {
    for (const u32 all = self().entries();;) {
      const u32 i = target::add(head(), 1, DEVICE_SCOPE);
      if (i == all) return {DRAIN, p.g.rank};
      if (i > all) return {};
      if (const Work w = self().entry_at(i); w.kind != LEAVE) return w;
    }
  }

  DEVICE bool wait_inputs(const Work& w) const {
    if (w.kind == PULL) return wait_pull(w);
    if (w.kind == DRAIN) return wait_drain(w);
    return w.kind != TILE || w.chunk == p.g.rank || wait_landed(w);
  }
  // Asks once for what wait_inputs would wait for, of a TILE; true means acquired too. Other kinds: not asked, so not ready.
  DEVICE bool ready(const Work& w) const { return w.kind == TILE && (w.chunk == p.g.rank || landed(w)); }
  DEVICE void finish(const Work& w) const {
    if (w.kind == PULL) finish_pull(w);
  }
};

struct AgGemmSchedule : AgGemmQueue<AgGemmSchedule> {
  using AgGemmQueue::AgGemmQueue;
  DEVICE u32 entries() const { return all_tiles(); }
  DEVICE Work entry_at(u32 i) const { return tile_at(i); }
};
