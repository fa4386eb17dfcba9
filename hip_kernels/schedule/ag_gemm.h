// ag_gemm, WHAT NEXT: C[M, N] = gather_rows(A)[M, K] @ B[N, K]^T, one launch a rank (paper section 3.2.1).
//
// Movers pull peers' tile rows of A (gather.h) in the order in which builders want them.
// Builders take the own shard's tiles first, which wait for nothing, then peers' tile rows. A mover whose share is moved
// becomes a builder (ONE_WAY) or leaves (FIXED); with TWO_WAY, builders pull while their next tile is not there.
//
// Where a device is made of dies that cache apart, tiles may lie in several queues, each a stretch of columns of all rows in
// that same order. A WG takes from its die's queue, and from the others once that is empty: so a die reads the columns of B
// of one stretch, not of all. Who takes what never matters for the result.
//
// Why it cannot deadlock: a PULL waits only for its source rank to have started, which that rank's first WG does before it
// waits for anything. A TILE waits only for PULLs of this rank's movers, which never wait for tiles and are all resident.
// DRAIN waits for peers to start, and for their PULLs of the own shard. By induction over epochs all of them end.
#pragma once
#include "gather.h"
#include "halves.h"
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
  u32 queues;                      // of tiles, 1 .. MAX_QUEUES
  u32 together;                    // tile rows of one chunk whose tiles are taken together, where peers take turns; 0 = one
  u32 halved;                      // tiles, the last of the queues, that are taken in halves; 0 where the contraction is cut
  Pulls pulls;                     // slabs are multiples of 64 k, and one where the contraction is cut
  Split split;                     // of ag_gemm_dgrad alone
};
static_assert(sizeof(AgGemmParams) == 352);

constexpr u32 MAX_QUEUES = 8;  // kosmos_raw/plan/ag_gemm.py counts their words

// The queues of tiles beside that of pulls. Self says what one holds: entries(queue) and entry_at(queue, i).
template <class Self, class P = AgGemmParams> struct AgGemmQueue : Gather<P> {
  using G = Gather<P>;
  using G::G, G::p, G::mover, G::peers, G::peer_at, G::next_pull, G::next_shared_pull, G::after_gather, G::landed;
  using G::wait_pull, G::wait_drain, G::wait_landed, G::wait_slab, G::finish_pull;
  u32 emptied = 0;  // queues that this WG has found empty; touched by next_work alone
  DEVICE const Self& self() const { return static_cast<const Self&>(*this); }

  // Counter words: Gather's, of which the first counts who found all queues empty; then heads of the queues.
  DEVICE u32* head(u32 queue) const { return after_gather() + queue; }
  DEVICE u32* after_queues() const { return head(MAX_QUEUES); }

  DEVICE u32 queue() const { return (target::die() + emptied) % p.queues; }
  DEVICE u32 columns() const { return (p.N + p.tile_n - 1) / p.tile_n; }
  DEVICE u32 first_column(u32 queue) const { return columns() * queue / p.queues; }
  DEVICE u32 columns_in(u32 queue) const { return first_column(queue + 1) - first_column(queue); }
  DEVICE bool own_first() const { return p.order == AS_CONSUMED || p.order == CHUNK_MAJOR; }
  DEVICE u32 together() const { return p.together ? p.together : 1; }
  DEVICE u32 groups() const { return (p.m.tile_rows_max + together() - 1) / together(); }  // of a chunk's tile rows
  DEVICE u32 tiles_in(u32 queue) const {
    const u32 most = groups() * together();
    return (own_first() ? p.m.tile_rows(p.g.rank) + peers() * most : p.g.ranks * most) * columns_in(queue);
  }

  DEVICE Halves halves(u32 queue) const { return {tiles_in(queue), (p.halved + p.queues - 1) / p.queues}; }

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
    while (emptied < p.queues) {
      const u32 q = queue(), i = target::load(head(q), DEVICE_SCOPE);
      if (i >= self().entries(q)) {
        emptied++;
        continue;
      }
      const Work w = self().entry_at(q, i);
      if (is_tile(w.kind) && !self().ready(w)) break;
      if (target::swap_if(head(q), i, i + 1, DEVICE_SCOPE) && w.kind != LEAVE) return w;
    }
    const Work w = next_shared_pull();
    return w.kind != LEAVE ? w : next_tile();
  }

  // Own chunk first, in groups of rows, then groups of peers' rows, interleaved as movers pull them. LEAVE: past a short
  // chunk's end.
  DEVICE Work tile_at(u32 queue, u32 i) const {
    const u32 first = first_column(queue), cols = columns_in(queue), most = groups(), height = together();
    const u32 own = own_first() ? p.m.tile_rows(p.g.rank) * cols : 0;
    if (i < own) {
      const TileAt t = tile_in_groups(i, p.m.tile_rows(p.g.rank), cols, p.m.side_by_side ? p.m.side_by_side : 1);
      return {TILE, p.g.rank, t.row, first + t.column};
    }
    const u32 j = (i - own) / (height * cols), in = (i - own) % (height * cols);
    const u32 among = own_first() ? peers() : p.g.ranks;  // the own chunk is the last in the round
    const bool by_chunk = p.order == CHUNK_MAJOR || p.order == RANK_ORDER;
    const u32 turn = by_chunk ? j / most : j % among, row = (by_chunk ? j % most : j / among) * height + in % height;
    const u32 q = p.order == RANK_ORDER ? turn : peer_at(turn);
    if (row < p.m.tile_rows(q)) return {TILE, q, row, first + in / height};
    return {};
  }

  DEVICE Work next_tile() {
    for (; emptied < p.queues; emptied++) {
      const u32 q = queue(), all = self().entries(q);
      for (u32 i; (i = target::add(head(q), 1, DEVICE_SCOPE)) < all;)
        if (const Work w = self().entry_at(q, i); w.kind != LEAVE) return w;
    }
    return last_work();
  }
  // All tiles are claimed. The first to find that draws DRAIN, so exactly one WG does.
  DEVICE Work last_work() const {
    if (target::add(G::head(), 1, DEVICE_SCOPE) == 0) return {DRAIN, p.g.rank};
    return {};
  }

  DEVICE bool wait_inputs(const Work& w) const {
    if (w.kind == PULL) return wait_pull(w);
    if (w.kind == DRAIN) return wait_drain(w);
    return !is_tile(w.kind) || w.chunk == p.g.rank || wait_landed(w);
  }
  // For a target that can wait in the middle of a tile: instead of wait_inputs(tile), wait_part(tile, i) before anything of
  // A's columns i * part_k() .. (i + 1) * part_k() is read. False: the launch has been given up.
  DEVICE u32 part_k() const { return p.pulls.slab_words * 8; }
  DEVICE bool wait_part(const Work& w, u32 part) const { return w.chunk == p.g.rank || wait_slab(w, part); }
  // Asks once for what wait_inputs would wait for, of a tile; true means acquired too. Other kinds: not asked, so not ready.
  DEVICE bool ready(const Work& w) const { return is_tile(w.kind) && (w.chunk == p.g.rank || landed(w)); }
  DEVICE void finish(const Work& w) const {
    if (w.kind == PULL) finish_pull(w);
  }
};

struct AgGemmSchedule : AgGemmQueue<AgGemmSchedule> {
  using AgGemmQueue::AgGemmQueue;
  DEVICE u32 entries(u32 queue) const { return halves(queue).all(); }
  DEVICE Work entry_at(u32 queue, u32 i) const {
    const Halves h = halves(queue);
    return h.of(i, tile_at(queue, h.entry(i)), p.N, p.tile_n);
  }
};
