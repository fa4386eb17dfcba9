// gemm_rs_push: the tables of roles, in BF16 and in MXFP8. What is sent is BF16 in both.
#pragma once
#include "../schedule/gemm_rs_push.h"  // defines: GemmRsPushParams, GemmRsPushSchedule
#include "../work/bf16.h"
#include "mx_operands.h"
#include "tile_operands.h"

struct GemmRsPush {
  using Schedule = GemmRsPushSchedule;
  using Params = GemmRsPushParams;

  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const u64 words = p.K / 8, row = p.m.first[w.chunk] + (u64)w.row * p.m.tile_m;
    const Columns cols(w, w.part, p.N, p.tile_n);
    return {p.a + row * words, p.b + cols.first * words, p.m.rows_in(w.chunk, w.row), cols.count, p.K, p.K, p.K};
  }
  // What rank q sends of a tile, at the tile's owner.
  DEVICE static Vec16* partial(const Params& p, const Work& w, u32 q) {
    return p.inbox.of[w.chunk] + GemmRsPushSchedule(p).slot(w, q) * (p.m.tile_m * p.tile_n / 8);
  }
  DEVICE static TileResult own_rows(const Params& p, const Work& w) {
    return {p.c + ((u64)w.row * p.m.tile_m * p.N + Columns(w, w.part, p.N, p.tile_n).first) / 4, p.N};
  }
  // Own rows: the ranks' values are added in FP32, in rank order, and rounded once. The first is taken as it is.
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const u64 at = ((u64)row * p.tile_n + (w.kind == HALF ? w.part % 2 * (p.tile_n / 2) : 0) + column) / 4;
    if (w.chunk != p.g.rank) return target::write((u64*)partial(p, w, p.g.rank) + at, four_bf16);
    float x[4] = {};
    for (u32 q = 0; q < p.g.ranks; q++) {
      const u64 v = q == p.g.rank ? four_bf16 : target::read((const u64*)partial(p, w, q) + at);
      for (u32 j = 0; j < 4; j++) {
        const float y = from_bf16(v >> 16 * j & 0xffff);
        x[j] = q ? x[j] + y : y;
      }
    }
    const TileResult to = own_rows(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, pack_bf16(x[0], x[1], x[2], x[3]));
  }
  // DRAIN is all waiting.
  DEVICE static void move(const Schedule&, const Work&) {}
};

struct GemmRsPushMxfp8Params : GemmRsPushParams {  // K is a multiple of 128
  MxScales a_scales, b_scales;
};
static_assert(sizeof(GemmRsPushMxfp8Params) == sizeof(GemmRsPushParams) + 32);

struct GemmRsPushMxfp8 : GemmRsPush {
  using Params = GemmRsPushMxfp8Params;
  static constexpr Element ELEMENT = MX_ELEMENT;

  DEVICE static TileOperands operands(const GemmRsPushParams& of_schedule, const Work& w) {
    const Params& p = static_cast<const Params&>(of_schedule);  // what a schedule has of them
    const Columns cols(w, w.part, p.N, p.tile_n);
    return mx_operands(mx_side(p.a, p.a_scales, p.m.first[w.chunk] + (u64)w.row * p.m.tile_m, p.K), p.m.rows_in(w.chunk, w.row),
                       mx_side(p.b, p.b_scales, cols.first, p.K), cols.count, p.K, p.K);
  }
};
