// gemm_rs, WHAT NEXT: C[rows of this rank, N] = sum over ranks of A[M, K] @ B[N, K]^T, one launch a rank (paper section
// 3.2.2).
//
// Builders multiply and store partial tiles into staging (staging.h), band by band: band b of every rank's chunk before band
// b + 1 of any, so that everybody's reduction can begin after the first step. Movers pull slices of their own chunk's bands
// from all ranks, add in FP32 in rank order, and round once. A builder that finds no tile left joins them, up to
// saturation (ONE_WAY), or leaves (FIXED). With TWO_WAY movers build while their next band is not made.
//
// Why it cannot deadlock: a TILE waits for nothing. POISON waits for all ranks to start, which the first WG of each does
// before it waits for anything. REDUCE waits for tiles of all ranks; movers are fewer than WGs, so builders are resident
// everywhere, and they claim all tiles before they ever claim a REDUCE. What is claimed after a REDUCE is a REDUCE or
// LEAVE, never a TILE that somebody waits for: that is why a target may claim ahead.
//
// With TWO_WAY a TILE may be claimed after a REDUCE. But a REDUCE is then claimed only when all tiles that it waits for have
// been claimed before it (band_is_made), or when this rank has no tile left. Of all works that are claimed and wait, the one
// that was claimed first waits for tiles that were claimed still earlier, behind works that do not wait; or for tiles that are
// not claimed, of a rank that has some left, and so no WG that waits for such a thing. So something always goes on.
#pragma once
#include "chunks.h"
#include "staging.h"

struct GemmRsParams {
  Group g;
  Counters counters;  // words: see the accessors of GemmRsSchedule
  const Vec16* a;     // [M, K] bf16
  const Vec16* b;     // [N, K] bf16
  Vec16* c;           // [rows(rank), N] bf16
  Staging staging;    // [M, N] in a buffer
  Chunks m;
  u32 N, K;           // multiples of 8
  u32 tile_n;
  u32 movers;         // WGs that begin as movers; fewer than WGs
  u32 max_movers;     // at which the links are saturated; at least 1, movers included
  u32 band_tile_rows; // tile rows of a band
  u32 slices;         // of a band, each one REDUCE
  u32 policy;
  u32 order;          // any but NOT_OWN_FIRST
  u32 zero;
};
static_assert(sizeof(GemmRsParams) == 344);

struct GemmRsSchedule {
  const GemmRsParams& p;
  bool mover = false;             // touched by next_work alone, as the next one
  bool all_began = false;         // has seen all ranks in this launch
  mutable bool all_here = false;  // wait_inputs has seen all ranks in this launch; saves later REDUCEs an acquire each

  DEVICE explicit GemmRsSchedule(const GemmRsParams& p) : p(p) {}

  // Counter words of one set. kosmos_raw/plan/gemm_rs.py counts the same words.
  DEVICE u32* tile_head() const { return p.counters.current(p.g); }
  DEVICE u32* move_head() const { return tile_head() + 1; }
  DEVICE u32* joined() const { return tile_head() + 2; }  // builders that asked to become movers

  DEVICE u32 columns() const { return (p.N + p.tile_n - 1) / p.tile_n; }
  DEVICE u32 bands(u32 tile_rows) const { return (tile_rows + p.band_tile_rows - 1) / p.band_tile_rows; }
  // At least one, also with nothing to poison: it is what waits for all ranks in every launch.
  DEVICE u32 poisons() const { return p.movers ? p.movers : 1; }

  DEVICE void begin() {
    mover = target::wg() < p.movers;
    p.counters.clear_other(p.g);
    announce_start(p.g);
  }

  DEVICE Work next_work() {
    if (aborted(p.g)) return {};
    if (!mover) {
      const Work w = next_tile();
      if (w.kind != LEAVE || p.policy == FIXED) return w;
      if (p.movers + target::add(joined(), 1, DEVICE_SCOPE) >= p.max_movers) return {};
      mover = true;
    }
    return p.policy == TWO_WAY ? next_two_way() : next_move();
  }

  // Band-major. Each rank starts with another chunk, its own last: so every reader gets its first band from somebody
  // early, and no chunk is everybody's first. Entries past a short chunk's end are skipped. In any order the last tile of
  // a band is that of its last row and column: band_is_made counts on it.
  DEVICE Work next_tile() {
    const u32 per_chunk = p.band_tile_rows * columns(), per_band = per_chunk * p.g.ranks, most = p.m.tile_rows_max;
    for (;;) {
      const u32 i = target::add(tile_head(), 1, DEVICE_SCOPE);
      if (p.order != AS_CONSUMED) {
        if (i >= p.g.ranks * most * columns()) return {};
        const u32 turn = i / columns() / most, row = i / columns() % most;
        const u32 q = p.order == RANK_ORDER ? turn : (p.g.rank + 1 + turn) % p.g.ranks;
        if (row < p.m.tile_rows(q)) return {TILE, q, row, i % columns()};
        continue;
      }
      if (i >= per_band * bands(most)) return {};
      const u32 q = (p.g.rank + 1 + i % per_band / per_chunk) % p.g.ranks, t = i % per_chunk;
      const u32 row = i / per_band * p.band_tile_rows + t / columns();
      if (row < p.m.tile_rows(q)) return {TILE, q, row, t % columns()};
    }
  }

  // Poison first: it fills the time in which no rank has made its first band yet.
  DEVICE Work move_at(u32 i) const {
    if (i < poisons()) return {POISON, p.g.rank, 0, i};
    const u32 j = i - poisons();
    if (j < bands(p.m.tile_rows(p.g.rank)) * p.slices) return {REDUCE, p.g.rank, j / p.slices, j % p.slices};
    return {};
  }
  DEVICE Work next_move() { return move_at(target::add(move_head(), 1, DEVICE_SCOPE)); }

  DEVICE Work next_two_way() {
    for (;;) {
      const u32 i = target::load(move_head(), DEVICE_SCOPE);
      const Work w = move_at(i);
      if (w.kind == LEAVE) return next_tile();
      if (w.kind == REDUCE && !band_is_made(w.row))
        if (const Work tile = next_tile(); tile.kind != LEAVE) return tile;
      if (target::swap_if(move_head(), i, i + 1, DEVICE_SCOPE)) return w;
    }
  }

  // Whether every rank has stored the last word of the last tile of this rank's band: then all of the band's tiles are
  // claimed. Asked without waiting.
  DEVICE bool band_is_made(u32 band) {
    if (!all_began) {
      for (u32 q = 0; q < p.g.ranks; q++)
        if (!has_reached(&own_signals(p.g).started[q], p.g.epoch, SYSTEM_SCOPE)) return false;
      target::acquire(SYSTEM_SCOPE);  // rule (2) of staging.h
      all_began = true;
    }
    const Span s = span({REDUCE, p.g.rank, band, p.slices - 1});
    for (u32 q = 0; s.begin < s.end && q < p.g.ranks; q++)
      if (!arrived(target::read_polled(p.staging.of[q] + partials_at() + s.end - 1))) return false;
    return true;
  }

  // The words of a REDUCE, in C and, from partials_at() on, in everybody's staging.
  struct Span {
    u64 begin, end;
  };
  DEVICE Span span(const Work& w) const {
    const u64 words = p.N / 8, first = (u64)w.row * p.band_tile_rows * p.m.tile_m;
    const u64 left = p.m.rows(p.g.rank) - first, band = (u64)p.band_tile_rows * p.m.tile_m;
    const u64 n = (left < band ? left : band) * words, at = partials_at() + first * words;
    return {first * words + part_begin(at, n, w.part, p.slices), first * words + part_begin(at, n, w.part + 1, p.slices)};
  }
  DEVICE u64 partials_at() const { return p.staging.buffer_at() + (u64)p.m.first[p.g.rank] * (p.N / 8); }

  DEVICE bool wait_inputs(const Work& w) const {
    if (w.kind == POISON) return wait_all_started(p.g, w);  // rule (1) of staging.h
    if (w.kind != REDUCE) return true;
    if (!all_here && !wait_all_started(p.g, w)) return false;  // rule (2)
    all_here = true;
    // A hint: when the last word of each rank has come, most others have. Who reduces looks at every word; but if it
    // began too early, all its lanes would poll peers' memory through the whole first step.
    const Span s = span(w);
    for (u32 q = 0; s.begin < s.end && q < p.g.ranks; q++) {
      const Vec16* last = p.staging.of[q] + partials_at() + s.end - 1;
      for (Patience patience; !arrived(target::read_polled(last));)
        if (!patience.keep_waiting(p.g, w, (const u32*)last, 1, 0)) return false;
    }
    return true;
  }

  DEVICE bool ready(const Work& w) const { return w.kind == TILE; }  // which waits for nothing

  // Nothing to publish: partials are their own signal, and the end of the launch is a release of poison and result.
  DEVICE void finish(const Work&) const {}
};
