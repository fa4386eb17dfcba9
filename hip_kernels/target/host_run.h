// The CPU: one call is one launch of one rank. Also what Python asks of a host library.
#pragma once
#include <pthread.h>

#include "host_tile.h"
#include "serial.h"

namespace target {
constexpr u32 MAX_WGS = 256;

template <class Op> struct Launch {
  const typename Op::Params* params;
  u32 wg;
  static void* thread(void* self) {
    const Launch& l = *(const Launch*)self;
    wg_idx = l.wg;
    run<Op>(*l.params);
    return nullptr;
  }
};

// Returns 0, or the error of pthread_create: then some WGs are missing, so those that run are told to leave.
template <class Op> int launch(const typename Op::Params& p) {
  pthread_t threads[MAX_WGS];
  Launch<Op> launches[MAX_WGS];
  u32 n = 0;
  int error = 0;
  for (; n < p.g.wgs && !error; n++) {
    launches[n] = {&p, n};
    error = pthread_create(&threads[n], nullptr, Launch<Op>::thread, &launches[n]);
  }
  if (error) {
    n--;
    add(p.g.abort, 1, DEVICE_SCOPE);
  }
  while (n) pthread_join(threads[--n], nullptr);
  return error;
}
}  // namespace target

#define KOSMOS_KERNEL(name, Op)                                                                                            \
  extern "C" int name##_main(const void* params) { return target::launch<Op>(*(const Op::Params*)params); }                \
  extern "C" unsigned name##_params_bytes() { return sizeof(Op::Params); }                                                 \
  extern "C" unsigned name##_tile_m() { return target::TILE_M; }                                                           \
  extern "C" unsigned name##_tile_n() { return target::TILE_N; }
