// What bulk_ag and bulk_rs have in common for the player of histories: rows that move, and a product of each rank's own shape.
#pragma once
#include "player.h"

template <class P> struct Bulk {
  static constexpr u32 MOVED = MAX_ROWS * target::MAX_K / 4, MATRIX = 24 * 24 / 4;  // words of 8 bytes, of bf16
  struct Buffers {
    u64 *from, *to, *a, *b, *c, *sums;
    P params;
  };
  static inline constinit Buffers ranks[MAX_RANKS]{};

  static void give_memory(u32 me) {
    Buffers& r = ranks[me];
    r.from = target::new_data(MOVED);
    r.to = target::new_data(MOVED);
    r.a = target::new_data(MATRIX);
    r.b = target::new_data(MATRIX);
    r.c = target::new_data(2 * MATRIX);  // it may be FP32
    r.sums = target::new_data(4 * MATRIX);
  }

  static bool name_address(u32 me, const void* address, char* out, size_t bytes) {
    const Buffers& r = ranks[me];
    return name_part(me, address, out, bytes, "from", r.from, MOVED) ||
           name_part(me, address, out, bytes, "to", r.to, MOVED) ||
           name_part(me, address, out, bytes, "a", r.a, MATRIX) || name_part(me, address, out, bytes, "b", r.b, MATRIX) ||
           name_part(me, address, out, bytes, "c", r.c, 2 * MATRIX) ||
           name_part(me, address, out, bytes, "sums", r.sums, 4 * MATRIX);
  }

  // Params but for what is each operator's own.
  static P base(u32 me, u32 launch, u32 counter_words, u32 M, u32 N, u32 K) {
    const Shape& s = H.shape(me, launch);
    P p{};
    p.g = group(me, launch);
    p.counters = counters(me, launch, counter_words);
    p.a = (const Vec16*)ranks[me].a;
    p.b = (const Vec16*)ranks[me].b;
    p.c = ranks[me].c;
    p.m = s.m;
    p.width = s.K;
    p.M = M, p.N = N, p.K = K, p.ldc = (N + 7) / 8 * 8;
    p.tile_n = s.tile_n > 8 ? 16 : 8;
    p.policy = H.s.policy;
    return p;
  }

  // New inputs; a has lines of lda elements. What must be written of `to` and c is the caller's business.
  static void fill_inputs(u32 me, u32 launch, u32 rows, u32 lines_of_a, u32 lda) {
    const Buffers& r = ranks[me];
    const P& p = r.params;
    fill(r.from, rows * p.width / 4, MOVED, [=](u32 i) { return input_word('x', me, launch, i); });
    fill(r.a, lines_of_a * lda / 4, MATRIX, [=](u32 i) { return input_word('A', me, launch, i); });
    fill(r.b, p.K * p.ldc / 4, MATRIX, [=](u32 i) { return input_word('B', me, launch, i); });
  }

  // Row i, column j of the product; `by_k`: lines of A are k.
  static i32 product(u32 me, u32 launch, u32 i, u32 j, u32 lda, bool by_k) {
    const P& p = ranks[me].params;
    i32 sum = 0;
    for (u32 k = 0; k < p.K; k++)
      sum += element('A', me, launch, by_k ? k * lda + i : i * lda + k) * element('B', me, launch, k * p.ldc + j);
    return sum;
  }
};
