// bulk_ag: the tables of roles, in BF16 and in MXFP8.
#pragma once
#include "../schedule/bulk_ag.h"  // defines: BulkAgParams, BulkAgSchedule
#include "../work/bf16.h"
#include "mx_operands.h"
#include "tile_operands.h"

// Where tiles go.
struct BulkAgRows {
  using Schedule = BulkAgSchedule;

  DEVICE static u32 rows(const BulkAgParams& p, const Work& w) {
    const u32 left = p.M - w.row * p.m.tile_m;
    return left < p.m.tile_m ? left : p.m.tile_m;
  }
  DEVICE static TileResult result(const BulkAgParams& p, const Work& w) {
    return {p.c + ((u64)w.row * p.m.tile_m * p.ldc + Columns(w, w.part, p.N, p.tile_n).first) / 4, p.ldc};
  }
  DEVICE static void store(const BulkAgParams& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
};

struct BulkAg : BulkAgRows {
  using Params = BulkAgParams;
  static constexpr Layout LAYOUT = NN;

  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const Columns cols(w, w.part, p.N, p.tile_n);
    return {p.a + (u64)w.row * p.m.tile_m * (p.K / 8), p.b + cols.first / 8, rows(p, w), cols.count, p.K, p.K, p.ldc};
  }
  DEVICE static Block pulled(const Params& p, const Work& w) {
    return block_of(w, p.pulls, p.m, p.width / 8, p.gathered, p.shard_of[w.chunk]);
  }
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == PULL) copy_block(pulled(p, w));
  }
};

// In MXFP8 X is gathered for a product that contracts over its rows: its columns are. m deals `width` lines, all columns, to
// every rank that has rows; b is the columns of W, [N, K]. K is a multiple of 128, pulls have one slab; shard_of and gathered
// are not used.
struct BulkAgMxfp8Params : BulkAgParams {
  MxColumns x;
  MxScales a_scales, b_scales;
};
static_assert(sizeof(BulkAgMxfp8Params) == sizeof(BulkAgParams) + 224);

struct BulkAgMxfp8 : BulkAgRows {
  using Params = BulkAgMxfp8Params;
  static constexpr Element ELEMENT = MX_ELEMENT;

  DEVICE static const Params& all(const BulkAgParams& p) { return static_cast<const Params&>(p); }  // what a schedule has of them
  DEVICE static TileOperands operands(const BulkAgParams& of_schedule, const Work& w) {
    const Params& p = all(of_schedule);
    const Columns cols(w, w.part, p.N, p.tile_n);
    return mx_operands(mx_side(p.a, p.a_scales, (u64)w.row * p.m.tile_m, p.K), rows(p, w),
                       mx_side(p.b, p.b_scales, cols.first, p.K), cols.count, p.K, p.K);
  }
  DEVICE static void move(const Schedule& s, const Work& w) {
    if (w.kind == PULL) pull_columns<false>(all(s.p).x, s.p.m, w, s.p.pulls.slices);
  }
};
