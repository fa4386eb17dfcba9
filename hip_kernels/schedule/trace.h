// When each WG claimed, began and ended what. One row of events a WG, so no atomics. Schedules know nothing of it: the
// target's loop marks. Read by kosmos_raw/trace/.
#pragma once
#include "group.h"

enum Event : u32 { CLAIMED, READY, DONE };

struct Trace {
  u32 n = 0;
  DEVICE void mark(const Group& g, Event e, const Work& w) {
    if (!g.trace || n == g.trace_events) return;
    u64* to = g.trace + ((u64)target::wg() * g.trace_events + n++) * 2;
    to[0] = target::ticks();
    to[1] = (u64)e << 60 | (u64)w.kind << 56 | (u64)w.chunk << 48 | (u64)w.row << 24 | w.part;
  }
};
