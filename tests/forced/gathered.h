// ag_gemm and ag_gemm_dgrad for the player of histories: buffers, params, and the plain product that the result must be.
// They differ in how the weight lies, and in whether the contraction may be cut.
#pragma once
#include "../../hip_kernels/schedule/ag_gemm.h"
#include "../../hip_kernels/kernels/tile_operands.h"
#include "player.h"

template <Layout L, class P = AgGemmParams> struct Gathered {
  static constexpr u32 ROWS = MAX_ROWS * target::MAX_K / 4, WEIGHT = target::MAX_K * MAX_LDC / 4, MAX_PARTS = 2;
  static constexpr u32 RESULT = MAX_ROWS * MAX_LDC / 4;  // words of 8 bytes

  struct Buffers {
    u64 *shard, *gathered, *b, *c, *sums;
    P params;
  };
  static inline constinit Buffers ranks[MAX_RANKS]{};

  static void give_memory(u32 me) {
    Buffers& r = ranks[me];
    r.shard = target::new_data(ROWS);
    r.gathered = target::new_data(ROWS);
    r.b = target::new_data(WEIGHT);
    r.c = target::new_data(RESULT);
    r.sums = target::new_data(2 * MAX_PARTS * RESULT);
  }

  static u32 counter_words(const Shape& s) {
    const u32 most = L == TN ? 0 : MAX_COLS / 8 + 1;  // tiles in a row; what is not used is cleared all the same
    return 1 + MAX_RANKS + MAX_QUEUES + H.s.ranks * s.m.tile_rows_max * (s.K / 8 + most);  // as many as may be slabs
  }

  static u32 ldb(const AgGemmParams& p) { return L == TN ? p.K : (p.N + 7) / 8 * 8; }
  static u32 lines_of_b(const AgGemmParams& p) { return L == TN ? p.N : p.K; }

  static void prepare(u32 me, u32 launch) {
    const Shape& s = H.shape(me, launch);
    Buffers& r = ranks[me];
    Random dice(mix(H.seed, me, launch));
    P p{};
    p.g = group(me, launch);
    p.counters = counters(me, launch, counter_words(s));
    for (u32 q = 0; q < H.s.ranks; q++) p.shard_of[q] = (const Vec16*)ranks[q].shard;
    p.gathered = (Vec16*)r.gathered;
    p.b = (const Vec16*)r.b;
    p.c = r.c;
    p.m = s.m;
    p.N = 1 + dice.below(MAX_COLS);
    p.K = s.K;
    p.ldc = (p.N + 7) / 8 * 8 + 8 * dice.below(2);
    p.tile_n = L == TN ? s.tile_n : s.tile_n > 8 ? 16 : 8;
    p.movers = 1 + dice.below(H.wgs - !H.beside());
    p.policy = H.s.policy;
    p.order = dice.below(1 + NOT_OWN_FIRST);
    p.queues = 1 + dice.below(4);
    if (L != TN) p.split = {(float*)r.sums, s.K == 16 && dice.below(2) && !H.beside() ? 2u : 1u, 8};
    p.together = dice.below(4);
    p.halved = p.tile_n % (L == TN ? 8 : 16) || dice.below(2) ? 0 : dice.below(20);
    p.pulls = draw_pulls(dice, s.K, p.split.parts < 2);
    r.params = p;
    const u32 words = p.K / 4, M = s.M(), sums = p.split.parts > 1 ? p.split.parts * M * p.ldc / 2 : 0;
    fill(r.shard, s.m.rows(me) * words, ROWS, [=](u32 i) { return input_word('a', me, launch, i); });
    fill(r.b, lines_of_b(p) * ldb(p) / 4, WEIGHT, [=](u32 i) { return input_word('b', me, launch, i); });
    fill(r.gathered, M * words, ROWS, [](u32) { return NOBODY_WROTE; });
    fill(r.c, M * p.ldc / 4, RESULT, [](u32) { return NOBODY_WROTE; });
    fill(r.sums, sums, 2 * MAX_PARTS * RESULT, [](u32) { return NOBODY_WROTE; });
    target::shut(r.gathered + s.m.first[me] * words, s.m.rows(me) * words);  // own rows are read from the shard
  }

  // Every element, against the plain product.
  static void check(u32 me, u32 launch) {
    const AgGemmParams& p = ranks[me].params;
    i32 a[MAX_ROWS][target::MAX_K] = {};
    for (u32 q = 0; q < H.s.ranks; q++) unpack_input(a + p.m.first[q], 'a', q, launch, p.m.rows(q), p.K);
    check_matrix(me, launch, ranks[me].c, H.shape(me, launch).M(), p.N, p.ldc, [&](u32 row, u32 col) {
      i32 sum = 0;
      for (u32 k = 0; k < p.K; k++)
        sum += a[row][k] * element('b', me, launch, L == TN ? col * ldb(p) + k : k * ldb(p) + col);
      return sum;
    });
  }

  static bool name_address(u32 me, const void* address, char* out, size_t bytes) {
    const Buffers& r = ranks[me];
    return name_part(me, address, out, bytes, "shard", r.shard, ROWS) ||
           name_part(me, address, out, bytes, "gathered", r.gathered, ROWS) ||
           name_part(me, address, out, bytes, "b", r.b, WEIGHT) || name_part(me, address, out, bytes, "c", r.c, RESULT) ||
           name_part(me, address, out, bytes, "sums", r.sums, 2 * MAX_PARTS * RESULT);
  }
};
