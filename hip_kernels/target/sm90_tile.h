// sm_90a: the GEMM tile, 128 rows by 256 columns, or by half as many (HALF; or in all of a launch). Two threads load it, one
// each operand, stage by stage of 64 k, into a ring in shared memory, and two warpgroups of workers multiply. In one of two ways:
//
//   in slices  of 128 columns, which they take in turn: one multiplies while the other hands its sums over. 8192 x 8192 x 1024
//              takes 0.9 of the time of the other way, and no product takes longer
//   wide       64 rows each. A quarter fewer bytes are loaded. Where matrices come from memory and tiles that share them are not
//              begun together, as those of experts are not, what one has loaded must still be in L2 when another one comes to
//              it: Llama 4's products took up to 1.5 times as long in slices. Three stages in the ring do (a fourth took 0.6 %
//              of the cycles off); where it was, rows of BF16 wait to be stored while the next tile is multiplied
//
// In the ring lie panels of 64 lines by 64 elements, 8 KiB. An operand whose lines are rows or columns of the tile is loaded
// by boxes of 128 lines; one whose lines are k by a box each panel.
#pragma once
#include "../kernels/tile_operands.h"
#include "../schedule/group.h"
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
}  // namespace target
