// gfx950: the GEMM tile, 256 x 256 by eight waves, as a stream of K steps that does not stop where a tile ends.
//
// Waves stand 2 x 4; each makes 128 x 64 of the tile, in two halves of 64 rows. A K step has two phases, one a half, and a
// phase two parts: read fragments and start loads, then multiply; a barrier ends either. The two waves of a SIMD belong to
// two groups that run one barrier apart, so that one reads while the other multiplies, and the matrix core does not idle.
//
// Two promises make this right, for either group:
//   What a load part reads has arrived. It was asked for at least a K step ago: the LOADS youngest loads may be on
//   their way when a load part ends, no others, and the barrier behind the wait tells all waves.
//   What a load part overwrites nobody reads. A load part ends with wait_lds, so what it has read is in registers.
#pragma once
#include "../kernels/tile_operands.h"
#include "gfx950_scales.h"

namespace target {
constexpr u32 TILE_M = 256, TILE_N = 256;
constexpr u32 LEAST_STEPS = 3;    // the schedule is asked two K steps before a tile's end, and not in its first

// Rows of the matrix instruction. 32: half as many instructions, each long enough to hide a barrier.
template <class Op> constexpr u32 mfma_rows() {
  if constexpr (requires { Op::MFMA_ROWS; }) return Op::MFMA_ROWS;
  else return 32;
}

// MANY: of any layout, which a turn names.
template <Layout L, u32 R, Element E, bool MANY = false> struct Tile {
  static_assert(E == BF16 || (L == TN && !MANY), "MXFP8 is quantised along the contraction, and lies so");
  static constexpr Element ELEMENT = E;
  static constexpr u32 ROWS = R, BYTES = E == MXFP8 ? 1 : 2;
  using A = typename OperandOf<MANY, L != NT, TILE_M / 4, ROWS, BYTES>::Type;
  using B = typename OperandOf<MANY, L == TN, TILE_N / 8, ROWS, BYTES>::Type;
  using Sums = vec<float, ROWS * ROWS / 64>;  // of a lane, from one matrix instruction
  static constexpr u32 DEPTH = A::DEPTH, BLOCKS_M = A::BLOCKS, BLOCKS_N = B::BLOCKS, STEP = A::STEP;
  static constexpr u32 LOADS = 8 + (E == MXFP8);  // of a wave, in a K step
  static constexpr u32 LDS_BYTES = OPERAND_BYTES + (E == MXFP8 ? 2 * SCALE_BYTES : 0);

  const u32 wave, l, slice_a, slice_b;
  A a;
  B b;
  Scales<ROWS> scales;  // of MXFP8 alone
  u32 K = 0, steps = 0, u = 0;  // of the tile that is being loaded: its K, its K steps, and the one to be loaded next
  i32 left = 0;                 // k that are left of it at K step u
  u32 buffer = 0;               // bytes to the one that is being read
  U32x4 a_part[BLOCKS_M][DEPTH], b_part[2][BLOCKS_N][DEPTH];
  Sums sums[2][2][BLOCKS_M][BLOCKS_N];  // [half of A][half of B]

  DEVICE explicit Tile(LdsBytes* lds)
      : wave(from_elected(lane() / WAVE)), l(lane() % WAVE), slice_a(wave / 4), slice_b(wave % 4) {
    a.place(lds, wave, slice_a, l);
    b.place(lds + B_BYTES, wave, slice_b, l);
    if constexpr (E == MXFP8) scales.place(lds + OPERAND_BYTES, wave, a.row_of(0, slice_a, 0), b.row_of(0, slice_b, 0));
  }

  // ---- loads. All of a K step but the second half of A, and that: what a phase has just freed.
  DEVICE void load_most(u32 to) {
    if (__builtin_expect(left < (i32)STEP, 0)) {
      if constexpr (E == MXFP8) scales.load_end(to, left, l);
      a.load_end(0, to, left, wave, l);
      b.load_end(0, to, left, wave, l);
      b.load_end(1, to, left, wave, l);
    } else {
      if constexpr (E == MXFP8) scales.load(to, l);
      a.load(0, to);
      b.load(0, to);
      b.load(1, to);
    }
    if constexpr (E == MXFP8) advance(scales.from, scales.step_bytes);
    advance(b.from, b.step_bytes);
  }
  DEVICE void load_rest(u32 to) {
    if (__builtin_expect(left < (i32)STEP, 0)) a.load_end(1, to, left, wave, l);
    else a.load(1, to);
    advance(a.from, a.step_bytes);
    u++;
    left -= STEP;
  }
  DEVICE void turn(const TileOperands& t, Layout layout) {
    a.turn(t.a, t.rows, t.lda, wave, l, layout != NT);
    b.turn(t.b, t.cols, t.ldb, wave, l, layout == TN);
    if constexpr (E == MXFP8) scales.turn(t, wave);
    K = t.K;
    steps = (K + STEP - 1) / STEP;
    if (steps < LEAST_STEPS) steps = LEAST_STEPS;
    u = 0;
    left = (i32)K;
  }
  // The stream ends with the tile that is being multiplied.
  DEVICE void turn_off() {
    a.turn_off();
    b.turn_off();
    if constexpr (E == MXFP8) scales.turn_off();
    u = 0;
    left = 1 << 30;  // whole loads, of nothing
  }

  // ---- multiplications. B's fragment is the first operand: so a lane gets four neighbouring columns of one row of C.
  template <u32 H, bool FIRST> DEVICE void multiply() {
    if constexpr (FIRST) hold_parts();
    else hold_sums<H>();
    multiply_blocks<H, FIRST, 0>();
    // Sums that begin at zero are new registers, and for the scaled instructions compilers take those of a fragment that is
    // read for the last time. A result must not overlap a factor: the instruction writes it while it reads.
    if constexpr (FIRST && E == MXFP8) hold_parts();
    hold_sums<H>();
  }
  // Matrix instruction I of a part and all after it. By number, for what picks a scale's byte must be a constant.
  static constexpr u32 INSTRUCTIONS_K = E == MXFP8 ? DEPTH / 2 : DEPTH;
  template <u32 H, bool FIRST, u32 I> DEVICE void multiply_blocks() {
    if constexpr (I < INSTRUCTIONS_K * BLOCKS_M * 2 * BLOCKS_N) {
      constexpr u32 n = I % BLOCKS_N, h = I / BLOCKS_N % 2, m = I / BLOCKS_N / 2 % BLOCKS_M, k = I / BLOCKS_N / 2 / BLOCKS_M;
      Sums& c = sums[H][h][m][n];
      const Sums before = FIRST && k == 0 ? Sums{} : c;
      if constexpr (E == MXFP8) {
        const I32x8 x = both(b_part[h][n][2 * k], b_part[h][n][2 * k + 1]), y = both(a_part[m][2 * k], a_part[m][2 * k + 1]);
        constexpr u32 at_x = scale_at<ROWS>(h * BLOCKS_N + n, k), at_y = scale_at<ROWS>(m, k);
        const int scale_x = (int)scales.of_b, scale_y = (int)scales.of_a[H];
        if constexpr (ROWS == 16)
          c = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, before, 0, 0, at_x, scale_x, at_y, scale_y);
        else c = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(x, y, before, 0, 0, at_x, scale_x, at_y, scale_y);
      } else {
        const Bf16x8 x = __builtin_bit_cast(Bf16x8, b_part[h][n][k]), y = __builtin_bit_cast(Bf16x8, a_part[m][k]);
        if constexpr (ROWS == 16) c = __builtin_amdgcn_mfma_f32_16x16x32_bf16(x, y, before, 0, 0, 0);
        else c = __builtin_amdgcn_mfma_f32_32x32x16_bf16(x, y, before, 0, 0, 0);
      }
      multiply_blocks<H, FIRST, I + 1>();
    }
  }
  static DEVICE I32x8 both(U32x4 x, U32x4 y) {
    return __builtin_bit_cast(I32x8, __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7));
  }
  // No code, but an order. Matrix instructions touch no memory, so no barrier or fence holds them, and compilers do move
  // whole clusters of them into the next load part. What works on registers that volatile asm names stays on its side.
  template <u32 H> DEVICE void hold_sums() {
#pragma unroll
    for (u32 h = 0; h < 2; h++)
#pragma unroll
      for (u32 m = 0; m < BLOCKS_M; m++)
#pragma unroll
        for (u32 n = 0; n < BLOCKS_N; n++) asm volatile("" : "+v"(sums[H][h][m][n]));
  }
  DEVICE void hold_parts() {
#pragma unroll
    for (u32 k = 0; k < DEPTH; k++) {
#pragma unroll
      for (u32 m = 0; m < BLOCKS_M; m++) asm volatile("" : "+v"(a_part[m][k]));
#pragma unroll
      for (u32 n = 0; n < BLOCKS_N; n++) asm volatile("" : "+v"(b_part[0][n][k]), "+v"(b_part[1][n][k]));
    }
  }

  template <u32 H> DEVICE void read_a() {
    if constexpr (!A::ANY) read_a_as<A::ALONG, H>();
    else if (a.reads_along) read_a_as<true, H>();
    else read_a_as<false, H>();
  }
  template <u32 H> DEVICE void read_b() { read_b_as<B::ALONG, H>(); }
  DEVICE void read_both() {  // one branch for both halves of B: behind another one compilers wait for what is read before
    if (b.reads_along) {
      read_b_as<true, 0>();
      read_b_as<true, 1>();
    } else {
      read_b_as<false, 0>();
      read_b_as<false, 1>();
    }
    read_a<0>();
  }
  template <bool ALONG_K, u32 H> DEVICE void read_a_as() {
#pragma unroll
    for (u32 k = 0; k < DEPTH; k++)
#pragma unroll
      for (u32 m = 0; m < BLOCKS_M; m++) a_part[m][k] = a.template read<ALONG_K>(H, m, k, buffer);
  }
  template <bool ALONG_K, u32 H> DEVICE void read_b_as() {
#pragma unroll
    for (u32 k = 0; k < DEPTH; k++)
#pragma unroll
      for (u32 n = 0; n < BLOCKS_N; n++) b_part[H][n][k] = b.template read<ALONG_K>(H, n, k, buffer);
  }

  // ---- the stream
  // Fills the buffers. All of it arrives here, for a tile's first step does not wait for the stores of a tile before it.
  DEVICE void start(const TileOperands& t, Layout layout) {
    turn(t, layout);
    buffer = 0;
    load_most(0);
    load_rest(0);
    load_most(BUFFER_BYTES);
    wait_lds();
    wait_memory<0>();
    meet();
    if (slice_a) meet();  // from here on, the second group runs one barrier behind the first
  }
  DEVICE void stop() {
    if (!slice_a) meet();
    wait_memory<0>();  // no load may reach LDS after this
  }

  // The end of a load part. Nothing stands between a barrier and the multiplications; those of one group go before what
  // the other group issues.
  template <u32 YOUNGER, bool WITH_SCALES> DEVICE void part_ends() {
    wait_lds();
    if constexpr (WITH_SCALES) scales.pick(l);
    wait_memory<YOUNGER>();
    __builtin_amdgcn_s_setprio(1);
    meet();
  }
  DEVICE void multiplied() {
    meet();
    __builtin_amdgcn_s_setprio(0);
  }

  // One K step. FIRST: of a tile; sums begin at zero, and STORES stores of the last tile are younger than the loads waited
  // for. The director is asked at each phase's begin, when fragments hold no registers.
  template <bool FIRST, u32 STORES, class Director> DEVICE void step(Director& director) {
    constexpr u32 YOUNGER = LOADS + (FIRST ? STORES : 0);
    if constexpr (!FIRST)
      if (__builtin_expect(u + 1 == steps, 0)) {
        director.template look_ahead<E>();
        if constexpr (MANY) wait_lds();  // or the compiler waits where both ways meet, in each step
      }
    if constexpr (MANY) read_both();
    else {
      read_b<0>();
      read_a<0>();
      read_b<1>();
    }
    if constexpr (E == MXFP8) scales.read(buffer, l);  // all of them: the next load part overwrites them
    load_rest(buffer ^ BUFFER_BYTES);
    part_ends<YOUNGER, E == MXFP8>();
    multiply<0, FIRST>();
    multiplied();

    if constexpr (!FIRST)
      if (__builtin_expect(u == SECOND_STEP_AT, 0)) director.finish_last();
    read_a<1>();
    if (__builtin_expect(u == steps, 0)) director.turn(*this);
    load_most(buffer);
    part_ends<YOUNGER, false>();
    multiply<1, FIRST>();
    multiplied();
    buffer ^= BUFFER_BYTES;
  }
  // Loads run ahead of multiplications: u at a tile's end, and in the second phase of its second K step.
  static constexpr u32 END_AT = 1, SECOND_STEP_AT = 3;

  // Before a tile's first K step: from here on fragments are read as it lies.
  DEVICE void begin(Layout layout) {
    if constexpr (MANY) {
      a.begin(layout != NT, wave, slice_a, l);
      b.begin(layout == TN, wave, slice_b, l);
    }
  }
  // All K steps of a tile. What the director may do in between is in gfx950_run.h.
  template <u32 STORES, class Director> DEVICE void multiply_tile(Director& director) {
    step<true, STORES>(director);
    do step<false, STORES>(director);
    while (u != END_AT);
  }
};
}  // namespace target
