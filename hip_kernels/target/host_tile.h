// The CPU's GEMM tile: operands unpacked to FP32 panels in depth blocks, multiplied by a register block. Width of vectors is
// the compiler's (AVX-512, AVX2, SSE or NEON); nothing here names an instruction.
#pragma once
#include "../kernels/tile_operands.h"
#include "../schedule/group.h"
#include "../work/bf16.h"
#include "../work/mxfp8.h"

namespace target {
#if defined(__AVX512F__)
constexpr u32 LANES = 16, MICRO_ROWS = 12, MICRO_VECTORS = 2;  // 24 of 32 registers accumulate
#elif defined(__AVX__)
constexpr u32 LANES = 8, MICRO_ROWS = 6, MICRO_VECTORS = 2;    // 12 of 16
#else
constexpr u32 LANES = 4, MICRO_ROWS = 6, MICRO_VECTORS = 2;
#endif
constexpr u32 TILE_M = 96, TILE_N = 96, DEPTH = 256, MICRO_COLS = MICRO_VECTORS * LANES;
static_assert(TILE_M % MICRO_ROWS == 0 && TILE_N % MICRO_COLS == 0 && TILE_N % 8 == 0 && MICRO_COLS % 8 == 0);

template <class T, int N> using vec = T __attribute__((vector_size(N * sizeof(T))));
using Floats = vec<float, LANES>;
using Float8 = vec<float, 8>;
using U32x8 = vec<u32, 8>;
using U16x8 = vec<u16, 8>;

inline Float8 widen(U16x8 h) { return (Float8)(__builtin_convertvector(h, U32x8) << 16); }
inline U16x8 load8(const Vec16* p) { return __builtin_bit_cast(U16x8, read(p)); }

struct Panels {  // one thread's scratch
  alignas(64) float a[TILE_M][DEPTH];                              // row by row
  alignas(64) float b[TILE_N / MICRO_COLS][DEPTH][MICRO_COLS];     // k by k
  alignas(64) float c[TILE_M][TILE_N];
};

template <class Eight> inline void transpose(Eight (&x)[8]) {
  Eight y[8];
  const auto interleave = [](Eight (&to)[8], const Eight (&from)[8]) {
    for (u32 j = 0; j < 4; j++) {
      to[2 * j] = __builtin_shufflevector(from[j], from[j + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      to[2 * j + 1] = __builtin_shufflevector(from[j], from[j + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
  };
  interleave(y, x);
  interleave(x, y);
  interleave(y, x);
  for (u32 j = 0; j < 8; j++) x[j] = y[j];
}

// Rows past the end are not touched, or multiply into rows of C that are not stored. So do columns of B.
template <bool BY_K> inline void unpack_a(Panels& s, const TileOperands& t, u32 k0, u32 depth) {
  if constexpr (!BY_K) {
    for (u32 r = 0; r < t.rows; r++)
      for (u32 k = 0; k < depth; k += 8) *(Float8*)&s.a[r][k] = widen(load8(t.a + ((u64)r * t.lda + k0 + k) / 8));
    return;
  }
  for (u32 k = 0; k < depth; k += 8)
    for (u32 r = 0; r < t.rows; r += 8) {
      U16x8 x[8];
      for (u32 j = 0; j < 8; j++) x[j] = k + j < depth ? load8(t.a + ((u64)(k0 + k + j) * t.lda + r) / 8) : U16x8{};
      transpose(x);
      for (u32 j = 0; j < 8; j++) *(Float8*)&s.a[r + j][k] = widen(x[j]);
    }
}

inline void place_b(Panels& s, u32 n, u32 k, Float8 f) {
  __builtin_memcpy(&s.b[n / MICRO_COLS][k][n % MICRO_COLS], &f, sizeof f);
}
template <bool BY_K> inline void unpack_b(Panels& s, const TileOperands& t, u32 k0, u32 depth) {
  const auto place = [&](u32 n, u32 k, U16x8 h) { place_b(s, n, k, widen(h)); };
  for (u32 n = 0; n < t.cols; n += 8) {
    if constexpr (BY_K) {
      for (u32 k = 0; k < depth; k++) place(n, k, load8(t.b + ((u64)(k0 + k) * t.ldb + n) / 8));
      continue;
    }
    for (u32 k = 0; k < depth; k += 8) {
      U16x8 x[8];
      for (u32 j = 0; j < 8; j++) x[j] = n + j < t.cols ? load8(t.b + ((u64)(n + j) * t.ldb + k0 + k) / 8) : U16x8{};
      transpose(x);
      for (u32 j = 0; j < 8; j++) place(n, k + j, x[j]);
    }
  }
}

template <Layout L> inline void unpack(Panels& s, const TileOperands& t, u32 k0, u32 depth) {
  unpack_a<L == NT>(s, t, k0, depth);
  unpack_b<L != TN>(s, t, k0, depth);
}
inline void unpack_by(Layout layout, Panels& s, const TileOperands& t, u32 k0, u32 depth) {
  if (layout == TN) unpack<TN>(s, t, k0, depth);
  else if (layout == NN) unpack<NN>(s, t, k0, depth);
  else unpack<NT>(s, t, k0, depth);
}

// MXFP8: eight k of a line, from k on. Their product with their scale is exact.
inline Float8 eight_e4m3(const Vec16* lines, const u32* scales, u32 ld, u32 ld_scales, u32 line, u32 k) {
  using Bytes = vec<unsigned char, 8>;
  const u64 eight = read((const u64*)lines + ((u64)line * ld + k) / 8);
  const u32 four = read(scales + (u64)(k / MX_STEP) * ld_scales + line);
  const U32x8 codes = __builtin_convertvector(__builtin_bit_cast(Bytes, eight), U32x8);
  return e4m3_values<Float8>(codes) * scale_value(four >> k % MX_STEP / MX_BLOCK * 8 & 255);
}
inline void unpack_mxfp8(Panels& s, const TileOperands& t, u32 k0, u32 depth) {
  for (u32 r = 0; r < t.rows; r++)
    for (u32 k = 0; k < depth; k += 8)
      *(Float8*)&s.a[r][k] = eight_e4m3(t.a, t.scales_a, t.lda, t.ld_scales_a, r, k0 + k);
  for (u32 n = 0; n < t.cols; n += 8)
    for (u32 k = 0; k < depth; k += 8) {
      Float8 x[8];
      for (u32 j = 0; j < 8; j++)
        x[j] = n + j < t.cols ? eight_e4m3(t.b, t.scales_b, t.ldb, t.ld_scales_b, n + j, k0 + k) : Float8{};
      transpose(x);
      for (u32 j = 0; j < 8; j++) place_b(s, n, k + j, x[j]);
    }
}

inline void micro(float* c, const float* a, const float* b, u32 depth) {
  Floats acc[MICRO_ROWS][MICRO_VECTORS];
  for (u32 r = 0; r < MICRO_ROWS; r++)
    for (u32 v = 0; v < MICRO_VECTORS; v++) acc[r][v] = *(const Floats*)(c + r * TILE_N + v * LANES);
  for (u32 k = 0; k < depth; k++) {
    Floats col[MICRO_VECTORS];
    for (u32 v = 0; v < MICRO_VECTORS; v++) col[v] = *(const Floats*)(b + k * MICRO_COLS + v * LANES);
    for (u32 r = 0; r < MICRO_ROWS; r++)
      for (u32 v = 0; v < MICRO_VECTORS; v++) acc[r][v] += a[r * DEPTH + k] * col[v];
  }
  for (u32 r = 0; r < MICRO_ROWS; r++)
    for (u32 v = 0; v < MICRO_VECTORS; v++) *(Floats*)(c + r * TILE_N + v * LANES) = acc[r][v];
}

// to_bf16 of eight at once; tests compare it with the scalar one over every rounding case.
inline U16x8 narrow(Float8 f) {
  const U32x8 u = (U32x8)f, rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const auto nan = (u & 0x7fffffff) > 0x7f800000;
  return __builtin_convertvector(((U32x8)nan & 0x7fc0) | (~(U32x8)nan & rounded), U16x8);
}

template <class Op>
void hand_over_row(const typename Op::Params& p, const Work& w, u32 row, u32 cols, const float* sums) {
  const auto four = [&](u32 n) -> const float(&)[4] { return *(const float(*)[4])(sums + n); };
  const Epilogue how = epilogue<Op>(w);
  if constexpr (requires { Op::gated_to(p, w); })
    if (how == GATED_SUMS) {
      const auto to = Op::gated_to(p, w);
      for (u32 n = 0; n < cols; n += n % target::GATED == target::GATED - 4 ? target::GATED + 4 : 4)
        to.put(row, n / (2 * target::GATED) * target::GATED + n % target::GATED, four(n), four(n + target::GATED));
    }
  if constexpr (requires { Op::sums_to(p, w); })
    if (how == SUMS) {
      const auto to = Op::sums_to(p, w);
      for (u32 n = 0; n < cols; n += 4) to.put(row, n, four(n), to.was(row, n));
    }
  if constexpr (requires { Op::store(p, w, row, 0, 0); })
    for (u32 n = 0; how == ROWS && n < cols; n += 8) {
      const Vec16 v = __builtin_bit_cast(Vec16, narrow(*(const Float8*)(sums + n)));
      Op::store(p, w, row, n, v.lo);
      if (n + 4 < cols) Op::store(p, w, row, n + 4, v.hi);
    }
}

template <class Op> void gemm_tile(const typename Op::Params& p, const Work& w) {
  static thread_local Panels s;
  const TileOperands t = Op::operands(p, w);
  __builtin_memset(s.c, 0, sizeof s.c);
  for (u32 k0 = 0; k0 < t.K; k0 += DEPTH) {
    const u32 depth = t.K - k0 < DEPTH ? t.K - k0 : DEPTH;
    if (element_of<Op>(w.kind) == MXFP8) unpack_mxfp8(s, t, k0, depth);
    else if constexpr (many_layouts<Op>()) unpack_by(Op::layout(w.kind), s, t, k0, depth);
    else unpack<layout<Op>()>(s, t, k0, depth);
    for (u32 n = 0; n < t.cols; n += MICRO_COLS)
      for (u32 r = 0; r < t.rows; r += MICRO_ROWS) micro(&s.c[r][n], s.a[r], s.b[n / MICRO_COLS][0], depth);
  }
  for (u32 r = 0; r < t.rows; r++) hand_over_row<Op>(p, w, r, t.cols, s.c[r]);
}
}  // namespace target
