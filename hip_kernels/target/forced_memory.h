// Memory as weak as C++ and PTX allow, as far as one thread can play it.
//
// By value: stores, signals included, wait in a buffer of their fiber and become visible one by one, in any order, at random
// or at a release. A load may return the value before the last store, unless that store is known to come before the load. A
// 16-byte access is two of 8.
//
// By order: no value can show a load that is late, for its result is needed at once. So each fiber has a vector clock that
// says which accesses of others come before its own, by signals and fences alone, their scopes included. Two accesses of one
// data word, one of them a store, of which neither is known to come before the other, are a race even if all values are
// right: that load could have been late.
#pragma once
#include "forced_world.h"

namespace target {
inline bool before(u32 fiber, u32 when, const Fiber& f) { return fiber == f.id || when <= f.knows.at[fiber]; }

// --- data ---

// Of each symptom the first is described; a broken protocol shows millions.
inline bool known_already(Symptom s) { return W.symptoms[s] && W.symptoms[s]++; }

inline void race(const char* what, const u64* p, const char* who, u32 other) {
  if (known_already(RACE)) return;
  const Name name(p);
  symptom(RACE, "race: %s of %s by rank %u wg %u, not ordered after %s by rank %u wg %u", what, name.text, W.me->rank,
          W.me->wg, who, W.fibers[other].rank, W.fibers[other].wg);
}

inline DataWord* data_word(const u64* p) {
  const u64 i = p - W.data;
  if (p >= W.data && i < W.num_data && W.data_words[i].usable) return &W.data_words[i];
  if (known_already(OUTSIDE)) return nullptr;
  const Name name(p);
  symptom(OUTSIDE, "rank %u wg %u touches %s, outside every buffer of its launch", W.me->rank, W.me->wg, name.text);
  return nullptr;
}

inline u64* buffered(const List<Store>& stores, u32 word) {
  for (u32 i = stores.size; i--;)
    if (stores.at[i].word == word) return &stores.at[i].value;
  return nullptr;
}

inline void show_data(Fiber& f, u32 i) {
  const Store s = f.data.at[i];
  f.data.remove(i);
  DataWord& d = W.data_words[s.word];
  d.old = W.data[s.word];
  W.data[s.word] = s.value;
  d.shown = ++W.now;
  d.shown_by = f.id;
  d.shown_wrote = s.wrote;
  d.through = s.through;
  W.changes += s.through;
  if (d.buffered == f.id + 1) d.buffered = 0;
}

// Counts of a broken protocol are anything, and so are loops over them.
constexpr u64 MAX_ACCESSES = 1'000'000;  // of one history; right ones take half
void give_up_history(Symptom s, const char* why);
inline void count_access() {
  if (++W.accesses > MAX_ACCESSES) give_up_history(ENDLESS, "a loop without end");
}

inline u64 read_word(const u64* p) {
  count_access();
  DataWord* d = data_word(p);
  Fiber& f = *W.me;
  if (!d) return 0;
  d->readers.at[f.id] = f.now();
  if (d->buffered == f.id + 1) return *buffered(f.data, p - W.data);
  if (before(d->writer, d->wrote, f)) return *p;
  race("load", p, "the store", d->writer);
  return W.random.below(2) ? d->old : *p;
}

inline void write_word(u64* p, u64 v, bool through = false) {
  count_access();
  DataWord* d = data_word(p);
  Fiber& f = *W.me;
  if (!d) return;
  if (!before(d->writer, d->wrote, f)) race("store", p, "the store", d->writer);
  d->readers.at[f.id] = 0;  // own accesses are in order
  if (!covers(f.knows, d->readers))
    for (u32 i = 0; i < W.num_fibers; i++)
      if (d->readers.at[i] > f.knows.at[i]) race("store", p, "the load", i);
  d->writer = f.id;
  d->wrote = f.now();
  const u32 word = p - W.data;
  if (d->buffered == f.id + 1) {
    *buffered(f.data, word) = v;
    return;
  }
  d->buffered = f.id + 1;
  f.data.push({word, v, f.now(), through});
}

// --- signals ---

inline u32 signal_index(const u32* p) {
  const u64 i = p - W.signals;
  if (p >= W.signals && i < W.num_signals) return i;
  symptom(OUTSIDE, "rank %u wg %u touches a signal outside all signals", W.me->rank, W.me->wg);
  return MAX_SIGNALS - 1;
}

// A word that two ranks write, in whatever launches: each may find the other one's word for its own.
inline void check_writer(const Fiber& f, const SignalWord& s, u32 i) {
  if (s.when <= W.began || s.rank == f.rank || known_already(TWO_WRITERS)) return;
  const Name name(W.signals + i);
  symptom(TWO_WRITERS, "rank %u wg %u stores into %s, which rank %u has written", f.rank, f.wg, name.text, s.rank);
}

inline void changed(Fiber& f, u32 i, u32 value) {
  SignalWord& s = W.signal_words[i];
  check_writer(f, s, i);
  s.old = W.signals[i];
  W.signals[i] = value;
  s.when = ++W.now;
  s.writer = f.id;
  s.wrote = f.now();
  s.rank = f.rank;
  s.seen.at[f.id] = s.when;
  W.changes++;
}

inline void keep_old(SignalWord& s) {
  for (u32 k : SCOPES) s.published_old[k] = s.published[k];
  s.rank_old = s.rank;
}

inline void show_signal(Fiber& f, u32 i) {
  const Store store = f.signals.at[i];
  f.signals.remove(i);
  keep_old(W.signal_words[store.word]);
  changed(f, store.word, store.value);
  // As it was when the store was made: a release in between would have shown it.
  for (u32 k : SCOPES) W.signal_words[store.word].published[k] = f.released[k];
}

inline void show_own_signal(Fiber& f, u32 word) {
  for (u32 i = 0; i < f.signals.size; i++)
    if (f.signals.at[i].word == word) return show_signal(f, i);
}

inline void drain(Fiber& f) {
  while (f.data.size) show_data(f, f.data.size - 1);
  while (f.signals.size) show_signal(f, f.signals.size - 1);
}

inline void check_scope(const Fiber& f, const SignalWord& s, u32 i, Scope scope) {
  if (scope == SYSTEM_SCOPE || s.rank == f.rank || before(s.writer, s.wrote, f)) return;
  const Name name(W.signals + i);
  symptom(NARROW_SCOPE, "rank %u wg %u accesses %s in device scope, but rank %u writes it", f.rank, f.wg, name.text, s.rank);
}

inline void watch(Fiber& f, u32 word, u32 when) {
  if (f.num_watched < MAX_WATCHED) f.watched[f.num_watched++] = {word, when};
  else f.watches_all = true;
}

// Data that is its own signal. Loads and the store that they wait for need no order; but a store over what a load has got
// does, and so does a load after the store that took the last data away.
inline u64 read_polled_word(const u64* p) {
  DataWord* d = data_word(p);
  Fiber& f = *W.me;
  if (!d) return 0;
  const u32 word = p - W.data;
  const bool own = d->buffered == f.id + 1;
  const bool known = own || before(d->shown_by, d->shown_wrote, f), old = !known && W.random.below(4) == 0;
  if (!known && !d->through) race("polling load", p, "the ordinary store", d->shown_by);
  const u64 v = own ? *buffered(f.data, word) : old ? d->old : *p;
  if (v != W.absent) d->readers.at[f.id] = f.now();
  watch(f, MAX_SIGNALS + word, old ? 0 : d->shown);
  return v;
}

// What the writer of a value had released is one acquire away.
inline void hear(Fiber& f, SignalWord& s) {
  if (s.seen.at[f.id] == s.when) return;
  s.seen.at[f.id] = s.when;
  join(f.heard[SYSTEM_SCOPE], s.published[SYSTEM_SCOPE]);
  if (s.rank == f.rank) join(f.heard[DEVICE_SCOPE], s.published[DEVICE_SCOPE]);
}
inline void hear_old(Fiber& f, const SignalWord& s) {
  join(f.heard[SYSTEM_SCOPE], s.published_old[SYSTEM_SCOPE]);
  if (s.rank_old == f.rank) join(f.heard[DEVICE_SCOPE], s.published_old[DEVICE_SCOPE]);
}

inline u32 load_signal(Fiber& f, const u32* p, Scope scope) {
  const u32 i = signal_index(p);
  SignalWord& s = W.signal_words[i];
  if (const u64* own = buffered(f.signals, i)) return *own;
  check_scope(f, s, i, scope);
  if (!before(s.writer, s.wrote, f) && s.seen.at[f.id] < s.when && W.random.below(4) == 0) {
    watch(f, i, 0);  // so that pause does not sleep on it
    hear_old(f, s);
    return s.old;
  }
  hear(f, s);
  watch(f, i, s.when);
  return *p;
}

inline void store_signal(Fiber& f, u32* p, u32 v, Scope scope) {
  const u32 i = signal_index(p);
  check_scope(f, W.signal_words[i], i, scope);
  if (u64* own = buffered(f.signals, i)) *own = v;
  else f.signals.push({i, v});
  if (W.random.below(4)) show_own_signal(f, i);
}

// Returns what was there. Stores v if that is `was`; without `was`, adds v.
inline u32 change_signal(Fiber& f, u32* p, const u32* was, u32 v, Scope scope) {
  const u32 i = signal_index(p);
  SignalWord& s = W.signal_words[i];
  show_own_signal(f, i);
  check_scope(f, s, i, scope);
  hear(f, s);
  const u32 found = W.signals[i];
  if (was && found != *was) {
    watch(f, i, s.when);
    return found;
  }
  keep_old(s);
  // A read-modify-write passes on what came before the value that it found.
  if (s.rank != f.rank) s.published[DEVICE_SCOPE] = s.published[SYSTEM_SCOPE];
  for (u32 k : SCOPES) join(s.published[k], f.released[k]);
  changed(f, i, was ? v : found + v);
  return found;
}

// --- fences ---

inline void release_now(Fiber& f, Scope scope) {
  drain(f);
  f.released[DEVICE_SCOPE] = f.knows;
  if (scope == SYSTEM_SCOPE) f.released[SYSTEM_SCOPE] = f.knows;
  tick(f);
}

inline void acquire_now(Fiber& f, Scope scope) {
  join(f.knows, f.heard[DEVICE_SCOPE]);
  if (scope == SYSTEM_SCOPE) join(f.knows, f.heard[SYSTEM_SCOPE]);
}
}  // namespace target
