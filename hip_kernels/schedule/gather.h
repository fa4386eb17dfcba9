// The movers of every operator that gathers rows: which rows a WG pulls next, what a pull waits for, and how it is told of.
//
// P has g, counters, m (the rows), movers. Counter words of one set: [0] head of the tile queue (ag_gemm has others), [1 + q]
// pulls from q done, then slices landed per (q, tile row). kosmos_raw/plan/shapes.py counts the same words.
#pragma once
#include "chunks.h"
#include "group.h"

template <class P> struct Gather {
  const P& p;
  u32 pulls = 0;       // the WG's only state, touched by next_work alone
  bool mover = false;

  DEVICE explicit Gather(const P& p) : p(p) {}

  DEVICE u32* head() const { return p.counters.current(p.g); }
  DEVICE u32* pulls_done(u32 q) const { return head() + 1 + q; }
  DEVICE u32* slices_landed(u32 q, u32 row) const { return head() + 1 + MAX_RANKS + q * p.m.tile_rows_max + row; }
  DEVICE u32* after_gather() const { return slices_landed(p.g.ranks, 0); }  // words of the operator's own

  DEVICE u32 peers() const { return p.g.ranks - 1; }
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

  // The same pulls from one queue that any WG may ask (TWO_WAY), row by row. Its head is the count of pulls from oneself,
  // which nobody else needs.
  DEVICE Work next_shared_pull() const {
    const u32 most = peers() ? slices(peer_at(0)) : 0;
    for (;;) {
      const u32 n = target::add(pulls_done(p.g.rank), 1, DEVICE_SCOPE);
      if (n >= p.m.tile_rows_max * peers() * most) return {};
      const u32 q = peer_at(n / most % peers()), row = n / most / peers(), slice = n % most;
      if (row < p.m.tile_rows(q) && slice < slices(q)) return {PULL, q, row, slice};
    }
  }

  DEVICE bool wait_pull(const Work& w) const { return wait_started(p.g, w, w.chunk, 1); }

  // Of the WG that draws DRAIN: all ranks have begun, and all have read this rank's shard.
  DEVICE bool wait_drain(const Work& w) const {
    const Group& g = p.g;
    if (!wait_all_started(g, w)) return false;
    if (!p.m.rows(g.rank)) return true;  // nobody reads, nor reports on, an empty shard
    // No acquire: it is the next launch that writes the shard, and the end of this one orders that.
    for (u32 i = 0; i < peers(); i++)
      if (!wait_at_least(g, w, &own_signals(g).reads_done[peer_at(i)], g.epoch, SYSTEM_SCOPE)) return false;
    return true;
  }

  DEVICE bool landed(const Work& w) const {
    if (!has_reached(slices_landed(w.chunk, w.row), slices(w.chunk), DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // pairs with the first release in finish_pull
    return true;
  }
  DEVICE bool wait_landed(const Work& w) const {
    if (!wait_at_least(p.g, w, slices_landed(w.chunk, w.row), slices(w.chunk), DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // as in landed
    return true;
  }

  DEVICE void finish_pull(const Work& w) const {
    target::release(DEVICE_SCOPE);  // rows first, then the count: a builder that sees the count must see the rows
    target::add(slices_landed(w.chunk, w.row), 1, DEVICE_SCOPE);
    const u32 all = slices(w.chunk) * p.m.tile_rows(w.chunk);
    if (target::add(pulls_done(w.chunk), 1, DEVICE_SCOPE) + 1 != all) return;
    target::acquire(DEVICE_SCOPE);  // the other movers' reads of this shard, then the word to its owner
    target::release(SYSTEM_SCOPE);
    target::store(&p.g.signals_of[w.chunk]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
