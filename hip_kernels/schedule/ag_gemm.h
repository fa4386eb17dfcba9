// ag_gemm, WHAT NEXT: C[M, N] = gather_rows(A)[M, K] @ B[N, K]^T, one launch a rank (paper section 3.2.1).
//
// Movers pull peers' tile rows of A in the order in which builders want them, and count what has landed per (peer, tile row).
// Builders take the own shard's tiles first, which wait for nothing, then peers' tile rows. A mover whose share is moved
// becomes a builder (ONE_WAY) or leaves (FIXED).
//
// Why it cannot deadlock: a PULL waits only for its source rank to have started, which that rank's first WG does before it
// waits for anything. A TILE waits only for PULLs of this rank's movers, which never wait for tiles and are all resident.
// DRAIN waits for peers to start, and for their PULLs of the own shard. By induction over epochs all of them end.
#pragma once
#include "chunks.h"
#include "group.h"

struct AgGemmParams {
  Group g;
  Counters counters;               // words: see the accessors of AgGemmSchedule
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
};
static_assert(sizeof(AgGemmParams) == 304);

struct AgGemmSchedule {
  const AgGemmParams& p;
  u32 pulls = 0;       // the WG's only state, touched by next_work alone
  bool mover = false;

  DEVICE explicit AgGemmSchedule(const AgGemmParams& p) : p(p) {}

  // Counter words of one set: [0] head of the tile queue, [1 + q] pulls from q done, then slices landed per (q, tile row).
  // kosmos_raw/plan/ag_gemm.py counts the same words.
  DEVICE u32* head() const { return p.counters.current(p.g); }
  DEVICE u32* pulls_done(u32 q) const { return head() + 1 + q; }
  DEVICE u32* slices_landed(u32 q, u32 row) const { return head() + 1 + MAX_RANKS + q * p.m.tile_rows_max + row; }

  DEVICE u32 peers() const { return p.g.ranks - 1; }
  DEVICE u32 columns() const { return (p.N + p.tile_n - 1) / p.tile_n; }
  // Each rank starts with another peer, so that no link is asked by all at once.
  DEVICE u32 peer_at(u32 i) const { return (p.g.rank + 1 + i) % p.g.ranks; }
  // How many movers share the rows of q.
  DEVICE u32 slices(u32 q) const {
    const u32 i = (q + p.g.ranks - p.g.rank - 1) % p.g.ranks;
    return p.movers < peers() ? 1 : (p.movers - i + peers() - 1) / peers();
  }

  DEVICE void begin() {
    mover = peers() && target::wg() < p.movers;
    p.counters.clear_other(p.g);
    announce_start(p.g);
  }

  DEVICE Work next_work() {
    if (aborted(p.g)) return {};
    if (mover) {
      const Work w = next_pull();
      if (w.kind != LEAVE || p.policy == FIXED) return w;
      mover = false;
    }
    return next_tile();
  }

  // Mover m keeps to one peer and slice when movers are enough, else it goes round its peers row by row.
  DEVICE Work next_pull() {
    const u32 stride = p.movers < peers() ? p.movers : peers(), first = target::wg() % stride;
    const u32 mine = (peers() - first + stride - 1) / stride;
    while (pulls < mine * p.m.tile_rows_max) {
      const u32 n = pulls++, q = peer_at(first + n % mine * stride), row = n / mine;
      if (row < p.m.tile_rows(q)) return {PULL, q, row, target::wg() / stride};
    }
    return {};
  }

  // Own chunk first, in groups, then peers' tile rows interleaved as movers pull them. Entries past a short chunk's end are skipped.
  // The last entry is DRAIN, so exactly one WG draws it.
  DEVICE Work next_tile() {
    const u32 cols = columns(), own = p.m.tile_rows(p.g.rank) * cols, total = own + peers() * p.m.tile_rows_max * cols;
    for (;;) {
      const u32 i = target::add(head(), 1, DEVICE_SCOPE);
      if (i == total) return {DRAIN, p.g.rank};
      if (i > total) return {};
      if (i < own) {
        const TileAt t = tile_in_groups(i, p.m.tile_rows(p.g.rank), cols, p.m.side_by_side ? p.m.side_by_side : 1);
        return {TILE, p.g.rank, t.row, t.column};
      }
      const u32 j = (i - own) / cols, q = peer_at(j % peers()), row = j / peers();
      if (row < p.m.tile_rows(q)) return {TILE, q, row, (i - own) % cols};
    }
  }

  DEVICE bool wait_inputs(const Work& w) const {
    const Group& g = p.g;
    if (w.kind == PULL) return wait_started(g, w, w.chunk, 1);
    if (w.kind == TILE && w.chunk != g.rank) {
      if (!wait_at_least(g, w, slices_landed(w.chunk, w.row), slices(w.chunk), DEVICE_SCOPE)) return false;
      target::acquire(DEVICE_SCOPE);  // pairs with the first release in finish
    }
    if (w.kind == DRAIN) {
      if (!wait_all_started(g, w)) return false;
      if (!p.m.rows(g.rank)) return true;  // nobody reads, nor reports on, an empty shard
      // No acquire: it is the next launch that writes the shard, and the end of this one orders that.
      for (u32 i = 0; i < peers(); i++)
        if (!wait_at_least(g, w, &own_signals(g).reads_done[peer_at(i)], g.epoch, SYSTEM_SCOPE)) return false;
    }
    return true;
  }

  // Asks once for what wait_inputs would wait for, of a TILE; true means acquired too. Other kinds: not asked, so not ready.
  DEVICE bool ready(const Work& w) const {
    if (w.kind != TILE) return false;
    if (w.chunk == p.g.rank) return true;
    if (!has_reached(slices_landed(w.chunk, w.row), slices(w.chunk), DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // pairs with the first release in finish
    return true;
  }

  DEVICE void finish(const Work& w) const {
    if (w.kind != PULL) return;
    target::release(DEVICE_SCOPE);  // rows first, then the count: a builder that sees the count must see the rows
    target::add(slices_landed(w.chunk, w.row), 1, DEVICE_SCOPE);
    const u32 all = slices(w.chunk) * p.m.tile_rows(w.chunk);
    if (target::add(pulls_done(w.chunk), 1, DEVICE_SCOPE) + 1 != all) return;
    target::acquire(DEVICE_SCOPE);  // the other movers' reads of this shard, then the word to its owner
    target::release(SYSTEM_SCOPE);
    target::store(&p.g.signals_of[w.chunk]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
