// What a translated file includes.
#pragma once
#include "memory.h"
#include "mfma.h"

INLINE i64 sign_extend(u64 x, u32 bits) { return bits ? (i64)(x << (64 - bits)) >> (64 - bits) : 0; }
INLINE u64 whole_quads(u64 x) {
  x |= (x >> 1 & 0x7777777777777777ull) | (x >> 2 & 0x3333333333333333ull) | (x >> 3 & 0x1111111111111111ull);
  return (x & 0x1111111111111111ull) * 15;
}
