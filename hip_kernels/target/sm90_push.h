// sm_90a: tiles that ranks exchange, by TMA and through panels of 64 x 64 in shared memory. A partial tile lies at its owner as
// the workers left it in their panels, 8 KiB each, so that the owner's workers read it back as they hold their own sums.
//
// Panels of each warpgroup of workers are used in turn by publisher and workers alike. The widest tile has room for half of
// what a warpgroup holds, the others for all of it: then nobody waits for what is being sent or fetched. A tile of a peer's rows: the workers
// fill a panel, the publisher sends it. A tile of the own rows: the publisher fetches what peers have sent, the workers add it
// in rank order and leave the result in the last of them, from where they store it. Fetching begins while they multiply.
#pragma once
#include "sm90_tile.h"

namespace target {
template <class Op> INLINE constexpr bool exchanges() {
  return requires(const typename Op::Params& p, const Work& w) { Op::partial(p, w, 0u); };
}

constexpr u32 PANELS_AT = SLOTS_AT + SLOTS_BYTES;  // barriers: a filled, a fetched and an empty one for each panel
constexpr u32 WARPS = 4;                  // of a warpgroup: that many fill or empty a panel
constexpr u32 MOST_PANELS = 4;            // of a warpgroup
static_assert(PANELS_AT + 2 * MOST_PANELS * 3 * 8 <= DYNAMIC_SHARED_BYTES);

// Panels of a warpgroup where tiles are n wide. Where the ring is shorter than its room, more lie behind it.
INLINE constexpr u32 panels(u32 n) { return n == TILE_N_MEDIUM ? MOST_PANELS : 2; }
static_assert(stages(TILE_N_MEDIUM) * stage_bytes(TILE_N_MEDIUM) + 2 * (MOST_PANELS - 2) * PANEL_BYTES <= RING_BYTES);

// One thread's place in the sequence of panels, which is the same for both warpgroups.
struct PanelsAt {
  u32 shared, behind, count, at = 0, empty_parity = 1;
  u32 odd = 0;  // bit i, of the barrier that this thread waits for besides empty, panel i
  INLINE PanelsAt(u32 shared, u32 n) : shared(shared), behind(shared + stages(n) * stage_bytes(n)), count(panels(n)) {}
  INLINE u32 panel(u32 group) const {
    return at < 2 ? panel_at(shared, group, at) : behind + (group * 2 + at - 2) * PANEL_BYTES;
  }
  INLINE u32 barrier(u32 group, u32 which) const {
    return shared + PANELS_AT + ((group * MOST_PANELS + at) * 3 + which) * 8;
  }
  INLINE void next() {
    if (++at == count) at = 0, empty_parity ^= 1;
  }
  INLINE u32 filled(u32 group) const { return barrier(group, 0); }   // by workers
  INLINE u32 fetched(u32 group) const { return barrier(group, 1); }  // by TMA
  INLINE u32 empty(u32 group) const { return barrier(group, 2); }
  INLINE void wait_empty(u32 group) const { wait(empty(group), empty_parity); }
  INLINE u32 parity() const { return odd >> at & 1; }
  INLINE void passed() { odd ^= 1u << at; }
};
INLINE void init_panels(u32 shared) {
  for (u32 i = 0; i < 2 * MOST_PANELS; i++) {
    init(shared + PANELS_AT + i * 24, WARPS);
    init(shared + PANELS_AT + i * 24 + 8, 1);
    init(shared + PANELS_AT + i * 24 + 16, WARPS);
  }
}

INLINE u32 panels_across(const TileOperands& t) { return (t.cols + PANEL - 1) / PANEL; }
// Of the whole tile, the first that belongs to its half.
INLINE u32 first_panel(const Work& w, u32 n) { return w.kind == HALF ? w.part % 2 * (n / 2 / PANEL) : 0; }
constexpr u32 PANEL_WORDS = PANEL_BYTES / 16;

// The publisher. False: a wait gave up, and the tile is not to be published.
template <class Op> INLINE bool exchange(const typename Op::Schedule& s, const Work& w, PanelsAt& at) {
  const auto& p = s.p;
  const u32 across = panels_across(Op::operands(p, w));
  if (p.g.ranks == 1) return true;
  const bool there = s.wait_to_store(w);
  order_with_tma();
  if (w.chunk == p.g.rank) {
    for (u32 c = 0; c < across; c++)
      for (u32 q = 0; q < p.g.ranks; q++) {
        if (q == p.g.rank) continue;
        const Vec16* from = Op::partial(p, w, q) + (first_panel(w, p.tile_n) + c) * 2 * PANEL_WORDS;
        for (u32 group = 0; group < 2; group++) {
          at.wait_empty(group);
          arrive_expecting(at.fetched(group), PANEL_BYTES);
          load_bytes(at.panel(group), from + group * PANEL_WORDS, PANEL_BYTES, at.fetched(group));
        }
        at.next();
      }
    return there;
  }
  Vec16* to = Op::partial(p, w, p.g.rank);
  u32 last = 0;
  for (u32 c = 0; c < across; c++) {
    for (u32 group = 0; group < 2; group++) {
      wait(at.filled(group), at.parity());
      if (there) {
        store_bytes(to + (c * 2 + group) * PANEL_WORDS, at.panel(group), PANEL_BYTES);
        commit_stores();
      }
      if (last) {
        wait_stores_read<1>();
        arrive_times(last, WARPS);
      }
      last = at.empty(group);
    }
    at.passed();
    at.next();
  }
  wait_stores_read<0>();
  arrive_times(last, WARPS);
  wait_stores<0>();
  order_with_tma();
  return there;
}

// The workers, a tile of a peer's rows.
template <u32 N> INLINE void send_tile(const float (&sums)[N / 2], const TileOperands& t, PanelsAt& at) {
  const u32 group = lane() / 128, across = panels_across(t);
#pragma unroll
  for (u32 c = 0; c < N / PANEL; c++) {
    if (c >= across) continue;
    at.wait_empty(group);
    const WarpPanel panel(at.panel(group));
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
      const float* s = sums + c * 32 + q * 8;
      panel.put(q, pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7]));
    }
    shared_then_tma();
    __syncwarp();
    if (lane() % 32 == 0) arrive(at.filled(group));
    at.next();
  }
}

// A tile of the own rows, of which all ranks have a part.
template <u32 N>
INLINE void add_tile(const float (&sums)[N / 2], const Group& g, const TileOperands& t, const TileResult& to, PanelsAt& at) {
  const u32 group = lane() / 128, across = panels_across(t), last = g.rank + 1 == g.ranks ? g.ranks - 2 : g.ranks - 1;
#pragma unroll
  for (u32 c = 0; c < N / PANEL; c++) {
    if (c >= across) continue;
    float x[32];
#pragma unroll 1
    for (u32 q = 0; q < g.ranks; q++) {
      const WarpPanel panel(at.panel(group));
      const bool own = q == g.rank;
      if (!own) {
        wait(at.fetched(group), at.parity());
        at.passed();
      }
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float* s = sums + c * 32 + i * 8;
        u32 v[4] = {pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7])};
        if (!own) panel.get(i, v);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          const float low = __uint_as_float(v[j] << 16), high = __uint_as_float(v[j] & 0xffff0000);
          x[i * 8 + j * 2] = q ? x[i * 8 + j * 2] + low : low;
          x[i * 8 + j * 2 + 1] = q ? x[i * 8 + j * 2 + 1] + high : high;
        }
      }
      if (own || q == last) continue;
      __syncwarp();
      if (lane() % 32 == 0) arrive(at.empty(group));
      at.next();
    }
    const WarpPanel panel(at.panel(group));
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const float* s = x + i * 8;
      panel.put(i, pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7]));
    }
    __syncwarp();
    panel.store<false>(t, to, c, same_line);
    shared_then_tma();  // TMA writes here next
    __syncwarp();
    if (lane() % 32 == 0) arrive(at.empty(group));
    at.next();
  }
}
}  // namespace target
