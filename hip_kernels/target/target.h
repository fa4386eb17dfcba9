// Picks HOW HERE: the one file through which everything else reaches a target.
//
// Every target gives the same names, in namespace target:
//   lane() lanes() wg()            the lanes of this WG that WORK, and which WG this is. The host has one lane a WG
//   die() DIES                     which die of the device this WG runs on, below DIES; dies cache apart. Only a hint
//   barrier()                      of those lanes; each has completed its own stores first
//   load store add swap_if         signals, u32, relaxed. Scope says who may look: this device, or its peers and the host
//   release(Scope) acquire(Scope)  fences, with every wait that the target needs
//   read<T> write<T>               data, T of 8 or 16 bytes, ordinary: ordered by fences only
//   read_polled<T> write_through<T>
//                                  data that is its own signal: relaxed, seen by peers, past every cache. A Vec16 may come
//                                  in two halves
//   fma sqrt                       of FP32, rounded once
//   exp2 reciprocal                of FP32, to a unit or two in the last place; as fast as can be
//   pack_bf16                      four FP32, rounded to nearest even; NaNs are quiet
//   uniform(x)                     x, which is the same in all lanes: where that cannot be seen, it saves registers
//   GATED                          gate rows, then as many up rows, alternate in weights of a gated product; see tile_operands.h
//   COPY_BATCH                     words of 16 bytes that a lane has on their way at a time when it copies
//   CUT_WORDS                      words of 16 bytes at whose multiples what is moved is cut in parts: whole lines of memory
//   Converts                       conversions that the target has instructions for, and may lack; see where they are used
//   REMEMBERS                      0: who decides has no register to spare for what it has seen; it rather looks again
//   moved(bytes)                   called with what was read of peers; the host counts it, others do not
//   MULTIPLIES_MXFP8               0: its tile does not know MXFP8; who moves or quantises then makes BF16 of it (work/mx_move.h)
//   pause() ticks()                inside a bounded wait; ticks has a fixed rate, which the device's Python side knows
//   TILE_M TILE_N                  rows and columns of an output tile
//   WG_THREADS TRACE_ROWS          threads of a WG as launched; rows of trace events that it writes
//   run<Op>(params)                the loop: asks Op::Schedule what comes next, does it, publishes it. The GEMM tile is in it
// and two macros that make an entry point: KOSMOS_KERNEL(name, Op) of that loop, and KOSMOS_PLAIN_KERNEL(name, Op) of
// Op::work(params, scratch), for what waits for nobody: its WGs need not run at once, and have Op::SCRATCH_BYTES of memory.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;

struct alignas(16) Vec16 { u64 lo, hi; };  // eight bf16: what one lane moves at a time

enum Scope { DEVICE_SCOPE, SYSTEM_SCOPE };

// Of one node. Raising it changes the layout of Signals and Group; kosmos_raw/build/params.py has the same number.
constexpr u32 MAX_RANKS = 8;

#if defined(KOSMOS_FORCED)
#include "forced.h"
#elif defined(__HIP__)
#include "gfx950.h"
#elif defined(__CUDACC__)
#include "sm90.h"
#else
#include "host.h"
#endif

static_assert(target::MULTIPLIES_MXFP8 <= 1 && target::REMEMBERS <= 1);
