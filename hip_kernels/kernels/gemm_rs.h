// gemm_rs: the tables of roles, in BF16 and in MXFP8. What moves is BF16 in both.
#pragma once
#include "../schedule/gemm_rs.h"  // defines: GemmRsParams, GemmRsSchedule
#include "../work/bf16.h"
#include "../work/reduce.h"
#include "mx_operands.h"
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

struct GemmRsMxfp8Params : GemmRsParams {  // K is a multiple of 128
  MxScales a_scales, b_scales;
};
static_assert(sizeof(GemmRsMxfp8Params) == sizeof(GemmRsParams) + 32);

struct GemmRsMxfp8 : GemmRs {
  using Params = GemmRsMxfp8Params;
  static constexpr Element ELEMENT = MX_ELEMENT;

  DEVICE static TileOperands operands(const GemmRsParams& of_schedule, const Work& w) {
    const Params& p = static_cast<const Params&>(of_schedule);  // what a schedule has of them
    const u32 col = w.part * p.tile_n, cols = p.N - col < p.tile_n ? p.N - col : p.tile_n;
    return mx_operands(mx_side(p.a, p.a_scales, p.m.first[w.chunk] + (u64)w.row * p.m.tile_m, p.K), p.m.rows_in(w.chunk, w.row),
                       mx_side(p.b, p.b_scales, col, p.K), cols, p.K, p.K);
  }
};
