// DOING IT, reductions: partial results of all ranks, each in staging that its owner fills while this one reads.
#pragma once
#include "../schedule/staging.h"
#include "bf16.h"

// One of `parts` equal parts of what the last turn has left in the other buffer.
DEVICE inline void poison_staging(const Staging& s, u32 rank, u32 part, u32 parts) {
  Vec16* to = s.of[rank] + s.other_at();
  const u64 end = s.dirty_words * (part + 1) / parts;
  for (u64 i = s.dirty_words * part / parts + target::lane(); i < end; i += target::lanes())
    target::write_through(to + i, Vec16{SENTINEL, SENTINEL});
}

// to[i] = the sum of (of[q] + offset)[i] over all ranks, for i from begin to end: FP32, in rank order, rounded once. The
// first rank's value is taken as it is, so that -0.0 stays. STAGED: words may not have come yet, and hold sentinels until
// then. Returns when a wait gives up; next_work then sees the abort word.
template <bool STAGED, class Pointer>
DEVICE inline void sum_ranks(const Group& g, const Work& w, Vec16* to, const Pointer (&of)[MAX_RANKS], u64 offset, u64 begin,
                             u64 end) {
  for (u64 i = begin + target::lane(); i < end; i += target::lanes()) {
    Vec16 v[MAX_RANKS];  // of all ranks at once: one round trip of a link, not one a rank
    for (Patience patience;;) {
      bool all = true;
#pragma unroll
      for (u32 q = 0; q < MAX_RANKS; q++) {
        v[q] = {};  // or compilers keep what was there before, in registers, through all other work
        if (q < g.ranks) v[q] = STAGED ? target::read_polled(of[q] + offset + i) : target::read(of[q] + offset + i);
      }
#pragma unroll
      for (u32 q = 0; q < MAX_RANKS; q++)
        if (STAGED && q < g.ranks) all = all && arrived(v[q]);
      if (all) break;
      if (!patience.keep_waiting(g, w, (const u32*)(of[g.rank] + offset + i), 1, 0)) return;
    }
    float sums[8] = {};
#pragma unroll
    for (u32 q = 0; q < MAX_RANKS; q++)
#pragma unroll
      for (u32 j = 0; j < 8 && q < g.ranks; j++) {
        const float x = from_bf16((j < 4 ? v[q].lo : v[q].hi) >> 16 * (j % 4) & 0xffff);
        sums[j] = q ? sums[j] + x : x;
      }
    const u64 lo = pack_bf16(sums[0], sums[1], sums[2], sums[3]), hi = pack_bf16(sums[4], sums[5], sums[6], sums[7]);
    target::write(to + i, Vec16{lo, hi});
  }
}
