// bulk_rs, WHAT NEXT: adds X over all ranks and deals its rows out, out[rows of this rank] = sum of X, beside a product that
// needs none of it, C[M, N] (+)= A[K, M]^T @ B[K, N] (paper section 3.2.3). X is complete when the launch begins.
//
// Movers pull slices of their own rows from all ranks and add them, builders build, in independent queues. Whoever finds no
// more work of its own kind takes the other kind, once; builders become movers up to saturation. (FIXED: it leaves.)
// BESIDE: all WGs build, and agents of their own in the first of them do all REDUCEs; the contraction is not cut.
//
// Why it cannot deadlock: a REDUCE waits only for all ranks to start. A TILE waits for nothing. A SUM (split.h) waits for
// tiles that resident WGs of this rank have claimed. DRAIN, last in the tile queue, waits for peers' REDUCEs, which wait
// for no DRAIN: of those that a rank has, its movers do all, and only one of its WGs can draw DRAIN. (BESIDE: whoever does
// REDUCEs draws nothing else.)
#pragma once
#include "chunks.h"
#include "halves.h"
#include "group.h"
#include "split.h"

struct BulkRsParams {
  Group g;
  Counters counters;            // words: see the accessors of BulkRsSchedule
  const Vec16* x_of[MAX_RANKS];  // every rank's X, [rows of all, width] bf16
  Vec16* out;                   // [rows(rank), width] bf16
  const Vec16* a;               // [K, lda] bf16
  const Vec16* b;               // [K, ldc] bf16
  void* c;                      // [M, ldc] bf16 or fp32
  Split split;
  Chunks m;                     // rows of X
  u32 width;                    // of X, a multiple of 8
  u32 M, N, K;
  u32 lda, ldc;                 // M and N rounded up to 8
  u32 tile_n;
  u32 movers;                   // WGs that begin as movers, fewer than WGs; BESIDE: those with an agent that moves
  u32 max_movers;               // at which the links are saturated
  u32 slices;                   // of the own rows, each one REDUCE
  u32 into;                     // an Into
  u32 policy;
  u32 halved, zero;             // tiles, the last of the queue, that are taken in halves; none where the contraction is cut
};
static_assert(sizeof(BulkRsParams) == 360);

struct BulkRsSchedule {
  const BulkRsParams& p;
  bool mover = false, turned = false;  // touched by next_work alone
  mutable bool all_here = false;       // all ranks were seen in this launch

  DEVICE explicit BulkRsSchedule(const BulkRsParams& p) : p(p) {}

  // Counter words of one set. kosmos_raw/plan/bulk.py counts the same words.
  DEVICE u32* tile_head() const { return p.counters.current(p.g); }
  DEVICE u32* reduce_head() const { return tile_head() + 1; }
  DEVICE u32* joined() const { return tile_head() + 2; }        // builders that asked to become movers
  DEVICE u32* reduces_done() const { return tile_head() + 3; }
  DEVICE u32* parts_done(u32 row, u32 column) const { return tile_head() + 4 + row * columns() + column; }

  DEVICE u32 tile_rows() const { return (p.M + p.m.tile_m - 1) / p.m.tile_m; }
  DEVICE u32 columns() const { return (p.N + p.tile_n - 1) / p.tile_n; }
  DEVICE u32 reduces() const { return p.m.rows(p.g.rank) ? p.slices : 0; }

  DEVICE void begin() {
    mover = target::wg() < p.movers && p.policy != BESIDE;
    p.counters.clear_other(p.g);
    announce_start(p.g);
  }

  DEVICE Work next_work() {
    if (aborted(p.g)) return {};
    const Work w = mover ? next_reduce() : next_tile();
    if (w.kind != LEAVE || turned || p.policy == FIXED || p.policy == BESIDE) return w;
    turned = true;
    if (!mover && p.movers + target::add(joined(), 1, DEVICE_SCOPE) >= p.max_movers) return {};
    mover = !mover;
    return mover ? next_reduce() : next_tile();
  }

  // Of the agent that moves beside its WG's builders (BESIDE). It has a schedule of its own, which never begins.
  DEVICE Work next_beside() {
    if (target::wg() >= p.movers || aborted(p.g)) return {};
    return next_reduce();
  }

  DEVICE Work next_reduce() {
    const u32 i = target::add(reduce_head(), 1, DEVICE_SCOPE);
    if (i < reduces()) return {REDUCE, p.g.rank, 0, i};
    return {};
  }

  // All tiles, or all parts of them and then the sums of parts, then DRAIN.
  DEVICE Work next_tile() {
    const u32 parts = p.split.parts, tiles = tile_rows() * columns(), height = p.m.side_by_side ? p.m.side_by_side : 1;
    const Halves halves(tiles, p.halved);
    for (const u32 last = parts > 1 ? tiles * (parts + 1) : halves.all();;) {
      const u32 i = target::add(tile_head(), 1, DEVICE_SCOPE);
      if (i == last) return {DRAIN, p.g.rank};
      if (i > last) return {};
      const bool sum = parts > 1 && i >= tiles * parts;
      const u32 tile = parts == 1 ? halves.entry(i) : sum ? i - tiles * parts : i / parts;
      const TileAt t = tile_in_groups(tile, tile_rows(), columns(), height);
      if (parts > 1) return {sum ? SUM : TILE, p.g.rank, t.row, sum ? t.column : t.column * parts + i % parts};
      if (const Work w = halves.of(i, {TILE, p.g.rank, t.row, t.column}, p.N, p.tile_n); w.kind != LEAVE) return w;
    }
  }

  DEVICE bool wait_inputs(const Work& w) const {
    const Group& g = p.g;
    if (w.kind == REDUCE) return all_here || (all_here = wait_all_started(g, w));
    if (w.kind == SUM) {
      if (!wait_at_least(g, w, parts_done(w.row, w.part), p.split.parts, DEVICE_SCOPE)) return false;
      target::acquire(DEVICE_SCOPE);  // pairs with the release of a TILE in finish
    }
    if (w.kind == DRAIN) {
      if (!wait_all_started(g, w)) return false;
      // No acquire: the next launch writes X, and the end of this one orders that. Who gets no rows reads nothing.
      for (u32 i = 1; i < g.ranks; i++) {
        const u32 q = (g.rank + i) % g.ranks;
        if (p.m.rows(q) && !wait_at_least(g, w, &own_signals(g).reads_done[q], g.epoch, SYSTEM_SCOPE)) return false;
      }
    }
    return true;
  }

  DEVICE bool ready(const Work& w) const { return is_tile(w.kind); }  // which waits for nothing

  DEVICE void finish(const Work& w) const {
    if (w.kind == TILE && p.split.parts > 1) {
      target::release(DEVICE_SCOPE);  // sums first, then the count
      target::add(parts_done(w.row, w.part / p.split.parts), 1, DEVICE_SCOPE);
    }
    if (w.kind == REDUCE) reads_end(w);
  }
  DEVICE void reads_end(const Work&) const {
    target::release(DEVICE_SCOPE);  // what was read of X, then the count
    if (target::add(reduces_done(), 1, DEVICE_SCOPE) + 1 != reduces()) return;
    target::acquire(DEVICE_SCOPE);  // the other movers' reads, then the word to all owners of X
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&p.g.signals_of[q]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
