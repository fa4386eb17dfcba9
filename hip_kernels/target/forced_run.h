// The forced target's loops: serial, which it shares with the host, and run-ahead, the shape of sm_90a.
#pragma once
#include "ahead.h"
#include "forced_tile.h"
#include "serial.h"

namespace target {
// Through it the fiber that decides hands work to the one that works, as the threads of one WG do on sm_90a.
struct Box {
  Work work;
  u32 *posted, *taken;  // [1] signals: how many works so far
  Clock clock;          // what came before the newest of either; a WG's own barriers fence for it
};

inline void hand_over(Box& box, u32* count, u32 n) {
  join(box.clock, W.me->knows);
  tick(*W.me);
  poke(count, n);
}
inline void await(Box& box, const u32* count, u32 n) {
  while (peek(count) != n) pause();
  join(W.me->knows, box.clock);
}

// Claims, and waits for inputs, while the worker is still busy with the work before.
template <class Op> void decide(const typename Op::Params& p, Box& box) {
  typename Op::Schedule schedule(p);
  Trace trace;
  trace.place(p.g);
  schedule.begin();
  for (u32 n = 1;; n++) {
    Work w = schedule.next_work();
    trace.mark(p.g, CLAIMED, w);
    if (w.kind != LEAVE && !wait_to_begin(schedule, w)) w = {};
    if (w.kind != LEAVE) trace.mark(p.g, READY, w);
    await(box, box.taken, n - 1);
    box.work = w;
    hand_over(box, box.posted, n);
    if (w.kind == LEAVE) return;
  }
}

// A tile whose first part is there. False: a wait gave up.
template <class Op> bool tile_ahead(const typename Op::Params& p, const typename Op::Schedule& schedule, const Work& w) {
  Tile<Op> tile(p, w);
  if constexpr (requires { schedule.wait_part(w, 0u); }) {
    for (u32 i = 0, step = schedule.part_k() ? schedule.part_k() : MAX_K; i * step < tile.t.K; i++) {
      if (i && !schedule.wait_part(w, i)) return false;
      tile.read_a(i * step, step);
    }
  } else tile.read_a(0, tile.t.K);
  tile.read_b();
  if constexpr (requires { schedule.wait_to_store(w); })
    if (!schedule.wait_to_store(w)) return false;
  tile.store();
  return true;
}

// Where movers are agents of their own, nobody publishes what a WG has worked on, as on sm_90a.
template <class Op> bool publishes(const typename Op::Params& p) {
  if constexpr (requires(typename Op::Schedule& s) { s.next_beside(); }) return p.policy != BESIDE;
  else return true;
}

// Has a Schedule of its own that never began: all but next_work needs only params and the work.
template <class Op> void work_behind(const typename Op::Params& p, Box& box) {
  const typename Op::Schedule schedule(p);
  Trace trace(p.g.wgs + wg());  // the decider has the first rows
  for (u32 n = 1;; n++) {
    await(box, box.posted, n);
    const Work w = box.work;
    hand_over(box, box.taken, n);
    if (w.kind == LEAVE) return;
    if (is_tile(w.kind)) {
      if (!tile_ahead<Op>(p, schedule, w)) continue;  // given up: nothing is published
      if constexpr (has_copies<Op>())
        if (Op::makes_copies(w)) Op::make_copies(p, w);
    } else Op::move(schedule, w);
    if (publishes<Op>(p)) schedule.finish(w);
    trace.mark(p.g, DONE, w);
  }
}
}  // namespace target

// No entry point: a test makes the launches.
#define KOSMOS_KERNEL(name, Op) \
  extern "C" unsigned name##_params_bytes() { return sizeof(Op::Params); }
