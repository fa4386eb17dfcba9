// When each WG claimed, began and ended what. One writer a row of events, so no atomics; a WG has as many rows as its target
// has threads that mark. Schedules know nothing of it: the target's loop marks. Read by kosmos_raw/trace/.
#pragma once
#include "group.h"

enum Event : u32 { CLAIMED, READY, DONE, PLACED };  // PLACED: on which die, once, where a device has several

struct Trace {
  u32 row, n = 0;
  DEVICE explicit Trace(u32 row = target::wg()) : row(row) {}
  DEVICE void place(const Group& g) {
    if constexpr (target::DIES > 1) mark(g, PLACED, {LEAVE, 0, 0, target::die()});
  }
  DEVICE void mark(const Group& g, Event e, const Work& w) {
    if (!g.trace || n == g.trace_events) return;
    u64* to = g.trace + ((u64)row * g.trace_events + n++) * 2;
    to[0] = target::ticks();
    to[1] = (u64)e << 62 | (u64)w.kind << 56 | (u64)w.chunk << 48 | (u64)w.row << 24 | w.part;
  }
};
