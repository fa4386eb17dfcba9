// BF16 as bits, four to a 64-bit word.
#pragma once
#include "../target/target.h"

// One of the eight in a word.
DEVICE inline u32 bf16_in(const Vec16& v, u32 i) { return (u32)((i < 4 ? v.lo : v.hi) >> i % 4 * 16) & 0xffff; }
DEVICE inline float from_bf16(u32 h) { return __builtin_bit_cast(float, h << 16); }
DEVICE inline float bf16_at(const Vec16& v, u32 i) { return from_bf16(bf16_in(v, i)); }
// Rounded to nearest even; NaNs are quiet.
DEVICE inline u64 pack_bf16(float a, float b, float c, float d) { return target::pack_bf16(a, b, c, d); }
DEVICE inline Vec16 eight_bf16(const float (&x)[8]) {
  return {pack_bf16(x[0], x[1], x[2], x[3]), pack_bf16(x[4], x[5], x[6], x[7])};
}
