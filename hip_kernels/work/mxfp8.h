// MXFP8 as bits: 32 elements of E4M3 share one E8M0 byte. All targets give the same bytes: integers, products with powers of
// two, and conversions of a target only where they equal the ones here. Oracle, and what becomes of NaNs and infinities:
// kosmos_raw/numerics/mxfp8.py.
//
// How a matrix lies in memory. Its lines run along the contraction: elements [lines, depth], depth a multiple of 128, zeros
// past the end. Scales [depth / 128, lines], each a word of four bytes, of the four blocks of 128 along a line: what one
// K step of a tile needs of them is as many words in a row as the tile has lines.
#pragma once
#include "fp32.h"

constexpr u32 MX_BLOCK = 32, MX_STEP = 128;
DEVICE inline u32 padded_to_step(u32 depth) { return (depth + MX_STEP - 1) / MX_STEP * MX_STEP; }

// Which power of two a block is divided by. kosmos_raw/numerics/mxfp8.py has the same names.
enum ScaleRule : u32 { SCALE_UP, SCALE_FLOOR, SCALE_EVEN };

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

// Codes of FP32 magnitudes, of one or of a vector: to nearest even, saturating. Adding a power of two 2^20 above y leaves
// y's four upper bits, or all multiples of 2^-9, as the last bits of a sum that has rounded the others away.
template <class Float, class Bits> DEVICE inline Bits e4m3_codes(Bits magnitude) {
  const Bits most = Bits{} + 0x43e00000, kept = magnitude > most ? most : magnitude;  // 448
  const Bits least = Bits{} + 0x3c800000, binade = kept & 0x7f800000, low = binade < least ? least : binade;  // 2^-6
  const Bits anchor = low + (20u << 23);
  const Bits rounded = __builtin_bit_cast(Bits, __builtin_bit_cast(Float, kept) + __builtin_bit_cast(Float, anchor));
  return rounded - anchor + (low >> 20) - (121u << 3);
}
DEVICE inline u32 to_e4m3(float y) {  // a NaN becomes 0x7f
  const u32 bits = bits_of(y), magnitude = bits & 0x7fffffff;
  return magnitude > FP32_INFINITY ? 0x7f : e4m3_codes<float>(magnitude) | (bits >> 24 & 0x80);
}
// What codes stand for, of one or of a vector. Moved to FP32's places an element is 2^-120 of itself, subnormals included.
template <class Float, class Bits> DEVICE inline Float e4m3_values(Bits codes) {
  const Bits magnitude = codes & 0x7f, nan = Bits{} + 0x7fc00000;
  const Float value = __builtin_bit_cast(Float, magnitude << 20 | (codes & 0x80) << 24) * float_of(247u << 23);
  return __builtin_bit_cast(Float, magnitude == Bits{} + 0x7f ? nan : __builtin_bit_cast(Bits, value));
}
DEVICE inline float from_e4m3(u32 code) { return e4m3_values<float>(code); }

// 32 finite FP32 times a power of two, as elements: four in a word, the first in the low byte. A target may have vectors,
// or an instruction for two.
template <class By = target::Converts>
DEVICE inline void block_e4m3(const u32 (&x)[MX_BLOCK], float inverse, u32 (&elements)[MX_BLOCK / 4]) {
  if constexpr (requires { typename By::Bits32; }) {
    using Bits = typename By::Bits32;
    using Floats = typename By::Floats32;
    const Bits bits = __builtin_bit_cast(Bits, __builtin_bit_cast(Floats, x) * inverse);
    By::low_bytes(e4m3_codes<Floats>(bits & 0x7fffffff) | (bits >> 24 & 0x80), elements);
  } else {
#pragma unroll
    for (u32 i = 0; i < MX_BLOCK; i += 4) {
      float y[4];
#pragma unroll
      for (u32 j = 0; j < 4; j++) y[j] = float_of(x[i + j]) * inverse;
      if constexpr (requires { By::two_e4m3(y[0], y[1]); })
        elements[i / 4] = By::two_e4m3(y[0], y[1]) | By::two_e4m3(y[2], y[3]) << 16;
      else elements[i / 4] = to_e4m3(y[0]) | to_e4m3(y[1]) << 8 | to_e4m3(y[2]) << 16 | to_e4m3(y[3]) << 24;
    }
  }
}
template <class By = target::Converts> DEVICE inline u32 largest_magnitude(const u32 (&x)[MX_BLOCK]) {
  if constexpr (requires { typename By::Bits32; })
    return By::largest(__builtin_bit_cast(typename By::Bits32, x) & 0x7fffffff);
  u32 largest = 0;
#pragma unroll
  for (u32 i = 0; i < MX_BLOCK; i++) {
    const u32 magnitude = x[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
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

// One block of FP32 bits. Returns its byte.
DEVICE inline u32 quantize_block(const u32 (&x)[MX_BLOCK], ScaleRule rule, u32 (&elements)[MX_BLOCK / 4]) {
  const u32 largest = largest_magnitude(x);  // as an integer: NaNs are above infinity
  if (__builtin_expect(largest >= FP32_INFINITY, 0)) return quantize_special(x, rule, elements);
  const u32 byte = scale_byte(largest, rule);
  block_e4m3(x, inverse_scale(byte), elements);
  return byte;
}
