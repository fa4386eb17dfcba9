// ag_gemm: the table of roles, and the entry point. What it computes and why it ends: schedule/ag_gemm.h.
// Oracle: kosmos_raw/numerics/oracles.py::ag_gemm.
#include "../schedule/ag_gemm.h"  // defines: AgGemmParams, AgGemmSchedule
#include "../work/bf16.h"
#include "../work/move.h"
#include "tile_operands.h"

struct AgGemm {
  using Schedule = AgGemmSchedule;
  using Params = AgGemmParams;

  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const u64 words = p.K / 8, row = (u64)w.row * p.m.tile_m;
    const Vec16* a = w.chunk == p.g.rank ? p.shard_of[w.chunk] : p.gathered + p.m.first[w.chunk] * words;
    const Columns cols(w, w.part, p.N, p.tile_n);
    return {a + row * words, p.b + cols.first * words, p.m.rows_in(w.chunk, w.row), cols.count, p.K, p.K, p.K};
  }
  DEVICE static TileResult result(const Params& p, const Work& w) {
    const u64 row = p.m.first[w.chunk] + (u64)w.row * p.m.tile_m;
    return {p.c + (row * p.ldc + Columns(w, w.part, p.N, p.tile_n).first) / 4, p.ldc};
  }
  // Four columns of one row of the tile; column is a multiple of 4.
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
  DEVICE static Block pulled(const Params& p, const Work& w) {
    return block_of(w, p.pulls, p.m, p.K / 8, p.gathered, p.shard_of[w.chunk]);
  }
  // Every kind that is no TILE, all lanes. DRAIN is all waiting: nothing is left to do when its inputs are there.
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == PULL) copy_block(pulled(p, w));
  }
};

#include "../target/run.h"
KOSMOS_KERNEL(ag_gemm, AgGemm)
