// sm_90a: the loop. Four threads of warpgroup 0 and the 256 workers go through the same works in the same order:
//
//   decider    asks the schedule, waits for inputs, puts the work into a slot
//   loaders    of a TILE, bring the operands into the ring, one A and one B; run ahead of the workers as far as it goes
//   workers    multiply and store, or move
//   publisher  waits for the workers' stores, and publishes: they never wait for a fence
//
// So the next work is claimed while the last one is multiplied, and its operands are loaded while that is stored. The
// decider asks when A's loader has two stages left: late, so that no WG holds work that another could begin sooner, and
// early enough to hide the question. Never more than one ahead of what is worked on: legal while no work of the workers
// waits for anything, or for nothing that the claim could be holding.
#pragma once
#include "../schedule/trace.h"
#include "sm90_tile.h"

namespace target {
// 128 * 56 + 256 * 224 registers are those of 384 threads with 168, which is what the compiler gives them. With 40 the
// threads of warpgroup 0 spill.
constexpr u32 FEW_REGISTERS = 56, MANY_REGISTERS = 224;

// Work n goes through slot n % 2. All addresses are in shared memory.
struct Slots {
  static constexpr u32 READERS = WORKERS / 32 + 3;  // warps of workers, two loaders, publisher
  u32 at;
  INLINE explicit Slots(u32 shared) : at(shared + SLOTS_AT) {}
  INLINE u32 filled(u32 n) const { return at + n % 2 * 8; }
  INLINE u32 worked(u32 n) const { return at + 16 + n % 2 * 8; }  // the workers' stores are done
  INLINE u32 empty(u32 n) const { return at + 32 + n % 2 * 8; }   // all have read it, and it is published
  INLINE u32 soon() const { return at + 48; }                     // A's loader is nearly through
  INLINE u32 work(u32 n) const { return at + 64 + n % 2 * 16; }
  INLINE static u32 parity(u32 n) { return n / 2 % 2; }

  INLINE void init_all() const {
    for (u32 i = 0; i < 2; i++) {
      init(filled(i), 1);
      init(worked(i), WORKERS / 32);
      init(empty(i), READERS);
    }
    init(soon(), 1);
  }
  INLINE void put(u32 n, const Work& w) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(work(n)), "r"(w.kind), "r"(w.chunk), "r"(w.row), "r"(w.part) : "memory");
    arrive(filled(n));  // what the decider has acquired, the others have with it
  }
  INLINE Work get(u32 n) const {
    wait(filled(n), parity(n));
    u32 kind;
    Work w;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(kind), "=r"(w.chunk), "=r"(w.row), "=r"(w.part)
                 : "r"(work(n)) : "memory");
    w.kind = (Kind)kind;
    return w;
  }
};
static_assert(SLOTS_AT + 96 <= DYNAMIC_SHARED_BYTES && SLOTS_AT % 16 == 0);

template <class Op> INLINE void decide(const typename Op::Params& p, const Slots& slots) {
  typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg());
  trace.place(p.g);
  schedule.begin();
  for (u32 n = 0;; n++) {
    if (n) wait(slots.soon(), (n - 1) % 2);
    wait(slots.empty(n), slots.parity(n) ^ 1);  // the first two find their slots empty
    Work w = schedule.next_work();
    trace.mark(p.g, CLAIMED, w);
    if (w.kind != LEAVE && !schedule.wait_inputs(w)) w = {};
    if (w.kind != LEAVE) trace.mark(p.g, READY, w);
    slots.put(n, w);
    if (w.kind == LEAVE) return;
  }
}

template <class Op, bool IS_A>
INLINE void load(const typename Op::Params& p, const Operands& o, const Slots& slots, u32 shared) {
  const auto soon = [&] {
    if (IS_A) arrive(slots.soon());
  };
  for (u32 i = 0; i < o.count; i++) prefetch(&o.maps[i]);
  RingAt at;
  for (u32 n = 0;; n++) {
    const Work w = slots.get(n);
    arrive(slots.empty(n));
    if (w.kind == LEAVE) return;
    if (is_tile(w.kind)) {
      stores_then_tma();  // movers', of what is loaded now
      load_tile<layout<Op>(), IS_A>(Op::operands(p, w), o, p.tile_n, shared, at, soon);
    } else soon();
  }
}

template <class Op> INLINE void publish(const typename Op::Params& p, const Slots& slots) {
  const typename Op::Schedule schedule(p);  // never begun: finish needs nothing but the params
  Trace trace(TRACE_ROWS * wg() + 1);
  for (u32 n = 0;; n++) {
    const Work w = slots.get(n);
    if (w.kind == LEAVE) return;
    wait(slots.worked(n), slots.parity(n));
    schedule.finish(w);
    trace.mark(p.g, DONE, w);
    arrive(slots.empty(n));
  }
}

template <class Op, u32 N> INLINE void work(const typename Op::Params& p, const Slots& slots, u32 shared) {
  const typename Op::Schedule schedule(p);  // never begun: move needs nothing but the params
  const bool speaks = lane() % 32 == 0;     // for its warp
  RingAt at;
  for (u32 n = 0;; n++) {
    const Work w = slots.get(n);
    __syncwarp();
    if (speaks) arrive(slots.empty(n));
    if (w.kind == LEAVE) return;
    if (is_tile(w.kind)) {
      const TileOperands t = Op::operands(p, w);
      if (t.K) {
        float sums[N / 2];
        multiply_tile<layout<Op>(), N>(sums, k_steps(t), shared, at);
        hand_over<Op, N>(p, w, sums, t, shared);
      } else hand_over_zeros<Op>(p, w, t);
    } else Op::move(schedule, w);
    __syncwarp();  // all lanes' stores, then the word of one
    if (speaks) arrive(slots.worked(n));
  }
}

template <class Op> INLINE void run(const typename Op::Params& p, const Operands& o) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  const u32 shared = shared_address(dynamic_shared), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Slots slots(shared);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 6; i++) {
      init(shared + LOADED_AT + i * 8, 2);
      init(shared + READ_AT + i * 8, WORKERS / 128);
    }
    slots.init_all();
    inits_are_visible();
  }
  __syncthreads();  // the last barrier of all threads: the roles part here
  if (warp < FIRST_WORKER / 32) {
    give_registers<FEW_REGISTERS>();
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) decide<Op>(p, slots);
      else if (warp == 1) load<Op, true>(p, o, slots, shared);
      else if (warp == 2) load<Op, false>(p, o, slots, shared);
      else publish<Op>(p, slots);
    }
  } else {
    take_registers<MANY_REGISTERS>();
    if (p.tile_n == TILE_N) work<Op, TILE_N>(p, slots, shared);
    else if (p.tile_n == TILE_N_MEDIUM) work<Op, TILE_N_MEDIUM>(p, slots, shared);
    else work<Op, TILE_N_NARROW>(p, slots, shared);
  }
}
}  // namespace target

// __grid_constant__: without it the structs are copied to a stack frame of every thread, where TMA finds no map.
#define KOSMOS_KERNEL(name, Op)                                                                                            \
  extern "C" __global__ void __launch_bounds__(target::WG_THREADS, 1)                                                      \
      name##_main(const __grid_constant__ Op::Params p, const __grid_constant__ target::Operands o) {                      \
    target::run<Op>(p, o);                                                                                                 \
  }

// Two WGs an SM. Only workers work: lane() counts them. The second struct is that of every kernel, and unused.
#define KOSMOS_PLAIN_KERNEL(name, Op)                                                                                      \
  extern "C" __global__ void __launch_bounds__(target::WG_THREADS, 2)                                                      \
      name##_main(const __grid_constant__ Op::Params p, const __grid_constant__ target::Operands) {                        \
    extern __shared__ __align__(16) unsigned char scratch[];                                                               \
    if (threadIdx.x >= target::FIRST_WORKER) Op::work(p, scratch);                                                         \
  }
