// The loop of a target that decides and works in turn with ONE thread (host, and the serial form of the forced target).
#pragma once
#include "../schedule/trace.h"

namespace target {
template <class Op> void run(const typename Op::Params& p) {
  typename Op::Schedule schedule(p);
  Trace trace;
  trace.place(p.g);
  schedule.begin();
  for (;;) {
    const Work w = schedule.next_work();
    trace.mark(p.g, CLAIMED, w);
    if (w.kind == LEAVE || !schedule.wait_inputs(w)) return;
    trace.mark(p.g, READY, w);
    if (is_tile(w.kind)) {
      gemm_tile<Op>(p, w);
      if constexpr (has_copies<Op>())
        if (Op::makes_copies(w)) Op::make_copies(p, w);
    } else Op::move(schedule, w);
    schedule.finish(w);
    trace.mark(p.g, DONE, w);
  }
}

// What moves beside the builders of a WG (BESIDE), where a test plays that on a target which has no such agents.
template <class Op> void run_beside(const typename Op::Params& p) {
  if constexpr (requires(typename Op::Schedule& s) { s.next_beside(); }) {
    typename Op::Schedule schedule(p);  // never begun
    for (;;) {
      const Work w = schedule.next_beside();
      if (w.kind == LEAVE || !schedule.wait_inputs(w)) return;
      Op::move(schedule, w);
      schedule.finish(w);
    }
  }
}
}  // namespace target
