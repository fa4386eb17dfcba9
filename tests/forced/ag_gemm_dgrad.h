// ag_gemm_dgrad for the player of histories: as ag_gemm, with a weight that lies the other way, and a split contraction.
#pragma once
#include "../../hip_kernels/kernels/ag_gemm_dgrad.h"
#include "history.h"

constexpr u32 MAX_LD = (MAX_COLS + 7) / 8 * 8, MAX_PARTS = 2;

struct DgradRank {
  u64 *shard, *gathered, *b, *c, *sums;
  AgGemmParams params;
};
constinit inline DgradRank dgrad_ranks[MAX_RANKS]{};

inline void dgrad_memory(u32 me) {
  constexpr u32 ROW_WORDS = target::MAX_K / 4;
  DgradRank& r = dgrad_ranks[me];
  r.shard = target::new_data(MAX_ROWS * ROW_WORDS);
  r.gathered = target::new_data(MAX_ROWS * ROW_WORDS);
  r.b = target::new_data(target::MAX_K * MAX_LD / 4);
  r.c = target::new_data(MAX_ROWS * MAX_LD / 4);
  r.sums = target::new_data(MAX_PARTS * MAX_ROWS * MAX_LD / 2);
}

inline u32 dgrad_counters(const Shape& s) {
  const u32 most = MAX_COLS / 8 + 1;  // tiles in a row; what is not used is cleared all the same
  return 1 + MAX_RANKS + H.s.ranks * s.m.tile_rows_max * (1 + most);
}

inline void dgrad_prepare(u32 me, u32 launch) {
  const Shape& s = H.shape(me, launch);
  DgradRank& r = dgrad_ranks[me];
  Random dice(mix(H.seed, me, launch));
  AgGemmParams p{};
  p.g = group(me, launch);
  p.counters = counters(me, launch, dgrad_counters(s));
  for (u32 q = 0; q < H.s.ranks; q++) p.shard_of[q] = (const Vec16*)dgrad_ranks[q].shard;
  p.gathered = (Vec16*)r.gathered;
  p.b = (const Vec16*)r.b;
  p.c = r.c;
  p.m = s.m;
  p.N = 1 + dice.below(MAX_COLS);
  p.K = s.K;
  p.ldc = (p.N + 7) / 8 * 8;
  p.tile_n = s.tile_n > 8 ? 16 : 8;
  p.movers = 1 + dice.below(H.wgs - 1);
  p.policy = H.s.policy;
  p.order = dice.below(3);
  p.split = {(float*)r.sums, s.K == 16 && SPLIT_KERNEL ? 2u : 1u, 8};
  r.params = p;
  const u32 words = p.K / 4, M = s.M(), all = MAX_ROWS * target::MAX_K / 4;
  fill(r.shard, s.m.rows(me) * words, all, [=](u32 i) { return input_word('a', me, launch, i); });
  fill(r.b, p.K * p.ldc / 4, target::MAX_K * MAX_LD / 4, [=](u32 i) { return input_word('b', me, launch, i); });
  fill(r.gathered, M * words, all, [](u32) { return NOBODY_WROTE; });
  fill(r.c, M * p.ldc / 4, MAX_ROWS * MAX_LD / 4, [](u32) { return NOBODY_WROTE; });
  const u32 sums = p.split.parts > 1 ? p.split.parts * M * p.ldc / 2 : 0;
  fill(r.sums, sums, MAX_PARTS * MAX_ROWS * MAX_LD / 2, [](u32) { return NOBODY_WROTE; });
  for (u32 i = s.m.first[me] * words; i < s.m.first[me + 1] * words; i++)  // own rows are read from the shard
    W.data_words[r.gathered - W.data + i].usable = false;
}

inline void dgrad_check(u32 me, u32 launch) {
  const DgradRank& r = dgrad_ranks[me];
  const AgGemmParams& p = r.params;
  i32 a[MAX_ROWS][target::MAX_K] = {};
  for (u32 q = 0; q < H.s.ranks; q++) unpack_input(a + p.m.first[q], 'a', q, launch, p.m.rows(q), p.K);
  check_matrix(me, launch, r.c, H.shape(me, launch).M(), p.N, p.ldc, [&](u32 row, u32 col) {
    i32 sum = 0;
    for (u32 k = 0; k < p.K; k++) {
      const u32 at = k * p.ldc + col;
      sum += a[row][k] * four('b', me, launch, at / 4).at[at % 4];
    }
    return sum;
  });
}

inline bool dgrad_names(u32 me, const void* address, char* out, size_t bytes) {
  const DgradRank& r = dgrad_ranks[me];
  constexpr u32 WORDS = MAX_ROWS * target::MAX_K / 4;
  return name_part(me, address, out, bytes, "shard", r.shard, WORDS) ||
         name_part(me, address, out, bytes, "gathered", r.gathered, WORDS) ||
         name_part(me, address, out, bytes, "b", r.b, target::MAX_K * MAX_LD / 4) ||
         name_part(me, address, out, bytes, "c", r.c, MAX_ROWS * MAX_LD / 4) ||
         name_part(me, address, out, bytes, "sums", r.sums, MAX_PARTS * MAX_ROWS * MAX_LD / 2);
}
