// gemm_rs broken on purpose: each breaks one rule of its protocol, and says which.
#pragma once
#include "gemm_rs.h"
#include "mutants.h"

// Nobody may read what is not poisoned yet: rule (2). What is there is the partial of two turns ago.
struct ReducesBeforeStart : GemmRsSchedule {
  explicit ReducesBeforeStart(const GemmRsParams& p) : GemmRsSchedule(p) { all_here = true; }
};

// What is claimed after a REDUCE, which blocks, is never a TILE that somebody waits for.
struct BuildsAfterReducing : GemmRsSchedule {
  using GemmRsSchedule::GemmRsSchedule;
  bool turn = false;
  Work next_work() {
    if (aborted(p.g)) return {};
    turn = !turn;
    if (const Work w = turn ? next_move() : next_tile(); w.kind != LEAVE) return w;
    return turn ? next_tile() : next_move();
  }
};

// A builder joins the movers when ALL tiles are claimed, not before.
struct JoinsTooEarly : GemmRsSchedule {
  using GemmRsSchedule::GemmRsSchedule;
  Work next_work() {
    if (aborted(p.g)) return {};
    if (!mover) {
      const Work w = next_tile();
      mover = true;
      if (w.kind != LEAVE) return w;
    }
    return next_move();
  }
};

// All slices of all bands are reduced.
struct ForgetsLastBand : GemmRsSchedule {
  using GemmRsSchedule::GemmRsSchedule;
  Work next_work() {
    const Work w = GemmRsSchedule::next_work();
    return w.kind == REDUCE && w.row + 1 == bands(p.m.tile_rows(p.g.rank)) ? Work{} : w;
  }
};

// With TWO_WAY a REDUCE is claimed when its whole band is. Here: whenever no other work of its kind is.
struct ReducesUnmadeBands : GemmRsSchedule {
  using GemmRsSchedule::GemmRsSchedule;
  bool turn = false;
  Work next_work() {
    if (!mover || aborted(p.g)) return GemmRsSchedule::next_work();
    turn = !turn;
    if (const Work w = turn ? next_move() : next_tile(); w.kind != LEAVE) return w;
    return turn ? next_tile() : next_move();
  }
};
// Here: when the last word of its own slice is there, of a row that may have more tiles.
struct AsksForTheSlice : GemmRsSchedule {
  using GemmRsSchedule::GemmRsSchedule;
  Work next_work() {
    if (!mover || aborted(p.g)) return GemmRsSchedule::next_work();
    for (;;) {
      const u32 i = target::load(move_head(), DEVICE_SCOPE);
      const Work w = move_at(i);
      if (w.kind == LEAVE) return next_tile();
      if (w.kind == REDUCE && !is_made(w))
        if (const Work tile = next_tile(); tile.kind != LEAVE) return tile;
      if (target::swap_if(move_head(), i, i + 1, DEVICE_SCOPE)) return w;
    }
  }
  bool is_made(const Work& w) {
    const Span s = span(w);
    band_is_made(w.row);
    if (!all_began) return false;
    for (u32 q = 0; s.begin < s.end && q < p.g.ranks; q++)
      if (!arrived(target::read_polled(p.staging.of[q] + partials_at() + s.end - 1))) return false;
    return true;
  }
};
// Here: although its owner may not have begun, and what is there is of two turns ago.
struct AsksBeforeStart : GemmRsSchedule {
  explicit AsksBeforeStart(const GemmRsParams& p) : GemmRsSchedule(p) { all_began = true; }
};

// That the last word has come is a hint, and says nothing of the others.
struct TrustsTheHint : GemmRs {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != REDUCE) return GemmRs::move(s, w);
    add_ranks<false>(s.p.g, w, addends(s, w));
  }
};

// Partials are stored past the caches.
struct StoresIntoCaches : GemmRs {
  static void store(const Params& p, const Work& w, u32 row, u32 column, u64 v) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, v);
  }
};

// No result may equal the sentinel.
struct StoresASentinel : GemmRs {
  static void store(const Params& p, const Work& w, u32 row, u32 column, u64 v) {
    GemmRs::store(p, w, row, column, row + column ? v : (v & ~0xffffull) | (SENTINEL & 0xffff));
  }
};
