// The CPU: a WG is an OS thread with one lane. Needs no C++ standard library, so that clang alone builds it.
#pragma once
#include <sched.h>
#include <time.h>

#define DEVICE

#include "soft_bf16.h"

namespace target {
constexpr u32 WG_THREADS = 1, TRACE_ROWS = 1, COPY_BATCH = 8, CUT_WORDS = 64, DIES = 1, GATED = 16, REMEMBERS = 1;
#ifdef KOSMOS_BF16_TILES  // for tests: as a target that cannot
constexpr u32 MULTIPLIES_MXFP8 = 0;
#else
constexpr u32 MULTIPLIES_MXFP8 = 1;
#endif
inline thread_local u32 wg_idx = 0;
inline u32 lane() { return 0; }
inline u32 lanes() { return 1; }
inline u32 wg() { return wg_idx; }
inline u32 die() { return 0; }
inline void barrier() {}

// For tests: a WG comes late, by up to so many microseconds, to each claim and each publication.
inline u32 most_delay_us = 0;
inline void come_late() {
  static thread_local u64 dice = 0;
  if (!dice) dice = (u64)&dice ^ (wg_idx + 1) * 0x9e3779b97f4a7c15ull;  // other threads, other places
  dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
  const timespec t = {0, (long)(dice % (most_delay_us + 1) * 1000)};
  nanosleep(&t, nullptr);
}

}  // namespace target

#include "host_signals.h"  // defines: load, store, add, swap_if, release, acquire

namespace target {
template <class T> inline T read(const T* p) { return *p; }
template <class T> inline void write(T* p, T v) { *p = v; }
inline u64 read_polled(const u64* p) {
  const u64 v = __atomic_load_n(p, __ATOMIC_RELAXED);
  found(p);
  return v;
}
inline void write_through(u64* p, u64 v) {
  publish(p);
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline Vec16 read_polled(const Vec16* p) { return {read_polled(&p->lo), read_polled(&p->hi)}; }
inline void write_through(Vec16* p, Vec16 v) {
  write_through(&p->lo, v.lo);
  write_through(&p->hi, v.hi);
}

// By all WGs and ranks of this process so far.
inline u64 moved_bytes = 0;
inline void moved(u64 bytes) { __atomic_fetch_add(&moved_bytes, bytes, __ATOMIC_RELAXED); }

struct Converts {  // 32 at a time, in vectors of the compiler's choice, which it does not find by itself
  using Bits32 = u32 __attribute__((vector_size(128)));
  using Floats32 = float __attribute__((vector_size(128)));
  static void low_bytes(Bits32 x, u32 (&bytes)[8]) {
    using Bytes = unsigned char __attribute__((vector_size(32)));
    const Bytes b = __builtin_convertvector(x, Bytes);
    __builtin_memcpy(bytes, &b, sizeof b);
  }
  static u32 largest(Bits32 x) { return __builtin_reduce_max((int __attribute__((vector_size(128))))x); }  // below 2^31
};

// There are more WGs than cores: what is waited for runs only if the waiter leaves the core.
inline void pause() { sched_yield(); }
inline u64 ticks() {  // nanoseconds
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline u32 uniform(u32 x) { return x; }
inline float exp2(float x) { return __builtin_exp2f(x); }
inline float reciprocal(float x) { return 1 / x; }
inline u64 pack_bf16(float a, float b, float c, float d) { return pack_in_software(a, b, c, d); }
}  // namespace target
