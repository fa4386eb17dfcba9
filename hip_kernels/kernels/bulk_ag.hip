// bulk_ag: the table of roles, and the entry point. What it computes and why it ends: schedule/bulk_ag.h.
// Oracle: kosmos_raw/numerics/oracles.py::product.
#include "../schedule/bulk_ag.h"  // defines: BulkAgParams, BulkAgSchedule
#include "../work/bf16.h"
#include "../work/move.h"
#include "tile_operands.h"

struct BulkAg {
  using Schedule = BulkAgSchedule;
  using Params = BulkAgParams;
  static constexpr Layout LAYOUT = NN;

  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const u64 row = (u64)w.row * p.m.tile_m;
    const u32 rows = p.M - row < p.m.tile_m ? p.M - row : p.m.tile_m;
    const Columns cols(w, w.part, p.N, p.tile_n);
    return {p.a + row * (p.K / 8), p.b + cols.first / 8, rows, cols.count, p.K, p.K, p.ldc};
  }
  DEVICE static TileResult result(const Params& p, const Work& w) {
    return {p.c + ((u64)w.row * p.m.tile_m * p.ldc + Columns(w, w.part, p.N, p.tile_n).first) / 4, p.ldc};
  }
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
  DEVICE static Block pulled(const Params& p, const Work& w) {
    return block_of(w, p.pulls, p.m, p.width / 8, p.gathered, p.shard_of[w.chunk]);
  }
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == PULL) copy_block(pulled(p, w));
  }
};

#include "../target/run.h"
KOSMOS_KERNEL(bulk_ag, BulkAg)
