// What the forced target knows: its fibers, its memory, how this history is played, and what went wrong in it.
//
// Clocks and versions of words are numbers from one counter, which never starts again: what an earlier history left in the
// tables is older than everything in this one, so no table is cleared between histories.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "forced_fiber.h"
#include "random.h"

namespace target {
constexpr u32 MAX_FIBERS = 64, MAX_DATA = 1 << 18, MAX_SIGNALS = 1 << 16, MAX_FENCES = 48, MAX_WATCHED = 24, MAX_BLIND = 8;
constexpr u64 NEVER = 1ull << 62;  // steps
constexpr Scope SCOPES[] = {DEVICE_SCOPE, SYSTEM_SCOPE};

template <class T> struct List {
  T* at = nullptr;
  u32 size = 0, room = 0;
  void push(const T& v) {
    if (size == room) at = (T*)realloc(at, (room = room ? 2 * room : 64) * sizeof(T));
    at[size++] = v;
  }
  void remove(u32 i) { at[i] = at[--size]; }  // the order of a store buffer means nothing
};

// Per fiber, how far its actions are known to come before mine (a vector clock).
struct alignas(64) Clock {
  u32 at[MAX_FIBERS];
};

struct Store {  // made, but not yet visible to others
  u32 word;
  u64 value;
  u32 wrote = 0;          // of data: when
  bool through = false;   // past the caches: data that is its own signal
};

struct Watched {
  u32 word, when;  // a signal, or MAX_SIGNALS + a data word that is polled
};

// One WG, or one of the two threads of control of a WG that runs ahead.
struct Fiber {
  Stack stack;
  u32 id, rank, wg;
  bool done, polling, watches_all;
  u64 looked;                // changes of the world that were looked at while polling
  u32 num_watched;
  Watched watched[MAX_WATCHED];  // what was polled since the last pause returned
  Clock knows;               // what comes before this fiber's next action
  Clock released[2];         // by Scope: what it knew at its last release of that scope or a wider one
  Clock heard[2];            // by Scope: what its loads have brought; an acquire of that scope makes it known
  List<Store> data, signals;
  u32 now() const { return knows.at[id]; }
};

struct DataWord {  // 8 bytes of ordinary memory
  Clock readers;   // when each fiber last read it
  u64 old;         // before the last store that became visible
  u32 writer, wrote;
  u32 buffered;    // 1 + the fiber in whose buffer a newer value is; 0 = none
  u32 shown, shown_by, shown_wrote;  // the store that is visible: when it became so, whose it is, when it was made
  bool through;    // that store went past the caches
  bool usable;     // lies in a buffer of the launch; all other words are guards
};

struct SignalWord {
  Clock published[2];  // by Scope: what comes before its value
  Clock published_old[2];  // and before its old value
  Clock seen;          // the newest version that each fiber has loaded: it never goes back
  u32 old, when, writer, wrote, rank, rank_old;
};

struct Fence {  // a place in the text
  const char *file, *function;
  u32 line;
  bool releases;
  Scope scope;
  u64 passed;
};

#define SYMPTOM_NAMES(X) X(WRONG_VALUE) X(RACE) X(OUTSIDE) X(NARROW_SCOPE) X(DEADLOCK) X(ENDLESS) X(CRASH) X(WRONG_END) \
  X(TWO_WRITERS)
#define KOSMOS_ENUM(name) name,
enum Symptom : u32 { SYMPTOM_NAMES(KOSMOS_ENUM) SYMPTOMS };

struct World {
  Fiber fibers[MAX_FIBERS];
  u32 num_fibers, alive, width;  // width of clocks in use
  Fiber* me;
  Stack controller;
  void (*body)();                               // what a fiber runs
  bool (*on_idle)();                            // nobody can go on: change something and return true, or it is a deadlock
  void (*name)(const void*, char*, size_t);     // of an address, for messages
  Random random;
  u32 now, began;  // began: of this history
  u64 changes, time, steps, digest;
  u64 accesses;  // of data
  bool over;     // a broken protocol ran wild: the history ends here

  // How this history is played, drawn from its seed.
  u32 burst, burst_most, visible_one_in, fine, fine_left, slow_rank, slow_fiber;

  // Mutations.
  bool no_release, no_acquire;
  u32 without_fence, narrow_fence;  // 1 + index; 0 = none
  struct { const u32 *begin, *end; } blind[MAX_BLIND];
  u32 num_blind;

  Fence fences[MAX_FENCES];
  u32 num_fences;

  u64 absent;  // what a polled word holds while its data has not come
  u32 num_data, num_signals;
  alignas(64) u64 data[MAX_DATA];
  alignas(64) u32 signals[MAX_SIGNALS];
  DataWord data_words[MAX_DATA];
  SignalWord signal_words[MAX_SIGNALS];

  u64 symptoms[SYMPTOMS];  // how often
  char message[800];  // the first one of each symptom
};
constinit inline World W{};  // no code of the C++ library's makes it

inline void symptom(Symptom s, const char* format, ...) {
  if (W.symptoms[s]++) return;
  size_t n = strlen(W.message);
  n += snprintf(W.message + n, sizeof W.message - n, "%sat time %llu: ", n ? "\n" : "", W.time);
  if (n >= sizeof W.message) return;
  va_list list;
  va_start(list, format);
  vsnprintf(W.message + n, sizeof W.message - n, format, list);
  va_end(list);
}

struct Name {
  char text[64];
  explicit Name(const void* p) {
    snprintf(text, sizeof text, "%p", p);
    if (W.name) W.name(p, text, sizeof text);
  }
};

inline void join(Clock& to, const Clock& from) {
  for (u32 i = 0; i < W.width; i += 16)
    for (u32 j = i; j < i + 16; j++) to.at[j] = to.at[j] > from.at[j] ? to.at[j] : from.at[j];
}
inline bool covers(const Clock& known, const Clock& happened) {
  u32 missing = 0;
  for (u32 i = 0; i < W.width; i += 16)
    for (u32 j = i; j < i + 16; j++) missing |= happened.at[j] > known.at[j];
  return !missing;
}
// The fiber's later actions are not covered by what it has passed on so far.
inline void tick(Fiber& f) { f.knows.at[f.id] = ++W.now; }
}  // namespace target
