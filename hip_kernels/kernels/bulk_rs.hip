// bulk_rs: the table of roles, and the entry point. What it computes and why it ends: schedule/bulk_rs.h.
// Oracle: kosmos_raw/numerics/oracles.py::product.
#include "../schedule/bulk_rs.h"  // defines: BulkRsParams, BulkRsSchedule
#include "../work/reduce.h"
#include "../work/sum.h"
#include "tile_operands.h"

struct BulkRs {
  using Schedule = BulkRsSchedule;
  using Params = BulkRsParams;
  static constexpr Layout LAYOUT = NT;

  DEVICE static u32 rows(const Params& p, u32 row) {
    const u32 left = p.M - row * p.m.tile_m;
    return left < p.m.tile_m ? left : p.m.tile_m;
  }
  DEVICE static u32 cols(const Params& p, u32 column) {
    const u32 left = p.N - column * p.tile_n;
    return left < p.tile_n ? left : p.tile_n;
  }
  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const u32 column = w.part / p.split.parts, part = w.part % p.split.parts;
    const u64 k = p.split.begin(part);
    return {p.a + (k * p.lda + (u64)w.row * p.m.tile_m) / 8, p.b + (k * p.ldc + (u64)column * p.tile_n) / 8,
            rows(p, w.row), cols(p, column), p.split.k(part, p.K), p.lda, p.ldc};
  }
  DEVICE static void store_f32(const Params& p, const Work& w, u32 row, u32 column, const float (&four)[4]) {
    const u64 at = ((u64)w.row * p.m.tile_m + row) * p.ldc + (u64)(w.part / p.split.parts) * p.tile_n + column;
    if (p.split.parts == 1) put_four(p.c, at, (Into)p.into, four);
    else put_four(p.split.sums, w.part % p.split.parts * ((u64)p.M * p.ldc) + at, SET_F32, four);
  }
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == SUM) {
      const u64 first = (u64)w.row * p.m.tile_m * p.ldc + (u64)w.part * p.tile_n;
      sum_parts(p.split, (u64)p.M * p.ldc, p.c, (Into)p.into, first, p.ldc, rows(p, w.row), cols(p, w.part));
    }
    if (w.kind != REDUCE) return;
    const u64 words = p.width / 8, n = p.m.rows(p.g.rank) * words;
    sum_ranks<false>(p.g, w, p.out, p.x_of, p.m.first[p.g.rank] * words, n * w.part / p.slices, n * (w.part + 1) / p.slices);
  }
};

#include "../target/run.h"
KOSMOS_KERNEL(bulk_rs, BulkRs)
