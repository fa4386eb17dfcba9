// gfx950: the loop, and a plain 128 x 128 BF16 tile: one buffer in LDS, no prefetch.
#pragma once
#include "../kernels/tile_operands.h"
#include "../schedule/trace.h"
#include "../work/bf16.h"

namespace target {
constexpr u32 TILE_M = 128, TILE_N = 128, TILE_K = 64;

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
using U32x4 = vec<u32, 4>;
using Bf16x8 = vec<__bf16, 8>;
using F32x16 = vec<float, 16>;

// Each wave makes 64 x 32 of the tile with v_mfma_f32_32x32x16_bf16. The product is made transposed (B's fragment first):
// then a lane holds four neighbouring columns of a row, which is what Op::store takes.
template <class Op> DEVICE inline void gemm_tile(const typename Op::Params& p, const Work& w) {
  constexpr u32 CHUNKS = TILE_K / 8;  // of 16 bytes a row
  constexpr u32 LD = CHUNKS + 1;      // the pad keeps 32 rows of a fragment off each other's banks
  __shared__ U32x4 a_rows[TILE_M * LD], b_rows[TILE_N * LD];
  const TileOperands t = Op::operands(p, w);
  const u32 wave = lane() / WAVE, m0 = wave / 4 * 64, n0 = wave % 4 * 32, r = lane() % 32, half = lane() % WAVE / 32;
  const u32 words = t.K / 8;
  F32x16 c[2] = {};
  for (u32 k0 = 0; k0 < words; k0 += CHUNKS) {
    for (u32 i = lane(); i < TILE_M * CHUNKS; i += WG_THREADS) {  // TILE_M == TILE_N
      const u32 row = i / CHUNKS, chunk = i % CHUNKS, k = k0 + chunk;
      U32x4 a = {}, b = {};
      if (row < t.rows && k < words) a = __builtin_bit_cast(U32x4, read(t.a + (u64)row * words + k));
      if (row < t.cols && k < words) b = __builtin_bit_cast(U32x4, read(t.b + (u64)row * words + k));
      a_rows[row * LD + chunk] = a;
      b_rows[row * LD + chunk] = b;
    }
    barrier();
#pragma unroll
    for (u32 k = 0; k < CHUNKS; k += 2) {
      const Bf16x8 b = __builtin_bit_cast(Bf16x8, b_rows[(n0 + r) * LD + k + half]);
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const Bf16x8 a = __builtin_bit_cast(Bf16x8, a_rows[(m0 + 32 * h + r) * LD + k + half]);
        c[h] = __builtin_amdgcn_mfma_f32_32x32x16_bf16(b, a, c[h], 0, 0, 0);
      }
    }
    barrier();
  }
#pragma unroll
  for (u32 h = 0; h < 2; h++)
#pragma unroll
    for (u32 i = 0; i < 16; i += 4) {
      const u32 row = m0 + 32 * h + r, col = n0 + 2 * i + 4 * half;
      if (row < t.rows && col < t.cols) Op::store(p, w, row, col, pack_bf16(c[h][i], c[h][i + 1], c[h][i + 2], c[h][i + 3]));
    }
}

template <class Op> DEVICE inline void run(const typename Op::Params& p) {
  __shared__ U32x4 box;
  typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg());
  const bool decides = __builtin_amdgcn_readfirstlane(lane() / WAVE) == 0;  // a whole wave, so that no branch here diverges
  Work w;
  if (decides) schedule.begin();
  for (;;) {
    barrier();  // all lanes are done with w and their stores are complete: what finish publishes
    if (decides) {
      if (w.kind != LEAVE) {
        schedule.finish(w);
        trace.mark(p.g, DONE, w);
      }
      w = schedule.next_work();
      trace.mark(p.g, CLAIMED, w);
      if (w.kind != LEAVE && !schedule.wait_inputs(w)) w = {};
      if (w.kind != LEAVE) trace.mark(p.g, READY, w);
      box = (U32x4){w.kind, w.chunk, w.row, w.part};
    }
    barrier();
    const U32x4 b = box;
    w = {(Kind)from_elected(b.x), from_elected(b.y), from_elected(b.z), from_elected(b.w)};
    if (w.kind == LEAVE) return;
    if (w.kind == TILE) gemm_tile<Op>(p, w);
    else Op::move(schedule, w);
  }
}
}  // namespace target

// The least number of threads is the greatest: with none given the compiler assumes 1024, and halves the registers.
#define KOSMOS_KERNEL(name, Op)                                                                                            \
  extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(512, 512))) void name##_main(const Op::Params p) {      \
    static_assert(target::WG_THREADS == 512);                                                                              \
    target::run<Op>(p);                                                                                                    \
  }
