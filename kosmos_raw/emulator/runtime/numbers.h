// Number formats of gfx950 that the host has not: bf16, OCP fp8 / fp6 / fp4, e8m0; and arithmetic with their rules.
#pragma once
#include "types.h"

INLINE float from_bf16(u32 bits) { return from_bits<float>(bits << 16); }
// Round to nearest even; a NaN stays one.
INLINE u32 to_bf16(float x) {
  const u32 u = to_bits(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return (u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded;
}
INLINE float from_f16(u32 bits) { return (float)from_bits<half>(bits); }
INLINE u32 to_f16(float x) { return to_bits((half)x); }

constexpr float power_of_two(int e) { return __builtin_bit_cast(float, (u32)(e + 127) << 23); }  // normal range only

// A small float of E exponent and M mantissa bits, without infinities or NaNs: moved into float's fields, then rebiased
// by an exact multiplication, which also gets its subnormals right.
template <int E, int M> INLINE float widen(u32 x) {
  const u32 magnitude = x & ((1u << (E + M)) - 1), sign = x >> (E + M) & 1;
  const float value = from_bits<float>(magnitude << (23 - M)) * power_of_two(127 - ((1 << (E - 1)) - 1));
  return from_bits<float>(to_bits(value) | sign << 31);
}
INLINE float from_fp8(u32 x) { return (x & 0x7f) == 0x7f ? from_bits<float>(0x7fc00000u) : widen<4, 3>(x); }
INLINE float from_bf8(u32 x) {
  const u32 magnitude = x & 0x7f;
  const u32 special = (x & 0x80) << 24 | 0x7f800000 | (magnitude & 3) << 21;
  return magnitude >= 0x7c ? from_bits<float>(special) : widen<5, 2>(x);
}
INLINE float from_e8m0(u32 x) {
  return from_bits<float>(x == 255 ? 0x7fc00000u : x == 0 ? 0x00400000u : x << 23);  // 2^-127 is subnormal
}

// Round to nearest even into E, M bits; larger values give codes past the largest one, which the caller sorts out.
template <int E, int M> INLINE u32 narrow(float x) {
  constexpr int BIAS = (1 << (E - 1)) - 1;
  constexpr float MAGIC = power_of_two(24 - M - BIAS);  // its last mantissa bit weighs as much as a subnormal's last bit
  const u32 magnitude = to_bits(x) & 0x7fffffff;
  const u32 subnormal = to_bits(from_bits<float>(magnitude) + MAGIC) - to_bits(MAGIC);
  const u32 rounded = (magnitude + (1u << (22 - M)) - 1 + (magnitude >> (23 - M) & 1)) >> (23 - M);
  return from_bits<float>(magnitude) < power_of_two(1 - BIAS) ? subnormal : rounded - ((u32)(127 - BIAS) << M);
}
// Overflow gives NaN (fp8) or infinity (bf8): MODE.FP16_OVFL is 0.
INLINE u32 to_fp8(float x) {
  const u32 code = narrow<4, 3>(x);
  return to_bits(x) >> 31 << 7 | (code < 0x7f && x == x ? code : 0x7f);
}
INLINE u32 to_bf8(float x) {
  const u32 code = narrow<5, 2>(x);
  return to_bits(x) >> 31 << 7 | (x != x ? 0x7f : code < 0x7c ? code : 0x7c);
}
// x / 2^e, where e is the exponent field of `scale`: its mantissa and sign do not count.
INLINE float divide_by_scale(float x, float scale) {
  const u32 e = to_bits(scale) >> 23 & 255;
  if (e == 255) return from_bits<float>(0x7fc00000u);
  const double inverse = __builtin_bit_cast(double, (u64)(1023 + 127 - (i32)e) << 52);
  return (float)(x * inverse);
}
INLINE float multiply_by_scale(float x, float scale) { return x * from_e8m0(to_bits(scale) >> 23 & 255); }

// What hardware makes of a float32 subnormal that it does not keep: a zero of the same sign.
INLINE float flushed(float x) {
  const u32 u = to_bits(x);
  return from_bits<float>(u & 0x7f800000 ? u : u & 0x80000000);
}
INLINE float by_mode(bool keeps, float x) { return keeps ? x : flushed(x); }

// Float to integer: truncates, saturates, NaN becomes 0.
INLINE u32 to_u32(float x) { return !(x > 0) ? 0 : x >= 4294967296.f ? ~0u : (u32)x; }
INLINE i32 to_i32(float x) {
  if (x != x) return 0;
  return x >= 2147483648.f ? 0x7fffffff : x <= -2147483648.f ? (i32)0x80000000 : (i32)x;
}
INLINE u32 to_u32(double x) { return !(x > 0) ? 0 : x >= 4294967295. ? ~0u : (u32)x; }
INLINE i32 to_i32(double x) {
  if (x != x) return 0;
  return x >= 2147483647. ? 0x7fffffff : x <= -2147483648. ? (i32)0x80000000 : (i32)x;
}

INLINE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }
// By float, rounded to odd so that the second rounding is the only one: few processors make a half of a double.
INLINE half to_half(double x) {
  const float near = (float)x;
  if (!(near < x || near > x)) return (half)near;
  const bool beyond = __builtin_fabs((double)near) > __builtin_fabs(x);
  return (half)from_bits<float>((to_bits(near) - beyond) | 1);
}
INLINE half fma_(half a, half b, half c) { return to_half(__builtin_fma((double)a, (double)b, (double)c)); }
INLINE float ldexp_(float x, i32 e) { return __builtin_ldexpf(x, e); }
INLINE double ldexp_(double x, i32 e) { return __builtin_ldexp(x, e); }

// minNum and maxNum: a NaN loses. -0 is less than +0.
template <class T> INLINE T min_num(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return to_bits(a) > to_bits(b) ? a : b;  // of two zeros the one with the sign bit
  return a < b ? a : b;
}
template <class T> INLINE T max_num(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return to_bits(a) < to_bits(b) ? a : b;
  return a < b ? b : a;
}
template <class T> INLINE T med3(T a, T b, T c) { return larger(smaller(a, b), smaller(larger(a, b), c)); }
INLINE float med3_num(float a, float b, float c) {
  if (a != a || b != b || c != c) return min_num(min_num(a, b), c);
  return max_num(min_num(a, b), min_num(max_num(a, b), c));
}

// The class bits of v_cmp_class: signalling NaN, quiet NaN, -inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +inf.
template <class T, int E, int M> INLINE bool in_class(T x, u32 mask) {
  const u64 bits = to_bits(x), fraction = bits & ((1ull << M) - 1), top = (1ull << E) - 1;
  const u64 exponent = bits >> M & top, negative = bits >> (E + M) & 1;
  int c;
  if (exponent == top && fraction) c = fraction >> (M - 1) ? 1 : 0;
  else if (exponent == top) c = negative ? 2 : 9;
  else if (exponent) c = negative ? 3 : 8;
  else if (fraction) c = negative ? 4 : 7;
  else c = negative ? 5 : 6;
  return mask >> c & 1;
}

INLINE int exponent_of(half x) { return to_bits(x) >> 10 & 31; }
INLINE int exponent_of(float x) { return to_bits(x) >> 23 & 255; }
INLINE int exponent_of(double x) { return to_bits(x) >> 52 & 2047; }
template <class T> INLINE bool subnormal(T x) { return x != 0 && exponent_of(x) == 0; }

// v_perm_b32: each byte of the selector picks a byte of high:low, a sign, 0x00 or 0xff.
INLINE u32 permute_bytes(u32 high, u32 low, u32 selector) {
  const u64 bytes = (u64)high << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 s = selector >> (8 * i) & 255;
    u32 b;
    if (s < 8) b = bytes >> (8 * s) & 255;
    else if (s < 12) b = (bytes >> (16 * (s - 8) + 15) & 1) * 255;
    else b = s == 12 ? 0 : 255;
    result |= b << (8 * i);
  }
  return result;
}
INLINE u32 reverse_bits(u32 x) { return __builtin_bitreverse32(x); }

// ---- division, in the three steps that the compiler expands it to ----
// Scales numerator or denominator (s0 says which) by 2^64 or 2^-64 where the steps between would overflow or lose bits.
template <class T> struct Scaled { T value; bool flag; };
template <class T> INLINE Scaled<T> div_scale(T s0, T den, T num) {
  constexpr bool F64 = sizeof(T) == 8;
  constexpr int STEP = F64 ? 128 : 64, FAR = F64 ? 768 : 96, TINY = F64 ? 53 : 23;
  const bool is_den = to_bits(s0) == to_bits(den), is_num = to_bits(s0) == to_bits(num);
  if (num == 0 || den == 0) return {(T)__builtin_nanf(""), false};
  if (exponent_of(num) - exponent_of(den) >= FAR) return {is_den ? ldexp_(s0, STEP) : s0, true};
  if (subnormal(den)) return {ldexp_(s0, STEP), false};
  const bool inverse_small = subnormal((T)1 / den), quotient_small = subnormal(num / den) || num / den == 0;
  if (inverse_small && quotient_small) return {is_den ? ldexp_(s0, -STEP) : s0, true};
  if (inverse_small) return {ldexp_(s0, -STEP), false};
  if (quotient_small) return {is_num ? ldexp_(s0, STEP) : s0, true};
  if (exponent_of(num) <= TINY) return {ldexp_(s0, STEP), false};
  return {s0, false};
}
template <class T> INLINE T div_fmas(T a, T b, T c, bool scaled) {
  constexpr bool F64 = sizeof(T) == 8;
  const T r = fma_(a, b, c);
  if (!scaled) return r;
  return ldexp_(r, (exponent_of(c) > (F64 ? 1023 : 127) ? 1 : -1) * (F64 ? 128 : 64));
}
template <class T> INLINE T div_fixup(T quotient, T den, T num) {
  const T infinity = (T)__builtin_inff();
  const bool negative = __builtin_signbit(den) != __builtin_signbit(num);
  T r;
  if (num != num) return num;
  if (den != den) return den;
  if ((num == 0 && den == 0) || (__builtin_isinf(num) && __builtin_isinf(den))) return (T)__builtin_nanf("");
  if (den == 0 || __builtin_isinf(num)) r = infinity;
  else if (__builtin_isinf(den) || num == 0) r = 0;
  else if (sizeof(T) == 4 && exponent_of(num) - exponent_of(den) < -150) r = 0;
  else if (quotient != quotient) r = infinity;  // the steps between overflowed, as nothing here is NaN
  else r = __builtin_signbit(quotient) ? -quotient : quotient;
  return negative ? -r : r;
}

// ---- the rest of the vector instructions that need more than a line ----
INLINE float dot_bf16(u32 a, u32 b, float c) {
  return fma_(from_bf16(a >> 16), from_bf16(b >> 16), fma_(from_bf16(a & 0xffff), from_bf16(b & 0xffff), c));
}
INLINE float dot_f16(u32 a, u32 b, float c) {
  return fma_(from_f16(a >> 16), from_f16(b >> 16), fma_(from_f16(a & 0xffff), from_f16(b & 0xffff), c));
}
INLINE u32 to_f16_toward_zero(float x) {
  const u32 nearest = to_f16(x), sign = nearest & 0x8000;
  const float back = from_f16(nearest);
  const bool infinite = (nearest & 0x7fff) == 0x7c00;
  if (infinite) return __builtin_isinf(x) ? nearest : sign | 0x7bff;
  return __builtin_fabsf(back) > __builtin_fabsf(x) ? nearest - 1 : nearest;
}
// Integers with `clamp`.
template <class T> INLINE T clamped(i64 x) {
  constexpr bool SIGNED = (T)-1 < 0;
  constexpr i64 TOP = (1ll << (8 * sizeof(T) - SIGNED)) - 1, LEAST = SIGNED ? -TOP - 1 : 0;
  return (T)larger(LEAST, smaller(x, TOP));
}
template <class T> INLINE T clamped_sum(T a, T b) { return clamped<T>((i64)a + (i64)b); }
template <class T> INLINE T clamped_difference(T a, T b) { return clamped<T>((i64)a - (i64)b); }
template <int BITS> INLINE u32 dot_unsigned(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 32; i += BITS) c += (a >> i & ((1u << BITS) - 1)) * (b >> i & ((1u << BITS) - 1));
  return c;
}
template <int BITS> INLINE i32 dot_signed(u32 a, u32 b, i32 c) {
  for (int i = 0; i < 32; i += BITS)
    c = (i32)((u32)c + (u32)(((i32)(a << (32 - BITS - i)) >> (32 - BITS)) * ((i32)(b << (32 - BITS - i)) >> (32 - BITS))));
  return c;
}
INLINE u32 put_byte(u32 into, u32 which, u32 byte) { return (into & ~(255u << (8 * which))) | byte << (8 * which); }
INLINE u32 sum_of_byte_differences(u32 a, u32 b) {
  u32 sum = 0;
  for (int i = 0; i < 32; i += 8) {
    const i32 d = (i32)(a >> i & 255) - (i32)(b >> i & 255);
    sum += d < 0 ? -d : d;
  }
  return sum;
}
INLINE float sine_of_turns(float x) { return __builtin_sinf(6.2831853071795865f * (x - __builtin_floorf(x))); }
INLINE float cosine_of_turns(float x) { return __builtin_cosf(6.2831853071795865f * (x - __builtin_floorf(x))); }
INLINE float fraction_part(float x) { return smaller(x - __builtin_floorf(x), from_bits<float>(0x3f7fffffu)); }
INLINE i32 exponent_part(float x) {
  int e = 0;
  if (x == x && !__builtin_isinf(x) && x != 0) (void)__builtin_frexpf(x, &e);
  return e;
}
INLINE float mantissa_part(float x) {
  int e = 0;
  return x == x && !__builtin_isinf(x) ? __builtin_frexpf(x, &e) : x;
}
