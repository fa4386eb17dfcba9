// C = A B on one rank in each layout, through the schedule of ag_gemm: for tests and measurements of the tile.
// TN: A[M, K], B[N, K]. NN: A[M, K], B[K, N]. NT: A[K, M], B[K, N]. Lines are padded to 8 elements.
#include "../../hip_kernels/kernels/tile_operands.h"
#include "../../hip_kernels/schedule/ag_gemm.h"

template <Layout L> struct Gemm {
  using Schedule = AgGemmSchedule;
  using Params = AgGemmParams;
  static constexpr Layout LAYOUT = L;

  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const Columns cols(w, w.part, p.N, p.tile_n);
    const u32 row = w.row * p.m.tile_m;
    const u32 words = (p.K + 7) / 8, lda = L == NT ? (p.m.rows(0) + 7) / 8 * 8 : words * 8;
    const u32 ldb = L == TN ? words * 8 : p.ldc;
    const Vec16* a = p.shard_of[0] + (L == NT ? row / 8 : (u64)row * words);
    const u64 b = L == TN ? (u64)cols.first * words : cols.first / 8;
    return {a, p.b + b, p.m.rows_in(0, w.row), cols.count, p.K, lda, ldb};
  }
  DEVICE static void move(const Schedule&, const Work&) {}
};

// The same result by the other way out: four columns at a time.
template <Layout L> struct Fours : Gemm<L> {
  DEVICE static void store(const AgGemmParams& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const u64 first = (u64)w.row * p.m.tile_m * p.ldc + Columns(w, w.part, p.N, p.tile_n).first;
    target::write(p.c + (first + (u64)row * p.ldc + column) / 4, four_bf16);
  }
};
template <Layout L> struct Rows : Fours<L> {
  DEVICE static TileResult result(const AgGemmParams& p, const Work& w) {
    return {p.c + ((u64)w.row * p.m.tile_m * p.ldc + Columns(w, w.part, p.N, p.tile_n).first) / 4, p.ldc};
  }
};

#include "../../hip_kernels/target/run.h"
KOSMOS_KERNEL(tn, Rows<TN>)
KOSMOS_KERNEL(nn, Rows<NN>)
KOSMOS_KERNEL(nt, Rows<NT>)
KOSMOS_KERNEL(fours, Fours<TN>)
