// The same histories on real threads: the host target, and what tests/forced needs of a world beside it.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../hip_kernels/target/random.h"

#define KOSMOS_ENUM(name) name,

namespace target {
constexpr u32 MAX_K = 16;
constexpr u64 NEVER = 20'000'000'000;  // nanoseconds: nothing waits so long unless it waits for ever
struct Clock {};
struct Box {};

// One after the other, so that what is asked for in the same order lies at the same offsets.
inline u64 data[1 << 18] __attribute__((aligned(64)));
inline u32 num_data;
inline u64* new_data(u32 words) {
  u64* at = data + num_data;
  num_data += (words + 7) / 8 * 8;
  if (num_data > sizeof data / 8) abort();
  return at;
}
inline u32* new_signals(u32 words, u32 value = 0) {
  u32* at = (u32*)new_data((words + 1) / 2);
  for (u32 i = 0; i < words; i++) at[i] = value;
  return at;
}
inline void open(u64*, u32, u32) {}
inline void shut(u64*, u32) {}
inline void make_blind(const u32*, u32) {}
inline void polled_words_hold(u64) {}

enum Symptom { WRONG_VALUE };
inline u32 symptoms = 0;
inline void symptom(Symptom, const char* format, ...) {
  __atomic_fetch_add(&symptoms, 1, __ATOMIC_RELAXED);
  va_list list;
  va_start(list, format);
  vprintf(format, list);
  va_end(list);
  printf("\n");
}
}  // namespace target
