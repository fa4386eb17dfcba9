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
    const u32 col = w.part * p.tile_n, cols = p.N - col < p.tile_n ? p.N - col : p.tile_n;
    return {p.a + row * (p.K / 8), p.b + col / 8, rows, cols, p.K, p.K, p.ldc};
  }
  DEVICE static TileResult result(const Params& p, const Work& w) {
    return {p.c + ((u64)w.row * p.m.tile_m * p.ldc + (u64)w.part * p.tile_n) / 4, p.ldc};
  }
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == PULL)
      pull_slice(p.gathered, p.shard_of[w.chunk], p.m, p.width, w.chunk, w.row, w.part, s.slices(w.chunk));
  }
};

#include "../target/run.h"
KOSMOS_KERNEL(bulk_ag, BulkAg)
