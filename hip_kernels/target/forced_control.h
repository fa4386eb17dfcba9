// Who runs next. One fiber runs at a time; at every signal, claim, wait and fence, and in some histories at data accesses
// too, the controller may go on with another one, or let a buffered store become visible. All of it follows from the seed.
#pragma once
#include <signal.h>

#include "forced_memory.h"

namespace target {
constexpr u64 MAX_STEPS = 1'000'000;  // of one history; right ones take a twentieth

enum Ending : u32 { ENDED, DEADLOCKED, TOO_LONG };

inline void back_to_controller() { switch_stack(W.me->stack, W.controller); }

inline void switch_point() {
  W.time++;
  W.steps++;
  if (W.burst) W.burst--;
  else back_to_controller();
}

inline void data_switch_point() {
  if (!W.fine || --W.fine_left) return;
  W.fine_left = 1 + W.random.below(W.fine);
  back_to_controller();
}

inline void fiber_main() {
  W.body();
  W.me->done = true;
  W.alive--;
  back_to_controller();
}

// A polling fiber sleeps until one of the signals changes that it loaded since its last pause returned. A deadlock is so
// known exactly and at once: a WG that polls again sees the same and does the same. Who polls nothing, or very much, never
// sleeps; then it is ENDLESS instead.
inline u32 version(u32 watched) {
  return watched < MAX_SIGNALS ? W.signal_words[watched].when : W.data_words[watched - MAX_SIGNALS].shown;
}
inline bool asleep(Fiber& f) {
  if (!f.polling) return false;
  if (f.looked == W.changes) return true;
  if (f.watches_all || !f.num_watched) return false;
  for (u32 i = 0; i < f.num_watched; i++)
    if (version(f.watched[i].word) != f.watched[i].when) return false;
  f.looked = W.changes;
  return true;
}

// A slow fiber is one that most often is not chosen although it could run: orders that fair dice hardly ever throw.
inline bool passed_over(const Fiber& f) { return (f.rank == W.slow_rank || f.id == W.slow_fiber) && W.random.below(16); }

inline Fiber* pick() {
  Fiber* slow = nullptr;
  const u32 first = W.random.below(W.num_fibers);
  for (u32 i = 0; i < W.num_fibers; i++) {
    Fiber& f = W.fibers[(first + i) % W.num_fibers];
    if (f.done || asleep(f)) continue;
    if (!passed_over(f)) return &f;
    slow = &f;
  }
  return slow;
}

// One buffered store of some fiber; false if there is none.
inline bool show_something() {
  const u32 first = W.random.below(W.num_fibers);
  for (u32 i = 0; i < W.num_fibers; i++) {
    Fiber& f = W.fibers[(first + i) % W.num_fibers];
    const u32 n = f.data.size + f.signals.size;
    if (!n) continue;
    const u32 k = W.random.below(n);
    if (k < f.data.size) show_data(f, k);
    else show_signal(f, k - f.data.size);
    return true;
  }
  return false;
}

inline void wake_all() {
  for (u32 i = 0; i < W.num_fibers; i++) W.fibers[i].polling = false;
}

inline void go_on(Fiber& f) {
  f.polling = false;
  W.me = &f;
  W.burst = W.random.below(W.burst_most);
  W.digest = (W.digest ^ f.id ^ W.time << 8) * 0x9e3779b97f4a7c15ull;
  switch_stack(W.controller, f.stack);
}

inline void give_up_history(Symptom s, const char* why) {
  symptom(s, "rank %u wg %u: %s", W.me->rank, W.me->wg, why);
  W.over = true;
  back_to_controller();
}
inline void on_fault(int number) { give_up_history(CRASH, number == SIGFPE ? "division by zero" : "wild access"); }
// While fibers run, a fault ends the history and not the process.
struct Faults {
  static constexpr int NUMBERS[] = {SIGFPE, SIGSEGV, SIGBUS};
  struct sigaction before[3];
  Faults() {
    struct sigaction now = {};
    now.sa_handler = on_fault;
    now.sa_flags = SA_NODEFER;  // the handler never returns
    for (u32 i = 0; i < 3; i++) sigaction(NUMBERS[i], &now, &before[i]);
  }
  ~Faults() {
    for (u32 i = 0; i < 3; i++) sigaction(NUMBERS[i], &before[i], nullptr);
  }
};

// Runs all fibers to their ends.
inline Ending interleave() {
  const Faults faults;
  while (W.alive) {
    if (W.over) return ENDED;
    if (++W.steps > MAX_STEPS) return TOO_LONG;
    if (W.random.below(W.visible_one_in) == 0) show_something();
    if (Fiber* f = pick()) go_on(*f);
    else if (!show_something() && !W.on_idle()) return DEADLOCKED;
  }
  return ENDED;
}

inline bool nothing_more() { return false; }

// Forgets the last history, which may have been left in the middle.
inline void begin_history(u64 seed) {
  for (Fiber& f : W.fibers) {
    for (u32 i = 0; i < f.data.size; i++) W.data_words[f.data.at[i].word].buffered = 0;
    f.data.size = f.signals.size = 0;
  }
  if (W.now > 1u << 31) {  // before clocks wrap round
    memset(W.data_words, 0, sizeof W.data_words);
    memset(W.signal_words, 0, sizeof W.signal_words);
    W.now = 0;
  }
  memset(W.symptoms, 0, sizeof W.symptoms);
  W.num_fibers = W.alive = W.num_data = W.num_signals = W.num_blind = 0;
  W.time = W.changes = 1;
  W.absent = 0;
  W.steps = W.digest = W.accesses = 0;
  W.over = false;
  W.message[0] = 0;
  W.on_idle = nothing_more;
  W.began = W.now++;  // whatever is in the tables came before
  W.random = Random(seed);
  constexpr u32 BURSTS[] = {1, 4, 16, 64}, VISIBLE[] = {1, 4, 32};
  W.burst_most = BURSTS[W.random.below(4)];
  W.visible_one_in = VISIBLE[W.random.below(3)];
  W.fine = W.random.below(4) == 0 ? 1u << W.random.below(6) : 0;
  W.fine_left = 1;
}

inline void spawn(u32 rank, u32 wg) {
  Fiber& f = W.fibers[W.num_fibers];
  f.id = W.num_fibers++;
  f.rank = rank;
  f.wg = wg;
  f.done = f.polling = f.watches_all = false;
  f.num_watched = 0;
  f.looked = 0;
  for (u32 i = 0; i < MAX_FIBERS; i++) f.knows.at[i] = W.now;
  for (u32 k : SCOPES) f.released[k] = f.heard[k] = Clock{};
  prepare(f.stack, fiber_main);
  W.alive++;
}

// After the last spawn.
inline void begin_fibers() {
  W.width = (W.num_fibers + 15) / 16 * 16;
  for (u32 i = 0; i < W.num_fibers; i++) tick(W.fibers[i]);
  W.slow_rank = W.slow_fiber = ~0u;
  const u32 f = W.random.below(W.num_fibers);
  switch (W.random.below(4)) {
    case 0: W.slow_rank = W.fibers[f].rank; break;
    case 1: W.slow_fiber = f; break;
  }
}

// --- memory, handed out at the beginning of a history ---

constexpr u32 GUARD_WORDS = 2;  // between buffers; keeps them aligned to 16 bytes

inline u64* new_data(u32 words) {
  u64* at = W.data + W.num_data + GUARD_WORDS;
  for (u32 i = 0; i < GUARD_WORDS + words; i++) W.data_words[W.num_data + i].usable = false;
  W.num_data += (GUARD_WORDS + words + 1) / 2 * 2;
  if (W.num_data > MAX_DATA) abort();
  return at;
}
inline u32* new_signals(u32 words, u32 value = 0) {
  u32* at = W.signals + W.num_signals;
  for (u32 i = 0; i < words; i++) at[i] = value;
  W.num_signals += words;
  if (W.num_signals >= MAX_SIGNALS) abort();
  return at;
}
// The first `used` words of a buffer may be touched, the rest of it may not.
inline void open(u64* p, u32 used, u32 words) {
  for (u32 i = 0; i < words; i++) W.data_words[p - W.data + i].usable = i < used;
}
// Nobody may touch these.
inline void shut(u64* p, u32 words) {
  for (u32 i = 0; i < words; i++) W.data_words[p - W.data + i].usable = false;
}

// --- between launches: what a stream and its host do ---

// A launch sees all that came before it on its stream, and its WGs have not released or heard anything yet.
inline void begin_launch(const Clock& stream) {
  Fiber& f = *W.me;
  join(f.knows, stream);
  for (u32 k : SCOPES) f.released[k] = f.heard[k] = Clock{};
}
// The end of a kernel makes all visible and acquires all.
inline void end_launch(Clock& stream) {
  switch_point();
  Fiber& f = *W.me;
  drain(f);
  acquire_now(f, SYSTEM_SCOPE);
  join(stream, f.knows);
  tick(f);
}
// Words that belong to the test and not to a kernel, but are polled like signals.
inline u32 peek(const u32* p) {
  const u32 i = signal_index(p);
  watch(*W.me, i, W.signal_words[i].when);
  return *p;
}
inline void poke(u32* p, u32 v) { changed(*W.me, signal_index(p), v); }
}  // namespace target
