// bulk_rs: the tables of roles, in BF16 and in MXFP8. What moves is BF16 in both.
#pragma once
#include "../schedule/bulk_rs.h"  // defines: BulkRsParams, BulkRsSchedule
#include "../work/reduce.h"
#include "../work/sum.h"
#include "mx_operands.h"
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
  DEVICE static SumsTo sums_to(const Params& p, const Work& w) {
    const u64 first = (u64)w.row * p.m.tile_m * p.ldc + cols(p, w).first;
    if (p.split.parts == 1) return {p.c, first, p.ldc, (Into)p.into};
    return {p.split.sums, w.part % p.split.parts * ((u64)p.M * p.ldc) + first, p.ldc, SET_F32};
  }
  static constexpr bool STAGED = false;
  DEVICE static Addends addends(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    const u64 words = p.width / 8, n = p.m.rows(p.g.rank) * words, first = p.m.first[p.g.rank] * words;
    return {p.out, p.x_of, first, part_begin(first, n, w.part, p.slices), part_begin(first, n, w.part + 1, p.slices)};
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

// The columns of both factors: a is [M, K], b [N, K], K a multiple of 128.
struct BulkRsMxfp8Params : BulkRsParams {
  MxScales a_scales, b_scales;
};
static_assert(sizeof(BulkRsMxfp8Params) == sizeof(BulkRsParams) + 32);

struct BulkRsMxfp8 : BulkRs {
  using Params = BulkRsMxfp8Params;
  static constexpr Layout LAYOUT = TN;
  static constexpr Element ELEMENT = MX_ELEMENT;

  DEVICE static TileOperands operands(const BulkRsParams& of_schedule, const Work& w) {
    const Params& p = static_cast<const Params&>(of_schedule);  // what a schedule has of them
    const u32 part = w.part % p.split.parts, k = p.split.begin(part);
    const Columns c = cols(p, w);
    return mx_operands(mx_side(p.a, p.a_scales, (u64)w.row * p.m.tile_m, p.K, k), rows(p, w.row),
                       mx_side(p.b, p.b_scales, c.first, p.K, k), c.count, p.split.k(part, p.K), p.K);
  }
};
