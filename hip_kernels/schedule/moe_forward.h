// moe_forward, WHAT NEXT: route, plan, dispatch beside GEMM1, GEMM2 beside combine, fold; one launch a rank, any skew, in rings
// that need not hold all rows (paper section 3.3.1).
//
// Tile row v (moe_layout.h) lies in slot v % slots of three rings: x (received), h (of GEMM1), y (of GEMM2). Step i is the tile
// rows [i * G, (i + 1) * G) of every owner, G = step_rows; GEMM2 of a step is queued `lag` steps behind its GEMM1. Steps order the
// queues; waits, credits and signals are per tile row. Legal: x_slots >= G, y_slots >= G, h_slots >= (lag + 1) G. Of those G,
// x_slots and what the layout follows from must be the same on all ranks.
//
// Why it cannot deadlock. All work of all ranks stands in one order, by keys that are compared from the left; what comes
// before the plan first, in the order of its queue, then
//     PUSH(i): (i, 0)   GEMM1(i): (i, 1)   SEND(i) that frees a y slot of GEMM2(j): (j + lag, 2)   GEMM2(i): (i + lag, 3)
// and at last other SENDs, SHARED, FOLD.
//  (1) Every wait is for something smaller. PUSH(v) waits for GEMM1(v - x_slots), an earlier step. GEMM1(v) for its pushes, and
//      for GEMM2(v - h_slots), whose key is at most (i - 1, 3). GEMM2(v) for GEMM1(v) and SEND(v - y_slots). The bounds are tight.
//  (2) A WG that builds begins what is not ready only when all smaller work of its rank is claimed: entries of the main queue
//      are drawn in order, and with one in hand it takes what else is smaller first (guards). Moves of the first steps, which
//      need no credit, are dealt to the movers, who make them before anything else.
//  (3) What is claimed because it is ready never blocks: within a launch signals only rise.
// Take the smallest unfinished work of all ranks. Its inputs are finished. If it is claimed, it runs, or is in hand of a WG that
// does something smaller or ready before: that ends. If not, some WG of its rank that builds comes to next_work: none of them
// has left, and by (2) none is blocked. It claims something finite, in the end this. WGs of a crew that does not build may
// block out of order; others make up for it, so one WG at least must build.
// Claiming ahead adds nothing: what blocks blocks in wait_inputs, not in the work.
#pragma once
#include "chunks.h"
#include "inputs.h"
#include "moe_claims.h"
#include "moe_params.h"

struct MoeSchedule : MoeClaims<MoeWords> {
  // The WG's only state, touched by next_work alone.
  bool planned = false;
  mutable bool there = false;  // the inputs of what next_work gave last have been seen; nobody need look again
  // An entry of the main queue that is in hand. Drawn, not seen first and then taken: of a hundred WGs that try that at the
  // same time one succeeds, and for the others it was a round trip (a claim each 2 us on H200, however many WGs).
  bool drawn = false;
  u32 entry = 0, step = 0;  // the last one drawn; the step it belongs to
  Work in_hand;
  u32 built = 0;  // tiles of experts

  DEVICE explicit MoeSchedule(const MoeParams& p) : MoeClaims(p) {}

  DEVICE void begin() {
    p.counters.clear_other(p.g);
    announce_start(p.g);
  }

  // ---- queues. In front: known on the host. Each entry waits only for entries before it, PLAN for peers' SCANs too.
  DEVICE u32 front_size() const { return token_rows() * p.columns0 + blocks() + p.scans + 1 + blocks(); }
  DEVICE Work front_at(u32 i) const {
    const u32 me = p.g.rank, tiles = token_rows() * p.columns0;
    if (i < tiles) return {ROUTE, me, i / p.columns0, i % p.columns0};
    i -= tiles;
    if (i < blocks()) return {TOPK, me, i};
    i -= blocks();
    if (i < p.scans) return {SCAN, me, 0, i};
    return i == p.scans ? Work{PLAN, me} : Work{SORT, me, i - p.scans - 1};
  }

  // The filler: depends on nothing but itself.
  DEVICE u32 shared_size() const { return p.S ? token_rows() * (p.shared_columns + p.columns2) : 0; }
  DEVICE bool shared_left() const { return seen(SHARED, shared_size()) < shared_size(); }
  DEVICE Work next_shared() const {
    const u32 i = target::add(head(SHARED), 1, DEVICE_SCOPE), columns = p.shared_columns, ones = token_rows() * columns;
    if (i >= shared_size()) return {};
    if (i < ones) return tile_in(SHARED1, 0, token_rows(), columns, i);
    return tile_in(SHARED2, 0, token_rows(), p.columns2, i - ones);
  }

  // Main: step i holds GEMM1 of step i, then GEMM2 of step i - lag. Behind all tiles: folds.
  DEVICE static u32 least(u32 a, u32 b) { return a < b ? a : b; }
  DEVICE u32 rows_before(u32 i) const { return least(i * p.layout.step_rows, p.layout.rows()); }
  DEVICE u32 late(u32 i) const { return i > p.lag ? i - p.lag : 0; }
  DEVICE u32 tiles_before(u32 i) const { return rows_before(i) * p.columns1 + rows_before(late(i)) * p.columns2; }
  DEVICE u32 all_tiles() const { return p.layout.rows() * (p.columns1 + p.columns2); }
  DEVICE Work main_at(u32 i) {
    if (i < all_tiles()) return tile_at(i);
    const u32 folded = i - all_tiles();
    return folded < blocks() ? Work{FOLD, p.g.rank, folded} : Work{};
  }
  DEVICE Work tile_at(u32 i) {
    while (i >= tiles_before(step + 1)) step++;
    i -= tiles_before(step);
    const u32 from = rows_before(step), ones = (rows_before(step + 1) - from) * p.columns1;
    if (i < ones) return tile_in(GEMM1, from, rows_before(step + 1) - from, p.columns1, i);
    const u32 first = rows_before(late(step));
    return tile_in(GEMM2, first, rows_before(late(step + 1)) - first, p.columns2, i - ones);
  }
  DEVICE Work tile_in(Kind kind, u32 first, u32 rows, u32 columns, u32 i) const {
    const TileAt t = tile_in_groups(i, rows, columns, p.side_by_side ? p.side_by_side : 1);
    return {kind, p.g.rank, first + t.row, t.column};
  }

  // ---- claims (moe_claims.h)
  // Steps whose moves need no credit are dealt to the movers in turn; the head counts those behind.
  DEVICE u32 dealt_steps() const {
    return p.movers ? least(p.x_slots / p.layout.step_rows, p.layout.steps()) : 0;
  }
  DEVICE u32 dealt_moves() const { return dealt_steps() ? p.layout.moves_end(dealt_steps() - 1) : 0; }
  DEVICE Work next_dealt() {
    const u32 n = target::wg() < p.movers ? dealt_moves() : 0, i = deal(p.movers, n);
    return i < n ? p.layout.move(i) : Work{};
  }
  DEVICE Claim next_move(u32 end) const {
    const u32 first = dealt_moves(), at = seen(MOVES, p.layout.one(MoeLayout::N_MOVES) - first), i = first + at;
    return i < end ? Claim{MOVES, at, p.layout.move(i)} : Claim{};
  }
  DEVICE Claim next_send(u32 end) const {
    const u32 i = seen(SENDS, p.layout.one(MoeLayout::N_SENDS));
    return i < end ? Claim{SENDS, i, p.layout.send(i)} : Claim{};
  }

  DEVICE Work next_work() {
    there = false;
    if (aborted(p.g)) return {};
    if (!planned)
      if (const Work w = before_plan(); w.kind != LEAVE) return w;
    if (const Work w = next_dealt(); w.kind != LEAVE) return w;
    for (;;) {
      if (!drawn && (builds() || target::load(head(MAIN), DEVICE_SCOPE) >= all_tiles())) {
        drawn = true;
        entry = target::add(head(MAIN), 1, DEVICE_SCOPE);
        in_hand = main_at(entry);
      }
      const Claim c = best((drawn ? entry : 0) >= all_tiles());  // not drawn: seen that there are tiles
      if (c.head == SHARED) {
        there = false;
        if (const Work s = next_shared(); s.kind != LEAVE) return s;
        continue;
      }
      if (!c) return {};
      if (c.head == MAIN) drawn = false;
      else if (!take(c)) continue;  // another WG has just claimed it
      built += is_tile(c.work.kind);
      return c.work;
    }
  }

  // What this WG should take now, seen and not yet taken: what its crews have ready, else what comes before the entry in hand,
  // else that entry, or the filler where it would wait. Nothing: it leaves. One loop asks for inputs, for every copy of that
  // question is kilobytes of code.
  enum Stage : u32 { MOVING, SENDING, BUILDING };
  DEVICE Claim best(bool no_tiles) const {
#pragma unroll 1
    for (u32 stage = MOVING;; stage++) {
      const Claim c = candidate(stage, no_tiles);
      const bool asks = stage != BUILDING || (c.head == MAIN && (target::REMEMBERS || shared_left()));
      const bool has = c && asks && has_inputs(c.work);
      there = target::REMEMBERS && has;
      if (has) return c;
      if (stage == BUILDING) return asks && shared_left() ? Claim{SHARED, 0, {}} : c;
    }
  }
  DEVICE Claim candidate(u32 stage, bool no_tiles) const {
    if (stage == MOVING) return next_of_movers(no_tiles);
    return stage == SENDING ? next_of_senders(no_tiles) : next_built();
  }

  // LEAVE: planned.
  DEVICE Work before_plan() {
    const u32 n = front_size();
    if (target::load(head(FRONT), DEVICE_SCOPE) < n)
      if (const u32 i = target::add(head(FRONT), 1, DEVICE_SCOPE); i < n) return front_at(i);
    if (!target::load(head(PLAN_DONE), DEVICE_SCOPE)) {
      // The wait for peers' counts is filled; but who will dispatch stands ready.
      if (target::wg() >= p.movers && target::wg() >= p.crew && shared_left())
        if (const Work s = next_shared(); s.kind != LEAVE) return s;
      return {GATE, p.g.rank};  // no claim: any number of WGs may hold it
    }
    target::acquire(DEVICE_SCOPE);  // pairs with the release in finish, of PLAN: its tables are read from here on
    planned = true;
    return {};
  }

  DEVICE bool builds() const { return target::wg() >= p.crew || built < p.crew_tiles; }

  // What a crew takes at any time and out of order if it is ready, for then it cannot block. With no tile left everybody is
  // in both crews: a push that waits must not hold up a send that is ready.
  DEVICE Claim next_of_movers(bool no_tiles) const {
    return no_tiles || target::wg() < p.movers ? next_move(p.layout.one(MoeLayout::N_MOVES)) : Claim{};
  }
  DEVICE Claim next_of_senders(bool no_tiles) const {
    const bool sends = target::wg() < p.senders && (target::wg() >= p.crew || !builds());
    return no_tiles || sends ? next_send(p.layout.one(MoeLayout::N_SENDS)) : Claim{};
  }
  DEVICE Claim next_built() const {
    if (!drawn) return not_ready();
    if (const Claim c = before(in_hand)) return c;
    if (in_hand.kind != LEAVE) return {MAIN, entry, in_hand};
    return shared_left() ? Claim{SHARED, 0, in_hand} : Claim{};
  }
  // Of a crew that does not build: it waits for what its list has next.
  DEVICE Claim not_ready() const {
    if (target::wg() < p.senders)
      if (const Claim c = next_send(p.layout.one(MoeLayout::N_SENDS))) return c;
    return target::wg() < p.movers ? next_move(p.layout.one(MoeLayout::N_MOVES)) : Claim{};
  }

  // Guards: what must be claimed before w may block. `step` is that of w.
  DEVICE Claim before(const Work& w) const {
    const bool tile = is_tile(w.kind);
    const u32 steps = p.layout.steps();
    if (steps && (!tile || step >= dealt_steps()))
      if (const Claim c = next_move(p.layout.moves_end(least(tile ? step : steps, steps - 1)))) return c;
    if (!tile) return next_send(p.layout.one(MoeLayout::N_SENDS));
    if (w.kind == GEMM1 || w.row < p.y_slots) return {};
    return next_send(p.layout.sends_end((w.row - p.y_slots) / p.layout.step_rows));
  }

  // ---- waits
  DEVICE Input input(const Work& w, u32 i) const {
    const u32 R = p.g.ranks, me = p.g.rank, v = w.row;
    switch (w.kind) {
      case TOPK: return i || !p.columns0 ? Input::end() : Input::local(routed(v * p.block / p.layout.tile_m), p.columns0);
      case SCAN: return i ? Input::end() : Input::local(head(TOPK_DONE), blocks());
      case SORT: return i < p.scans ? Input::remote(p.g, &own().counts_in[me][i]) : Input::end();
      case PLAN: return i < R * p.scans ? Input::remote(p.g, &own().counts_in[i / p.scans][i % p.scans]) : Input::end();
      case GATE: return i ? Input::end() : Input::local(head(PLAN_DONE), 1);
      case SHARED2: return i ? Input::end() : Input::local(shared1_done(v), p.shared_columns);
      case PUSH:
        if (i == 0) return Input::local(head(SORT_DONE), blocks());
        return i > 1 || v < p.x_slots ? Input::end() : Input::remote(p.g, freed(me, w.chunk, v - p.x_slots));
      case PULL:
        if (i == 0) return Input::remote(p.g, &own().sorted_in[w.chunk]);
        return i > 1 || v < p.x_slots ? Input::end() : Input::local(gemm1_done(v - p.x_slots), p.columns1);
      case GEMM1:
        if (i < R && p.layout.pull) return i ? Input::none() : Input::local(pulled(v), bits_set(p.layout.sources_of(v)));
        if (i < R) return p.layout.sources_of(v) >> i & 1 ? Input::remote(p.g, arrived(me, v, i)) : Input::none();
        return i > R || v < p.h_slots ? Input::end() : Input::local(gemm2_done(v - p.h_slots), p.columns2);
      case GEMM2:
        if (i == 0) return Input::local(gemm1_done(v), p.columns1);
        return i > 1 || v < p.y_slots ? Input::end() : Input::local(sent(v - p.y_slots), bits_set(p.layout.sources_of(v - p.y_slots)));
      case SEND: return i ? Input::end() : Input::local(gemm2_done(v), p.columns2);
      case FOLD:
        if (i < R) return p.layout.one(MoeLayout::OWES + i) ? Input::remote(p.g, &own().landed[i]) : Input::none();
        return i > R || !p.S ? Input::end() : Input::local(shared2_done(v * p.block / p.layout.tile_m), p.columns2);
      default: return Input::end();
    }
  }

  // One look; relaxed.
  DEVICE bool has_inputs(const Work& w) const { return has_inputs_of(*this, w); }
  DEVICE bool ready(const Work& w) const {
    if (!there && !has_inputs(w)) return false;
    acquire_inputs(w);
    return true;
  }
  DEVICE bool wait_inputs(const Work& w) const {
    // Counts come behind the start signal; but only that tells of a rank that makes another call.
    if (w.kind == PLAN && !wait_all_started(p.g, w)) return false;
    if (!there && !wait_inputs_of(*this, w)) return false;
    acquire_inputs(w);
    return true;
  }
  // Pairs with the releases in finish.
  DEVICE void acquire_inputs(const Work& w) const {
    if (w.kind == PLAN || w.kind == PULL || w.kind == PUSH || w.kind == GEMM1 || w.kind == FOLD) target::acquire(SYSTEM_SCOPE);
    else target::acquire(DEVICE_SCOPE);
  }

  // ---- what is published. Data first, then the count or the signal: each pairs with acquire_inputs.
  DEVICE static u32 count(u32* c) {
    target::release(DEVICE_SCOPE);
    return target::add(c, 1, DEVICE_SCOPE) + 1;
  }
  DEVICE void finish(const Work& w) const {
    switch (w.kind) {
      case ROUTE: count(routed(w.row)); return;
      case TOPK: count(head(TOPK_DONE)); return;
      case SCAN: return counts_are_out(w.part);
      case PLAN: count(head(PLAN_DONE)); return;
      case SORT:
        if (count(head(SORT_DONE)) == blocks() && p.layout.pull) list_is_complete();
        return;
      case SHARED1: count(shared1_done(w.row)); return;
      case SHARED2: count(shared2_done(w.row)); return;
      case PUSH:
        target::release(SYSTEM_SCOPE);
        return target::store(arrived(w.chunk, w.row, p.g.rank), p.g.epoch, SYSTEM_SCOPE);
      case PULL: count(pulled(w.row)); return;
      case GEMM1:
        if (count(gemm1_done(w.row)) == p.columns1 && !p.layout.pull) slot_is_free(w.row);
        return;
      case GEMM2: count(gemm2_done(w.row)); return;
      case SEND: return rows_are_out(w);
      default: return;
    }
  }
  // Of a rank without tokens too: peers wait for the counts of all.
  DEVICE void counts_are_out(u32 part) const {
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&signals(q).counts_in[p.g.rank][part], p.g.epoch, SYSTEM_SCOPE);
  }
  DEVICE void list_is_complete() const {
    target::acquire(DEVICE_SCOPE);  // the other blocks, then the word to those who read them
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&signals(q).sorted_in[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
  // The credit, to those who have rows in what takes the slot next.
  DEVICE void slot_is_free(u32 v) const {
    if (v + p.x_slots >= p.layout.rows()) return;
    target::acquire(DEVICE_SCOPE);  // the other columns' reads, then the word to those who write
    target::release(SYSTEM_SCOPE);
    const u32 sources = p.layout.sources_of(v + p.x_slots);
    for (u32 q = 0; q < p.g.ranks; q++)
      if (sources >> q & 1) target::store(freed(q, p.g.rank, v), p.g.epoch, SYSTEM_SCOPE);
  }
  // By each sender in system scope, though the last one's release would do in any model of memory: what goes to a peer
  // leaves a cache that belongs to some of a GPU's WGs only when one of those says so.
  DEVICE void row_is_out(u32 v) const {
    target::release(SYSTEM_SCOPE);
    target::add(sent(v), 1, DEVICE_SCOPE);
  }
  DEVICE void rows_are_out(const Work& w) const {
    row_is_out(w.row);
    if (target::add(sent_to(w.chunk), 1, DEVICE_SCOPE) + 1 != p.layout.one(MoeLayout::SENDS_TO + w.chunk)) return;
    target::acquire(DEVICE_SCOPE);  // the other sends, then the word to who owns the tokens
    target::release(SYSTEM_SCOPE);
    target::store(&signals(w.chunk).landed[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
