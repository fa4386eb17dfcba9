// DOING IT, reductions: what all ranks have of the same rows, added up.
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

// What a REDUCE adds: to[i] = the sum of (of[q] + offset)[i] over all ranks, for i from begin to end.
struct Addends {
  Vec16* to;
  const Vec16* const* of;  // [MAX_RANKS]
  u64 offset, begin, end;
};

// In rank order, in FP32, rounded once. The first rank's value is taken as it is, so that -0.0 stays.
struct WordSums {
  float at[8] = {};
  DEVICE void add(const Vec16& v, bool first) {
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      const float x = bf16_at(v, j);
      at[j] = first ? x : at[j] + x;
    }
  }
  DEVICE Vec16 rounded() const { return eight_bf16(at); }
};
DEVICE inline Vec16 add_words(const Vec16 (&v)[MAX_RANKS], u32 ranks) {
  WordSums sums;
#pragma unroll
  for (u32 q = 0; q < MAX_RANKS; q++)
    if (q < ranks) sums.add(v[q], q == 0);
  return sums.rounded();
}
DEVICE inline bool all_arrived(const Vec16 (&v)[MAX_RANKS], u32 ranks) {
  bool all = true;
#pragma unroll
  for (u32 q = 0; q < MAX_RANKS; q++)
    if (q < ranks) all = all && arrived(v[q]);
  return all;
}

// Word i of all ranks at once: one round trip of a link, not one a rank. STAGED: it may not have come yet, and holds
// sentinels until then. False: the wait gave up; next_work then sees the abort word.
template <bool STAGED>
DEVICE inline bool read_words(Vec16 (&v)[MAX_RANKS], const Group& g, const Work& w, const Addends& a, u64 i) {
  for (Patience patience;;) {
#pragma unroll
    for (u32 q = 0; q < MAX_RANKS; q++) {
      v[q] = {};  // or compilers keep what was there before, in registers, through all other work
      if (q < g.ranks) v[q] = STAGED ? target::read_polled(a.of[q] + a.offset + i) : target::read(a.of[q] + a.offset + i);
    }
    if (!STAGED || all_arrived(v, g.ranks)) return true;
    if (!patience.keep_waiting(g, w, (const u32*)(a.of[g.rank] + a.offset + i), 1, 0)) return false;
  }
}

template <bool STAGED> DEVICE inline void add_ranks(const Group& g, const Work& w, const Addends& a) {
  target::moved((a.end - a.begin) * 16 * (g.ranks - 1));
  for (u64 i = a.begin + target::lane(); i < a.end; i += target::lanes()) {
    Vec16 v[MAX_RANKS];
    if (!read_words<STAGED>(v, g, w, a, i)) return;
    target::write(a.to + i, add_words(v, g.ranks));
  }
}
