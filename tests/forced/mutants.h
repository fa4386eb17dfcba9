// Operators broken on purpose, in ways that several have in common: each breaks one rule of the protocol, and says which.
#pragma once
#include "player.h"

template <class Op, class S> struct Scheduled : Op {
  using Schedule = S;
};

// Some WG stays until peers have read what is this rank's.
template <class S> struct NeverDrains : S {
  using S::S;
  Work next_work() {
    const Work w = S::next_work();
    return w.kind == DRAIN ? Work{} : w;
  }
};

// Work of some kind goes on without what it has to wait for. Nothing else waits less.
template <class S, Kind kind> struct DoesNotWaitFor : S {
  using S::S;
  bool wait_inputs(const Work& w) const { return w.kind == kind || S::wait_inputs(w); }
};

// Waits for what a schedule lists as inputs of w, but for those that `skips` names.
template <class S, class Skips> bool wait_but_for(const S& s, const Work& w, Skips skips) {
  for (u32 i = 0;; i++) {
    const auto in = s.input(w, i);
    if (!in.more) break;
    if (in.signal && !skips(s, w, i) && !wait_at_least(s.p.g, w, in.signal, in.want, in.scope)) return false;
  }
  s.acquire_inputs(w);
  return true;
}

// That the inputs of a work have been seen counts for the next one too.
template <class S> struct SawItBefore : S {
  using S::S;
  Work next_work() {
    const bool was = this->there;
    const Work w = S::next_work();
    this->there |= was;
    return w;
  }
};

// A start is announced before anything is waited for.
template <class S> struct AnnouncesLate : S {
  using S::S;
  mutable bool announced = false;
  void begin() {
    this->mover = target::wg() < this->p.movers;
    this->p.counters.clear_other(this->p.g);
  }
  bool wait_inputs(const Work& w) const {
    const bool there = S::wait_inputs(w);
    if (!announced) announce_start(this->p.g);
    announced = true;
    return there;
  }
};

// With TWO_WAY nobody takes a tile whose rows are not there while there is something to pull.
template <class S> struct BuildsUnready : S {
  using S::S;
  Work next_work() {
    if (aborted(this->p.g)) return {};
    const Work w = this->next_tile();
    return w.kind != LEAVE ? w : this->next_shared_pull();
  }
};

// Not a rule of the schedule, but of the tests: a store beside its place is noticed.
template <class Op> struct StoresBeside : Op {
  static void store(const typename Op::Params& p, const Work& w, u32 row, u32 column, u64 v) {
    Op::store(p, w, row, column + 4, v);
  }
};
template <class To> struct FourBeside {
  To to;
  auto was(u32 row, u32 column) const { return to.was(row, column + 4); }
  template <class Was> void put(u32 row, u32 column, const float (&four)[4], const Was& was) const {
    to.put(row, column + 4, four, was);
  }
};
template <class Op> struct StoresSumsBeside : Op {
  static auto sums_to(const typename Op::Params& p, const Work& w) { return FourBeside{Op::sums_to(p, w)}; }
};

// Moves that are dealt are made by those who have them, and by nobody else.
template <class S> struct ForgetsWhatIsDealt : S {
  using S::S;
  Work next_work() {
    this->dealt = 1 << 20;
    return S::next_work();
  }
};
