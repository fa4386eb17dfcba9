// FP32 as bits.
#pragma once
#include "../target/target.h"

constexpr u32 FP32_INFINITY = 0x7f800000;
DEVICE inline float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE inline u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
