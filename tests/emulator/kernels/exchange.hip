// Persistent kernels that hand data from rank to rank: what caches, missing waits and missing fences must spoil.
#include "device.h"

constexpr u32 THREADS = 256;

struct Exchange {
  u32* inbox;            // [THREADS * 2], this rank's; its left neighbour writes
  u32* right_inbox;      // the right neighbour's
  u32* full;             // [1] round whose data is in the inbox; the left neighbour writes
  u32* right_full;
  u32* taken;            // [1] round that the right neighbour has read; it writes
  u32* left_taken;
  u32* out;              // [rounds][THREADS * 2]
  u32 rank, rounds;
};

template <bool SYSTEM> DEVICE u32 load(const u32* p) {
  return SYSTEM ? __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
                : __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// One wave polls, the others wait for it. Uniform control: no branch on single lanes.
DEVICE void wait_until(const u32* p, u32 wanted) {
  if (__builtin_amdgcn_readfirstlane(thread() / 64) == 0)
    while ((int)(__builtin_amdgcn_readfirstlane(load<true>(p)) - wanted) < 0) __builtin_amdgcn_s_sleep(1);
  barrier();
}
template <bool SYSTEM> DEVICE void acquire() {
  if (SYSTEM) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
  else __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
}
template <bool SYSTEM> DEVICE void release() {
  if (SYSTEM) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  else __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  asm volatile("s_waitcnt vmcnt(0) ; behind the write-back" ::: "memory");
}
DEVICE void tell(u32* p, u32 v) {
  if (thread() == 0) __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
DEVICE u32 value(u32 rank, u32 round, u32 i) { return rank << 24 ^ round << 16 ^ i * 2654435761u; }

// WG 0 sends to the right, WG 1 receives from the left, round after round through the same inbox.
template <bool SYSTEM> DEVICE void run(const Exchange& p) {
  const u32 t = thread();
  for (u32 round = 1; round <= p.rounds; round++) {
    if (wg() == 0) {
      wait_until(p.taken, round - 1);
      p.right_inbox[t] = value(p.rank, round, t);
      p.right_inbox[t + THREADS] = value(p.rank, round, t + THREADS);
      barrier();
      release<SYSTEM>();
      barrier();
      tell(p.right_full, round);
    } else {
      wait_until(p.full, round);
      acquire<SYSTEM>();
      p.out[(round - 1) * 2 * THREADS + t] = p.inbox[t];
      p.out[(round - 1) * 2 * THREADS + t + THREADS] = p.inbox[t + THREADS];
      barrier();
      tell(p.left_taken, round);
    }
  }
}
KERNEL(256) exchange(Exchange p) { run<true>(p); }
KERNEL(256) exchange_with_device_fences(Exchange p) { run<false>(p); }  // wrong: peers need system scope

// Workgroups of one device count together; each must see all. Device scope is right here.
struct Count {
  u32* counter;
  u32* data;  // [WGs]
  u32* seen;  // [WGs][WGs]
  u32 wgs;
};
KERNEL(64) count(Count p) {
  const u32 t = thread();
  if (t == 0) p.data[wg()] = wg() + 100;
  release<false>();
  if (t == 0) __hip_atomic_fetch_add(p.counter, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  while ((u32)__builtin_amdgcn_readfirstlane(load<false>(p.counter)) < p.wgs) __builtin_amdgcn_s_sleep(1);
  acquire<false>();
  if (t < p.wgs) p.seen[wg() * p.wgs + t] = p.data[t];
}
