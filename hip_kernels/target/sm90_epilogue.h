// sm_90a: what becomes of a tile's sums. Rows of BF16 and FP32 sums go through shared memory, where the lanes of a warp exchange them,
// so that those which follow each other in memory are written together.
#pragma once
#include "../work/sum.h"
#include "sm90_tile.h"

namespace target {
// A panel of results in shared memory: 64 rows, of which each warp has 16, by 64 columns of BF16. Two for each warpgroup.
INLINE u32 panel_at(u32 shared, u32 group, u32 which) { return shared + RESULT_AT + (group * 2 + which) * 4 * WARP_PANEL; }

// A lane's places in its warp's rows of a panel. The warp turns them there, so that eight lanes write the 128 bytes of a row of
// the result together.
struct WarpPanel {
  u32 at;  // the warp's first row
  INLINE explicit WarpPanel(u32 panel) : at(panel + lane() / 32 % 4 * WARP_PANEL) {}
  INLINE u32 matrices(u32 i) const {  // 16 columns, from column 16 i on, as WGMMA leaves them
    const u32 l = lane() % 32, row = l % 16;
    return at + row * 128 + ((i * 32 + l / 16 * 16) ^ (row % 8 * 16));
  }
  INLINE void put(u32 i, u32 a, u32 b, u32 c, u32 d) const { store_matrices(matrices(i), a, b, c, d); }
  INLINE void get(u32 i, u32 (&v)[4]) const { load_matrices(matrices(i), v); }

  // The rows, from `first` of the tile on, go to columns `from` and on of its result, whose row i is line(i) of it. THROUGH: past
  // every cache.
  template <bool THROUGH, class Line>
  INLINE void store(const TileOperands& t, const TileResult& to, u32 first, u32 from, Line line) const {
    const u32 l = lane() % 32, column = from + l % 8 * 8;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 row = l / 8 + i * 4;
      const Vec16 v = load_shared(at + row * 128 + ((l % 8 * 16) ^ (row % 8 * 16)));
      Vec16* place = (Vec16*)(to.c + ((u64)line(first + row) * to.ldc + column) / 4);
      if (first + row >= t.rows || column >= t.cols) continue;
      if constexpr (THROUGH) write_through(place, v);
      else write(place, v);
    }
  }
};

// A slice of a tile: its sums, and the tile's column that it begins with. Where one panel a warp is there, not two: `one`.
template <class M> struct Slice {
  typename M::Sums& sums;
  const TileOperands& t;  // of the whole tile
  u32 first, shared;
  bool one;
  INLINE u32 panel(u32 which) const {  // of this warpgroup
    if (M::BLOCKS == 1) return shared + STAGED_AT + (lane() / 128 * 2 + which) * 4 * WARP_PANEL;
    return one ? shared + RESULT_AT + lane() / 128 * 4 * WARP_PANEL : panel_at(shared, lane() / 128, which);
  }
};

// Rounded sums of 64 columns of a block, of this warp.
template <class M> INLINE void put_panel(const WarpPanel& panel, const Slice<M>& s, u32 block, u32 column) {
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const float* x = s.sums[block] + column / 2 + i * 8;
    panel.put(i, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
  }
}
// Plain rows of BF16: stored by who has made them, panel by panel.
template <bool THROUGH, class M, class Line> INLINE void store_rows(const Slice<M>& s, const TileResult& to, Line line) {
  constexpr u32 ACROSS = M::SLICE / PANEL;
#pragma unroll
  for (u32 n = 0; n < M::BLOCKS * ACROSS; n++) {
    const u32 b = n / ACROSS, c = n % ACROSS * PANEL;
    const WarpPanel panel(s.panel(n % 2));
    if (s.one) __syncwarp();  // the panel before has been read by all
    put_panel(panel, s, b, c);
    __syncwarp();  // also: the panel of two before has been read by all
    panel.store<THROUGH>(s.t, to, M::first_row(b), s.first + c, line);
  }
}

// Of a wide tile whose result is plain rows of BF16: workers leave it in shared memory and go on, and the publisher stores it. Not of
// operators that make copies: with it moe_backward_mxfp8 spills, and what has been stored is read again at once.
template <class Op> INLINE constexpr bool stages() { return is_wide<Op>() && !has_copies<Op>(); }
// A panel: of a warpgroup, from column c * PANEL on.
INLINE u32 staged_at(u32 shared, u32 group, u32 c) { return shared + STAGED_AT + (group * (TILE_N / PANEL) + c) * 4 * WARP_PANEL; }
template <class M> INLINE void stage_rows(const Slice<M>& s) {
#pragma unroll
  for (u32 c = 0; c < TILE_N / PANEL; c++) put_panel(WarpPanel(staged_at(s.shared, lane() / 128, c)), s, 0, c * PANEL);
}
// The publisher, with its whole warp: 16 rows of a panel at a time, which follow each other in the result too, and the next ones
// are on their way. One warp waits for each of its instructions: three times as many took 8000 cycles a tile.
INLINE void store_staged(const TileOperands& t, const SumsTo& to, u32 shared) {
  static_assert(GATED % 16 == 0);
  constexpr u32 TIMES = 4, PANELS = TILE_N / PANEL;
  const u32 l = lane() % 32, row = l / 8, step = to.ld / 8 * TIMES;  // of rows row, row + 4, ...; Vec16 from each to the next
  const u32 even = shared + STAGED_AT + row * 128 + ((l % 8 ^ row) * 16), odd = (even + 4 * 128) ^ 4 * 16;
  const auto get = [&](Vec16(&v)[TIMES], u32 first, u32 c) {
    const u32 panel = staged_at(0, first / 64, c) - STAGED_AT + first / 16 % 4 * WARP_PANEL;
#pragma unroll
    for (u32 i = 0; i < TIMES; i++) v[i] = load_shared((i % 2 ? odd : even) + panel + i / 2 * 8 * 128);
  };
  Vec16 v[TIMES], next[TIMES];
  get(v, 0, 0);
#pragma unroll 1
  for (u32 first = 0; first < t.rows; first += 16) {
    Vec16* place = (Vec16*)((u64*)to.c + (u64)to.line(first + row) * to.ld / 4) + l % 8;
#pragma unroll
    for (u32 c = 0; c < PANELS; c++) {
      if (c + 1 < PANELS) get(next, first, c + 1);
      else if (first + 16 < t.rows) get(next, first + 16, 0);
#pragma unroll
      for (u32 i = 0; i < TIMES; i++)
        if (first + row + i * 4 < t.rows && c * PANEL + l % 8 * 8 < t.cols) write(place + i * step + c * PANEL / 8, v[i]);
#pragma unroll
      for (u32 i = 0; i < TIMES; i++) v[i] = next[i];
    }
  }
}

// FP32 sums of a warp's 16 rows, 32 columns at a time, in its part of a panel. There lanes exchange them, so that each has four
// neighbours, and eight lanes 32 of a row: what they read and write of memory then are whole sectors.
constexpr u32 SUM_COLUMNS = 32;
static_assert(16 * SUM_COLUMNS * 4 == WARP_PANEL);
struct SumPanel {
  u32 at;
  template <class M>
  INLINE explicit SumPanel(const Slice<M>& s)
      : at(M::BLOCKS == 1 ? s.shared + SUMS_AT + lane() / 32 * WARP_PANEL : s.panel(0) + lane() / 32 % 4 * WARP_PANEL) {}
  // Units of 16 bytes are exchanged within a row, so that no bank is asked twice at a time.
  INLINE u32 place(u32 row, u32 unit) const { return at + row * 128 + ((unit ^ (row * 2 % 8 | row / 4 % 2)) * 16); }

  // 32 columns of one block, the which-th of all. By a number that is known when it runs: so there is one copy of what follows.
  template <u32 BLOCKS, u32 HALF_SLICE> INLINE void put(const float (&sums)[BLOCKS][HALF_SLICE], u32 which) const {
    constexpr u32 ACROSS = 2 * HALF_SLICE / SUM_COLUMNS;
    const u32 l = lane() % 32, row = l / 4, unit = l % 4 / 2, half = l % 2 * 8;
    __syncwarp();  // what was there has been read
#pragma unroll
    for (u32 c = 0; c < BLOCKS * ACROSS; c++) {
      if (c != which) continue;
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const float* s = sums[c / ACROSS] + c % ACROSS * 16 + j * 4;
        put_two(place(row, 2 * j + unit) + half, s[0], s[1]);
        put_two(place(row + 8, 2 * j + unit) + half, s[2], s[3]);
      }
    }
    __syncwarp();
  }
  INLINE static void put_two(u32 address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
  }
  struct Four {
    float at[4];
  };
  INLINE Four get(u32 row, u32 unit) const { return __builtin_bit_cast(Four, load_shared(place(row, unit))); }
};

// What a SumPanel takes at a time, the which-th of a slice: its first row and column in the tile.
struct SumsAt {
  u32 row, column;
};
template <class M> constexpr u32 SUM_PANELS = M::BLOCKS * (M::SLICE / SUM_COLUMNS);
template <class M> INLINE SumsAt sums_at(const Slice<M>& s, u32 which) {
  constexpr u32 ACROSS = M::SLICE / SUM_COLUMNS;
  return {M::first_row(which / ACROSS), s.first + which % ACROSS * SUM_COLUMNS};
}
// What a tile has in memory is read one panel ahead, four rows at a time for each lane: else each panel waits for memory. WHOLE: no
// row and no column is missing. Then nothing is asked for each four, and what is made of several is made side by side.
template <bool WHOLE, class M, class To> INLINE void hand_sums_over(const Slice<M>& s, const To& to) {
  constexpr u32 TIMES = 4;
  using Was = decltype(to.was(0, 0));
  const SumPanel panel(s);
  const u32 l = lane() % 32;
  const auto row = [&](u32 i) { return i * 4 + l / 8; };
  const auto each = [&](u32 which, auto f) {  // calls f(i, row, column) for those that the tile has
    const SumsAt at = sums_at(s, which);
    const u32 column = at.column + l % 8 * 4;
#pragma unroll
    for (u32 i = 0; i < TIMES; i++)
      if (WHOLE || (at.row + row(i) < s.t.rows && column < s.t.cols)) f(i, at.row + row(i), column);
  };
  Was was[TIMES] = {}, next[TIMES] = {};
  each(0, [&](u32 i, u32 row, u32 column) { was[i] = to.was(row, column); });
#pragma unroll 1
  for (u32 which = 0; which < SUM_PANELS<M>; which++) {
    if (which + 1 < SUM_PANELS<M>) each(which + 1, [&](u32 i, u32 row, u32 column) { next[i] = to.was(row, column); });
    if (WHOLE || sums_at(s, which).column < s.t.cols) {
      panel.put(s.sums, which);
      each(which, [&](u32 i, u32 at_row, u32 column) { to.put(at_row, column, panel.get(row(i), l % 8).at, was[i]); });
    }
#pragma unroll
    for (u32 i = 0; i < TIMES; i++) was[i] = next[i];
  }
}
template <class M> INLINE bool is_whole(const Slice<M>& s) { return s.t.rows == TILE_M && s.first + M::SLICE <= s.t.cols; }
template <class M, class To> INLINE void hand_sums_over(const Slice<M>& s, const To& to) {
  if constexpr (requires { typename To::Plain; })
    if (to.is_plain()) {
      const typename To::Plain plain{to};
      return is_whole(s) ? hand_sums_over<true>(s, plain) : hand_sums_over<false>(s, plain);
    }
  hand_sums_over<false>(s, to);
}
// The same of columns that alternate in blocks of GATED: four of gate and the four of up; column is that of one of both.
template <bool WHOLE, class M, class To> INLINE void hand_gated_over(const Slice<M>& s, const To& to) {
  static_assert(2 * GATED == SUM_COLUMNS);
  const SumPanel panel(s);
  const u32 l = lane() % 32;
#pragma unroll 1
  for (u32 which = 0; which < SUM_PANELS<M>; which++) {
    const SumsAt at = sums_at(s, which);
    if (!WHOLE && at.column >= s.t.cols) continue;
    panel.put(s.sums, which);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 row = i * 8 + l / 4, unit = l % 4;
      const SumPanel::Four gate = panel.get(row, unit), up = panel.get(row, unit + 4);
      if (WHOLE || at.row + row < s.t.rows) to.put(at.row + row, at.column / 2 + unit * 4, gate.at, up.at);
    }
  }
}
template <class M, class To> INLINE void hand_gated_over(const Slice<M>& s, const To& to) {
  if (!to.is_plain()) return hand_gated_over<false>(s, to);
  const typename To::Plain plain{to};
  return is_whole(s) ? hand_gated_over<true>(s, plain) : hand_gated_over<false>(s, plain);
}

// Where sums go. What a loader has looked up for it is in the tile's note.
template <class Op> INLINE auto sums_of(const typename Op::Params& p, const Work& w, const TileOperands& t) {
  if constexpr (requires { Op::sums_to(p, w, t.note); }) return Op::sums_to(p, w, t.note);
  else return Op::sums_to(p, w);
}
// A tile of K = 0. Apart from the others: sums that may come from elsewhere than WGMMA would slow it down.
template <class Op> INLINE void hand_over_zeros(const typename Op::Params& p, const Work& w, const TileOperands& t) {
  const auto each_four = [&](auto put) {
    const u32 fours = (t.cols + 3) / 4;
#pragma unroll 1
    for (u32 i = lane(); i < t.rows * fours; i += WORKERS) put(i / fours, i % fours * 4);
  };
  if constexpr (requires { Op::sums_to(p, w); }) {
    const auto to = sums_of<Op>(p, w, t);
    each_four([&](u32 row, u32 column) { to.put(row, column, {0, 0, 0, 0}, to.was(row, column)); });
  } else each_four([&](u32 row, u32 column) { Op::store(p, w, row, column, 0); });
}
// Sums that are rounded and stored are rows like others. Of the rest each kind has a loop of its own: to ask for each four what
// becomes of them took 11 us a tile of 128 x 256, this takes 3 to 5.
template <class Op, class M, class To> INLINE void hand_sums_over_as(const Slice<M>& s, const To& to) {
  if constexpr (__is_same(To, SumsInto<SET_BF16>)) {
    const SumsTo& rows = to.to;
    if constexpr (!stages<Op>())
      store_rows<false>(s, {(u64*)rows.c + rows.first / 4, rows.ld}, [&](u32 row) { return rows.line(row); });
  } else hand_sums_over(s, to);
}
// What an operator has that offers store alone.
template <class Op> struct Stored {
  const typename Op::Params& p;
  const Work& w;
  INLINE u32 was(u32, u32) const { return 0; }
  INLINE void put(u32 row, u32 column, const float (&x)[4], u32) const {
    Op::store(p, w, row, column, pack_bf16(x[0], x[1], x[2], x[3]));
  }
};
template <class Op, class M> INLINE void hand_over(const typename Op::Params& p, const Work& w, const Slice<M>& s) {
  const Epilogue how = epilogue<Op>(w);
  if (how == ROWS) {
    if constexpr (requires { Op::result(p, w); }) {
      if constexpr (!stages<Op>()) store_rows<through<Op>()>(s, Op::result(p, w), same_line);
    } else if constexpr (requires { Op::store(p, w, 0u, 0u, 0ull); })
      hand_sums_over(s, Stored<Op>{p, w});
    else static_assert(requires { Op::sums_to(p, w); }, "rows of this operator would go nowhere");
    return;
  }
  if constexpr (requires { Op::gated_to(p, w); })
    if (how == GATED_SUMS) return hand_gated_over(s, Op::gated_to(p, w));
  if constexpr (requires { Op::sums_to(p, w); })
    if (how == SUMS) sums_of<Op>(p, w, s.t).visit([&](const auto& to) { hand_sums_over_as<Op>(s, to); });
}
// Where the rows of a wide tile are stored that are staged: c is its first element, and null where something else becomes of it. B's
// loader looks it up, for it takes 2000 cycles of questions that workers would wait for.
template <class Op> INLINE SumsTo staged_to(const typename Op::Params& p, const Work& w, const TileOperands& t) {
  const Epilogue how = epilogue<Op>(w);
  SumsTo rows = {};
  if constexpr (requires { Op::result(p, w); }) {
    static_assert(!through<Op>(), "rows of wide tiles are not stored past caches");
    if (how == ROWS) {
      const TileResult to = Op::result(p, w);
      return {to.c, 0, to.ldc, SET_BF16};
    }
  }
  if constexpr (requires { Op::sums_to(p, w); })
    if (how == SUMS)
      sums_of<Op>(p, w, t).visit([&]<class To>(const To& to) {
        if constexpr (__is_same(To, SumsInto<SET_BF16>)) rows = begun_at_zero(to.to);
      });
  return rows;
}
}  // namespace target
