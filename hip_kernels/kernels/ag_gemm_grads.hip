// ag_gemm_grads: the table of roles, and the entry point. What it computes and why it ends: schedule/ag_gemm_grads.h.
// Oracle: kosmos_raw/numerics/oracles.py::product, of dequantised operands.
#include "../schedule/ag_gemm_grads.h"  // defines: AgGemmGradsParams, AgGemmGradsSchedule
#include "../work/bf16.h"
#include "../work/sum.h"
#include "mx_operands.h"

// Products of matrices that are quantised along the contraction are all TN.
struct AgGemmGrads {
  using Schedule = AgGemmGradsSchedule;
  using Params = AgGemmGradsParams;
  static constexpr Element ELEMENT = MX_ELEMENT;

  DEVICE static u64 first_row(const Params& p, const Work& w) {
    return (w.kind == WGRAD ? 0 : p.m.first[w.chunk]) + (u64)w.row * p.m.tile_m;
  }
  DEVICE static Columns cols(const Params& p, const Work& w) {
    return {w, w.part, w.kind == WGRAD ? p.gradient_N : p.N, p.tile_n};
  }
  DEVICE static TileOperands gradient_operands(const Params& p, const Work& w) {
    const MxColumns& c = p.columns;
    const u64 first = first_row(p, w);
    const u32 left = p.features - (u32)first, rows = left < p.m.tile_m ? left : p.m.tile_m;
    const Vec16* dy = target::MULTIPLIES_MXFP8 ? c.gathered : c.mx.values;
    const Columns to = cols(p, w);
    const u32 depth = c.depth();
    return mx_operands(mx_side(dy, {(const u32*)c.mx.scales, c.ld, 0}, first, depth), rows,
                       mx_side(p.x, p.x_scales, to.first, depth), to.count, depth, depth);
  }
  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    if (w.kind == WGRAD) return gradient_operands(p, w);
    const Columns to = cols(p, w);
    return mx_operands(gathered_side(p, w), p.m.rows_in(w.chunk, w.row), mx_side(p.b, p.b_scales, to.first, p.K), to.count, p.K,
                       p.K);
  }

  DEVICE static Epilogue epilogue(const Work& w) { return w.kind == WGRAD ? SUMS : ROWS; }
  DEVICE static TileResult result(const Params& p, const Work& w) {
    return {p.c + (first_row(p, w) * p.ldc + cols(p, w).first) / 4, p.ldc};
  }
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
  DEVICE static SumsTo sums_to(const Params& p, const Work& w) {
    return {p.gradient, first_row(p, w) * p.gradient_ld + cols(p, w).first, p.gradient_ld, (Into)p.into};
  }

  DEVICE static void move(const Schedule& s, const Work& w) {
    if (w.kind == PULL) pull_rows(s.p, w);
    if (w.kind == PULL_COLUMNS) pull_columns<true>(s.p.columns, s.p.column_m, w, s.p.column_pulls.slices);
  }
};

#include "../target/run.h"
KOSMOS_KERNEL(ag_gemm_grads, AgGemmGrads)
