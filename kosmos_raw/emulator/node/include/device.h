// What hiprtc predefines, as far as CuPy's own kernels need it: qualifiers, built-in variables, synchronisation, atomics,
// shuffles and the mathematics that the compiler does without ROCm's device libraries. What needs those is declared only: a
// kernel that uses it does not link, and says so.
#pragma once
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define THREADS_(most) __attribute__((amdgpu_flat_work_group_size(1, most)))
#define THREADS_AND_WAVES_(most, waves) THREADS_(most) __attribute__((amdgpu_waves_per_eu(waves)))
#define CHOOSE_(first, second, chosen, ...) chosen
#define __launch_bounds__(...) CHOOSE_(__VA_ARGS__, THREADS_AND_WAVES_, THREADS_, )(__VA_ARGS__)
#define __restrict__ __restrict
#define NULL __null
#define warpSize 64
#define DEVICE_ static __device__ inline __attribute__((always_inline))

using size_t = __SIZE_TYPE__;
using ptrdiff_t = __PTRDIFF_TYPE__;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long;
using intptr_t = long;
using uintptr_t = unsigned long;
namespace std {
using ::ptrdiff_t;
using ::size_t;
template <class T> T&& declval() noexcept;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
  using type = T;
};
}  // namespace std

// ---- built-in variables; block and grid sizes lie behind the kernel's own arguments ----
namespace kosmos_builtin {
template <class T> DEVICE_ unsigned implicit(int i) {
  return ((const __attribute__((address_space(4))) T*)__builtin_amdgcn_implicitarg_ptr())[i];
}
#define AXIS_(type, axis, value)                          \
  struct type##_##axis {                                  \
    __device__ operator unsigned() const { return value; } \
  };
#define THREE_(type, x_, y_, z_) \
  AXIS_(type, x, x_)             \
  AXIS_(type, y, y_)             \
  AXIS_(type, z, z_)             \
  struct type {                  \
    type##_x x;                  \
    type##_y y;                  \
    type##_z z;                  \
  };
THREE_(Thread, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(), __builtin_amdgcn_workitem_id_z())
THREE_(Block, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z())
THREE_(BlockSize, implicit<unsigned short>(6), implicit<unsigned short>(7), implicit<unsigned short>(8))
THREE_(GridSize, implicit<unsigned>(0), implicit<unsigned>(1), implicit<unsigned>(2))
}  // namespace kosmos_builtin
static const __device__ kosmos_builtin::Thread threadIdx{};
static const __device__ kosmos_builtin::Block blockIdx{};
static const __device__ kosmos_builtin::BlockSize blockDim{};
static const __device__ kosmos_builtin::GridSize gridDim{};

// ---- synchronisation ----
DEVICE_ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE_ void __threadfence_block() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"); }
DEVICE_ void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
DEVICE_ void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
DEVICE_ unsigned long long clock64() { return __builtin_readcyclecounter(); }
DEVICE_ long long clock() { return clock64(); }

// ---- atomics ----
#define ATOMIC_(T, name, builtin) \
  DEVICE_ T name(T* p, T v) { return builtin(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
#define ATOMICS_OF_NUMBERS_(T)                     \
  ATOMIC_(T, atomicAdd, __hip_atomic_fetch_add)    \
  ATOMIC_(T, atomicExch, __hip_atomic_exchange)
#define ATOMICS_OF_INTEGERS_(T)                  \
  ATOMICS_OF_NUMBERS_(T)                         \
  ATOMIC_(T, atomicMax, __hip_atomic_fetch_max)  \
  ATOMIC_(T, atomicMin, __hip_atomic_fetch_min)  \
  ATOMIC_(T, atomicAnd, __hip_atomic_fetch_and)  \
  ATOMIC_(T, atomicOr, __hip_atomic_fetch_or)    \
  ATOMIC_(T, atomicXor, __hip_atomic_fetch_xor)  \
  DEVICE_ T atomicSub(T* p, T v) { return atomicAdd(p, (T)-v); } \
  DEVICE_ T atomicCAS(T* p, T expected, T v) {   \
    __hip_atomic_compare_exchange_strong(p, &expected, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); \
    return expected;                             \
  }
ATOMICS_OF_INTEGERS_(int)
ATOMICS_OF_INTEGERS_(unsigned)
ATOMICS_OF_INTEGERS_(unsigned long)
ATOMICS_OF_INTEGERS_(unsigned long long)
ATOMICS_OF_NUMBERS_(float)
ATOMICS_OF_NUMBERS_(double)

// ---- bits ----
DEVICE_ int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
DEVICE_ float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
DEVICE_ unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
DEVICE_ float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
DEVICE_ long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
DEVICE_ double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
DEVICE_ int __clz(int x) { return x ? __builtin_clz(x) : 32; }
DEVICE_ int __popc(unsigned x) { return __builtin_popcount(x); }
DEVICE_ int __popcll(unsigned long long x) { return __builtin_popcountll(x); }

// ---- shuffles among the 64 lanes of a wave, or groups of `width` ----
namespace kosmos_builtin {
DEVICE_ int lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
template <class T> DEVICE_ T from_lane(T value, int source) {
  int words[(sizeof(T) + 3) / 4] = {};
  __builtin_memcpy(words, &value, sizeof value);
  for (int& word : words) word = __builtin_amdgcn_ds_bpermute(4 * source, word);
  __builtin_memcpy(&value, words, sizeof value);
  return value;
}
}  // namespace kosmos_builtin
template <class T> DEVICE_ T __shfl(T v, int source, int width = 64) {
  return kosmos_builtin::from_lane(v, (kosmos_builtin::lane() & ~(width - 1)) + (source & (width - 1)));
}
template <class T> DEVICE_ T __shfl_xor(T v, int mask, int width = 64) {
  const int me = kosmos_builtin::lane(), source = me ^ mask;
  return kosmos_builtin::from_lane(v, source >= ((me + width) & ~(width - 1)) ? me : source);
}
template <class T> DEVICE_ T __shfl_down(T v, unsigned by, int width = 64) {
  const int me = kosmos_builtin::lane();
  return kosmos_builtin::from_lane(v, (me & (width - 1)) + (int)by >= width ? me : me + (int)by);
}
template <class T> DEVICE_ T __shfl_up(T v, unsigned by, int width = 64) {
  const int me = kosmos_builtin::lane();
  return kosmos_builtin::from_lane(v, (me & (width - 1)) < (int)by ? me : me - (int)by);
}
#define SHUFFLE_SYNC_(name)                                                                \
  template <class M, class T, class W> DEVICE_ T name##_sync(M, T v, W which, int width = 64) { \
    return name(v, which, width);                                                          \
  }
SHUFFLE_SYNC_(__shfl)
SHUFFLE_SYNC_(__shfl_xor)
SHUFFLE_SYNC_(__shfl_down)
SHUFFLE_SYNC_(__shfl_up)

// ---- mathematics that the compiler does by itself ----
#define UNARY_(name)                                        \
  DEVICE_ float name##f(float x) { return __builtin_##name##f(x); } \
  DEVICE_ float name(float x) { return __builtin_##name##f(x); }    \
  DEVICE_ double name(double x) { return __builtin_##name(x); }
#define BINARY_(name)                                                         \
  DEVICE_ float name##f(float x, float y) { return __builtin_##name##f(x, y); } \
  DEVICE_ float name(float x, float y) { return __builtin_##name##f(x, y); }    \
  DEVICE_ double name(double x, double y) { return __builtin_##name(x, y); }
UNARY_(sqrt)
UNARY_(floor)
UNARY_(ceil)
UNARY_(trunc)
UNARY_(rint)
UNARY_(fabs)
UNARY_(round)
UNARY_(nearbyint)
BINARY_(fmax)
BINARY_(fmin)
BINARY_(copysign)
#define UNARY_FLOAT_(name)                                          \
  DEVICE_ float name##f(float x) { return __builtin_##name##f(x); } \
  DEVICE_ float name(float x) { return __builtin_##name##f(x); }    \
  __device__ double name(double);
UNARY_FLOAT_(exp)
UNARY_FLOAT_(exp2)
UNARY_FLOAT_(log)
UNARY_FLOAT_(log2)
DEVICE_ float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE_ double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE_ float ldexpf(float x, int e) { return __builtin_amdgcn_ldexpf(x, e); }
DEVICE_ float ldexp(float x, int e) { return ldexpf(x, e); }
DEVICE_ double ldexp(double x, int e) { return __builtin_amdgcn_ldexp(x, e); }
DEVICE_ float scalbnf(float x, int e) { return ldexpf(x, e); }
DEVICE_ double scalbn(double x, int e) { return ldexp(x, e); }
DEVICE_ float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
DEVICE_ double rsqrt(double x) { return 1. / __builtin_sqrt(x); }
template <class T> DEVICE_ T max(T a, T b) { return a > b ? a : b; }
template <class T> DEVICE_ T min(T a, T b) { return a < b ? a : b; }
DEVICE_ int abs(int x) { return x < 0 ? -x : x; }
DEVICE_ long abs(long x) { return x < 0 ? -x : x; }
DEVICE_ long long abs(long long x) { return x < 0 ? -x : x; }
DEVICE_ long long llabs(long long x) { return x < 0 ? -x : x; }
DEVICE_ float abs(float x) { return __builtin_fabsf(x); }
DEVICE_ double abs(double x) { return __builtin_fabs(x); }
#define CLASS_(T)                                            \
  DEVICE_ bool isnan(T x) { return x != x; }                 \
  DEVICE_ bool isinf(T x) { return __builtin_isinf(x); }     \
  DEVICE_ bool isfinite(T x) { return __builtin_isfinite(x); } \
  DEVICE_ bool signbit(T x) { return __builtin_signbit(x); }
CLASS_(float)
CLASS_(double)

// ---- half: its arithmetic is that of float ----
struct __half_raw {
  unsigned short x;
};
struct half {
  _Float16 value;
  __device__ half() {}
  __device__ half(float x) : value((_Float16)x) {}
  __device__ half(double x) : value((_Float16)x) {}
  __device__ half(int x) : value((_Float16)x) {}
  __device__ half(bool x) : value((_Float16)(float)x) {}
  __device__ half(unsigned x) : value((_Float16)x) {}
  __device__ half(long long x) : value((_Float16)x) {}
  __device__ half(unsigned long long x) : value((_Float16)x) {}
  __device__ half(__half_raw x) : value(__builtin_bit_cast(_Float16, x.x)) {}
  __device__ operator float() const { return value; }
  __device__ operator __half_raw() const { return {__builtin_bit_cast(unsigned short, value)}; }
};
using __half = half;
DEVICE_ unsigned short __half_as_ushort(half x) { return __builtin_bit_cast(unsigned short, x.value); }
DEVICE_ half __ushort_as_half(unsigned short x) { return half(__half_raw{x}); }
DEVICE_ float __half2float(half x) { return x.value; }
DEVICE_ half __float2half(float x) { return half(x); }
DEVICE_ half __float2half_rn(float x) { return half(x); }

// ---- declared only ----
#define NO_UNARY_(name)           \
  __device__ float name##f(float); \
  __device__ double name(double);  \
  DEVICE_ float name(float x) { return name##f(x); }
#define NO_BINARY_(name)                  \
  __device__ float name##f(float, float); \
  __device__ double name(double, double); \
  DEVICE_ float name(float x, float y) { return name##f(x, y); }
NO_UNARY_(sin)
NO_UNARY_(cos)
NO_UNARY_(tan)
NO_UNARY_(asin)
NO_UNARY_(acos)
NO_UNARY_(atan)
NO_UNARY_(sinh)
NO_UNARY_(cosh)
NO_UNARY_(tanh)
NO_UNARY_(asinh)
NO_UNARY_(acosh)
NO_UNARY_(atanh)
NO_UNARY_(expm1)
NO_UNARY_(log1p)
NO_UNARY_(log10)
NO_UNARY_(cbrt)
NO_UNARY_(erf)
NO_UNARY_(erfc)
NO_UNARY_(tgamma)
NO_UNARY_(lgamma)
NO_UNARY_(logb)
NO_BINARY_(pow)
NO_BINARY_(fmod)
NO_BINARY_(atan2)
NO_BINARY_(hypot)
NO_BINARY_(nextafter)
NO_BINARY_(remainder)
__device__ float frexpf(float, int*);
__device__ double frexp(double, int*);
DEVICE_ float frexp(float x, int* e) { return frexpf(x, e); }
__device__ float modff(float, float*);
__device__ double modf(double, double*);
DEVICE_ float modf(float x, float* e) { return modff(x, e); }
DEVICE_ void sincosf(float x, float* s, float* c) {
  *s = sinf(x);
  *c = cosf(x);
}
DEVICE_ void sincos(float x, float* s, float* c) { sincosf(x, s, c); }
DEVICE_ void sincos(double x, double* s, double* c) {
  *s = sin(x);
  *c = cos(x);
}
