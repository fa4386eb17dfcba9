// gemm_rs by push, WHAT NEXT: C[rows of this rank, N] = sum over ranks of A[M, K] @ B[N, K]^T, one launch a rank, as
// gemm_rs.h; but nobody moves. Who builds a tile of a peer's rows stores it straight into that peer's inbox, and who builds a
// tile of the own rows adds what has come for it from all peers, in rank order, when it stores it.
//
// Tiles go band by band, in low ones, so that at any time some WGs have tiles to send and others tiles to add: whoever sends
// is held up by a link that is asked by all. Those for peers run some bands ahead of the own: links are busy from the first
// tile on, and what an own tile waits for is most often there.
//
// The inbox needs no second buffer and no poison. A tile is stored when its owner has started this launch: it has then left
// every earlier one, in which it read what lay there. And it is read when its signal says so, which carries the epoch.
//
// Why it cannot deadlock: storing a peer's tile waits for that peer to start. Storing an own tile of row r waits for the peers'
// tiles of row r. Tiles are claimed in the order P0 P1 O0 P2 O1 .. of bands (or P0 P1 P2 O0 ..): an own tile comes before a tile for a peer only if
// its row is lower. So whoever holds what is waited for, or would have to claim it, is held up, if at all, at a lower row, and
// by induction over rows ends. (RANK_ORDER: the same over chunks, rows and columns, in one order on all ranks.) So a target may
// claim ahead, and ranks need not have bands of one height. DRAIN waits for starts only.
#pragma once
#include "chunks.h"
#include "halves.h"
#include "group.h"

// Where each rank gets partial results of its rows.
struct Inbox {
  Vec16* of[MAX_RANKS];      // every rank's [ranks - 1][tiles of a chunk][tile_m, tile_n] bf16; inside a tile as a target likes
  u32* arrived_of[MAX_RANKS];  // every rank's [ranks][per_rank] signals: the last launch in which rank q has stored tile i
  u32 per_rank, zero;
};
static_assert(sizeof(Inbox) == 136);

struct GemmRsPushParams {
  Group g;
  Counters counters;  // words: [0] head of the tile queue
  const Vec16* a;     // [M, K] bf16
  const Vec16* b;     // [N, K] bf16
  u64* c;             // [rows(rank), N] bf16
  Inbox inbox;
  Chunks m;
  u32 N, K;           // multiples of 8; K is not 0
  u32 tile_n;
  u32 band_tile_rows; // tile rows of a band
  u32 order;          // AS_CONSUMED or RANK_ORDER
  u32 halved;         // entries, the last of the queue and of own tiles alone, that are taken in halves
  u32 lead, zero;     // bands, at least one, that tiles for peers are ahead of the own; AS_CONSUMED
};
static_assert(sizeof(GemmRsPushParams) == 384);

struct GemmRsPushSchedule {
  const GemmRsPushParams& p;
  mutable u32 here = 0;  // bit q: rank q was seen in this launch

  DEVICE explicit GemmRsPushSchedule(const GemmRsPushParams& p) : p(p) {}

  DEVICE u32* head() const { return p.counters.current(p.g); }
  DEVICE u32 columns() const { return (p.N + p.tile_n - 1) / p.tile_n; }
  DEVICE u32 bands() const { return (p.m.tile_rows_max + p.band_tile_rows - 1) / p.band_tile_rows; }
  DEVICE u32 peers() const { return p.g.ranks - 1; }
  DEVICE u32 peer_at(u32 i) const { return (p.g.rank + 1 + i) % p.g.ranks; }  // ranks begin with different peers
  DEVICE u32 entries() const {
    const u32 rows = p.order == RANK_ORDER ? p.m.tile_rows_max : bands() * p.band_tile_rows;
    return p.g.ranks * rows * columns();
  }

  // Tile `index` of a chunk, and the place of what rank q sends of it to the chunk's owner.
  DEVICE u32 index(const Work& w) const { return w.row * columns() + (w.kind == HALF ? w.part / 2 : w.part); }
  DEVICE u64 slot(const Work& w, u32 q) const {
    return (u64)(q - (q > w.chunk)) * p.m.tile_rows_max * columns() + index(w);
  }
  DEVICE u32* arrived(const Work& w, u32 q) const { return p.inbox.arrived_of[w.chunk] + q * p.inbox.per_rank + index(w); }

  DEVICE void begin() {
    p.counters.clear_other(p.g);
    announce_start(p.g);
  }

  // LEAVE: past a short chunk's end.
  DEVICE Work tile_at(u32 i) const {
    const u32 cols = columns();
    if (p.order == RANK_ORDER) {
      const u32 q = i / cols / p.m.tile_rows_max, row = i / cols % p.m.tile_rows_max;
      if (row < p.m.tile_rows(q)) return {TILE, q, row, i % cols};
      return {};
    }
    // Peers' bands up to the lead; then of each following step peers' band and an own one; then the last own ones.
    const u32 of_band = p.band_tile_rows * cols, away = peers() * of_band, all = away + of_band;
    const u32 lead = p.lead < bands() ? p.lead : bands(), first = lead * away, last = first + (bands() - lead) * all;
    u32 band, in;
    if (i < first) band = i / away, in = i % away;
    else if (i < last) band = (i - first) / all + lead, in = (i - first) % all;
    else band = bands() + (i - last) / of_band, in = away + (i - last) % of_band;
    const bool own = in >= away;
    if (own) band -= lead, in -= away;
    const u32 q = own ? p.g.rank : peer_at(in / of_band), row = band * p.band_tile_rows + in % p.band_tile_rows;
    if (row < p.m.tile_rows(q)) return {TILE, q, row, in % of_band / p.band_tile_rows};
    return {};
  }

  // The last entry is DRAIN, which exactly one WG draws.
  DEVICE Work next_work() {
    if (aborted(p.g)) return {};
    for (const Halves halves(entries(), p.halved);;) {
      const u32 i = target::add(head(), 1, DEVICE_SCOPE);
      if (i == halves.all()) return {DRAIN, p.g.rank};
      if (i > halves.all()) return {};
      if (const Work w = halves.of(i, tile_at(halves.entry(i)), p.N, p.tile_n); w.kind != LEAVE) return w;
    }
  }

  DEVICE bool wait_start(const Work& w, u32 q) const {
    if (here >> q & 1) return true;
    if (!wait_started(p.g, w, q, 1)) return false;
    here |= 1u << q;
    return true;
  }
  // For a target that can multiply first: instead of wait_inputs(tile), this before the tile is stored.
  DEVICE bool wait_to_store(const Work& w) const {
    if (w.chunk != p.g.rank) return wait_start(w, w.chunk);
    for (u32 i = 0; i < peers(); i++) {
      const u32 q = peer_at(i);  // whose call must be this one, or nothing will come
      if (!wait_start(w, q) || !wait_at_least(p.g, w, arrived(w, q), p.g.epoch, SYSTEM_SCOPE)) return false;
    }
    target::acquire(SYSTEM_SCOPE);  // pairs with the release in finish
    return true;
  }
  DEVICE bool wait_inputs(const Work& w) const { return is_tile(w.kind) ? wait_to_store(w) : wait_all_started(p.g, w); }

  DEVICE bool ready(const Work& w) const {
    if (!is_tile(w.kind)) return false;
    if (w.chunk != p.g.rank) return here >> w.chunk & 1;
    for (u32 i = 0; i < peers(); i++)
      if (!has_reached(arrived(w, peer_at(i)), p.g.epoch, SYSTEM_SCOPE)) return false;
    target::acquire(SYSTEM_SCOPE);  // as in wait_to_store
    return true;
  }

  DEVICE void finish(const Work& w) const {
    if (w.kind != TILE || w.chunk == p.g.rank) return;
    target::release(SYSTEM_SCOPE);  // the tile, then the word to its owner
    target::store(arrived(w, p.g.rank), p.g.epoch, SYSTEM_SCOPE);
  }
};
