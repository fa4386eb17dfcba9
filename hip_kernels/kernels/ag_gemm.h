// ag_gemm: the tables of roles, in BF16 and in MXFP8.
#pragma once
#include "../schedule/ag_gemm.h"  // defines: AgGemmParams, AgGemmSchedule
#include "../work/bf16.h"
#include "mx_operands.h"
#include "tile_operands.h"

// Where tiles go.
struct AgGemmRows {
  using Schedule = AgGemmSchedule;

  DEVICE static u64 first_row(const AgGemmParams& p, const Work& w) { return p.m.first[w.chunk] + (u64)w.row * p.m.tile_m; }
  DEVICE static TileResult result(const AgGemmParams& p, const Work& w) {
    return {p.c + (first_row(p, w) * p.ldc + Columns(w, w.part, p.N, p.tile_n).first) / 4, p.ldc};
  }
  // Four columns of one row of the tile; column is a multiple of 4.
  DEVICE static void store(const AgGemmParams& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
};

struct AgGemm : AgGemmRows {
  using Params = AgGemmParams;

  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const u64 words = p.K / 8, row = (u64)w.row * p.m.tile_m;
    const Vec16* a = w.chunk == p.g.rank ? p.shard_of[w.chunk] : p.gathered + p.m.first[w.chunk] * words;
    const Columns cols(w, w.part, p.N, p.tile_n);
    return {a + row * words, p.b + cols.first * words, p.m.rows_in(w.chunk, w.row), cols.count, p.K, p.K, p.K};
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

struct AgGemmMxfp8Params : AgGemmParams {  // K is a multiple of 128, pulls have one slab
  MxGathered mx;
  MxScales b_scales;
};
static_assert(sizeof(AgGemmMxfp8Params) == sizeof(AgGemmParams) + 96);

struct AgGemmMxfp8 : AgGemmRows {
  using Params = AgGemmMxfp8Params;
  static constexpr Element ELEMENT = MX_ELEMENT;

  DEVICE static const Params& all(const AgGemmParams& p) { return static_cast<const Params&>(p); }  // what a schedule has of them
  DEVICE static TileOperands operands(const AgGemmParams& of_schedule, const Work& w) {
    const Params& p = all(of_schedule);
    const Columns cols(w, w.part, p.N, p.tile_n);
    return mx_operands(gathered_side(p, w), p.m.rows_in(w.chunk, w.row), mx_side(p.b, p.b_scales, cols.first, p.K), cols.count,
                       p.K, p.K);
  }
  DEVICE static void move(const Schedule& s, const Work& w) {
    if (w.kind == PULL) pull_rows(all(s.p), w);
  }
};
