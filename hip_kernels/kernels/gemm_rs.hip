// gemm_rs: the table of roles, and the entry point. What it computes and why it ends: schedule/gemm_rs.h.
// Oracle: kosmos_raw/numerics/oracles.py::gemm_rs.
#include "../schedule/gemm_rs.h"  // defines: GemmRsParams, GemmRsSchedule
#include "../work/bf16.h"
#include "../work/reduce.h"
#include "tile_operands.h"

struct GemmRs {
  using Schedule = GemmRsSchedule;
  using Params = GemmRsParams;

  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const u64 words = p.K / 8, row = p.m.first[w.chunk] + (u64)w.row * p.m.tile_m;
    const u32 col = w.part * p.tile_n, cols = p.N - col < p.tile_n ? p.N - col : p.tile_n;
    return {p.a + row * words, p.b + col * words, p.m.rows_in(w.chunk, w.row), cols, p.K, p.K, p.K};
  }
  // Past the caches: a peer may be polling for it. NaNs are quiet here, so none equals the sentinel.
  static constexpr bool THROUGH = true;
  DEVICE static TileResult result(const Params& p, const Work& w) {
    const u64 row = p.m.first[w.chunk] + (u64)w.row * p.m.tile_m;
    return {(u64*)(p.staging.of[p.g.rank] + p.staging.buffer_at()) + (row * p.N + (u64)w.part * p.tile_n) / 4, p.N};
  }
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write_through(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
  static constexpr bool STAGED = true;
  DEVICE static Addends addends(const Schedule& s, const Work& w) {
    const auto words = s.span(w);
    return {s.p.c, s.p.staging.of, s.partials_at(), words.begin, words.end};
  }
  // Every kind that is no TILE, all lanes.
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == POISON) poison_staging(p.staging, p.g.rank, w.part, s.poisons());
    if (w.kind == REDUCE) add_ranks<STAGED>(p.g, w, addends(s, w));
  }
};

#include "../target/run.h"
KOSMOS_KERNEL(gemm_rs, GemmRs)
