// ag_gemm for the player of histories: buffers, params, and the plain product that its result must be.
#pragma once
#include "../../hip_kernels/kernels/ag_gemm.hip"
#include "history.h"

struct AgGemmRank {
  u64 *shard, *gathered, *b, *c;
  AgGemmParams params;
};
constinit inline AgGemmRank ag_gemm_ranks[MAX_RANKS]{};

inline void ag_gemm_memory(u32 me) {
  constexpr u32 ROW_WORDS = target::MAX_K / 4;
  AgGemmRank& r = ag_gemm_ranks[me];
  r.shard = target::new_data(MAX_ROWS * ROW_WORDS);
  r.gathered = target::new_data(MAX_ROWS * ROW_WORDS);
  r.b = target::new_data(MAX_COLS * ROW_WORDS);
  r.c = target::new_data(MAX_ROWS * MAX_LDC / 4);
}

inline u32 ag_gemm_counters(const Shape& s) { return 1 + MAX_RANKS + H.s.ranks * s.m.tile_rows_max; }

inline AgGemmParams ag_gemm_params(u32 me, u32 launch) {
  const Shape& s = H.shape(me, launch);
  const AgGemmRank& r = ag_gemm_ranks[me];
  Random dice(mix(H.seed, me, launch));
  AgGemmParams p{};
  p.g = group(me, launch);
  p.counters = counters(me, launch, ag_gemm_counters(s));
  for (u32 q = 0; q < H.s.ranks; q++) p.shard_of[q] = (const Vec16*)ag_gemm_ranks[q].shard;
  p.gathered = (Vec16*)r.gathered;
  p.b = (const Vec16*)r.b;
  p.c = r.c;
  p.m = s.m;
  p.N = 1 + dice.below(MAX_COLS);
  p.K = s.K;
  p.ldc = (p.N + 7) / 8 * 8 + 8 * dice.below(2);
  p.tile_n = s.tile_n;
  p.movers = 1 + dice.below(H.wgs - 1);
  p.policy = H.s.policy;
  p.order = dice.below(3);
  return p;
}

inline void ag_gemm_prepare(u32 me, u32 launch) {
  AgGemmRank& r = ag_gemm_ranks[me];
  const AgGemmParams& p = r.params = ag_gemm_params(me, launch);
  const Chunks& m = p.m;
  const u32 words = p.K / 4, M = H.shape(me, launch).M(), all = MAX_ROWS * target::MAX_K / 4;
  fill(r.shard, m.rows(me) * words, all, [=](u32 i) { return input_word('a', me, launch, i); });
  fill(r.b, p.N * words, MAX_COLS * target::MAX_K / 4, [=](u32 i) { return input_word('b', me, launch, i); });
  fill(r.gathered, M * words, all, [](u32) { return NOBODY_WROTE; });
  fill(r.c, M * p.ldc / 4, MAX_ROWS * MAX_LDC / 4, [](u32) { return NOBODY_WROTE; });
  for (u32 i = m.first[me] * words; i < m.first[me + 1] * words; i++)  // own rows are read from the shard
    W.data_words[r.gathered - W.data + i].usable = false;
}

// Every element, against the plain product.
inline void ag_gemm_check(u32 me, u32 launch) {
  const AgGemmRank& r = ag_gemm_ranks[me];
  const AgGemmParams& p = r.params;
  i32 a[MAX_ROWS][target::MAX_K] = {}, b[MAX_COLS][target::MAX_K] = {};
  for (u32 q = 0; q < H.s.ranks; q++) unpack_input(a + p.m.first[q], 'a', q, launch, p.m.rows(q), p.K);
  unpack_input(b, 'b', me, launch, p.N, p.K);
  check_matrix(me, launch, r.c, H.shape(me, launch).M(), p.N, p.ldc, [&](u32 row, u32 col) {
    i32 sum = 0;
    for (u32 k = 0; k < target::MAX_K; k++) sum += a[row][k] * b[col][k];
    return sum;
  });
}

inline bool ag_gemm_names(u32 me, const void* address, char* out, size_t bytes) {
  const AgGemmRank& r = ag_gemm_ranks[me];
  constexpr u32 WORDS = MAX_ROWS * target::MAX_K / 4;
  return name_part(me, address, out, bytes, "shard", r.shard, WORDS) ||
         name_part(me, address, out, bytes, "gathered", r.gathered, WORDS) ||
         name_part(me, address, out, bytes, "b", r.b, MAX_COLS * target::MAX_K / 4) ||
         name_part(me, address, out, bytes, "c", r.c, MAX_ROWS * MAX_LDC / 4);
}

inline void ag_gemm_run(u32 me, target::Box& box, bool decides) { run_wg<AgGemm>(ag_gemm_ranks[me].params, box, decides); }

constexpr Operator AG_GEMM = {"ag_gemm",     ag_gemm_memory,   ag_gemm_prepare, ag_gemm_check,
                              ag_gemm_run,   ag_gemm_counters, ag_gemm_names};
