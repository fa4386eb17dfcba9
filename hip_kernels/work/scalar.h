// Functions of one FP32 number, made of additions and multiplications alone: no target has a mathematics library here, and
// all targets give the same bits, so a token is routed alike wherever it is.
#pragma once
#include "fp32.h"

// e^x to about one unit in the last place; 0 and infinity where it is too small or too large. NaN stays NaN.
DEVICE inline float exp_of(float x) {
  if (x < -104.f) return 0;
  if (x > 89.f) return float_of(FP32_INFINITY);
  constexpr float SHIFT = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number, which is in the low bits
  const float shifted = target::fma(x, 1.44269504f, SHIFT), n = shifted - SHIFT;
  const float r = target::fma(n, -1.42860677e-6f, target::fma(n, -0.693145752f, x));  // ln 2 in two parts
  float y = 1.f / 5040;
  y = target::fma(y, r, 1.f / 720);
  y = target::fma(y, r, 1.f / 120);
  y = target::fma(y, r, 1.f / 24);
  y = target::fma(y, r, 1.f / 6);
  y = target::fma(y, r, 0.5f);
  y = target::fma(y, r, 1.f);
  y = target::fma(y, r, 1.f);
  const i32 power = (i32)(bits_of(shifted) - bits_of(SHIFT)), half = power / 2;  // in two steps, for results below 2^-126
  return y * float_of((u32)(half + 127) << 23) * float_of((u32)(power - half + 127) << 23);
}

// log(1 + t) for 0 <= t <= 1, as 2 artanh(t / (2 + t)).
DEVICE inline float log1p_of(float t) {
  const float s = t / (2.f + t), q = s * s;
  float y = 1.f / 15;
  y = target::fma(y, q, 1.f / 13);
  y = target::fma(y, q, 1.f / 11);
  y = target::fma(y, q, 1.f / 9);
  y = target::fma(y, q, 1.f / 7);
  y = target::fma(y, q, 1.f / 5);
  y = target::fma(y, q, 1.f / 3);
  y = target::fma(y, q, 1.f);
  return 2.f * s * y;
}

DEVICE inline float sigmoid(float z) { return 1.f / (1.f + exp_of(-z)); }
DEVICE inline float softplus(float z) { return z > 0 ? z + log1p_of(exp_of(-z)) : log1p_of(exp_of(z)); }

// As fast as can be: to a few units in the last place, and up to |x| more where x is below 0. What is made of it is BF16.
DEVICE inline float fast_sigmoid(float x) { return target::reciprocal(1.f + target::exp2(x * -1.44269504f)); }

// Where SwiGLU cuts the gate, above, and up, on both sides. What is cut passes no gradient.
struct Limit {
  float at;
  DEVICE float gate(float x) const { return x > at ? at : x; }
  DEVICE float up(float x) const { return x > at ? at : x < -at ? -at : x; }
  DEVICE bool cuts_gate(float x) const { return x > at; }
  DEVICE bool cuts_up(float x) const { return x > at || x < -at; }
};
struct NoLimit {
  DEVICE static float gate(float x) { return x; }
  DEVICE static float up(float x) { return x; }
  DEVICE static bool cuts_gate(float) { return false; }
  DEVICE static bool cuts_up(float) { return false; }
};
// silu(gate) * up, of values as they are kept for the backward.
template <class L> DEVICE inline float swiglu(float gate, float up, const L& limit) {
  const float g = limit.gate(gate);
  return g * fast_sigmoid(g) * limit.up(up);
}

// FP32 in arrays that are read and written 8 or 16 bytes at a time.
DEVICE inline float float_at(const Vec16* base, u64 i) {
  return float_of((u32)(target::read((const u64*)base + i / 2) >> 32 * (i % 2)));
}
DEVICE inline float float_of_four(const Vec16& v, u32 j) { return float_of((u32)((j < 2 ? v.lo : v.hi) >> 32 * (j % 2))); }
DEVICE inline void floats_at(const Vec16* base, u64 i, float (&x)[4]) {  // i: a multiple of 4
  const Vec16 v = target::read(base + i / 4);
  for (u32 j = 0; j < 4; j++) x[j] = float_of_four(v, j);
}
DEVICE inline u64 two_floats(float a, float b) { return (u64)bits_of(b) << 32 | bits_of(a); }
DEVICE inline Vec16 four_floats(const float (&x)[4]) { return {two_floats(x[0], x[1]), two_floats(x[2], x[3])}; }
// Words that hold a number and a float.
DEVICE inline u64 number_and_float(u32 n, float x) { return (u64)bits_of(x) << 32 | n; }
DEVICE inline u32 number_in(u64 word) { return (u32)word; }
DEVICE inline float float_in(u64 word) { return float_of((u32)(word >> 32)); }
