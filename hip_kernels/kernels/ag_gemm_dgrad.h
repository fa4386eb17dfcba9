// ag_gemm_dgrad: the table of roles, with a whole contraction or one that is cut in parts: two kernels, for the first
// hands BF16 over, which targets store in their own way.
#pragma once
#include "../schedule/ag_gemm_dgrad.h"  // defines: AgGemmDgradSchedule
#include "../work/bf16.h"
#include "../work/move.h"
#include "../work/sum.h"
#include "tile_operands.h"

struct AgGemmDgrad {
  using Schedule = AgGemmDgradSchedule;
  using Params = AgGemmParams;
  static constexpr Layout LAYOUT = NN;

  // B is [K, N] with rows of N rounded up to 8, as C.
  DEVICE static TileOperands operands_of(const Params& p, const Work& w, u32 column, u32 part) {
    const u64 words = p.K / 8, row = (u64)w.row * p.m.tile_m, k = p.split.begin(part);
    const Vec16* a = w.chunk == p.g.rank ? p.shard_of[w.chunk] : p.gathered + p.m.first[w.chunk] * words;
    const Columns cols(w, column, p.N, p.tile_n);
    const u32 rows = p.m.rows_in(w.chunk, w.row), ldb = (p.N + 7) / 8 * 8;
    return {a + row * words + k / 8, p.b + (k * ldb + cols.first) / 8, rows, cols.count, p.split.k(part, p.K), p.K, ldb};
  }
  DEVICE static u64 first_row(const Params& p, const Work& w) { return p.m.first[w.chunk] + (u64)w.row * p.m.tile_m; }

  DEVICE static TileOperands operands(const Params& p, const Work& w) { return operands_of(p, w, w.part, 0); }
  DEVICE static TileResult result(const Params& p, const Work& w) {
    return {p.c + (first_row(p, w) * p.ldc + Columns(w, w.part, p.N, p.tile_n).first) / 4, p.ldc};
  }
  DEVICE static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    const TileResult to = result(p, w);
    target::write(to.c + ((u64)row * to.ldc + column) / 4, four_bf16);
  }
  DEVICE static Block pulled(const Params& p, const Work& w) {
    return block_of(w, p.pulls, p.m, p.K / 8, p.gathered, p.shard_of[w.chunk]);
  }
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == PULL) copy_block(pulled(p, w));
  }
};

struct AgGemmDgradSplit {
  using Schedule = AgGemmDgradSchedule;
  using Params = AgGemmParams;
  static constexpr Layout LAYOUT = NN;

  DEVICE static u64 part_words(const Params& p) { return (u64)p.m.first[MAX_RANKS] * p.ldc; }
  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    return AgGemmDgrad::operands_of(p, w, w.part / p.split.parts, w.part % p.split.parts);
  }
  DEVICE static FloatsTo sums_to(const Params& p, const Work& w) {
    const u64 first = AgGemmDgrad::first_row(p, w) * p.ldc + (u64)(w.part / p.split.parts) * p.tile_n;
    return {p.split.sums, w.part % p.split.parts * part_words(p) + first, p.ldc};
  }
  DEVICE static Block pulled(const Params& p, const Work& w) { return AgGemmDgrad::pulled(p, w); }
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    if (w.kind == PULL) AgGemmDgrad::move(s, w);
    if (w.kind != SUM) return;
    const u32 col = w.part * p.tile_n, cols = p.N - col < p.tile_n ? p.N - col : p.tile_n;
    const u64 first = AgGemmDgrad::first_row(p, w) * p.ldc + col;
    sum_parts(p.split, part_words(p), p.c, SET_BF16, first, p.ldc, p.m.rows_in(w.chunk, w.row), cols);
  }
};
