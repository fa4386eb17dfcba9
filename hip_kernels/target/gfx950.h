// gfx950 (CDNA4): 512 threads, 8 waves of 64, one WG a compute unit. All lanes work; the first wave decides too, with equal
// values in its lanes, so that the schedule stays in scalar registers and has no divergent branch. Needs no HIP header.
#pragma once

#ifndef __device__  // hiprtc and hipcc bring their own
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
// Inlined whole: a call would need a stack, and so scratch memory.
#define DEVICE __device__ __attribute__((always_inline))

#include "soft_bf16.h"

namespace target {
constexpr u32 GATED = 16;  // so that one thread has both sums, of every target's matrix instructions
constexpr u32 WG_THREADS = 512, WAVE = 64;
constexpr u32 COPY_BATCH = 8, CUT_WORDS = 64;
static_assert(COPY_BATCH * 16 * WG_THREADS == 64 << 10);  // bytes that a mover has on their way
constexpr u32 TRACE_ROWS = 1;  // rows of Group::trace that one WG writes
constexpr u32 DIES = 8;        // each with an L2 of its own
constexpr u32 REMEMBERS = 0;
constexpr u32 MULTIPLIES_MXFP8 = 1;

// The compiler knows nothing of it, or it makes every offset of every copy from it before the main loop, and keeps them
// through all tiles (44 bytes of scratch in moe_forward).
DEVICE inline u32 lane() {
  u32 l = __builtin_amdgcn_workitem_id_x();
  asm volatile("" : "+v"(l));
  return l;
}
DEVICE inline u32 lanes() { return WG_THREADS; }
DEVICE inline u32 wg() { return __builtin_amdgcn_workgroup_id_x(); }
// Which of the dies (XCDs) this WG is on: the hardware's XCC_ID, bits 0 to 3 of register 20. Ids are dealt to WGs in turn as a
// rule, not by promise.
DEVICE inline u32 die() { return __builtin_amdgcn_s_getreg(20 | 0 << 6 | 3 << 11); }

// In asm, for compilers forget it: behind buffer_wbl2 when they believe that nothing is outstanding, and before s_barrier.
DEVICE inline void wait_own_stores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

DEVICE inline void barrier() {
  wait_own_stores();
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");  // LDS too: the builtin below waits for nothing
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Signals: however many lanes of a wave ask, with equal values, one of them goes to memory and all get its answer.
DEVICE inline bool elected() { return lane() == (u32)__builtin_amdgcn_readfirstlane(lane()); }
DEVICE inline u32 from_elected(u32 v) { return __builtin_amdgcn_readfirstlane(v); }

// Every call passes a constant scope, so the branch on it folds away: the builtins want theirs as a literal.
DEVICE inline u32 load(const u32* p, Scope scope) {
  u32 v = 0;
  if (elected())
    v = scope == SYSTEM_SCOPE ? __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
                              : __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return from_elected(v);
}
DEVICE inline void store(u32* p, u32 v, Scope scope) {
  if (!elected()) return;
  if (scope == SYSTEM_SCOPE) __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  else __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE inline u32 add(u32* p, u32 v, Scope scope) {
  u32 was = 0;
  if (elected())
    was = scope == SYSTEM_SCOPE ? __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
                                : __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return from_elected(was);
}
DEVICE inline bool swap_if(u32* p, u32 was, u32 now, Scope scope) {
  bool swapped = false;
  if (elected())
    swapped = scope == SYSTEM_SCOPE ? __hip_atomic_compare_exchange_strong(p, &was, now, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                                                           __HIP_MEMORY_SCOPE_SYSTEM)
                                    : __hip_atomic_compare_exchange_strong(p, &was, now, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                                                           __HIP_MEMORY_SCOPE_AGENT);
  return from_elected(swapped);
}

// Writes back what this XCD's L2 holds. Without the wait the signal that follows may overtake the data.
DEVICE inline void release(Scope scope) {
  if (scope == SYSTEM_SCOPE) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  else __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  wait_own_stores();
}
// Drops what L1 and L2 hold of others' memory. The wait: a load behind it must not be answered before it is done.
DEVICE inline void acquire(Scope scope) {
  if (scope == SYSTEM_SCOPE) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
  else __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  wait_own_stores();
}
template <class T> DEVICE inline T read(const T* p) { return *p; }
template <class T> DEVICE inline void write(T* p, T v) { *p = v; }
// sc0 sc1: neither L2 nor the caches above keep it, so that a peer's store is seen and a peer sees ours.
DEVICE inline u64 read_polled(const u64* p) { return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE inline void write_through(u64* p, u64 v) { __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE inline Vec16 read_polled(const Vec16* p) { return {read_polled(&p->lo), read_polled(&p->hi)}; }
DEVICE inline void write_through(Vec16* p, Vec16 v) {
  write_through(&p->lo, v.lo);
  write_through(&p->hi, v.hi);
}

DEVICE inline void moved(u64) {}

struct Converts {
  // Clamped first: past 464 the instruction gives NaN, or does not, as a mode bit has it.
  DEVICE static u32 two_e4m3(float a, float b) {
    return __builtin_amdgcn_cvt_pk_fp8_f32(__builtin_amdgcn_fmed3f(a, -448, 448), __builtin_amdgcn_fmed3f(b, -448, 448), 0, false);
  }
};

DEVICE inline void pause() { __builtin_amdgcn_s_sleep(1); }               // about 64 cycles
DEVICE inline u64 ticks() { return __builtin_amdgcn_s_memrealtime(); }    // 100 MHz, one clock for all XCDs of a GPU

DEVICE inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE inline float sqrt(float x) { return __builtin_sqrtf(x); }
DEVICE inline u32 uniform(u32 x) { return from_elected(x); }
DEVICE inline float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE inline float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
DEVICE inline u64 pack_bf16(float a, float b, float c, float d) {
  typedef float Floats __attribute__((ext_vector_type(4)));
  typedef __bf16 Halves __attribute__((ext_vector_type(4)));
  return __builtin_bit_cast(u64, __builtin_convertvector((Floats){a, b, c, d}, Halves));
}
}  // namespace target
