// sm_90a: tiles that ranks exchange, by TMA and through panels of 64 x 64 in shared memory. A partial tile lies at its owner as
// the workers left it in their panels, 8 KiB each, so that the owner's workers read it back as they hold their own sums.
//
// The two panels of each warpgroup of workers are used in turn by publisher and workers alike, slice by slice. A tile of a peer's
// rows: the workers fill a panel, the publisher sends it. A tile of the own rows: the publisher fetches what peers have sent, the
// workers add it in rank order and leave the result in the last of them, from where they store it. Fetching begins while they
// multiply.
#pragma once
#include "sm90_epilogue.h"

namespace target {
template <class Op> INLINE constexpr bool exchanges() {
  return requires(const typename Op::Params& p, const Work& w) { Op::partial(p, w, 0u); };
}

constexpr u32 PANELS_AT = SLOTS_AT + SLOTS_BYTES;  // barriers: a filled, a fetched and an empty one for each panel
constexpr u32 WARPS = 4;                  // of a warpgroup: that many fill or empty a panel
using Exchanged = Made<false>;
constexpr u32 ACROSS = Exchanged::SLICE / PANEL;
static_assert(PANELS_AT + 2 * 2 * 3 * 8 <= DYNAMIC_SHARED_BYTES);

// One thread's place in the sequence of a warpgroup's panels.
struct PanelsAt {
  u32 shared;
  u32 count = 0, odd = 0;  // panels so far; bit i, of the barrier that this thread waits for besides empty, panel i
  INLINE explicit PanelsAt(u32 shared) : shared(shared) {}
  INLINE u32 at() const { return count % 2; }
  INLINE u32 panel(u32 group) const { return panel_at(shared, group, at()); }
  INLINE u32 barrier(u32 group, u32 which) const { return shared + PANELS_AT + ((group * 2 + at()) * 3 + which) * 8; }
  INLINE void next() { count++; }
  INLINE u32 filled(u32 group) const { return barrier(group, 0); }   // by workers
  INLINE u32 fetched(u32 group) const { return barrier(group, 1); }  // by TMA
  INLINE u32 empty(u32 group) const { return barrier(group, 2); }
  INLINE void wait_empty(u32 group) const { wait(empty(group), (count / 2 + 1) % 2); }
  INLINE u32 parity() const { return odd >> at() & 1; }
  INLINE void passed() { odd ^= 1u << at(); }
};
INLINE void init_panels(u32 shared) {
  for (u32 i = 0; i < 2 * 2; i++) {
    init(shared + PANELS_AT + i * 24, WARPS);
    init(shared + PANELS_AT + i * 24 + 8, 1);
    init(shared + PANELS_AT + i * 24 + 16, WARPS);
  }
}

// Of a slice: columns of panels, each of both blocks. A partial tile holds them one column of panels after the other.
INLINE u32 panels_across(const TileOperands& t, u32 first) {
  const u32 left = (t.cols - first + PANEL - 1) / PANEL;
  return left < ACROSS ? left : ACROSS;
}
constexpr u32 PANEL_WORDS = PANEL_BYTES / 16;
// Words of a partial tile before column `first` of a work's.
INLINE u32 words_before(const Work& w, u32 n, u32 first) {
  return ((w.kind == HALF ? w.part % 2 * (n / 2) : 0) + first) / PANEL * Exchanged::BLOCKS * PANEL_WORDS;
}

// The publisher, a slice.
template <class Op, class Params>
INLINE void fetch_slice(const Params& p, const Work& w, u32 first, u32 panels, u32 group, PanelsAt& at) {
  for (u32 i = 0; i < panels; i++)
    for (u32 q = 0; q < p.g.ranks; q++) {
      if (q == p.g.rank) continue;
      at.wait_empty(group);
      arrive_expecting(at.fetched(group), PANEL_BYTES);
      load_bytes(at.panel(group), Op::partial(p, w, q) + first + i * PANEL_WORDS, PANEL_BYTES, at.fetched(group));
      at.next();
    }
}
INLINE void send_panels(Vec16* to, u32 panels, bool there, u32 group, PanelsAt& at) {
  u32 last = 0;
  for (u32 i = 0; i < panels; i++) {
    wait(at.filled(group), at.parity());
    if (there) {
      store_bytes(to + i * PANEL_WORDS, at.panel(group), PANEL_BYTES);
      commit_stores();
    }
    if (last) {
      wait_stores_read<1>();
      arrive_times(last, WARPS);
    }
    last = at.empty(group);
    at.passed();
    at.next();
  }
  wait_stores_read<0>();
  arrive_times(last, WARPS);
}
// The publisher's place in the panels of both warpgroups, which take slices in turn.
struct Turn {
  u32 group = 0;
  PanelsAt now, next;  // of the warpgroup whose turn it is, and of the other one
  INLINE explicit Turn(u32 shared) : now(shared), next(shared) {}
  INLINE void pass_on() {
    const PanelsAt was = now;
    now = next, next = was, group ^= 1;
  }
};
// The publisher, a tile. False: a wait gave up, and the tile is not to be published.
template <class Op> INLINE bool exchange(const typename Op::Schedule& s, const Work& w, Turn& turn) {
  const auto& p = s.p;
  if (p.g.ranks == 1) return true;
  const TileOperands t = Op::operands(p, w);
  const bool there = s.wait_to_store(w), own = w.chunk == p.g.rank;
  order_with_tma();
  for (u32 first = 0; first < t.cols; first += Exchanged::SLICE) {
    const u32 words = words_before(w, p.tile_n, first), panels = panels_across(t, first) * Exchanged::BLOCKS;
    if (own) fetch_slice<Op>(p, w, words, panels, turn.group, turn.now);
    else send_panels(Op::partial(p, w, p.g.rank) + words, panels, there, turn.group, turn.now);
    turn.pass_on();
  }
  if (own) return there;
  wait_stores<0>();
  order_with_tma();
  return there;
}

// The workers, a slice of a tile of a peer's rows.
INLINE void send_slice(const Slice<Exchanged>& s, PanelsAt& at) {
  const u32 group = lane() / 128, across = panels_across(s.t, s.first);
#pragma unroll
  for (u32 i = 0; i < ACROSS * Exchanged::BLOCKS; i++) {
    const u32 c = i / Exchanged::BLOCKS;
    if (c >= across) continue;
    at.wait_empty(group);
    const WarpPanel panel(at.panel(group));
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
      const float* x = s.sums[i % Exchanged::BLOCKS] + c * 32 + q * 8;
      panel.put(q, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }
    shared_then_tma();
    __syncwarp();
    if (lane() % 32 == 0) arrive(at.filled(group));
    at.next();
  }
}

// A slice of a tile of the own rows, of which all ranks have a part.
INLINE void add_slice(const Slice<Exchanged>& s, const Group& g, const TileResult& to, PanelsAt& at) {
  const u32 group = lane() / 128, across = panels_across(s.t, s.first), last = g.rank + 1 == g.ranks ? g.ranks - 2 : g.ranks - 1;
#pragma unroll
  for (u32 n = 0; n < ACROSS * Exchanged::BLOCKS; n++) {
    const u32 c = n / Exchanged::BLOCKS, b = n % Exchanged::BLOCKS;
    if (c >= across) continue;
    // Rounded, as what peers send: then the panel's sums make room for those of all ranks.
    float* x = s.sums[b] + c * 32;
    u32 mine[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) mine[i] = pack(x[2 * i], x[2 * i + 1]);
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
        u32 v[4] = {mine[i * 4], mine[i * 4 + 1], mine[i * 4 + 2], mine[i * 4 + 3]};
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
      const float* y = x + i * 8;
      panel.put(i, pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
    }
    __syncwarp();
    panel.store<false>(s.t, to, Exchanged::first_row(b), s.first + c * PANEL, same_line);
    shared_then_tma();  // TMA writes here next
    __syncwarp();
    if (lane() % 32 == 0) arrive(at.empty(group));
    at.next();
  }
}
}  // namespace target
