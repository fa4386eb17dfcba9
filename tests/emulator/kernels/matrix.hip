// One matrix instruction a kernel; operands and results as the lanes hold them.
#include "device.h"

using I8 = vec<int, 8>;
using F4 = vec<float, 4>;
using F16 = vec<float, 16>;

#define PLAIN(name, instruction, Operand, Sums)                                             \
  KERNEL(64) name(const Operand* a, const Operand* b, const Sums* c, Sums* d) {            \
    const u32 t = thread();                                                                \
    d[t] = __builtin_amdgcn_mfma_f32_##instruction(a[t], b[t], c[t], 0, 0, 0);             \
  }
using Bf = vec<__bf16, 8>;
using H = vec<_Float16, 8>;
PLAIN(bf16_16, 16x16x32_bf16, Bf, F4)
PLAIN(bf16_32, 32x32x16_bf16, Bf, F16)
PLAIN(f16_16, 16x16x32_f16, H, F4)
PLAIN(f16_32, 32x32x16_f16, H, F16)

// Which byte of a scale register, and which element types: constants of the instruction.
#define SCALED(name, shape, Sums, TYPE_A, TYPE_B, BYTE_A, BYTE_B)                                                       \
  KERNEL(64) name(const I8* a, const I8* b, const Sums* c, Sums* d, const int* sa, const int* sb) {                    \
    const u32 t = thread();                                                                                            \
    d[t] = __builtin_amdgcn_mfma_scale_f32_##shape##_f8f6f4(a[t], b[t], c[t], TYPE_A, TYPE_B, BYTE_A, sa[t], BYTE_B, sb[t]); \
  }
#define BOTH_SHAPES(name, ...)                      \
  SCALED(name##_16, 16x16x128, F4, __VA_ARGS__)     \
  SCALED(name##_32, 32x32x64, F16, __VA_ARGS__)
BOTH_SHAPES(fp8_fp8, 0, 0, 0, 0)
BOTH_SHAPES(fp8_bf8, 0, 1, 1, 2)
BOTH_SHAPES(bf8_fp8, 1, 0, 3, 1)
BOTH_SHAPES(fp4_fp4, 4, 4, 2, 3)
BOTH_SHAPES(fp6_bf6, 2, 3, 0, 3)
BOTH_SHAPES(fp8_fp4, 0, 4, 2, 0)
