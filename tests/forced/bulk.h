// What bulk_ag and bulk_rs have in common for the player of histories: a product of each rank's own shape.
#pragma once
#include "history.h"

constexpr u32 MAX_SIDE = 24, MATRIX_WORDS = MAX_SIDE * MAX_SIDE / 4;  // of 8 bytes, in bf16

struct Product {
  u64 *a, *b, *c, *sums;
  u32 M, N, K, lda, ldb;  // elements; ldb is ldc too
};

inline void product_memory(Product& p) {
  p.a = target::new_data(MATRIX_WORDS);
  p.b = target::new_data(MATRIX_WORDS);
  p.c = target::new_data(2 * MATRIX_WORDS);  // it may be FP32
  p.sums = target::new_data(4 * MATRIX_WORDS);
}

inline void product_inputs(const Product& p, u32 me, u32 launch, u32 lines_of_a) {
  fill(p.a, lines_of_a * p.lda / 4, MATRIX_WORDS, [=](u32 i) { return input_word('A', me, launch, i); });
  fill(p.b, p.K * p.ldb / 4, MATRIX_WORDS, [=](u32 i) { return input_word('B', me, launch, i); });
}

inline i32 element(char matrix, u32 rank, u32 launch, u32 at) { return four(matrix, rank, launch, at / 4).at[at % 4]; }

// Row i, column j of the product; `by_k`: lines of A are k.
inline i32 product_at(const Product& p, u32 me, u32 launch, u32 i, u32 j, bool by_k) {
  i32 sum = 0;
  for (u32 k = 0; k < p.K; k++)
    sum += element('A', me, launch, by_k ? k * p.lda + i : i * p.lda + k) * element('B', me, launch, k * p.ldb + j);
  return sum;
}

inline bool product_names(const Product& p, u32 me, const void* address, char* out, size_t bytes) {
  return name_part(me, address, out, bytes, "a", p.a, MATRIX_WORDS) ||
         name_part(me, address, out, bytes, "b", p.b, MATRIX_WORDS) ||
         name_part(me, address, out, bytes, "c", p.c, 2 * MATRIX_WORDS) ||
         name_part(me, address, out, bytes, "sums", p.sums, 4 * MATRIX_WORDS);
}
