// What a work waits for, as a list: input(w, i) of a schedule is its i-th signal. Asking and waiting walk the same list, so
// they cannot differ; and it is one loop, where inlined waits were 44 KB of gfx950 code.
#pragma once
#include "group.h"

struct Input {
  const u32* signal;  // null: nothing in this place
  u32 want;
  Scope scope;
  bool more = true;  // false: the list has ended
  DEVICE static Input local(const u32* count, u32 want) { return {count, want, DEVICE_SCOPE}; }
  DEVICE static Input remote(const Group& g, const u32* signal) { return {signal, g.epoch, SYSTEM_SCOPE}; }
  DEVICE static Input none() { return {nullptr, 0, DEVICE_SCOPE}; }
  DEVICE static Input end() { return {nullptr, 0, DEVICE_SCOPE, false}; }
};

// One look; relaxed.
template <class Schedule> DEVICE inline bool has_inputs_of(const Schedule& s, const Work& w) {
  for (u32 i = 0;; i++) {
    const Input in = s.input(w, i);
    if (!in.more) return true;
    if (in.signal && !has_reached(in.signal, in.want, in.scope)) return false;
  }
}
// False: it gave up. Relaxed.
template <class Schedule> DEVICE inline bool wait_inputs_of(const Schedule& s, const Work& w) {
  for (u32 i = 0;; i++) {
    const Input in = s.input(w, i);
    if (!in.more) return true;
    if (in.signal && !wait_at_least(s.p.g, w, in.signal, in.want, in.scope)) return false;
  }
}

DEVICE inline u32 bits_set(u32 mask) {
  u32 n = 0;
  for (; mask; mask &= mask - 1) n++;
  return n;
}
