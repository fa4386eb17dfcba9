// The test target: all WGs of all ranks of an operator in one process, as fibers under a controller that forces
// interleavings and plays a weak memory (forced_control.h, forced_memory.h). Schedules run on it, not a word changed.
#pragma once

#define DEVICE
#include "forced_control.h"

#include "soft_bf16.h"

namespace target {
inline u32 lane() { return 0; }
inline u32 lanes() { return 1; }
constexpr u32 COPY_BATCH = 8, CUT_WORDS = 2, DIES = 8, GATED = 4, MULTIPLIES_MXFP8 = 0, REMEMBERS = 1;
inline u32 wg() { return W.me->wg; }
inline u32 die() { return W.me->wg % DIES; }
inline void barrier() {}
inline void moved(u64) {}
struct Converts {};

// A mutation: waits for these signals pass at once.
inline bool blind(const u32* p) {
  for (u32 i = 0; i < W.num_blind; i++)
    if (p >= W.blind[i].begin && p < W.blind[i].end) return true;
  return false;
}
inline void make_blind(const u32* begin, u32 words) { W.blind[W.num_blind++] = {begin, begin + words}; }

inline u32 load(const u32* p, Scope scope) {
  switch_point();
  if (blind(p)) return 0x3fffffff;  // at or past every epoch and count that is waited for
  return load_signal(*W.me, p, scope);
}
inline void store(u32* p, u32 v, Scope scope) {
  switch_point();
  store_signal(*W.me, p, v, scope);
}
inline u32 add(u32* p, u32 v, Scope scope) {
  switch_point();
  return change_signal(*W.me, p, nullptr, v, scope);
}
inline bool swap_if(u32* p, u32 was, u32 now, Scope scope) {
  switch_point();
  return change_signal(*W.me, p, &was, now, scope) == was;
}

// Every fence is known by its place, so that a test can take away, or narrow, one at a time. Returns false for "not there".
inline bool pass_fence(bool releases, Scope& scope, const char* file, const char* function, u32 line) {
  switch_point();
  u32 i = 0;
  for (; i < W.num_fences; i++) {
    const Fence& f = W.fences[i];
    if (f.line == line && f.releases == releases && !strcmp(f.file, file)) break;
  }
  if (i == MAX_FENCES) abort();
  if (i == W.num_fences) W.fences[W.num_fences++] = {file, function, line, releases, scope, 0};
  W.fences[i].passed++;
  if (i + 1 == W.narrow_fence) scope = DEVICE_SCOPE;
  return i + 1 != W.without_fence && !(releases ? W.no_release : W.no_acquire);
}
// No std::source_location: there is no C++ library.
inline void release(Scope scope, const char* file = __builtin_FILE(), const char* function = __builtin_FUNCTION(),
                    u32 line = __builtin_LINE()) {
  if (pass_fence(true, scope, file, function, line)) release_now(*W.me, scope);
}
inline void acquire(Scope scope, const char* file = __builtin_FILE(), const char* function = __builtin_FUNCTION(),
                    u32 line = __builtin_LINE()) {
  if (pass_fence(false, scope, file, function, line)) acquire_now(*W.me, scope);
}

template <class T> struct Words {
  static_assert(sizeof(T) == 8 || sizeof(T) == 16);
  u64 at[sizeof(T) / 8];
};
template <class T> T read(const T* p) {
  Words<T> w;
  for (u32 i = 0; i < sizeof(T) / 8; i++) {
    data_switch_point();
    w.at[i] = read_word((const u64*)p + i);
  }
  return __builtin_bit_cast(T, w);
}
template <class T> void write(T* p, T v) {
  const Words<T> w = __builtin_bit_cast(Words<T>, v);
  for (u32 i = 0; i < sizeof(T) / 8; i++) {
    data_switch_point();
    write_word((u64*)p + i, w.at[i]);
  }
}
// A scale of MXFP8, which this target does not multiply: never called, so nowhere made.
void write(unsigned char* p, unsigned char v);

// A polled word whose data has not come holds this; loads that return it order nothing.
inline void polled_words_hold(u64 absent) { W.absent = absent; }
template <class T> T read_polled(const T* p) {
  Words<T> w;
  for (u32 i = 0; i < sizeof(T) / 8; i++) {
    switch_point();
    w.at[i] = read_polled_word((const u64*)p + i);
  }
  return __builtin_bit_cast(T, w);
}
template <class T> void write_through(T* p, T v) {
  const Words<T> w = __builtin_bit_cast(Words<T>, v);
  for (u32 i = 0; i < sizeof(T) / 8; i++) {
    data_switch_point();
    write_word((u64*)p + i, w.at[i], true);
  }
}

inline void pause() {
  Fiber& f = *W.me;
  f.looked = 0;
  f.polling = true;
  W.burst = 0;
  switch_point();
  f.num_watched = 0;
  f.watches_all = false;
}
inline u64 ticks() { return W.time; }  // virtual: steps, and what a test adds

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline u32 uniform(u32 x) { return x; }
inline float exp2(float x) { return __builtin_exp2f(x); }
inline float reciprocal(float x) { return 1 / x; }
inline u64 pack_bf16(float a, float b, float c, float d) { return pack_in_software(a, b, c, d); }
}  // namespace target
