// Matrix instructions, 16x16 and 32x32, one block. EXEC is not looked at.
//
// M rows, G = 64 / M groups of lanes; lane l has row (A) or column (B) l % M and group g = l / M. Its element j is at
//   k = P g + j                            P = K / G elements a lane
//   k = 16 G (j / 16) + 16 g + j % 16      8-bit types of f8f6f4: two chunks of 16
// The scale of row m and k in [32 b, 32 b + 32) is one byte of lane m + M b. Result register i of lane l is column l % M
// and row 4 (l / 16) + i (16x16) or 8 (i / 4) + 4 (l / 32) + i % 4 (32x32). Sums are fused float32 steps in order of k,
// block by block when scaled; hardware may differ in the last bits.
#pragma once
#include "lanes.h"

enum Element { F32, F16, BF16, FP8, BF8, FP6, BF6, FP4 };

template <Element T> constexpr int ELEMENT_BITS = T == F32 ? 32 : T <= BF16 ? 16 : T <= BF8 ? 8 : T <= BF6 ? 6 : 4;

// Element j of lanes first .. first + M of the registers r, as float.
template <Element T, int M> INLINE void widen_row(float* out, const u32 (*r)[LANES], int first, int j) {
  constexpr int BITS = ELEMENT_BITS<T>;
  const int bit = BITS * j, word = bit / 32, shift = bit % 32;
  const u32 *low = r[word] + first, *high = r[shift + BITS > 32 ? word + 1 : word] + first;
  for (int m = 0; m < M; m++) {
    u32 x = low[m] >> shift;
    if (32 % BITS) x |= shift + BITS > 32 ? high[m] << (32 - shift) : 0;  // six bits may cross a word
    if (BITS < 32) x &= (1u << (BITS % 32)) - 1;
    if constexpr (T == F32) out[m] = from_bits<float>(x);
    else if constexpr (T == F16) out[m] = from_f16(x);
    else if constexpr (T == BF16) out[m] = from_bf16(x);
    else if constexpr (T == FP8) out[m] = from_fp8(x);
    else if constexpr (T == BF8) out[m] = from_bf8(x);
    else if constexpr (T == FP6) out[m] = widen<2, 3>(x);
    else if constexpr (T == BF6) out[m] = widen<3, 2>(x);
    else out[m] = widen<2, 1>(x);
  }
}

// out[k][row] of one operand.
template <int M, int K, Element T> INLINE void gather(float (*out)[M], const u32 (*r)[LANES]) {
  constexpr int G = LANES / M, P = K / G;
  constexpr bool CHUNKED = ELEMENT_BITS<T> == 8 && P == 32;
  for (int j = 0; j < P; j++)
    for (int g = 0; g < G; g++) {
      const int k = CHUNKED ? 16 * G * (j / 16) + 16 * g + j % 16 : P * g + j;
      widen_row<T, M>(out[k], r, M * g, j);
    }
}

template <int M> constexpr int result_row(int i, int lane) {
  return M == 16 ? 4 * (lane / 16) + i : 8 * (i / 4) + 4 * (lane / 32) + i % 4;
}

// As many rows and columns of sums at a time as the host's vector registers hold.
#ifdef __AVX512F__
constexpr int SUM_ROWS = 8;
#else
constexpr int SUM_ROWS = 4;
#endif
typedef float Floats __attribute__((ext_vector_type(16), aligned(4)));
typedef double Doubles __attribute__((ext_vector_type(16)));

// sum[m][n] += a[k][m] * b[k][n] for k in [begin, end), then times the scales when there are any.
template <int M>
INLINE void multiply(float (*sum)[M], float (*a)[M], float (*b)[M], int begin, int end, const float* sa, const float* sb) {
  for (int m0 = 0; m0 < M; m0 += SUM_ROWS)
    for (int n0 = 0; n0 < M; n0 += 16) {
      Floats part[SUM_ROWS];
#pragma unroll
      for (int m = 0; m < SUM_ROWS; m++) part[m] = sa ? (Floats)0.f : *(Floats*)&sum[m0 + m][n0];
      for (int k = begin; k < end; k++) {
        const Floats columns = *(Floats*)&b[k][n0];
#pragma unroll
        for (int m = 0; m < SUM_ROWS; m++) part[m] = __builtin_elementwise_fma((Floats)a[k][m0 + m], columns, part[m]);
      }
#pragma unroll
      for (int m = 0; m < SUM_ROWS; m++) {
        Floats& to = *(Floats*)&sum[m0 + m][n0];
        if (!sa) {
          to = part[m];
          continue;
        }
        // In double, which has every product of two scales: 2^127 times 2^-127, and 2^-127 times 2^-20 of a large sum.
        const Doubles scale = (Doubles)(double)sa[m0 + m] * __builtin_convertvector(*(Floats*)&sb[n0], Doubles);
        to += __builtin_convertvector(__builtin_convertvector(part[m], Doubles) * scale, Floats);
      }
    }
}

template <int M> INLINE void scales(float* out, const u32* r, int block, int byte) {
  for (int m = 0; m < M; m++) out[m] = from_e8m0(r[m + M * block] >> (8 * byte) & 255);
}

template <int M, int K, Element TA, Element TB, class C>
NOINLINE void mfma(Wave& w, u32 d, u32 a_, u32 b_, u64 c_, i32 scale_a, int byte_a, u32 scale_b, int byte_b) {
  // scale_a < 0: none
  constexpr int REGISTERS = M * M / LANES;
  alignas(64) float a[K][M], b[K][M], sum[M][M], sa[M], sb[M];
  gather<M, K, TA>(a, w.v + a_);
  gather<M, K, TB>(b, w.v + b_);
  // A row of the result lies in the lanes of one group, in one register.
  for (int i = 0; i < REGISTERS; i++)
    for (int first = 0; first < LANES; first += M) {
      const auto c = C::template get<float>(w, c_ + (__is_same(C, V) ? i : 0));
      for (int m = 0; m < M; m++) sum[result_row<M>(i, first)][m] = c[first + m];
    }
  if (scale_a < 0) {
    multiply<M>(sum, a, b, 0, K, nullptr, nullptr);
  } else {
    for (int block = 0; block < K / 32; block++) {
      scales<M>(sa, w.v[scale_a], block, byte_a);
      scales<M>(sb, w.v[scale_b], block, byte_b);
      multiply<M>(sum, a, b, 32 * block, 32 * block + 32, sa, sb);
    }
  }
  for (int i = 0; i < REGISTERS; i++)
    for (int first = 0; first < LANES; first += M) memcpy(&w.v[d + i][first], sum[result_row<M>(i, first)], 4 * M);
  w.matrix_flops += 2ull * M * M * K;
}
