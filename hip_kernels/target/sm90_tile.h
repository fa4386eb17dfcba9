// sm_90a: the GEMM tile, 128 rows by 256, 192 or 128 columns, or half as many (HALF). Two threads load it, one each operand, stage by stage of 64 k,
// into a ring in shared memory; two warpgroups of workers multiply, 64 rows each.
//
// In the ring lie panels of 64 lines by 64 elements, 8 KiB. An operand whose lines are rows or columns of the tile is loaded
// by a box as high as the tile, or two as high as half of it; one whose lines are k by a box each panel. As few as can be: a
// thread that issues four loads a stage is slower than the multiplications of a narrow tile.
#pragma once
#include "../kernels/tile_operands.h"
#include "../schedule/group.h"
#include "../work/sum.h"
#include "sm90_mma.h"

namespace target {
constexpr u32 TILE_M = 128, TILE_N = 256, TILE_N_MEDIUM = 192, TILE_N_NARROW = 128;  // a launch's width: Params::tile_n
constexpr u32 TILE_K = 64, PANEL = 64;
constexpr u32 MAX_OPERANDS = 18;
static_assert(PANEL * TILE_K * 2 == PANEL_BYTES);

// Stages of a tile n columns wide. Fewer cost 2 % and more; the widest tile has room for no more.
INLINE constexpr u32 stages(u32 n) { return n == 128 ? 6 : 4; }
INLINE constexpr u32 stage_bytes(u32 n) { return (TILE_M + n) / PANEL * PANEL_BYTES; }

// Shared memory: the ring; two panels of results for each warpgroup, of which a warp has 16 rows; barriers and the slots.
constexpr u32 RING_BYTES = 4 * stage_bytes(TILE_N), WARP_PANEL = 16 * PANEL * 2;
constexpr u32 RESULT_AT = RING_BYTES, CONTROL_AT = RESULT_AT + WORKERS / 32 * 2 * WARP_PANEL;
constexpr u32 LOADED_AT = CONTROL_AT, READ_AT = LOADED_AT + 6 * 8;  // one barrier each a stage
constexpr u32 SLOTS_AT = READ_AT + 6 * 8, SLOTS_BYTES = 144;  // of the slots: sm90_run.h
constexpr u32 DYNAMIC_SHARED_BYTES = 230400;
static_assert(stages(192) * stage_bytes(192) <= RING_BYTES && stages(128) * stage_bytes(128) <= RING_BYTES);

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
struct RingAt {
  u32 stage = 0, parity = 0;
  INLINE void advance(u32 stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  INLINE void skip(u32 steps, u32 stages) {
    steps += stage;
    parity ^= steps / stages % 2;
    stage = steps % stages;
  }
};
constexpr u32 STAGE_READERS = WORKERS / 32;  // warps that say of a stage that they have read it

// A loader: the stage is free, and `bytes` of its own come into it. Returns the barrier that is told.
INLINE u32 begin_stage(u32 n, const RingAt& at, u32 shared, u32 bytes) {
  const u32 loaded = shared + LOADED_AT + at.stage * 8;
  wait(shared + READ_AT + at.stage * 8, at.parity ^ 1);
  arrive_expecting(loaded, bytes);
  return loaded;
}

INLINE u32 k_steps(const TileOperands& t) { return (t.K + TILE_K - 1) / TILE_K; }

// One thread for A, another for B. Calls before(k, steps) when it comes to step k. `first`: bytes from a stage's begin to the
// operand. Where lines are not k: `boxes` of them, each of `height` lines.
template <bool BY_K, class Before>
INLINE void load_operand(const Place& from, u32 lines, u32 steps, u32 n, u32 first, u32 boxes, u32 height, u32 shared,
                         RingAt& at, Before before) {
  const u32 panels = (lines + PANEL - 1) / PANEL;  // those past the tile's edge are not loaded
  for (u32 k = 0; k < steps; k++) {
    before(k, steps);
    const u32 loaded = begin_stage(n, at, shared, BY_K ? panels * PANEL_BYTES : boxes * height * TILE_K * 2);
    const u32 to = shared + at.stage * stage_bytes(n) + first;
    if constexpr (BY_K) {
#pragma unroll
      for (u32 j = 0; j < TILE_N / PANEL; j++)
        if (j < panels) load_box(to + j * PANEL_BYTES, from.map, loaded, from.x + j * PANEL, from.y + k * TILE_K);
    } else {
      load_box(to, from.map, loaded, from.x + k * TILE_K, from.y);
      if (boxes > 1) load_box(to + height * TILE_K * 2, from.map, loaded, from.x + k * TILE_K, from.y + height);
    }
    at.advance(stages(n));
  }
}
template <bool IS_A, bool BY_K, class Before>
INLINE void load_tile(const TileOperands& t, bool half, const Operands& o, u32 n, u32 shared, RingAt& at, Before before) {
  const u32 steps = k_steps(t);
  if (!steps) return;
  const Place from(o, IS_A ? t.a : t.b, BY_K);
  if constexpr (IS_A) load_operand<BY_K>(from, t.rows, steps, n, 0, 1, TILE_M, shared, at, before);
  else load_operand<BY_K>(from, t.cols, steps, n, TILE_M * TILE_K * 2, half ? 1 : 2, n / 2, shared, at, before);
}
template <class Op, bool IS_A, class Before>
INLINE void load_tile(const Work& w, const TileOperands& t, const Operands& o, u32 n, u32 shared, RingAt& at, Before before) {
  const Layout layout = layout_of<Op>(w.kind);
  if (IS_A ? layout == NT : layout != TN) load_tile<IS_A, true>(t, w.kind == HALF, o, n, shared, at, before);
  else load_tile<IS_A, false>(t, w.kind == HALF, o, n, shared, at, before);
}

// Of a stage, lines from `lines` on of what has k for lines: to zero, by each warpgroup for itself. A matrix may go on where
// K ends; what two warpgroups write is the same.
template <Layout L, u32 N> INLINE void clear_lines(u32 stage, u32 group, u32 lines) {
  const auto clear = [&](u32 panel) {
    for (u32 i = lines * 8 + lane() % 128; i < PANEL_BYTES / 16; i += 128)
      asm volatile("st.shared.v2.u64 [%0], {%1, %1};" ::"r"(panel + i * 16), "l"(0ull) : "memory");
  };
  if constexpr (L == NT) clear(stage + group * PANEL_BYTES);
#pragma unroll 1
  for (u32 j = 0; j < (N + PANEL - 1) / PANEL; j++) clear(stage + TILE_M * TILE_K * 2 + j * PANEL_BYTES);
  shared_then_tma();
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

// Workers. A thread's sums: of each 8 columns, two neighbours in row lane / 4 and two in the row 8 below, of its warp's 16.
// One stage, of which `k` are real: starts its multiplications. Returns the barrier that says when it has been read. FIRST:
// sums begin with it. RING: the launch's width, by which stages are laid out.
template <Layout L, u32 N, u32 RING, bool FIRST, bool CUT>
INLINE u32 start_step(float (&sums)[N / 2], u32 shared, u32 group, RingAt& at, u32 k) {
  constexpr bool A_BY_K = L == NT, B_BY_K = L != TN;
  wait(shared + LOADED_AT + at.stage * 8, at.parity);
  const u32 stage = shared + at.stage * stage_bytes(RING), read = shared + READ_AT + at.stage * 8;
  if constexpr (CUT && L != TN)
    if (k < TILE_K) clear_lines<L, N>(stage, group, k);
  const u64 a = operand<A_BY_K>(stage + group * PANEL_BYTES), b = operand<B_BY_K>(stage + TILE_M * TILE_K * 2);
  wgmma_begin();
#pragma unroll
  for (u32 i = 0; i < TILE_K / 16; i++)
    wgmma<N, A_BY_K, B_BY_K>(sums, a + i * OPERAND_STEP<A_BY_K>, b + i * OPERAND_STEP<B_BY_K>, !FIRST || i);
  wgmma_commit();
  at.advance(stages(RING));
  return read;
}
// The first step apart: were it in the loop, sums would look used before they are set, and be kept while nobody multiplies.
// CUT: K may end where the matrices do not.
template <Layout L, u32 N, u32 RING, bool CUT>
INLINE void multiply_tile(float (&sums)[N / 2], u32 K, u32 shared, RingAt& at) {
  const u32 l = lane(), group = l / 128;
  const bool speaks = l % 32 == 0;
  u32 last = start_step<L, N, RING, true, CUT>(sums, shared, group, at, K);
#pragma unroll 1
  for (u32 k = TILE_K; k < K; k += TILE_K) {
    const u32 read = start_step<L, N, RING, false, CUT>(sums, shared, group, at, K - k);
    wgmma_wait<1>();  // the step before
    if (speaks) arrive(last);
    last = read;
  }
  wgmma_wait<0>();
  if (speaks) arrive(last);
#pragma unroll
  for (u32 i = 0; i < N / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");  // no use of them moves before the wait
}
template <class Op, u32 N, u32 RING>
INLINE void multiply_tile(float (&sums)[N / 2], const Work& w, u32 K, u32 shared, RingAt& at) {
  if constexpr (!many_layouts<Op>()) return multiply_tile<layout<Op>(), N, RING, false>(sums, K, shared, at);
  const Layout layout = layout_of<Op>(w.kind);
  if (layout == TN) multiply_tile<TN, N, RING, true>(sums, K, shared, at);
  else if (layout == NN) multiply_tile<NN, N, RING, true>(sums, K, shared, at);
  else multiply_tile<NT, N, RING, true>(sums, K, shared, at);
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

  // The rows go to columns 64 c and on of the tile's result, whose row i is line(i) of it. THROUGH: past every cache.
  template <bool THROUGH, class Line> INLINE void store(const TileOperands& t, const TileResult& to, u32 c, Line line) const {
    const u32 l = lane() % 32, first = lane() / 32 * 16, column = l % 8 * 8;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 row = l / 8 + i * 4;
      const Vec16 v = load_shared(at + row * 128 + ((column * 2) ^ (row % 8 * 16)));
      Vec16* place = (Vec16*)(to.c + ((u64)line(first + row) * to.ldc + c * PANEL + column) / 4);
      if (first + row >= t.rows || c * PANEL + column >= t.cols) continue;
      if constexpr (THROUGH) write_through(place, v);
      else write(place, v);
    }
  }
};

// Plain rows of BF16.
// ONE: there is one panel a warp, not two.
template <u32 N, bool THROUGH, class Line>
INLINE void store_rows(const float (&sums)[N / 2], const TileOperands& t, const TileResult& to, u32 shared, bool one, Line line) {
#pragma unroll
  for (u32 c = 0; c < (N + PANEL - 1) / PANEL; c++) {
    const WarpPanel panel(one ? shared + RESULT_AT + lane() / 128 * 4 * WARP_PANEL : panel_at(shared, lane() / 128, c % 2));
    if (one) __syncwarp();  // the panel before has been read by all
#pragma unroll
    for (u32 i = 0; i < 4 && c * PANEL + i * 16 < N; i++) {
      const float* s = sums + c * 32 + i * 8;
      panel.put(i, pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7]));
    }
    __syncwarp();  // also: the panel of two before has been read by all
    panel.store<THROUGH>(t, to, c, line);
  }
}

// FP32 sums of a warp's 16 rows, 32 columns at a time, in its part of a panel. There lanes exchange them, so that each has four
// neighbours, and eight lanes 32 of a row: what they read and write of memory then are whole sectors.
constexpr u32 SUM_COLUMNS = 32;
static_assert(16 * SUM_COLUMNS * 4 == WARP_PANEL);
struct SumPanel {
  u32 at;
  INLINE SumPanel(u32 shared, bool one)
      : at((one ? shared + RESULT_AT + lane() / 128 * 4 * WARP_PANEL : panel_at(shared, lane() / 128, 0)) +
           lane() / 32 % 4 * WARP_PANEL) {}
  // Units of 16 bytes are exchanged within a row, so that no bank is asked twice at a time.
  INLINE u32 place(u32 row, u32 unit) const { return at + row * 128 + ((unit ^ (row * 2 % 8 | row / 4 % 2)) * 16); }

  // Columns [32 which, 32 which + 32). By a number that is known when it runs: so there is one copy of what follows.
  template <u32 N> INLINE void put(const float (&sums)[N / 2], u32 which) const {
    const u32 l = lane() % 32, row = l / 4, unit = l % 4 / 2, half = l % 2 * 8;
    __syncwarp();  // what was there has been read
#pragma unroll
    for (u32 c = 0; c < N / SUM_COLUMNS; c++) {
      if (c != which) continue;
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const float* s = sums + c * 16 + j * 4;
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

template <u32 N, class To>
INLINE void hand_sums_over(const float (&sums)[N / 2], const TileOperands& t, const SumPanel& panel, const To& to) {
  constexpr u32 TIMES = 4;  // of four rows; what a tile has in memory is read for all of them before any is stored
  const u32 l = lane() % 32, first = lane() / 32 * 16;
#pragma unroll 1
  for (u32 which = 0; which * SUM_COLUMNS < t.cols; which++) {
    panel.put<N>(sums, which);
    const u32 column = which * SUM_COLUMNS + l % 8 * 4;
    const auto row = [&](u32 i) { return i * 4 + l / 8; };
    const auto is_there = [&](u32 i) { return first + row(i) < t.rows && column < t.cols; };
    decltype(to.was(0, 0)) was[TIMES];
#pragma unroll
    for (u32 i = 0; i < TIMES; i++) {
      was[i] = {};
      if (is_there(i)) was[i] = to.was(first + row(i), column);
    }
#pragma unroll
    for (u32 i = 0; i < TIMES; i++)
      if (is_there(i)) to.put(first + row(i), column, panel.get(row(i), l % 8).at, was[i]);
  }
}
// The same of columns that alternate in blocks of GATED: four of gate and the four of up; column is that of one of both.
template <u32 N, class To>
INLINE void hand_gated_over(const float (&sums)[N / 2], const TileOperands& t, const SumPanel& panel, const To& to) {
  static_assert(2 * GATED == SUM_COLUMNS);
  const u32 l = lane() % 32, first = lane() / 32 * 16;
#pragma unroll 1
  for (u32 which = 0; which * SUM_COLUMNS < t.cols; which++) {
    panel.put<N>(sums, which);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 row = i * 8 + l / 4, unit = l % 4;
      const SumPanel::Four gate = panel.get(row, unit), up = panel.get(row, unit + 4);
      if (first + row < t.rows) to.put(first + row, which * GATED + unit * 4, gate.at, up.at);
    }
  }
}

// A tile of K = 0. Apart from the others: sums that may come from elsewhere than WGMMA would slow it down.
template <class Op> INLINE void hand_over_zeros(const typename Op::Params& p, const Work& w, const TileOperands& t) {
  const auto each_four = [&](auto put) {
    const u32 fours = (t.cols + 3) / 4;
#pragma unroll 1
    for (u32 i = lane(); i < t.rows * fours; i += WORKERS) put(i / fours, i % fours * 4);
  };
  if constexpr (requires { Op::sums_to(p, w); }) {
    const auto to = Op::sums_to(p, w);
    each_four([&](u32 row, u32 column) { to.put(row, column, {0, 0, 0, 0}, to.was(row, column)); });
  } else each_four([&](u32 row, u32 column) { Op::store(p, w, row, column, 0); });
}
// Sums that are rounded and stored are rows like others. Of the rest each kind has a loop of its own: to ask for each four what
// becomes of them took 11 us a tile of 128 x 256, this takes 3 to 5.
template <u32 N, class To>
INLINE void hand_sums_over_as(const float (&sums)[N / 2], const TileOperands& t, u32 shared, bool one, const To& to) {
  if constexpr (__is_same(To, SumsInto<SET_BF16>)) {
    const SumsTo& rows = to.to;
    store_rows<N, false>(sums, t, {(u64*)rows.c + rows.first / 4, rows.ld}, shared, one, [&](u32 row) { return rows.line(row); });
  } else hand_sums_over<N>(sums, t, SumPanel(shared, one), to);
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
// ONE: there is one panel a warp, not two.
template <class Op, u32 N>
INLINE void hand_over(const typename Op::Params& p, const Work& w, const float (&sums)[N / 2], const TileOperands& t,
                      u32 shared, bool one) {
  const Epilogue how = epilogue<Op>(w);
  if (how == ROWS) {
    if constexpr (requires { Op::result(p, w); })
      store_rows<N, through<Op>()>(sums, t, Op::result(p, w), shared, one, same_line);
    else if constexpr (requires { Op::store(p, w, 0u, 0u, 0ull); })
      hand_sums_over<N>(sums, t, SumPanel(shared, one), Stored<Op>{p, w});
    else static_assert(requires { Op::sums_to(p, w); }, "rows of this operator would go nowhere");
    return;
  }
  if constexpr (requires { Op::gated_to(p, w); })
    if (how == GATED_SUMS) return hand_gated_over<N>(sums, t, SumPanel(shared, one), Op::gated_to(p, w));
  if constexpr (requires { Op::sums_to(p, w); })
    if (how == SUMS) Op::sums_to(p, w).visit([&](const auto& to) { hand_sums_over_as<N>(sums, t, shared, one, to); });
}
}  // namespace target
