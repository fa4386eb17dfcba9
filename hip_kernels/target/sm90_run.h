// sm_90a: the loop, in which one thread decides ahead of the 256 that work, and a plain 128 x 128 BF16 tile: one buffer in
// shared memory, no prefetch.
#pragma once
#include "../kernels/tile_operands.h"
#include "../schedule/trace.h"
#include "../work/bf16.h"

namespace target {
constexpr u32 TILE_M = 128, TILE_N = 128, TILE_K = 64;

DEVICE inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE inline void init(u64* mbarrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(arrivals) : "memory");
}
DEVICE inline void arrive(u64* mbarrier) {  // releases to the WG
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(mbarrier)) : "memory");
}
DEVICE inline void wait(u64* mbarrier, u32 parity) {  // acquires. The braces make the label local to each copy
  asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
               ::"r"(shared_address(mbarrier)), "r"(parity) : "memory");
}

// Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE inline void load_matrices(u32 (&v)[4], const Vec16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(shared_address(row)));
}
DEVICE inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Each warp makes 64 x 32 of the tile.
template <class Op> DEVICE inline void gemm_tile(const typename Op::Params& p, const Work& w) {
  constexpr u32 CHUNKS = TILE_K / 8;  // of 16 bytes a row
  constexpr u32 LD = CHUNKS + 1;      // the pad keeps the 8 rows of a matrix off each other's banks
  __shared__ Vec16 a_rows[TILE_M * LD], b_rows[TILE_N * LD];
  const TileOperands t = Op::operands(p, w);
  const u32 warp = lane() / 32, l = lane() % 32, m0 = warp / 4 * 64, n0 = warp % 4 * 32, words = t.K / 8;
  float c[4][4][4] = {};
  for (u32 k0 = 0; k0 < words; k0 += CHUNKS) {
#pragma unroll
    for (u32 i = lane(); i < TILE_M * CHUNKS; i += WORKERS) {  // TILE_M == TILE_N
      const u32 row = i / CHUNKS, chunk = i % CHUNKS, k = k0 + chunk;
      Vec16 a = {}, b = {};
      if (row < t.rows && k < words) a = read(t.a + (u64)row * words + k);
      if (row < t.cols && k < words) b = read(t.b + (u64)row * words + k);
      a_rows[row * LD + chunk] = a;
      b_rows[row * LD + chunk] = b;
    }
    barrier();
#pragma unroll
    for (u32 k = 0; k < CHUNKS; k += 2) {
      u32 a[4][4], b[2][4];  // b: two blocks of 8 columns in each
#pragma unroll
      for (u32 i = 0; i < 4; i++) load_matrices(a[i], a_rows + (m0 + 16 * i + l % 16) * LD + k + l / 16);
#pragma unroll
      for (u32 j = 0; j < 2; j++) load_matrices(b[j], b_rows + (n0 + 16 * j + l / 16 * 8 + l % 8) * LD + k + l / 8 % 2);
#pragma unroll
      for (u32 i = 0; i < 4; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) multiply(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
    barrier();
  }
  // A lane holds two columns of row l / 4 and of the row 8 below. Neighbours swap, so that each gets four of one row.
  const bool odd = l % 2;
#pragma unroll
  for (u32 i = 0; i < 4; i++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      const float(&e)[4] = c[i][j];
      const float x = __shfl_xor_sync(~0u, odd ? e[0] : e[2], 1), y = __shfl_xor_sync(~0u, odd ? e[1] : e[3], 1);
      const u32 row = m0 + 16 * i + l / 4 + 8 * odd, col = n0 + 8 * j + l % 4 / 2 * 4;
      if (row < t.rows && col < t.cols)
        Op::store(p, w, row, col, odd ? pack_bf16(x, y, e[2], e[3]) : pack_bf16(e[0], e[1], x, y));
    }
}

// One box of shared memory between the two sides. As soon as the workers have taken work n, the deciding thread claims work
// n + 1 and waits for its inputs: one ahead, never two. Legal while no work of the workers waits for anything itself, or for
// nothing that the claim of n + 1 could be holding.
struct Box {
  alignas(16) u32 work[4];
  u64 full, empty;
};

template <class Op> DEVICE inline void decide(const typename Op::Params& p, Box& box) {
  typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg());
  schedule.begin();
  for (u32 n = 0;; n++) {
    wait(&box.empty, n % 2 ^ 1);  // the first one finds the box empty
    Work w = schedule.next_work();
    trace.mark(p.g, CLAIMED, w);
    if (w.kind != LEAVE && !schedule.wait_inputs(w)) w = {};
    if (w.kind != LEAVE) trace.mark(p.g, READY, w);
    box.work[0] = w.kind, box.work[1] = w.chunk, box.work[2] = w.row, box.work[3] = w.part;
    arrive(&box.full);  // what wait_inputs acquired, the workers have with it
    if (w.kind == LEAVE) return;
  }
}

template <class Op> DEVICE inline void work(const typename Op::Params& p, Box& box) {
  const typename Op::Schedule schedule(p);  // never begun: finish and move need nothing but the params
  Trace trace(TRACE_ROWS * wg() + 1);
  for (u32 n = 0;; n++) {
    wait(&box.full, n % 2);
    const Work w = {(Kind)box.work[0], box.work[1], box.work[2], box.work[3]};
    arrive(&box.empty);
    if (w.kind == LEAVE) return;
    if (w.kind == TILE) gemm_tile<Op>(p, w);
    else Op::move(schedule, w);
    barrier();  // all lanes' stores, then the release in finish
    if (lane() == 0) {
      schedule.finish(w);
      trace.mark(p.g, DONE, w);
    }
  }
}

template <class Op> DEVICE inline void run(const typename Op::Params& p) {
  __shared__ Box box;
  if (threadIdx.x == 0) {
    init(&box.full, 1);
    init(&box.empty, WORKERS);
  }
  __syncthreads();  // the last barrier of all threads: the two sides part here
  if (threadIdx.x == 0) decide<Op>(p, box);
  if (threadIdx.x >= FIRST_WORKER) work<Op>(p, box);
}
}  // namespace target

// __grid_constant__: without it the struct is copied to a stack frame of every thread.
#define KOSMOS_KERNEL(name, Op)                                                                                            \
  extern "C" __global__ void __launch_bounds__(target::WG_THREADS, 1) name##_main(const __grid_constant__ Op::Params p) {  \
    target::run<Op>(p);                                                                                                    \
  }
