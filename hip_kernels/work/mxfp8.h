// MXFP8 as bits: 32 elements of E4M3 share one E8M0 byte. All targets give the same bytes: integers, products with powers of
// two, and conversions of a target only where they equal the ones here. Oracle, and what becomes of NaNs and infinities:
// kosmos_raw/numerics/mxfp8.py.
//
// How a matrix lies in memory. Its lines run along the contraction: elements [lines, depth], depth a multiple of 128, zeros
// past the end. Scales [depth / 128, lines], each a word of four bytes, of the four blocks of 128 along a line: what one
// K step of a tile needs of them is as many words in a row as the tile has lines.
#pragma once
#include "../target/target.h"

constexpr u32 MX_BLOCK = 32, MX_STEP = 128;
DEVICE inline u32 padded_to_step(u32 depth) { return (depth + MX_STEP - 1) / MX_STEP * MX_STEP; }

constexpr u32 FP32_INFINITY = 0x7f800000;

// Which power of two a block is divided by. kosmos_raw/numerics/mxfp8.py has the same names.
enum ScaleRule : u32 { SCALE_UP, SCALE_FLOOR, SCALE_EVEN };

DEVICE inline float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE inline u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }

// The byte of a block whose largest magnitude, finite, has these FP32 bits. 448 is 1.75 * 2^8. UP: 1.75 * 2^-119 has
// byte 0, and so has the next FP32, for a * (1/448) is subnormal there and rounds back.
DEVICE inline u32 scale_byte(u32 largest, ScaleRule rule) {
  if (rule == SCALE_EVEN) largest += 1u << 19;
  const u32 exponent = largest >> 23, mantissa = largest & 0x7fffff;
  const u32 above = rule == SCALE_UP && mantissa > 0x600000u + (exponent == 8);
  return exponent < 8 ? 0 : exponent - 8 + above;
}
// 2^(127 - byte), of 0 to 254. Of 254 it is subnormal.
DEVICE inline float inverse_scale(u32 byte) { return float_of(byte == 254 ? 0x00400000 : (254 - byte) << 23); }
// 2^(byte - 127). Of 0 it is subnormal, of 255 a NaN.
DEVICE inline float scale_value(u32 byte) { return float_of(byte == 255 ? 0x7fc00000 : byte == 0 ? 0x00400000 : byte << 23); }

// To nearest even, saturating; a NaN becomes 0x7f. Adding a power of two 2^20 above y leaves y's four upper bits, or all
// multiples of 2^-9, as the last bits of a sum that has rounded the others away.
DEVICE inline u32 to_e4m3(float y) {
  const u32 bits = bits_of(y), magnitude = bits & 0x7fffffff;
  const u32 kept = magnitude > 0x43e00000 ? 0x43e00000 : magnitude;  // 448
  const u32 binade = kept & 0x7f800000, low = binade < 0x3c800000 ? 0x3c800000 : binade;  // at least 2^-6
  const u32 anchor = low + (20u << 23);
  const u32 code = bits_of(float_of(kept) + float_of(anchor)) - anchor + (low >> 20) - (121u << 3);
  return magnitude > FP32_INFINITY ? 0x7f : code | (bits >> 24 & 0x80);
}
// Moved to FP32's places an element is 2^-120 of itself, subnormal ones included.
DEVICE inline float from_e4m3(u32 code) {
  const u32 magnitude = code & 0x7f;
  return magnitude == 0x7f ? float_of(0x7fc00000) : float_of(magnitude << 20 | (code & 0x80) << 24) * float_of(247u << 23);
}

// Four elements, the first in the low byte. All finite: then a target may have an instruction for two.
template <class By = target::Converts> DEVICE inline u32 to_four_e4m3(float a, float b, float c, float d) {
  if constexpr (requires { By::two_e4m3(a, b); }) return By::two_e4m3(a, b) | By::two_e4m3(c, d) << 16;
  else return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}

// A block with a NaN or an infinity in it.
DEVICE inline u32 quantize_special(const u32 (&x)[MX_BLOCK], ScaleRule rule, u32 (&elements)[MX_BLOCK / 4]) {
  u32 largest = 0;  // but for NaNs
#pragma unroll
  for (u32 i = 0; i < MX_BLOCK; i++) {
    const u32 magnitude = x[i] & 0x7fffffff;
    if (magnitude <= FP32_INFINITY && magnitude > largest) largest = magnitude;
  }
  const u32 byte = rule != SCALE_UP ? 255 : largest == FP32_INFINITY ? 254 : scale_byte(largest, rule);
  const float inverse = byte == 255 ? float_of(0x7fc00000) : inverse_scale(byte);
#pragma unroll
  for (u32 i = 0; i < MX_BLOCK / 4; i++) {
    elements[i] = 0;
#pragma unroll
    for (u32 j = 0; j < 4; j++) elements[i] |= to_e4m3(float_of(x[i * 4 + j]) * inverse) << 8 * j;
  }
  return byte;
}

// One block of FP32 bits; `largest` of their magnitudes, as integers. Returns the byte.
DEVICE inline u32 quantize_block(const u32 (&x)[MX_BLOCK], u32 largest, ScaleRule rule, u32 (&elements)[MX_BLOCK / 4]) {
  if (__builtin_expect(largest >= FP32_INFINITY, 0)) return quantize_special(x, rule, elements);
  const u32 byte = scale_byte(largest, rule);
  const float inverse = inverse_scale(byte);
#pragma unroll
  for (u32 i = 0; i < MX_BLOCK / 4; i++) {
    const u32* four = x + i * 4;
    elements[i] = to_four_e4m3(float_of(four[0]) * inverse, float_of(four[1]) * inverse, float_of(four[2]) * inverse,
                               float_of(four[3]) * inverse);
  }
  return byte;
}
