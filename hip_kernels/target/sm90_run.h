// sm_90a: the loop. Four threads of warpgroup 0 and the 256 workers go through the same works in the same order:
//
//   decider    asks the schedule, waits for inputs, puts the work into a slot
//   loaders    bring operands into the ring, one A and one B, or what is moved; run ahead as far as the ring goes. B's says how
//              large a tile is
//   workers    multiply and store, or add, or whatever else is no copy
//   publisher  stores copies, waits for all stores, and publishes: workers never wait for a fence. Or it moves beside
//              them (sm90_beside.h, and with its whole warp sm90_beside_sums.h)
//
// So the next work is claimed while the last one is multiplied, and its operands are loaded while that is stored. The
// decider asks when A's loader has few stages left: late, so that no WG holds work that another could begin sooner, and
// early enough to hide the question. Never more than one ahead of what is worked on: legal while no work of the workers
// waits for anything, or for nothing that the claim could be holding.
#pragma once
#include "../schedule/trace.h"
#include "ahead.h"
#include "sm90_beside_sums.h"
#include "sm90_push.h"

namespace target {
// 128 * 72 + 256 * 216 registers are those of 384 threads with 168, which is what the compiler gives them. With 56 the warp
// that adds beside spills.
constexpr u32 FEW_REGISTERS = 72, MANY_REGISTERS = 216;

// Work n goes through slot n % 2. All addresses are in shared memory. Where the publisher moves beside, it reads none of them.
struct Slots {
  static constexpr u32 READERS = WORKERS / 32 + 3;  // warps of workers, two loaders, publisher
  u32 at;
  INLINE explicit Slots(u32 shared) : at(shared + SLOTS_AT) {}
  INLINE u32 filled(u32 n) const { return at + n % 2 * 8; }
  INLINE u32 worked(u32 n) const { return at + 16 + n % 2 * 8; }  // the workers' stores are done
  INLINE u32 empty(u32 n) const { return at + 32 + n % 2 * 8; }   // all have read it, and it is published
  INLINE u32 soon() const { return at + 48; }                     // A's loader is nearly through
  INLINE u32 copied() const { return at + 56; }                   // the publisher has emptied the ring of a PULL
  INLINE u32 work(u32 n) const { return at + 64 + n % 2 * 16; }
  INLINE u32 described(u32 n) const { return at + 96 + n % 2 * 8; }  // B's loader has said how large the tile is
  INLINE u32 sizes(u32 n) const { return at + 112 + n % 2 * 16; }
  INLINE static u32 parity(u32 n) { return n / 2 % 2; }

  INLINE void init_all(bool published) const {
    for (u32 i = 0; i < 2; i++) {
      init(filled(i), 1);
      init(worked(i), WORKERS / 32);
      init(empty(i), published ? READERS : READERS - 1);
      init(described(i), 1);
    }
    init(soon(), 1);
    init(copied(), 1);
  }
  INLINE void put(u32 n, const Work& w) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(work(n)), "r"(w.kind), "r"(w.chunk), "r"(w.row), "r"(w.part) : "memory");
    arrive(filled(n));  // what the decider has acquired, the others have with it
  }
  // Of a tile, all that workers need. Operators may have to look it up in memory, which the loaders do ahead of them. Said of
  // every work before its slot is empty, so that nobody can miss a phase.
  INLINE void describe(u32 n, const TileOperands& t) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(sizes(n)), "r"(t.rows), "r"(t.cols), "r"(t.K), "r"(t.lda) : "memory");
    arrive(described(n));
  }
  INLINE TileOperands description(u32 n) const {
    wait(described(n), parity(n));
    TileOperands t = {};
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(t.rows), "=r"(t.cols), "=r"(t.K), "=r"(t.lda)
                 : "r"(sizes(n)) : "memory");
    return t;
  }
  INLINE bool is_filled(u32 n) const { return has_passed(filled(n), parity(n)); }
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
static_assert(SLOTS_BYTES == 112 + 2 * 16 && SLOTS_AT + SLOTS_BYTES <= DYNAMIC_SHARED_BYTES && SLOTS_AT % 16 == 0);

template <class Op> INLINE void decide(const typename Op::Params& p, const Slots& slots) {
  typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg());
  trace.place(p.g);
  schedule.begin();
  for (u32 n = 0;; n++) {
    if (n) wait(slots.soon(), (n - 1) % 2);
    Work w = schedule.next_work();
    trace.mark(p.g, CLAIMED, w);
    if (w.kind != LEAVE && !wait_to_begin(schedule, w)) w = {};
    if (w.kind != LEAVE) trace.mark(p.g, READY, w);
    // Only now, for the work of two before is still being published. The first two find their slots empty.
    wait(slots.empty(n), slots.parity(n) ^ 1);
    slots.put(n, w);
    if (w.kind == LEAVE) return;
  }
}

// Stages that are left to load when the next work is asked for. Operators that draw it, and so need not ask late, say more.
template <class Op> INLINE constexpr u32 asks_ahead() {
  if constexpr (requires { Op::ASKS_AHEAD; }) return Op::ASKS_AHEAD;
  else return 2;
}
// A's loader says when so few are left: what comes next can be decided while they are waited for. It also waits
// for the parts of A that may come later than the first. When such a wait gives up, so does the launch, and it is no matter
// what is loaded.
template <class Op, bool IS_A>
INLINE void load(const typename Op::Params& p, const Operands& o, const Slots& slots, u32 shared) {
  const typename Op::Schedule schedule(p);  // never begun: all but next_work needs nothing but the params
  for (u32 i = 0; i < o.count; i++) prefetch(&o.maps[i]);
  RingAt at;
  for (u32 n = 0;; n++) {
    const Work w = slots.get(n);
    TileOperands t = {};
    if (is_tile(w.kind)) t = Op::operands(p, w);
    if (!IS_A) slots.describe(n, t);
    arrive(slots.empty(n));
    if (w.kind == LEAVE) return;
    bool said = false;
    u32 part = 1, part_at = 0, part_steps = 0;
    if constexpr (requires { schedule.wait_part(w, 0u); })  // several parts are whole steps each
      part_at = part_steps = (schedule.part_k() + TILE_K - 1) / TILE_K;
    const auto before = [&](u32 k, u32 steps) {
      if constexpr (IS_A) {
        if constexpr (requires { schedule.wait_part(w, 0u); }) {
          if (k && k == part_at && is_tile(w.kind)) {
            schedule.wait_part(w, part++);
            part_at += part_steps;
            order_with_tma();
          }
        }
        if (!said && k + asks_ahead<Op>() >= steps) arrive(slots.soon()), said = true;
      }
    };
    order_with_tma();  // others' stores of what is loaded now
    if (is_tile(w.kind)) load_tile<Op, IS_A>(w, t, o, p.tile_n, shared, at, before);
    else load_moved<Op, IS_A>(schedule, w, shared, at, before);
    if (IS_A && !said) arrive(slots.soon());
  }
}

template <class Op> INLINE void publish(const typename Op::Params& p, const Slots& slots, u32 shared) {
  const typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg() + 1);
  RingAt at;
  PanelsAt panels(shared, p.tile_n);
  Work under_way;  // a PULL whose stores are: while the next one comes, nobody waits for them
  const auto settle = [&] {
    if (!pulls<Op>() || under_way.kind == LEAVE) return;
    order_with_tma();
    schedule.finish(under_way);
    trace.mark(p.g, DONE, under_way);
    under_way = {};
  };
  const auto settle_all = [&] {
    if (!pulls<Op>() || under_way.kind == LEAVE) return;
    wait_stores<0>();
    settle();
  };
  for (u32 n = 0;; n++) {
    if (!slots.is_filled(n)) settle_all();  // what comes next may have to wait
    const Work w = slots.get(n);
    if (w.kind != PULL) settle_all();
    if (w.kind == LEAVE) return;
    if constexpr (pulls<Op>()) {
      if (w.kind == PULL) {
        store_moved(BlockStages(Op::pulled(p, w), p.tile_n), shared, at, settle);
        arrive(slots.copied());
        settle_all();  // this one was nothing
        under_way = w;
        wait(slots.worked(n), slots.parity(n));
        arrive(slots.empty(n));
        continue;
      }
      at.skip(ring_steps<Op>(schedule, w), stages(p.tile_n));
    }
    bool done = true;
    if constexpr (exchanges<Op>()) {
      if (is_tile(w.kind)) done = exchange<Op>(schedule, w, panels);
    }
    wait(slots.worked(n), slots.parity(n));
    if (done) schedule.finish(w);
    trace.mark(p.g, DONE, w);
    arrive(slots.empty(n));
  }
}

// Whether it has halves of tiles that are n columns wide: what ranks exchange comes in whole panels.
template <class Op> INLINE constexpr bool halves(u32 n) {
  if constexpr (requires(const typename Op::Params& p) { p.halved; }) return !exchanges<Op>() || n / 2 % PANEL == 0;
  else return false;
}

// The workers, a tile of N columns or fewer.
template <class Op, u32 N, u32 RING>
INLINE void build(const typename Op::Params& p, const Work& w, const TileOperands& t, u32 shared, RingAt& at, PanelsAt& panels) {
  float sums[N / 2];
  multiply_tile<Op, N, RING>(sums, w, t.K, shared, at);
  if constexpr (exchanges<Op>()) {
    if (w.chunk != p.g.rank) send_tile<N>(sums, t, panels);
    else if (p.g.ranks > 1) add_tile<N>(sums, p.g, t, Op::own_rows(p, w), panels);
    else store_rows<N, false>(sums, t, Op::own_rows(p, w), shared, false, same_line);
  } else hand_over<Op, N>(p, w, sums, t, shared, moves_beside<Op>(p));
}

template <class Op, u32 N> INLINE void work(const typename Op::Params& p, const Slots& slots, u32 shared) {
  const typename Op::Schedule schedule(p);
  const bool speaks = lane() % 32 == 0, beside = moves_beside<Op>(p);  // speaks: for its warp
  Trace trace(TRACE_ROWS * wg() + 1);
  RingAt at;
  PanelsAt panels(shared, N);
  u32 copies = 0;
  for (u32 n = 0;; n++) {
    const Work w = slots.get(n);
    __syncwarp();
    if (speaks && !beside) arrive(slots.empty(n));
    if (w.kind == LEAVE) return;
    if (is_tile(w.kind)) {
      const TileOperands t = slots.description(n);
      if (!t.K) hand_over_zeros<Op>(p, w, t);
      else if (w.kind == HALF && halves<Op>(N)) build<Op, halves<Op>(N) ? N / 2 : N, N>(p, w, t, shared, at, panels);
      else build<Op, N, N>(p, w, t, shared, at, panels);
      if constexpr (has_copies<Op>())
        if (Op::makes_copies(w)) {
          barrier();  // all workers' stores
          Op::make_copies(p, w);
        }
    } else if (pulls<Op>() && w.kind == PULL) {
      // The publisher's business. But who has not seen a phase of a barrier end must not wait for the one after the next:
      // by its parity it would take the one before for it.
      wait(slots.copied(), copies++ % 2);
      at.skip(ring_steps<Op>(schedule, w), stages(N));
    } else if (adds<Op>() && w.kind == REDUCE) {
      if constexpr (adds<Op>()) add_moved<Op::STAGED>(p.g, w, Op::addends(schedule, w), N, shared, at);
    } else Op::move(schedule, w);
    __syncwarp();  // all lanes' stores, then the word of one
    if (beside && lane() == 0) trace.mark(p.g, DONE, w);
    if (speaks) arrive(beside ? slots.empty(n) : slots.worked(n));
  }
}

template <class Op> INLINE void run(const typename Op::Params& p, const Operands& o) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  const u32 shared = shared_address(dynamic_shared), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Slots slots(shared);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 6; i++) {
      init(shared + LOADED_AT + i * 8, 2);
      init(shared + READ_AT + i * 8, STAGE_READERS);
    }
    slots.init_all(!moves_beside<Op>(p));
    if constexpr (exchanges<Op>()) init_panels(shared);
    if constexpr (can_add_beside<Op>()) init_units(shared);
    else if (moves_beside<Op>(p)) init_pieces(shared);
    inits_are_visible();
  }
  __syncthreads();  // the last barrier of all threads: the roles part here
  if (warp < FIRST_WORKER / 32) {
    give_registers<FEW_REGISTERS>();
    const u32 thread = threadIdx.x % 32;
    if (warp == 3 && moves_beside<Op>(p)) {
      if constexpr (can_add_beside<Op>()) add_beside<Op>(p, dynamic_shared, thread);
      else if constexpr (can_pull_beside<Op>())
        if (thread < RUNS) pull_beside<Op>(p, dynamic_shared, thread);
    } else if (thread == 0) {
      if (warp == 0) decide<Op>(p, slots);
      else if (warp == 1) load<Op, true>(p, o, slots, shared);
      else if (warp == 2) load<Op, false>(p, o, slots, shared);
      else publish<Op>(p, slots, shared);
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
