// moe_forward broken on purpose: each breaks one rule, and says which.
#pragma once
#include "moe_check.h"
#include "mutants.h"

// --- work begins without something that it needs ---

using Skips = bool (*)(const MoeSchedule&, const Work&, u32);  // input i of w is not waited for
template <Skips SKIPS> struct Impatient : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  bool wait_inputs(const Work& w) const {
    if (w.kind == PLAN && !wait_all_started(p.g, w)) return false;
    return wait_but_for(*this, w, SKIPS);
  }
};
template <Kind KIND> bool all_of(const MoeSchedule&, const Work& w, u32) { return w.kind == KIND; }
template <Kind KIND, u32 INDEX> bool one_of(const MoeSchedule&, const Work& w, u32 i) { return w.kind == KIND && i == INDEX; }
inline bool rows_of_gemm1(const MoeSchedule& s, const Work& w, u32 i) { return w.kind == GEMM1 && i < s.p.g.ranks; }
inline bool slot_of_gemm1(const MoeSchedule& s, const Work& w, u32 i) { return w.kind == GEMM1 && i == s.p.g.ranks; }
inline bool rows_of_fold(const MoeSchedule& s, const Work& w, u32 i) { return w.kind == FOLD && i < s.p.g.ranks; }
inline bool shared_of_fold(const MoeSchedule& s, const Work& w, u32 i) { return w.kind == FOLD && i == s.p.g.ranks; }

// Tables are read when PLAN has written them.
struct PassesTheGate : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  Work next_work() {
    if (target::load(head(FRONT), DEVICE_SCOPE) >= front_size()) planned = true;
    return MoeSchedule::next_work();
  }
};

// A send waits for all columns.
struct SendsAfterOneColumn : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  bool wait_inputs(const Work& w) const {
    if (w.kind != SEND) return MoeSchedule::wait_inputs(w);
    if (!wait_at_least(p.g, w, gemm2_done(w.row), 1, DEVICE_SCOPE)) return false;
    acquire_inputs(w);
    return true;
  }
};

// A peer's counts of the next launch may be here already.
struct ComparesEqual : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  bool wait_inputs(const Work& w) const {
    if (w.kind != PLAN) return MoeSchedule::wait_inputs(w);
    if (!wait_all_started(p.g, w)) return false;
    for (u32 i = 0; i < p.g.ranks * p.scans; i++) {
      const u32* signal = input(w, i).signal;
      for (Patience patience; target::load(signal, SYSTEM_SCOPE) != p.g.epoch;)
        if (!patience.keep_waiting(p.g, w, signal, p.g.epoch, 0)) return false;
    }
    acquire_inputs(w);
    return true;
  }
};

// --- what is published ---

// Of a rank without tokens too.
struct SaysNothingOfNothing : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  void finish(const Work& w) const {
    if (w.kind != SCAN || p.tokens) MoeSchedule::finish(w);
  }
};
// A slot is free when all columns have been made.
struct CreditsFirstColumn : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  void finish(const Work& w) const {
    if (w.kind != GEMM1) return MoeSchedule::finish(w);
    if (count(gemm1_done(w.row)) == 1 && !p.layout.pull) slot_is_free(w.row);
  }
};
// MoeSchedule's finish, but credits go to ranks with rows in another tile row, to another place, or say something else.
struct Credits : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  template <class Place> void finish_with(const Work& w, u32 sources_of_row, Place place, u32 value) const {
    if (w.kind != GEMM1) return MoeSchedule::finish(w);
    if (count(gemm1_done(w.row)) != p.columns1 || p.layout.pull || w.row + p.x_slots >= p.layout.rows()) return;
    target::acquire(DEVICE_SCOPE);
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++)
      if (p.layout.sources_of(sources_of_row) >> q & 1) target::store(place(q), value, SYSTEM_SCOPE);
  }
};
// Credits go to those who have rows in what takes the slot next, not to those who had.
struct CreditsOldSources : Credits {
  using Credits::Credits;
  void finish(const Work& w) const {
    finish_with(w, w.row, [&](u32 q) { return freed(q, p.g.rank, w.row); }, p.g.epoch);
  }
};
// A slot of its own for each tile row: two WGs may store credits in the wrong order.
struct CreditsByOneWord : Credits {
  using Credits::Credits;
  u32 mark(u32 v) const { return p.g.epoch * 4096 + v; }
  bool wait_inputs(const Work& w) const {
    if (w.kind == PUSH && w.row >= p.x_slots)
      if (!wait_at_least(p.g, w, freed(p.g.rank, w.chunk, 0), mark(w.row - p.x_slots), SYSTEM_SCOPE)) return false;
    return Impatient<one_of<PUSH, 1>>(p).wait_inputs(w);
  }
  void finish(const Work& w) const {
    finish_with(w, w.row + p.x_slots, [&](u32 q) { return freed(q, p.g.rank, 0); }, mark(w.row));
  }
};
// A signal's place does not depend on a shape, so no other rank writes there in another launch.
struct CreditsMoveWithTheShape : Credits {
  using Credits::Credits;
  u32* credit(u32 at, u32 o, u32 v) const { return signals(at).rows[p.layout.row_cap].arrived + o * p.layout.row_cap + v; }
  bool wait_inputs(const Work& w) const {
    if (w.kind == PUSH && w.row >= p.x_slots)
      if (!wait_at_least(p.g, w, credit(p.g.rank, w.chunk, w.row - p.x_slots), p.g.epoch, SYSTEM_SCOPE)) return false;
    return Impatient<one_of<PUSH, 1>>(p).wait_inputs(w);
  }
  void finish(const Work& w) const {
    finish_with(w, w.row + p.x_slots, [&](u32 q) { return credit(q, p.g.rank, w.row); }, p.g.epoch);
  }
};
// The owner of tokens is told of the last rows, not of the first.
struct LandsEarly : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  void finish(const Work& w) const {
    if (w.kind != SEND) return MoeSchedule::finish(w);
    target::release(SYSTEM_SCOPE);
    target::add(sent(w.row), 1, DEVICE_SCOPE);
    if (target::add(sent_to(w.chunk), 1, DEVICE_SCOPE) != 0) return;
    target::acquire(DEVICE_SCOPE);
    target::release(SYSTEM_SCOPE);
    target::store(&signals(w.chunk).landed[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};

// --- what is claimed before what. The loop is MoeSchedule's, with a rule taken away ---

enum Rule : u32 { MOVES_BEFORE_TILES, SENDS_BEFORE_TILES, MOVES_BEFORE_LEAVING, SENDS_BEFORE_FOLDS, READY_SENDS, READY_MOVES };
template <Rule WITHOUT> struct Lawless : MoeSchedule {
  using MoeSchedule::MoeSchedule;
  Claim crews(bool no_tiles) const {
    if (no_tiles || target::wg() < p.movers)
      if (const Claim c = next_move(p.layout.at(MoeLayout::N_MOVES)))
        if (WITHOUT == READY_MOVES || c.work.row < p.x_slots || has_inputs(c.work)) return c;
    if (no_tiles || target::wg() < p.senders)
      if (const Claim c = next_send(p.layout.at(MoeLayout::N_SENDS))) if (WITHOUT == READY_SENDS || has_inputs(c.work)) return c;
    return {};
  }
  Claim guards(const Work& w) const {
    const bool tile = is_tile(w.kind);
    const Claim c = before(w);
    if (WITHOUT == MOVES_BEFORE_TILES && tile && c.head == MOVES) return {};
    if (WITHOUT == SENDS_BEFORE_TILES && tile && c.head == SENDS) return {};
    if (WITHOUT == MOVES_BEFORE_LEAVING && !tile && c.head == MOVES) return {};
    if (WITHOUT == SENDS_BEFORE_FOLDS && !tile && c.head == SENDS) return {};
    return c;
  }
  Work next_work() {
    if (aborted(p.g)) return {};
    if (!planned)
      if (const Work w = before_plan(); w.kind != LEAVE) return w;
    if (const Work w = next_dealt(); w.kind != LEAVE) return w;
    for (;;) {
      const u32 i = target::load(head(MAIN), DEVICE_SCOPE), tiles = all_tiles();
      Claim c = crews(i >= tiles);
      if (!c) {
        const Work w = i < tiles ? tile_at(i) : i < tiles + blocks() ? Work{FOLD, p.g.rank, i - tiles} : Work{};
        c = guards(w);
        if (!c && shared_left() && (i >= tiles || !has_inputs(w)))
          if (const Work s = next_shared(); s.kind != LEAVE) return s;
        if (!c && w.kind == LEAVE) return {};
        if (!c) c = {MAIN, i, w};
      }
      if (take(c)) return c.work;
    }
  }
};

// --- the work ---

template <class S> struct With : MoeForward {
  using Schedule = S;
};

// Inside an expert and a source, rows stand in token order.
struct SortsBackwards : MoeForward {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != SORT) return MoeForward::move(s, w);
    const Params& p = s.p;
    const Router r(p);
    const u32 k = p.routing.top_k, first = w.row * p.block * k, left = p.tokens * k - first;
    const u32 end = first + (left < p.block * k ? left : p.block * k);
    const u64* counts = r.counts_at(p.g.rank) + (u64)p.g.rank * r.experts;
    for (u32 i = first; i < end; i++) {
      const u32 e = number_in(target::read(p.choices + i));
      u32 at = (u32)target::read(p.places + (u64)w.row * r.experts + e);
      for (u32 f = 0; f < e; f++) at += (u32)target::read(counts + f);
      for (u32 j = i + 1; j < end; j++) at += number_in(target::read(p.choices + j)) == e;
      target::write(p.list + at, (u64)i);
      target::write(p.row_of_slot + i, (u64)at);
    }
  }
};
// Padding is zeros.
struct LeavesPadding : MoeForward {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != PUSH) return MoeForward::move(s, w);
    const MoeRows rows(s.p);
    const MoeLayout& l = s.p.layout;
    const u32 me = s.p.g.rank, e = w.part, tile = l.tile_of(e, w.row);
    const MoeLayout::Rows span = l.real_rows_in(me, e, tile);
    for (u32 i = span.begin; i < span.end; i++) {
      const u64 token = target::read(s.p.list + l.send_base(me, e) + i) / s.p.routing.top_k;
      Vec16* to = rows.ring_x(w.chunk, w.row) + (u64)(l.start(me, e) + i - tile * l.tile_m) * rows.words;
      for (u32 c = 0; c < rows.words; c++) {
        const Vec16 v = target::read(s.p.x + token * rows.words + c);
        target::write(to + c, s.p.routing.weigh_inputs ? SourceRow{nullptr, float_in(target::read(s.p.choices + token)), true}.weighted(v) : v);
      }
    }
  }
};
// The fold adds in the order of the choices.
struct FoldsBackwards : MoeForward {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != FOLD) return MoeForward::move(s, w);
    const Params& p = s.p;
    const MoeRows rows(p);
    const u32 begin = w.row * p.block, left = p.tokens - begin, n = left < p.block ? left : p.block, k = p.routing.top_k;
    for (u32 i = 0; i < n * rows.words; i++) {
      const u64 t = begin + i / rows.words, column = i % rows.words;
      float sum[8] = {};
      for (u32 j = k; j-- > 0;) {
        const u64 row = target::read(p.row_of_slot + t * k + j);
        const float weight = p.routing.weigh_inputs ? 1.f : float_in(target::read(p.choices + t * k + j));
        MoeRows::add(sum, target::read(rows.combine(p.g.rank) + row * rows.words + column), weight);
      }
      const u64 at = t * p.logit_ld + p.gate_column;
      if (p.S) MoeRows::add(sum, target::read(p.shared_y + t * rows.words + column), p.gate_column == NOBODY ? 1.f : sigmoid(float_at(p.logits, at)));
      target::write(p.out + t * rows.words + column, eight_bf16(sum));
    }
  }
};
