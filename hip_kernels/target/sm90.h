// sm_90a (Hopper): 384 threads, one WG an SM. Warpgroup 0 decides, loads and publishes; warpgroups 1 and 2 work, and lane(),
// lanes() and barrier() mean their 256 threads. Needs no CUDA header, so that NVRTC takes the same text.
#pragma once

#define DEVICE __device__

#include "soft_bf16.h"

namespace target {
constexpr u32 GATED = 16;  // so that one thread has both sums, of every target's matrix instructions
constexpr u32 WG_THREADS = 384, WORKERS = 256, FIRST_WORKER = WG_THREADS - WORKERS;
constexpr u32 COPY_BATCH = 16;  // 64 KiB of all workers
constexpr u32 CUT_WORDS = 64;
constexpr u32 DIES = 1;
constexpr u32 REMEMBERS = 1;
constexpr u32 MULTIPLIES_MXFP8 = 0;  // WGMMA has no scales of blocks
// Rows of Group::trace that one WG writes: the decider's, that of who ends works, the mover's beside, that of the second warpgroup
// that ends works
constexpr u32 TRACE_ROWS = 4;

// Read anew at each use. Else compilers keep what follows from it, for all kinds of work, in registers through the
// multiplications: moe_forward then spills.
DEVICE inline u32 lane() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - FIRST_WORKER;
}
DEVICE inline u32 lanes() { return WORKERS; }
DEVICE inline u32 wg() { return blockIdx.x; }
DEVICE inline u32 die() { return 0; }
DEVICE inline void barrier() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// Every call passes a constant scope, so the branch on it folds away.
DEVICE inline u32 load(const u32* p, Scope scope) {
  u32 v;
  if (scope == SYSTEM_SCOPE) asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  else asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE inline void store(u32* p, u32 v, Scope scope) {
  if (scope == SYSTEM_SCOPE) asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
  else asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE inline u32 add(u32* p, u32 v, Scope scope) {
  u32 was;
  if (scope == SYSTEM_SCOPE)
    asm volatile("atom.relaxed.sys.global.add.u32 %0, [%1], %2;" : "=r"(was) : "l"(p), "r"(v) : "memory");
  else asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(was) : "l"(p), "r"(v) : "memory");
  return was;
}
DEVICE inline bool swap_if(u32* p, u32 was, u32 now, Scope scope) {
  u32 seen;
  if (scope == SYSTEM_SCOPE)
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(seen) : "l"(p), "r"(was), "r"(now) : "memory");
  else
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(seen) : "l"(p), "r"(was), "r"(now) : "memory");
  return seen == was;
}

// Cumulative: what other threads of the WG did before a barrier, or saw before they filled a slot, counts as the caller's.
// fence.acq_rel for both would be right too, but then an acquire waits for the SM's stores, microseconds beside a copy.
DEVICE inline void release(Scope scope) {
  if (scope == SYSTEM_SCOPE) asm volatile("fence.release.sys;" ::: "memory");
  else asm volatile("fence.release.gpu;" ::: "memory");
}
DEVICE inline void acquire(Scope scope) {
  if (scope == SYSTEM_SCOPE) asm volatile("fence.acquire.sys;" ::: "memory");
  else asm volatile("fence.acquire.gpu;" ::: "memory");
}
template <class T> DEVICE inline T read(const T* p) { return *p; }
template <class T> DEVICE inline void write(T* p, T v) { *p = v; }
DEVICE inline u64 read_polled(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE inline Vec16 read_polled(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "l"(p) : "memory");
  return v;
}
DEVICE inline void write_through(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE inline void write_through(Vec16* p, Vec16 v) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(v.lo), "l"(v.hi) : "memory");
}

DEVICE inline void moved(u64) {}

struct Converts {
  DEVICE static u32 two_e4m3(float a, float b) {  // to nearest even, saturating
    u16 v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(b), "f"(a));
    return v;
  }
};

DEVICE inline void pause() { __nanosleep(64); }
DEVICE inline u64 ticks() {  // nanoseconds; steps of up to a microsecond
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

DEVICE inline float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE inline float sqrt(float x) { return __fsqrt_rn(x); }
DEVICE inline u32 uniform(u32 x) { return x; }
DEVICE inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE inline u64 pack_bf16(float a, float b, float c, float d) {
  u32 lo, hi;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(lo) : "f"(b), "f"(a));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(hi) : "f"(d), "f"(c));
  return (u64)hi << 32 | lo;
}
}  // namespace target
