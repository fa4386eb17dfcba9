// sm_90a: the GEMM tile, 128 rows by 256 columns, or by half as many (HALF; or in all of a launch). Two threads load it, one
// each operand, stage by stage of 64 k, into a ring in shared memory, and two warpgroups of workers multiply. In one of two ways:
//
//   in slices  of 128 columns, which they take in turn: one multiplies while the other hands its sums over. 8192 x 8192 x 1024
//              takes 0.9 of the time of the other way, and no product takes longer
//   wide       64 rows each. A quarter fewer bytes are loaded. Where matrices come from memory and tiles that share them are not
//              begun together, as those of experts are not, what one has loaded must still be in L2 when another one comes to
//              it: Llama 4's products took up to 1.5 times as long in slices. Three stages in the ring do (a fourth took no cycle
//              off); where it was, rows of BF16 wait to be stored while the next tile is multiplied
//
// In the ring lie panels of 64 lines by 64 elements, 8 KiB. An operand whose lines are rows or columns of the tile is loaded
// by boxes of 128 lines; one whose lines are k by a box each panel.
#pragma once
#include "../kernels/tile_operands.h"
#include "../schedule/group.h"
#include "../work/sum.h"
#include "sm90_mma.h"

namespace target {
constexpr u32 TILE_M = 128, TILE_N = 256, TILE_N_NARROW = 128;  // a launch's width: Params::tile_n
constexpr u32 TILE_K = 64, PANEL = 64, BOX_LINES = 128, BLOCK_ROWS = 64;  // BLOCK_ROWS: that multiplications are high
constexpr u32 MAX_OPERANDS = 18;
static_assert(PANEL * TILE_K * 2 == PANEL_BYTES);

// How tiles are made. A thread's sums: of each of its warpgroup's blocks, of 8 columns two neighbours in row lane / 4 and two in
// the row 8 below, of its warp's 16.
template <bool WIDE> struct Made {
  static constexpr u32 BLOCKS = WIDE ? 1 : 2, SLICE = WIDE ? TILE_N : TILE_N / 2, STAGES = WIDE ? 3 : 6;
  static constexpr u32 STAGE_BYTES = (TILE_M + SLICE) / PANEL * PANEL_BYTES, RING_BYTES = STAGES * STAGE_BYTES;
  using Sums = float[BLOCKS][SLICE / 2];
  INLINE static u32 first_row(u32 block) {  // of its warp's
    return (WIDE ? lane() / 128 : block) * BLOCK_ROWS + lane() / 32 % 4 * 16;
  }
  INLINE static u32 slices(u32 columns) { return (columns + SLICE - 1) / SLICE; }
};
template <class Op> INLINE constexpr bool is_wide() {
  if constexpr (requires { Op::WIDE; }) return Op::WIDE;
  else return false;
}
template <class Op> using MadeOf = Made<is_wide<Op>()>;

// Shared memory: the ring; results; barriers and the slots. Results are, in slices, two panels of 64 rows for each warpgroup, of
// which a warp has 16 rows; wide, a whole tile of BF16, and of sums that are not stored so one panel for each warpgroup.
constexpr u32 MOST_STAGES = Made<false>::STAGES, WARP_PANEL = 16 * PANEL * 2;
constexpr u32 RESULT_AT = Made<false>::RING_BYTES, CONTROL_AT = RESULT_AT + WORKERS / 32 * 2 * WARP_PANEL;
constexpr u32 STAGED_AT = Made<true>::RING_BYTES, SUMS_AT = STAGED_AT + TILE_M * TILE_N * 2;
static_assert(SUMS_AT + WORKERS / 32 * WARP_PANEL == CONTROL_AT);
constexpr u32 LOADED_AT = CONTROL_AT, READ_AT = LOADED_AT + MOST_STAGES * 8;  // one barrier each a stage
constexpr u32 TURN_AT = READ_AT + MOST_STAGES * 8, SLOTS_AT = TURN_AT + 2 * 8, SLOTS_BYTES = 368;  // of the slots: sm90_run.h
constexpr u32 DYNAMIC_SHARED_BYTES = 230400;

// The matrices that the launch's tiles lie in: first those whose lines are rows or columns of tiles, then those whose lines
// are k. One that is read both ways is there twice. kosmos_raw/device/cuda.py fills it.
struct Operands {
  TensorMap maps[MAX_OPERANDS];
  u64 begin[MAX_OPERANDS], end[MAX_OPERANDS];  // addresses
  u32 line_words[MAX_OPERANDS];                // 16-byte words from line to line
  u32 count, by_rows;                          // by_rows: of them, the first
  u32 zero[4];
};
static_assert(sizeof(Operands) == 2688);

// Where an operand of a tile begins: element x of line y of a matrix.
struct Place {
  const TensorMap* map;
  u32 x, y;
  INLINE Place(const Operands& o, const Vec16* first, bool by_k) {
    u32 i = by_k ? o.by_rows : 0;
    const u32 end = by_k ? o.count : o.by_rows;
    while (i + 1 < end && ((u64)first < o.begin[i] || (u64)first >= o.end[i])) i++;
    const u32 words = (u32)(((u64)first - o.begin[i]) / sizeof(Vec16));
    map = &o.maps[i];
    y = words / o.line_words[i];
    x = words % o.line_words[i] * 8;
  }
};

// Where a thread is in the ring. It never restarts, whatever is worked on.
template <class M> struct RingAt {
  u32 stage = 0, parity = 0;
  INLINE void advance() {
    if (++stage == M::STAGES) stage = 0, parity ^= 1;
  }
  INLINE void skip(u32 steps) {
    steps += stage;
    parity ^= steps / M::STAGES % 2;
    stage = steps % M::STAGES;
  }
};
constexpr u32 STAGE_READERS = WORKERS / 32;  // of a stage. In slices half of the warps read it, and each says so twice

// Warpgroups that take slices in turn. Who goes on in the ring has the other's word that all stages of its slice have come: it did
// not wait for these itself, and by its parity would take one of them for its own. (Found by bulk_rs, one wrong element.)
struct Turns {
  u32 shared, taken = 0, heard = 0;  // slices so far, by both; words of the other
  INLINE explicit Turns(u32 shared) : shared(shared) {}
  INLINE u32 barrier(u32 group) const { return shared + TURN_AT + group * 8; }
  INLINE bool next_is_mine() { return taken++ % 2 == lane() / 128; }
  INLINE void catch_up() {
    const u32 group = lane() / 128;
    if (heard < (taken + group) / 2) wait(barrier(group), heard++ % 2);
  }
  INLINE void pass_on() const {
    if (lane() % 32 == 0) arrive(barrier(1 - lane() / 128));
  }
};

// A loader: the stage is free, and `bytes` of its own come into it. Returns the barrier that is told.
template <class M> INLINE u32 begin_stage(const RingAt<M>& at, u32 shared, u32 bytes) {
  const u32 loaded = shared + LOADED_AT + at.stage * 8;
  wait(shared + READ_AT + at.stage * 8, at.parity ^ 1);
  arrive_expecting(loaded, bytes);
  return loaded;
}

INLINE u32 k_steps(const TileOperands& t) { return (t.K + TILE_K - 1) / TILE_K; }

// One thread for A, another for B. Calls before(step, steps) when it comes to a step, of all slices.
template <bool IS_A, bool BY_K, class M, class Before>
INLINE void load_tile(const TileOperands& t, const Operands& o, u32 shared, RingAt<M>& at, Before before) {
  constexpr u32 LINES = IS_A ? TILE_M : M::SLICE;
  const u32 of_slice = k_steps(t), steps = M::slices(t.cols) * of_slice;
  if (!steps) return;
  Place from(o, IS_A ? t.a : t.b, BY_K);
  for (u32 step = 0, k = 0, first = 0; step < steps; step++) {
    before(step, steps);
    const u32 left = IS_A ? t.rows : t.cols - first;
    const u32 panels = left < LINES ? (left + PANEL - 1) / PANEL : LINES / PANEL;  // those past the tile's edge are not loaded
    const u32 loaded = begin_stage(at, shared, (BY_K ? panels : LINES / PANEL) * PANEL_BYTES);
    const u32 to = shared + at.stage * M::STAGE_BYTES + (IS_A ? 0 : TILE_M * TILE_K * 2);
    if constexpr (BY_K) {
#pragma unroll
      for (u32 j = 0; j < LINES / PANEL; j++)
        if (j < panels) load_box(to + j * PANEL_BYTES, from.map, loaded, from.x + j * PANEL, from.y + k * TILE_K);
    } else {
#pragma unroll
      for (u32 j = 0; j < LINES; j += BOX_LINES) load_box(to + j * TILE_K * 2, from.map, loaded, from.x + k * TILE_K, from.y + j);
    }
    at.advance();
    if (++k < of_slice) continue;
    k = 0, first += M::SLICE;
    if (!IS_A) (BY_K ? from.x : from.y) += M::SLICE;
  }
}
template <class Op, bool IS_A, class M, class Before>
INLINE void load_tile(const Work& w, const TileOperands& t, const Operands& o, u32 shared, RingAt<M>& at, Before before) {
  const Layout layout = layout_of<Op>(w.kind);
  if (IS_A ? layout == NT : layout != TN) load_tile<IS_A, true>(t, o, shared, at, before);
  else load_tile<IS_A, false>(t, o, shared, at, before);
}

// Of a stage, lines from `lines` on of what has k for lines: to zero, by each warpgroup that reads it for itself. A matrix may go
// on where K ends.
template <Layout L, class M> INLINE void clear_lines(u32 stage, u32 lines) {
  const auto clear = [&](u32 panel) {
    for (u32 i = lines * 8 + lane() % 128; i < PANEL_BYTES / 16; i += 128)
      asm volatile("st.shared.v2.u64 [%0], {%1, %1};" ::"r"(panel + i * 16), "l"(0ull) : "memory");
  };
#pragma unroll 1
  for (u32 j = L == NT ? 0 : TILE_M / PANEL; j < M::STAGE_BYTES / PANEL_BYTES; j++) clear(stage + j * PANEL_BYTES);
  shared_then_tma();
  asm volatile("bar.sync %0, 128;" ::"r"(2 + lane() / 128) : "memory");
}

// Workers. One stage, of which `k` are real: starts its multiplications. Returns the barrier that says when it has been read.
// FIRST: sums begin with it.
template <Layout L, bool FIRST, bool CUT, class M>
INLINE u32 start_step(typename M::Sums& sums, u32 shared, RingAt<M>& at, u32 k) {
  constexpr bool A_BY_K = L == NT, B_BY_K = L != TN;
  wait(shared + LOADED_AT + at.stage * 8, at.parity);
  const u32 stage = shared + at.stage * M::STAGE_BYTES, read = shared + READ_AT + at.stage * 8;
  if constexpr (CUT && L != TN)
    if (k < TILE_K) clear_lines<L, M>(stage, k);
  const u32 block = M::BLOCKS == 1 ? lane() / 128 : 0;  // its first
  const u64 a = operand<A_BY_K>(stage + block * PANEL_BYTES), b = operand<B_BY_K>(stage + TILE_M * TILE_K * 2);
  wgmma_begin();
#pragma unroll
  for (u32 i = 0; i < TILE_K / 16; i++)
#pragma unroll
    for (u32 j = 0; j < M::BLOCKS; j++)
      wgmma<M::SLICE, A_BY_K, B_BY_K>(sums[j], a + i * OPERAND_STEP<A_BY_K> + j * (PANEL_BYTES >> 4), b + i * OPERAND_STEP<B_BY_K>,
                                      !FIRST || i);
  wgmma_commit();
  at.advance();
  return read;
}
// The first step apart: were it in the loop, sums would look used before they are set, and be kept while nobody multiplies.
// CUT: K may end where the matrices do not.
template <Layout L, bool CUT, class M>
INLINE void multiply_slice(typename M::Sums& sums, u32 K, u32 shared, RingAt<M>& at, Turns& turns) {
  const bool speaks = lane() % 32 == 0;
  if (M::BLOCKS > 1) turns.catch_up();
  u32 last = start_step<L, true, CUT>(sums, shared, at, K);
#pragma unroll 1
  for (u32 k = TILE_K; k < K; k += TILE_K) {
    const u32 read = start_step<L, false, CUT>(sums, shared, at, K - k);
    wgmma_wait<1>();  // the step before
    if (speaks) arrive_times(last, M::BLOCKS);
    last = read;
  }
  if (M::BLOCKS > 1) turns.pass_on();
  wgmma_wait<0>();
  if (speaks) arrive_times(last, M::BLOCKS);
#pragma unroll
  for (u32 j = 0; j < M::BLOCKS; j++)
#pragma unroll
    for (u32 i = 0; i < M::SLICE / 2; i++) asm volatile("" : "+f"(sums[j][i])::"memory");  // no use of them moves before the wait
}
template <class Op, class M>
INLINE void multiply_slice(typename M::Sums& sums, const Work& w, u32 K, u32 shared, RingAt<M>& at, Turns& turns) {
  if constexpr (!many_layouts<Op>()) return multiply_slice<layout<Op>(), false>(sums, K, shared, at, turns);
  const Layout layout = layout_of<Op>(w.kind);
  if (layout == TN) multiply_slice<TN, true>(sums, K, shared, at, turns);
  else if (layout == NN) multiply_slice<NN, true>(sums, K, shared, at, turns);
  else multiply_slice<NT, true>(sums, K, shared, at, turns);
}

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
    if (M::BLOCKS == 1) return shared + SUMS_AT + lane() / 128 * 4 * WARP_PANEL;
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

// Of a wide tile whose result is plain rows of BF16: workers leave it in shared memory and go on, and the publisher stores it.
// A panel: of a warpgroup, from column c * PANEL on.
INLINE u32 staged_at(u32 shared, u32 group, u32 c) { return shared + STAGED_AT + (group * (TILE_N / PANEL) + c) * 4 * WARP_PANEL; }
template <class M> INLINE void stage_rows(const Slice<M>& s) {
#pragma unroll
  for (u32 c = 0; c < TILE_N / PANEL; c++) put_panel(WarpPanel(staged_at(s.shared, lane() / 128, c)), s, 0, c * PANEL);
}
// The publisher, with its whole warp: 16 rows of a panel at a time, which follow each other in the result too, and the next ones
// are on their way. One warp waits for each of its instructions, so there are few: 8000 cycles a tile were three times as many.
INLINE void store_staged(const TileOperands& t, const SumsTo& to, u32 shared) {
  static_assert(GATED % 16 == 0);
  constexpr u32 TIMES = 4, PANELS = TILE_N / PANEL;
  const u32 l = lane() % 32, row = l / 8, step = to.ld / 8 * TIMES;  // of rows row, row + 4, ...; Vec16 from each to the next
  const u32 even = shared + STAGED_AT + row * 128 + ((l % 8 ^ row) * 16), odd = even + 4 * 128 ^ 4 * 16;
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
  INLINE explicit SumPanel(const Slice<M>& s) : at(s.panel(0) + lane() / 32 % 4 * WARP_PANEL) {}
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
  if constexpr (requires { To::MAKES_MUCH; })
    if (is_whole(s)) return hand_sums_over<true>(s, to);
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
  if constexpr (requires { To::MAKES_MUCH; })
    if (is_whole(s)) return hand_gated_over<true>(s, to);
  hand_gated_over<false>(s, to);
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
template <class M, class To> INLINE void hand_sums_over_as(const Slice<M>& s, const To& to) {
  if constexpr (__is_same(To, SumsInto<SET_BF16>)) {
    const SumsTo& rows = to.to;
    if constexpr (M::BLOCKS > 1)  // wide tiles' are staged
      store_rows<false>(s, {(u64*)rows.c + rows.first / 4, rows.ld}, [&](u32 row) { return rows.line(row); });
  } else if constexpr (requires { to.specialise([](const auto&) {}); })
    to.specialise([&](const auto& plain) { hand_sums_over(s, plain); });
  else hand_sums_over(s, to);
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
      if constexpr (M::BLOCKS > 1) store_rows<through<Op>()>(s, Op::result(p, w), same_line);
    } else if constexpr (requires { Op::store(p, w, 0u, 0u, 0ull); })
      hand_sums_over(s, Stored<Op>{p, w});
    else static_assert(requires { Op::sums_to(p, w); }, "rows of this operator would go nowhere");
    return;
  }
  if constexpr (requires { Op::gated_to(p, w); })
    if (how == GATED_SUMS) return Op::gated_to(p, w).specialise([&](const auto& to) { hand_gated_over(s, to); });
  if constexpr (requires { Op::sums_to(p, w); })
    if (how == SUMS) sums_of<Op>(p, w, s.t).visit([&](const auto& to) { hand_sums_over_as(s, to); });
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
