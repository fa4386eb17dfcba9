// The CPU: one call is one launch of one rank. Also what Python asks of a host library.
#pragma once
#include <pthread.h>

#include "host_tile.h"
#include "serial.h"

namespace target {
constexpr u32 MAX_WGS = 256;

// The end of a launch acquires, as that of a kernel does: what DRAIN has seen is ordered before what the host does next,
// though DRAIN has no fence of its own.
inline void leave() { acquire(SYSTEM_SCOPE); }

template <class Params> struct Launch {
  const Params* params;
  void (*body)(const Params&);
  u32 wg;
  static void* thread(void* self) {
    const Launch& l = *(const Launch*)self;
    wg_idx = l.wg;
    l.body(*l.params);
    leave();
    return nullptr;
  }
};

// Returns 0, or the error of pthread_create: then some WGs are missing, so those that run are told to leave.
template <class Params> int launch(const Params& p, void (*body)(const Params&), u32 wgs, u32* abort) {
  pthread_t threads[MAX_WGS];
  Launch<Params> launches[MAX_WGS];
  u32 n = 0;
  int error = 0;
  for (; n < wgs && !error; n++) {
    launches[n] = {&p, body, n};
    error = pthread_create(&threads[n], nullptr, Launch<Params>::thread, &launches[n]);
  }
  if (error) {
    n--;
    if (abort) add(abort, 1, DEVICE_SCOPE);
  }
  while (n) pthread_join(threads[--n], nullptr);
  return error;
}

// A kernel without a schedule: its WGs wait for nobody, and need not run at once.
template <class Op> void run_plain(const typename Op::Params& p) {
  alignas(64) static thread_local unsigned char scratch[Op::SCRATCH_BYTES];
  Op::work(p, scratch);
}
}  // namespace target

#define KOSMOS_KERNEL(name, Op)                                                                                            \
  extern "C" int name##_main(const void* params) {                                                                         \
    const auto& p = *(const Op::Params*)params;                                                                            \
    return target::launch(p, target::run<Op>, p.g.wgs, p.g.abort);                                                         \
  }                                                                                                                        \
  KOSMOS_CONSTANTS(name, Op)
#define KOSMOS_PLAIN_KERNEL(name, Op)                                                                                      \
  extern "C" int name##_main(const void* params) {                                                                         \
    const auto& p = *(const Op::Params*)params;                                                                            \
    return target::launch(p, target::run_plain<Op>, p.wgs, nullptr);                                                       \
  }                                                                                                                        \
  KOSMOS_CONSTANTS(name, Op)
#define KOSMOS_CONSTANTS(name, Op)                                                                                         \
  extern "C" void name##_come_late(unsigned us) { target::most_delay_us = us; }                                            \
  extern "C" unsigned long long name##_moved_bytes() { return __atomic_load_n(&target::moved_bytes, __ATOMIC_RELAXED); }   \
  extern "C" unsigned name##_params_bytes() { return sizeof(Op::Params); }                                                 \
  extern "C" unsigned name##_tile_m() { return target::TILE_M; }                                                           \
  extern "C" unsigned name##_tile_n() { return target::TILE_N; }
