// sm_90a: sums beside the builders of a WG. As sm90_beside.h, but what comes is added: one warp adds what all ranks have of the
// same words while the others multiply, so that no SM is taken from the GEMM.
//
// Its ring is the second half of the panels of results, as there. But one lane issues all loads and stores, for they are few and
// long: four made a product of 1280 x 8192 x 8192 with 67 MB from the peer 0.395 ms on two H200s, one 0.361.
#pragma once
#include "sm90_beside.h"

namespace target {
// A unit is the same words of every rank, own ones too.
constexpr u32 UNITS = 4, UNIT_BYTES = WORKERS / 32 * WARP_PANEL / UNITS;
constexpr u32 UNITS_AHEAD = UNITS - 1;  // as PIECES_AHEAD
static_assert(RESULT_AT + 2 * UNITS * UNIT_BYTES == CONTROL_AT);

// Of a unit that is coming: where its sums go, how many words of a rank it has, and the REDUCE that ends with it.
struct alignas(16) Unit {
  Vec16* to;
  u32 words, zero;
  Work ends;
};
constexpr u32 UNITS_AT = PIECES_AT, UNIT_BARRIERS_AT = UNITS_AT + UNITS * sizeof(Unit);
static_assert(UNIT_BARRIERS_AT + UNITS * 8 <= DYNAMIC_SHARED_BYTES && UNITS_AT % alignof(Unit) == 0);
INLINE void init_units(u32 shared) {
  for (u32 i = 0; i < UNITS; i++) init(shared + UNIT_BARRIERS_AT + i * 8, 1);
}

// Sums of eight, rounded once. In BF16 they are what they are in FP32: that is exact unless one is less than 2^-16 of the other,
// and then the larger one is the sum in both.
INLINE Vec16 add_two(const Vec16& x, const Vec16& y) {
  const auto add = [](u64 a, u64 b) {
    u32 low, high;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(low) : "r"((u32)a), "r"((u32)b));
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(high) : "r"((u32)(a >> 32)), "r"((u32)(b >> 32)));
    return (u64)high << 32 | low;
  };
  return {add(x.lo, y.lo), add(x.hi, y.hi)};
}

template <class Op> INLINE constexpr bool can_add_beside() {
  return adds<Op>() && requires(typename Op::Schedule& s) { s.next_beside(); };
}
template <class Op> INLINE bool moves_beside(const typename Op::Params& p) {
  if constexpr (can_pull_beside<Op>() || can_add_beside<Op>()) return p.policy == BESIDE;
  else return false;
}

// A whole warp. Its first lane decides and publishes; nobody but the caller reads the sums in this launch.
template <class Op> INLINE void add_beside(const typename Op::Params& p, unsigned char* memory, u32 lane) {
  static_assert(!Op::STAGED);
  typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg() + 2);
  Unit* const units = (Unit*)(memory + UNITS_AT);
  const u32 shared = shared_address(memory), ring = shared + RESULT_AT + UNITS * UNIT_BYTES, barriers = shared + UNIT_BARRIERS_AT;
  const u32 ranks = p.g.ranks, room = UNIT_BYTES / ranks / 512 * 32;  // words of each rank
  u32 loaded = 0, added = 0;  // units so far
  Work coming;                // the REDUCE that is loaded
  u64 next = 0, last = 0;     // words of it that are left

  const auto end = [&](const Work& w) {
    schedule.finish(w);
    trace.mark(p.g, DONE, w);
  };
  const auto begin_next = [&] {  // whether there is more to add
    while (next == last) {
      claim_beside<~0u>(schedule, trace, p.g, lane, coming);
      if (coming.kind == LEAVE) return false;
      __syncwarp();      // what lane 0 has acquired, the others have with it
      order_with_tma();  // as for all loads: others' stores of what is loaded now
      const Addends a = Op::addends(schedule, coming);
      next = a.begin, last = a.end;
      if (next == last && lane == 0) end(coming);
    }
    return true;
  };
  const auto load_unit = [&] {
    const Addends a = Op::addends(schedule, coming);  // again: so compilers see that a.of is in the params
    const u32 i = loaded++ % UNITS, barrier = barriers + i * 8, words = last - next < room ? (u32)(last - next) : room;
    if (lane == 0) {
      units[i] = {a.to + next, words, 0, next + words == last ? coming : Work{}};
      wait_stores_read<1>();  // of the sums that were here
      arrive_expecting(barrier, words * 16 * ranks);
#pragma unroll 1
      for (u32 q = 0; q < ranks; q++)
        load_bytes(ring + i * UNIT_BYTES + q * room * 16, a.of[q] + a.offset + next, words * 16, barrier);
    }
    next += words;
  };
  const auto add_unit = [&] {
    const u32 i = added % UNITS, unit = ring + i * UNIT_BYTES, words = units[i].words;
    wait(barriers + i * 8, added++ / UNITS % 2);
#pragma unroll 1
    for (u32 k = lane; k < words; k += 64) {  // two words at a time; the sums take the first rank's place
      const bool two = k + 32 < words;
      const u32 at = unit + k * 16, other = two ? at + 32 * 16 : at;
      Vec16 sum, other_sum;
      if (ranks == 2) {
        sum = add_two(load_shared(at), load_shared(at + room * 16));
        other_sum = add_two(load_shared(other), load_shared(other + room * 16));
      } else {
        WordSums x, y;
        x.add(load_shared(at), true), y.add(load_shared(other), true);
#pragma unroll 1
        for (u32 q = 1; q < ranks; q++) {
          const Vec16 u = load_shared(at + q * room * 16), v = load_shared(other + q * room * 16);
          x.add(u, false), y.add(v, false);
        }
        sum = x.rounded(), other_sum = y.rounded();
      }
      store_shared(at, sum);
      if (two) store_shared(other, other_sum);
    }
    shared_then_tma();
    __syncwarp();
    if (lane) return;
    store_bytes(units[i].to, unit, words * 16);
    commit_stores();
  };

  for (bool more = true;;) {
    while (more && loaded - added < UNITS_AHEAD && (more = begin_next())) load_unit();
    __syncwarp();  // all see what lane 0 wrote of these units
    // Of the unit that was added last: now, so that the fence delays no load. Its place is not one of those just loaded.
    if (lane == 0 && added) {
      const Work ends = units[(added - 1) % UNITS].ends;
      if (ends.kind != LEAVE) end(ends);
    }
    if (loaded == added) break;
    add_unit();
  }
  wait_stores<0>();
}
}  // namespace target
