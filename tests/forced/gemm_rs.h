// gemm_rs for the player of histories: buffers and params.
#pragma once
#include "../../hip_kernels/kernels/gemm_rs.hip"
#include "reduced.h"

constexpr u32 BUFFER_WORDS = MAX_ROWS * MAX_N / 4;  // of 8 bytes

struct GemmRsRank {
  u64 *a, *b, *c, *staging;
  u32 turn, dirty_words;  // of 16 bytes
  GemmRsParams params;
};
constinit inline GemmRsRank gemm_rs_ranks[MAX_RANKS]{};

inline void gemm_rs_memory(u32 me) {
  constexpr u32 ROW_WORDS = target::MAX_K / 4;
  GemmRsRank& r = gemm_rs_ranks[me];
  r.a = target::new_data(MAX_ROWS * ROW_WORDS);
  r.b = target::new_data(MAX_N * ROW_WORDS);
  r.c = target::new_data(MAX_ROWS * MAX_N / 4);
  r.staging = target::new_data(2 * BUFFER_WORDS);
  r.turn = r.dirty_words = 0;
  target::open(r.staging, 2 * BUFFER_WORDS, 2 * BUFFER_WORDS);
  for (u32 i = 0; i < 2 * BUFFER_WORDS; i++) r.staging[i] = SENTINEL;
  target::polled_words_hold(SENTINEL);
}

inline u32 gemm_rs_counters(const Shape&) { return 3; }

inline GemmRsParams gemm_rs_params(u32 me, u32 launch) {
  const Shape& s = H.shape(me, launch);
  const GemmRsRank& r = gemm_rs_ranks[me];
  Random dice(mix(H.seed, 'r', launch)), own(mix(H.seed, me, launch));  // bands are alike on all ranks, crews need not be
  GemmRsParams p{};
  p.g = group(me, launch);
  p.counters = counters(me, launch, gemm_rs_counters(s));
  p.a = (const Vec16*)r.a;
  p.b = (const Vec16*)r.b;
  p.c = (Vec16*)r.c;
  for (u32 q = 0; q < H.s.ranks; q++) p.staging.of[q] = (Vec16*)gemm_rs_ranks[q].staging;
  p.staging.buffer_words = BUFFER_WORDS / 2;
  p.staging.dirty_words = r.dirty_words;
  p.staging.turn = r.turn;
  p.m = s.m;
  p.N = (s.N + 7) / 8 * 8;
  p.K = s.K;
  p.tile_n = s.tile_n < 8 ? 8 : s.tile_n / 8 * 8;
  p.band_tile_rows = 1 + dice.below(3);
  p.movers = own.below(H.wgs);
  p.max_movers = p.movers + own.below(H.wgs + 1);
  if (!p.max_movers || (p.policy == FIXED && !p.movers)) p.movers = p.max_movers = 1;
  p.slices = 1 + own.below(4);
  p.policy = H.s.policy;
  p.order = own.below(1 + RANK_ORDER);
  if (p.policy == FIXED && !p.movers) p.movers = p.max_movers = 1;
  return p;
}

inline void gemm_rs_prepare(u32 me, u32 launch) {
  GemmRsRank& r = gemm_rs_ranks[me];
  const GemmRsParams& p = r.params = gemm_rs_params(me, launch);
  const u32 words = p.K / 4, M = H.shape(me, launch).M();
  fill(r.a, M * words, MAX_ROWS * target::MAX_K / 4, [=](u32 i) { return input_word('a', me, launch, i); });
  fill(r.b, p.N * words, MAX_N * target::MAX_K / 4, [=](u32 i) { return input_word('b', me, launch, i); });
  fill(r.c, p.m.rows(me) * p.N / 4, MAX_ROWS * MAX_N / 4, [](u32) { return NOBODY_WROTE; });
  r.turn++;
  r.dirty_words = M * p.N / 8;
}

inline void gemm_rs_check(u32 me, u32 launch) {
  const GemmRsParams& p = gemm_rs_ranks[me].params;
  check_reduced(me, launch, gemm_rs_ranks[me].c, p.m, p.N, p.K);
}

inline bool gemm_rs_names(u32 me, const void* address, char* out, size_t bytes) {
  const GemmRsRank& r = gemm_rs_ranks[me];
  return name_part(me, address, out, bytes, "a", r.a, MAX_ROWS * target::MAX_K / 4) ||
         name_part(me, address, out, bytes, "b", r.b, MAX_N * target::MAX_K / 4) ||
         name_part(me, address, out, bytes, "c", r.c, MAX_ROWS * MAX_N / 4) ||
         name_part(me, address, out, bytes, "staging", r.staging, 2 * BUFFER_WORDS);
}
