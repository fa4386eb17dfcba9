// sm_90a: the loop. Four threads of warpgroup 0 and the 256 workers go through the same works in the same order:
//
//   decider    asks the schedule, waits for inputs, puts the work into a slot
//   loaders    bring operands into the ring, one A and one B, or what is moved; run ahead as far as the ring goes. B's says how
//              large a tile is
//   workers    multiply and store, a warpgroup a slice of a tile; or both add, or do whatever else is no copy
//   publisher  stores copies and rows of wide tiles, waits for all stores, and publishes: workers never wait for a fence. Or
//              it moves beside them (sm90_beside.h, and with its whole warp sm90_beside_sums.h)
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

// Work n goes through slot n % COUNT: of four, two are worked on, one is published, and one is loaded. All addresses are in shared
// memory. Where the publisher moves beside, it reads none of them.
struct Slots {
  static constexpr u32 READERS = WORKERS / 32 + 3, COUNT = 4;  // READERS: warps of workers, two loaders, publisher
  u32 at;
  INLINE explicit Slots(u32 shared) : at(shared + SLOTS_AT) {}
  INLINE u32 barrier(u32 i) const { return at + i * 8; }
  INLINE u32 filled(u32 n) const { return barrier(n % COUNT); }
  INLINE u32 worked(u32 n) const { return barrier(COUNT + n % COUNT); }         // the workers' stores are done
  INLINE u32 empty(u32 n) const { return barrier(2 * COUNT + n % COUNT); }      // all have read it, and it is published
  INLINE u32 described(u32 n) const { return barrier(3 * COUNT + n % COUNT); }  // B's loader has said how large the tile is
  INLINE u32 soon() const { return barrier(4 * COUNT); }                        // A's loader is nearly through
  INLINE u32 copied() const { return barrier(4 * COUNT + 1); }                  // the publisher has emptied the ring of a PULL
  INLINE u32 work(u32 n) const { return barrier(4 * COUNT + 2) + n % COUNT * 16; }
  INLINE u32 sizes(u32 n) const { return barrier(6 * COUNT + 2) + n % COUNT * 16; }
  INLINE u32 placed(u32 n) const { return barrier(8 * COUNT + 2 + n % COUNT); }  // B's loader has said where its rows go
  INLINE u32 place_of(u32 n) const { return barrier(9 * COUNT + 2) + n % COUNT * 16; }
  INLINE static u32 parity(u32 n) { return n / COUNT % 2; }

  INLINE void init_all(bool published) const {
    for (u32 i = 0; i < COUNT; i++) {
      init(filled(i), 1);
      init(worked(i), WORKERS / 32);
      init(empty(i), published ? READERS : READERS - 1);
      init(described(i), 1);
      init(placed(i), 1);
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
                 ::"r"(sizes(n)), "r"(t.rows), "r"(t.cols), "r"(t.K), "r"(t.note) : "memory");
    arrive(described(n));
  }
  INLINE TileOperands description(u32 n) const {
    wait(described(n), parity(n));
    TileOperands t = {};
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(t.rows), "=r"(t.cols), "=r"(t.K), "=r"(t.note)
                 : "r"(sizes(n)) : "memory");
    return t;
  }
  INLINE void place(u32 n, const SumsTo& rows) const {
    asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(place_of(n)), "l"(rows.c), "l"((u64)rows.separated << 32 | rows.ld) : "memory");
    arrive(placed(n));
  }
  INLINE SumsTo place(u32 n) const {
    wait(placed(n), parity(n));
    const Vec16 v = load_shared(place_of(n));
    return {(void*)v.lo, 0, (u32)v.hi, SET_BF16, 0, (u32)(v.hi >> 32)};
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
static_assert(SLOTS_BYTES >= 8 * (11 * Slots::COUNT + 2) && SLOTS_AT + SLOTS_BYTES <= DYNAMIC_SHARED_BYTES && SLOTS_AT % 16 == 0);

template <class Op> INLINE void decide(const typename Op::Params& p, const Slots& slots) {
  typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg());
  trace.place(p.g);
  schedule.begin();
  for (u32 n = 0;; n++) {
    if (n) wait(slots.soon(), (n - 1) % 2);
    Work w = schedule.next_work();
    trace.mark(p.g, CLAIMED, w);
    // Of what is moved no WG takes more than two: others could begin it.
    if (n > 1 && !is_tile(w.kind)) wait(slots.empty(n - 2), slots.parity(n - 2));
    if (w.kind != LEAVE && !wait_to_begin(schedule, w)) w = {};
    if (w.kind != LEAVE) trace.mark(p.g, READY, w);
    // Only now, for a work before, the one that had this slot, is still being published. The first find their slots empty.
    wait(slots.empty(n), slots.parity(n) ^ 1);
    slots.put(n, w);
    if (w.kind == LEAVE) return;
  }
}

// Stages that are left to load when the next work is asked for. Operators that draw it, and whose answers take longer, say more.
// Stages are short, and nothing else would hide the question: 8192 x 8192 x 1024, in tiles of 128 columns, takes 0.87 of cuBLAS's
// rate when it is asked at 2, 1.01 at 6, and 1.11 at 12.
template <class Op> INLINE constexpr u32 asks_ahead() {
  if constexpr (requires { Op::ASKS_AHEAD; }) return Op::ASKS_AHEAD;
  else return 12;
}
// A's loader says when so few are left: what comes next can be decided while they are waited for. It also waits
// for the parts of A that may come later than the first. When such a wait gives up, so does the launch, and it is no matter
// what is loaded.
template <class Op, bool IS_A>
INLINE void load(const typename Op::Params& p, const Operands& o, const Slots& slots, u32 shared) {
  const typename Op::Schedule schedule(p);  // never begun: all but next_work needs nothing but the params
  for (u32 i = 0; i < o.count; i++) prefetch(&o.maps[i]);
  using M = MadeOf<Op>;
  RingAt<M> at;
  u32 last_steps = ~0u;
  for (u32 n = 0;; n++) {
    const Work w = slots.get(n);
    // Behind a tile of few steps there will be another one: then before it is looked up where it lies.
    bool said = IS_A && w.kind != LEAVE && last_steps <= asks_ahead<Op>();
    if (said) arrive(slots.soon());
    TileOperands t = {};
    if (is_tile(w.kind)) t = Op::operands(p, w);
    if (!IS_A) slots.describe(n, t);
    arrive(slots.empty(n));
    if (w.kind == LEAVE) return;
    u32 part = 1, part_at = 0, part_steps = 0;
    if constexpr (requires { schedule.wait_part(w, 0u); })  // several parts are whole steps each; the first slice waits for them
      part_at = part_steps = (schedule.part_k() + TILE_K - 1) / TILE_K;
    bool placed = false;
    const u32 of_slice = k_steps(t);
    last_steps = is_tile(w.kind) ? M::slices(t.cols) * of_slice : ~0u;
    const auto before = [&](u32 k, u32 steps) {
      if constexpr (IS_A) {
        if constexpr (requires { schedule.wait_part(w, 0u); }) {
          if (k && k == part_at && k < of_slice && is_tile(w.kind)) {
            schedule.wait_part(w, part++);
            part_at += part_steps;
            order_with_tma();
          }
        }
        if (!said && steps - k <= asks_ahead<Op>()) arrive(slots.soon()), said = true;
      } else if constexpr (stages<Op>()) {
        if (!is_tile(w.kind) || k != (steps > M::STAGES ? M::STAGES : steps - 1)) return;
        slots.place(n, staged_to<Op>(p, w, t));  // the ring is full: there is time
        placed = true;
      }
    };
    order_with_tma();  // others' stores of what is loaded now
    if (is_tile(w.kind)) load_tile<Op, IS_A>(w, t, o, shared, at, before);
    else load_moved<Op, IS_A>(schedule, w, shared, at, before);
    if (IS_A && !said) arrive(slots.soon());
    if (!IS_A && stages<Op>() && !placed) slots.place(n, {});  // of every work, as it is described
  }
}

template <class Op> INLINE void publish(const typename Op::Params& p, const Slots& slots, u32 shared) {
  const typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg() + 1);
  RingAt<MadeOf<Op>> at;
  Turn turn(shared);
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
        store_moved(BlockStages<MadeOf<Op>>(Op::pulled(p, w)), shared, at, settle);
        arrive(slots.copied());
        settle_all();  // this one was nothing
        under_way = w;
        wait(slots.worked(n), slots.parity(n));
        arrive(slots.empty(n));
        continue;
      }
      at.skip(ring_steps<Op>(schedule, w));
    }
    bool done = true;
    if constexpr (exchanges<Op>()) {
      if (is_tile(w.kind)) done = exchange<Op>(schedule, w, turn);
    }
    wait(slots.worked(n), slots.parity(n));
    if constexpr (stages<Op>()) {  // with the whole warp
      if (is_tile(w.kind)) {
        if (const SumsTo to = slots.place(n); to.c) store_staged(slots.description(n), to, shared);
      }
      __syncwarp();  // all lanes' stores, then the word of one
    }
    if (!stages<Op>() || threadIdx.x % 32 == 0) {
      if (done) schedule.finish(w);
      trace.mark(p.g, DONE, w);
      arrive(slots.empty(n));
    }
    if (stages<Op>()) __syncwarp();  // or the one would store alone
  }
}

// The workers, one warpgroup of them: a slice of a tile, of work n.
template <class Op>
INLINE void build(const typename Op::Params& p, const Slots& slots, u32 n, const Work& w, const TileOperands& t, u32 first, u32 shared,
                  RingAt<MadeOf<Op>>& at, Turns& turns, PanelsAt& panels) {
  using M = MadeOf<Op>;
  typename M::Sums sums;
  multiply_slice<Op>(sums, w, t.K, shared, at, turns);
  const Slice<M> slice{sums, t, first, shared, moves_beside<Op>(p)};
  if constexpr (exchanges<Op>()) {
    if (w.chunk != p.g.rank) send_slice(slice, panels);
    else if (p.g.ranks > 1) add_slice(slice, p.g, Op::own_rows(p, w), panels);
    else store_rows<false>(slice, Op::own_rows(p, w), same_line);
  } else if (stages<Op>() && slots.place(n).c) {
    // What was staged of the work before has been stored, long ago: its publisher waits for nothing but memory.
    if (n) wait(slots.empty(n - 1), slots.parity(n - 1));
    stage_rows(slice);
  } else hand_over<Op>(p, w, slice);
}

template <class Op> INLINE void work(const typename Op::Params& p, const Slots& slots, u32 shared) {
  const typename Op::Schedule schedule(p);
  const bool speaks = lane() % 32 == 0, beside = moves_beside<Op>(p);  // speaks: for its warp
  const u32 group = lane() / 128;
  Trace trace(TRACE_ROWS * wg() + 1 + group * 2);
  RingAt<MadeOf<Op>> at;
  Turns turns(shared);
  PanelsAt panels(shared);
  u32 copies = 0;
  for (u32 n = 0;; n++) {
    const Work w = slots.get(n);
    __syncwarp();
    if (speaks && !beside) arrive(slots.empty(n));
    if (w.kind == LEAVE) return;
    bool last = group == 0;  // whose word it is that the work is done: of a tile, that of who has its last slice
    if (is_tile(w.kind)) {
      const TileOperands t = slots.description(n);
      if (!t.K) hand_over_zeros<Op>(p, w, t);
#pragma unroll 1
      for (u32 first = 0; t.K && first < t.cols; first += MadeOf<Op>::SLICE) {
        const bool mine = is_wide<Op>() || turns.next_is_mine();
        if (!is_wide<Op>()) last = mine;
        if (mine) build<Op>(p, slots, n, w, t, first, shared, at, turns, panels);
        else at.skip(k_steps(t));
      }
      if constexpr (has_copies<Op>())
        if (Op::makes_copies(w)) {
          barrier();  // all workers' stores
          Op::make_copies(p, w);
        }
    } else if (pulls<Op>() && w.kind == PULL) {
      // The publisher's business. But who has not seen a phase of a barrier end must not wait for the one after the next:
      // by its parity it would take the one before for it.
      wait(slots.copied(), copies++ % 2);
      at.skip(ring_steps<Op>(schedule, w));
    } else if (adds<Op>() && w.kind == REDUCE) {
      if constexpr (adds<Op>()) {
        turns.catch_up();
        add_moved<Op::STAGED>(p.g, w, Op::addends(schedule, w), shared, at);
      }
    } else Op::move(schedule, w);
    __syncwarp();  // all lanes' stores, then the word of one
    if (beside && last && lane() % 128 == 0) trace.mark(p.g, DONE, w);
    if (speaks) arrive(beside ? slots.empty(n) : slots.worked(n));
  }
}

template <class Op> INLINE void run(const typename Op::Params& p, const Operands& o) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  const u32 shared = shared_address(dynamic_shared), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Slots slots(shared);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < MOST_STAGES; i++) {
      init(shared + LOADED_AT + i * 8, 2);
      init(shared + READ_AT + i * 8, STAGE_READERS);
    }
    for (u32 group = 0; group < 2; group++) init(Turns(shared).barrier(group), WORKERS / 32 / 2);
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
    } else if (warp == 3 && stages<Op>()) publish<Op>(p, slots, shared);
    else if (thread == 0) {
      if (warp == 0) decide<Op>(p, slots);
      else if (warp == 1) load<Op, true>(p, o, slots, shared);
      else if (warp == 2) load<Op, false>(p, o, slots, shared);
      else publish<Op>(p, slots, shared);
    }
  } else {
    take_registers<MANY_REGISTERS>();
    work<Op>(p, slots, shared);
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
