// BF16 as bits, four to a 64-bit word.
#pragma once
#include "../target/target.h"

DEVICE inline float from_bf16(u32 h) { return __builtin_bit_cast(float, h << 16); }
// Rounded to nearest even; NaNs are quiet.
DEVICE inline u64 pack_bf16(float a, float b, float c, float d) { return target::pack_bf16(a, b, c, d); }
