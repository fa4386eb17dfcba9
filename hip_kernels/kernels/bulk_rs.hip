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
  DEVICE static Columns cols(const Params& p, const Work& w) {
    return {w, w.kind == SUM ? w.part : w.part / p.split.parts, p.N, p.tile_n};
  }
  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const u32 part = w.part % p.split.parts;
    const u64 k = p.split.begin(part);
    const Columns c = cols(p, w);
    return {p.a + (k * p.lda + (u64)w.row * p.m.tile_m) / 8, p.b + (k * p.ldc + c.first) / 8,
            rows(p, w.row), c.count, p.split.k(part, p.K), p.lda, p.ldc};
  }
  DEVICE static void store_f32(const Params& p, const Work& w, u32 row, u32 column, const float (&four)[4]) {
    const u64 at = ((u64)w.row * p.m.tile_m + row) * p.ldc + cols(p, w).first + column;
    if (p.split.parts == 1) put_four(p.c, at, (Into)p.into, four);
    else put_four(p.split.sums, w.part % p.split.parts * ((u64)p.M * p.ldc) + at, SET_F32, four);
  }
  static constexpr bool STAGED = false;
  DEVICE static Addends addends(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    const u64 words = p.width / 8, n = p.m.rows(p.g.rank) * words;
    return {p.out, p.x_of, p.m.first[p.g.rank] * words, n * w.part / p.slices, n * (w.part + 1) / p.slices};
  }
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == SUM) {
      const Columns c = cols(p, w);
      const u64 first = (u64)w.row * p.m.tile_m * p.ldc + c.first;
      sum_parts(p.split, (u64)p.M * p.ldc, p.c, (Into)p.into, first, p.ldc, rows(p, w.row), c.count);
    }
    if (w.kind == REDUCE) add_ranks<STAGED>(p.g, w, addends(s, w));
  }
};

#include "../target/run.h"
KOSMOS_KERNEL(bulk_rs, BulkRs)
