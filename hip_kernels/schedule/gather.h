// The movers of every operator that gathers rows: which rows a WG pulls next, what a pull waits for, and how it is told of.
//
// P has g, counters, m (the rows), movers, pulls. It may have a second matrix, of which every rank has lines as well, column_m
// and column_pulls (one slab): it is pulled behind the first one.
//
// Counter words of one set: [0] head of the tile queue (ag_gemm has others), [1 + q] pulls from q done, then slices landed per
// (q, tile row, slab), then those of the second matrix per tile row. kosmos_raw/plan/shapes.py counts the same words.
#pragma once
#include "chunks.h"
#include "group.h"

// How the rows of a rank are cut into PULLs. A PULL is long enough to keep a link busy beside what publishing it costs. Slabs
// are parts of the width that land one after another, so that builders can begin with the first.
struct Pulls {
  u32 slices;      // equal parts of a slab of a tile row, each one PULL
  u32 slabs;
  u32 slab_words;  // 16-byte words of a line of a slab; the last slab may have fewer
  u32 band;        // tile rows whose slabs are pulled side by side: the first slab of all of them, then the next one. If
                   // they do not come out even, the first band is the lower one: the last one's tiles end together
};
static_assert(sizeof(Pulls) == 16);

template <class P> struct Gather {
  static constexpr bool TWO = requires(const P& p) { p.column_m; };
  const P& p;
  u32 pulls = 0;         // of this WG so far; touched by next_work alone, as is mover
  bool mover = false;
  mutable u32 here = 0;  // bit q: wait_inputs has seen rank q in this launch; saves later pulls an acquire each

  DEVICE explicit Gather(const P& p) : p(p) {}

  DEVICE u32* head() const { return p.counters.current(p.g); }
  DEVICE u32* pulls_done(u32 q) const { return head() + 1 + q; }
  DEVICE u32* slices_landed(u32 q, u32 row, u32 slab) const {
    return head() + 1 + MAX_RANKS + (q * p.m.tile_rows_max + row) * p.pulls.slabs + slab;
  }
  DEVICE u32* columns_landed(u32 row) const { return slices_landed(p.g.ranks, 0, 0) + row; }  // from all peers together
  DEVICE u32* after_gather() const {  // words of the operator's own
    if constexpr (TWO) return columns_landed(p.column_m.tile_rows_max);
    else return slices_landed(p.g.ranks, 0, 0);
  }

  DEVICE u32 peers() const { return p.g.ranks - 1; }
  // Each rank starts with another peer, so that no link is asked by all at once.
  DEVICE u32 peer_at(u32 i) const { return (p.g.rank + 1 + i) % p.g.ranks; }
  DEVICE u32 pulls_of_rows(u32 q) const { return p.m.tile_rows(q) * p.pulls.slabs * p.pulls.slices; }
  DEVICE u32 entries_of_rows() const { return peers() * p.m.tile_rows_max * p.pulls.slabs * p.pulls.slices; }
  DEVICE u32 pulls_from(u32 q) const {
    if constexpr (TWO) return pulls_of_rows(q) + p.column_m.tile_rows(q) * p.column_pulls.slices;
    else return pulls_of_rows(q);
  }
  DEVICE u32 entries() const {
    if constexpr (TWO) return entries_of_rows() + peers() * p.column_m.tile_rows_max * p.column_pulls.slices;
    else return entries_of_rows();
  }

  DEVICE void begin() {
    mover = peers() && target::wg() < p.movers && p.policy != BESIDE;
    p.counters.clear_other(p.g);
    announce_start(p.g);
  }

  // Entry i of all pulls: peers in turn; of each peer band by band, in a band slab by slab, in a slab row by row. LEAVE: past
  // a short chunk's end. Then the second matrix, row by row.
  DEVICE Work pull_at(u32 i) const {
    if constexpr (TWO) {
      if (i >= entries_of_rows()) {
        const u32 k = i - entries_of_rows(), q = peer_at(k % peers()), row = k / peers() / p.column_pulls.slices;
        if (row >= p.column_m.tile_rows(q)) return {};
        return {PULL_COLUMNS, q, row, k / peers() % p.column_pulls.slices};
      }
    }
    const u32 q = peer_at(i % peers()), j = i / peers(), slices = p.pulls.slices;
    if (j >= pulls_of_rows(q)) return {};
    const u32 band = p.pulls.band, row_pulls = p.pulls.slabs * slices, low = p.m.tile_rows(q) % band;
    const bool in_low = j < low * row_pulls;
    const u32 k = in_low ? j : j - low * row_pulls, rows = in_low ? low : band;
    const u32 first = in_low ? 0 : low + k / (band * row_pulls) * band, in = k % (rows * row_pulls);
    return {PULL, q, first + in % (rows * slices) / slices, in / (rows * slices) * slices + in % slices};
  }

  // Movers take the entries in turn, so that the rows that are wanted first come first, from all peers alike.
  DEVICE Work next_pull() {
    for (u32 i; (i = pulls * p.movers + target::wg()) < entries();) {
      pulls++;
      if (const Work w = pull_at(i); w.kind != LEAVE) return w;
    }
    return {};
  }

  // Of the agent that moves beside its WG's builders (BESIDE). It has a schedule of its own, which never begins.
  DEVICE Work next_beside() {
    if (target::wg() >= p.movers || aborted(p.g)) return {};
    return next_pull();
  }

  // The same pulls from one queue that any WG may ask (TWO_WAY). Its head is the count of pulls from oneself, which nobody
  // else needs.
  DEVICE Work next_shared_pull() const {
    for (;;) {
      const u32 i = target::add(pulls_done(p.g.rank), 1, DEVICE_SCOPE);
      if (i >= entries()) return {};
      if (const Work w = pull_at(i); w.kind != LEAVE) return w;
    }
  }

  DEVICE bool wait_pull(const Work& w) const {
    if (here >> w.chunk & 1) return true;
    if (!wait_started(p.g, w, w.chunk, 1)) return false;
    here |= 1u << w.chunk;
    return true;
  }

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
    for (u32 slab = 0; slab < p.pulls.slabs; slab++)
      if (!has_reached(slices_landed(w.chunk, w.row, slab), p.pulls.slices, DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // pairs with the first release in finish_pull
    return true;
  }
  DEVICE bool wait_slab(const Work& w, u32 slab) const {
    if (!wait_at_least(p.g, w, slices_landed(w.chunk, w.row, slab), p.pulls.slices, DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // as in landed
    return true;
  }
  DEVICE bool wait_landed(const Work& w) const {
    for (u32 slab = 0; slab < p.pulls.slabs; slab++)
      if (!wait_slab(w, slab)) return false;
    return true;
  }

  // Of the second matrix: what all peers have in a tile row.
  DEVICE u32 slices_of_columns() const {
    u32 from = 0;
    for (u32 i = 0; i < peers(); i++) from += p.column_m.rows(peer_at(i)) > 0;
    return from * p.column_pulls.slices;
  }
  DEVICE bool columns_have_landed(u32 row) const {
    if (!has_reached(columns_landed(row), slices_of_columns(), DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // as in landed
    return true;
  }
  DEVICE bool wait_columns(const Work& w) const {
    if (!wait_at_least(p.g, w, columns_landed(w.row), slices_of_columns(), DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // as in landed
    return true;
  }

  DEVICE u32* counted_at(const Work& w) const {
    if constexpr (TWO) {
      if (w.kind == PULL_COLUMNS) return columns_landed(w.row);
    }
    return slices_landed(w.chunk, w.row, w.part / p.pulls.slices);
  }
  DEVICE void finish_pull(const Work& w) const {
    target::release(DEVICE_SCOPE);  // rows first, then the count: a builder that sees the count must see the rows
    target::add(counted_at(w), 1, DEVICE_SCOPE);
    if (target::add(pulls_done(w.chunk), 1, DEVICE_SCOPE) + 1 != pulls_from(w.chunk)) return;
    target::acquire(DEVICE_SCOPE);  // the other movers' reads of this shard, then the word to its owner
    target::release(SYSTEM_SCOPE);
    target::store(&p.g.signals_of[w.chunk]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
