// Ordinary HIP programs, as users write them and hiprtc compiles them: one kernel a subject. Tests only ask that the emulator
// knows every instruction in here, with float32 subnormals kept and flushed; what instructions do is tested one by one.
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define ME threadIdx.x
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

// ---- waves and workgroups ----
KERNEL reduce(const float* x, float* y, int n) {
  float v = 0;
  for (int i = ME; i < n; i += 256) v += x[i];
  for (int m = 32; m; m /= 2) v += __shfl_xor(v, m);
  __shared__ float s[4];
  if (ME % 64 == 0) s[ME / 64] = v;
  __syncthreads();
  if (ME == 0) atomicAdd(y, s[0] + s[1] + s[2] + s[3]);
}
KERNEL scan(const int* x, int* y) {
  int v = x[ME];
  for (int m = 1; m < 64; m *= 2) {
    const int u = __shfl_up(v, m);
    if ((int)(ME % 64) >= m) v += u;
  }
  y[ME] = v;
}
KERNEL histogram(const u8* x, unsigned* h, int n) {
  __shared__ unsigned bins[256];
  bins[ME] = 0;
  __syncthreads();
  for (int i = ME; i < n; i += 256) atomicAdd(&bins[x[i]], 1u);
  __syncthreads();
  atomicAdd(&h[ME], bins[ME]);
}
KERNEL bitonic_sort(unsigned* x) {
  __shared__ unsigned s[256];
  s[ME] = x[ME];
  __syncthreads();
  for (unsigned k = 2; k <= 256; k *= 2)
    for (unsigned j = k / 2; j; j /= 2) {
      const unsigned o = ME ^ j, a = s[ME], b = s[o];
      __syncthreads();
      if (o > ME && (a > b) == !(ME & k)) s[ME] = b, s[o] = a;
      __syncthreads();
    }
  x[ME] = s[ME];
}
KERNEL largest(const float* x, int* which) {
  float best = -1e30f;
  int b = 0;
  for (int i = 0; i < 32; i++)
    if (x[ME * 32 + i] > best) best = x[ME * 32 + i], b = i;
  for (int m = 1; m < 64; m *= 2) {
    const float o = __shfl_xor(best, m);
    const int ob = __shfl_xor(b, m);
    if (o > best || (o == best && ob < b)) best = o, b = ob;
  }
  which[ME] = b;
}
KERNEL transpose(const float* x, float* y) {
  __shared__ float t[32][33];
  for (int j = ME / 32; j < 32; j += 8) t[j][ME % 32] = x[j * 32 + ME % 32];
  __syncthreads();
  for (int j = ME / 32; j < 32; j += 8) y[j * 32 + ME % 32] = t[ME % 32][j];
}
KERNEL ballots(const int* a, u64* b) {
  b[ME] = __builtin_amdgcn_ballot_w64(a[ME] > 3) + __builtin_popcountll(__builtin_amdgcn_ballot_w64(a[ME] & 1));
}
KERNEL lanes(int* x) {
  int v = x[ME];
  v += __builtin_amdgcn_update_dpp(0, v, 0x111, 0xf, 0xf, true);
  v += __builtin_amdgcn_update_dpp(0, v, 0x142, 0xa, 0xf, false);
  v += __builtin_amdgcn_ds_swizzle(v, 0x401f);
  x[ME] = v + __builtin_amdgcn_mov_dpp(v, 0xb1, 0xf, 0xf, true);
}

// ---- memory ----
KERNEL atomics(int* a, unsigned* b, float* f, double* d, u64* l) {
  atomicMax(a, (int)ME), atomicMin(a + 1, (int)ME), atomicAnd(b, ME), atomicOr(b + 1, ME), atomicXor(b + 2, ME);
  atomicExch(b + 3, ME), atomicAdd(f, 1.5f), atomicAdd(d, 1.5), atomicAdd(l, (u64)3), atomicMax(l + 1, (u64)ME);
  b[4 + ME] = atomicAdd(a + 5, 1) + atomicCAS(b + 4, 1u, 2u), l[2 + ME] = atomicCAS(l + 3, (u64)1, (u64)2);
  f[4 + ME] = atomicAdd(f + 1, 2.f);
}
KERNEL shared_atomics(int* a, float* g) {
  __shared__ int s[4];
  __shared__ float f;
  __shared__ u64 l[2];
  if (ME < 4) s[ME] = 0, l[ME % 2] = 0, f = 0;
  __syncthreads();
  atomicAdd(&s[0], (int)ME), atomicMax(&s[1], (int)ME), atomicAdd(&f, 1.f), atomicAdd(&l[0], (u64)5);
  atomicCAS(&s[2], 0, 1), atomicCAS(&l[1], (u64)0, (u64)7);
  __syncthreads();
  a[ME] = s[ME % 4] + (int)l[ME % 2], g[ME] = f;
}
KERNEL local_array(const int* x, int* y, int n) {
  int a[16], s = 0;
  for (int i = 0; i < 16; i++) a[i] = x[i * 256 + ME];
  for (int i = 0; i < n; i++) s += a[(x[i] + i) & 15], a[i & 15] ^= s;
  y[ME] = s;
}
KERNEL pointer_to_anything(int* a, int n) {
  __shared__ int s[64];
  int own[4] = {n, 1, 2, 3};
  volatile int* p = n & 1 ? s : n & 2 ? own : a;
  p[ME % 4] = n;
  __syncthreads();
  a[ME] = p[(ME + 1) % 4];
}
KERNEL narrow(const u8* x, signed char* y, short* z) {
  __shared__ u8 t[512];
  __shared__ short u[256];
  t[ME] = x[ME], u[ME] = z[ME];
  __syncthreads();
  y[ME] = (signed char)t[255 - ME], z[ME] = u[ME ^ 5] + (signed char)t[ME / 2];
}
KERNEL streaming(const vec<float, 4>* x, vec<float, 4>* y, volatile float* z) {
  __builtin_nontemporal_store(__builtin_nontemporal_load(x + ME) * 2.f + 1.f, y + ME);
  z[ME] = z[ME + 1];
}
KERNEL table(const int* x, float* y) {
  static const __constant__ float values[8] = {1, 2, 3.5f, 4, 5, 6, 7.25f, 8};
  y[ME] = values[x[ME] & 7];
}
KERNEL cases(const int* x, float* y) {
  float v = y[ME];
  switch (x[blockIdx.x]) {
    case 0: v += 1; break;
    case 1: v *= 2; break;
    case 2: v = -v; break;
    case 3: v = v * v; break;
    case 4: v = 1 / v; break;
    default: v = 0;
  }
  y[ME] = v;
}

// ---- numbers ----
template <class T> __device__ void divided(const T* a, const T* b, T* c) { c[ME] = a[ME] / b[ME] + a[ME] % b[ME]; }
KERNEL divide_long(const long* a, const long* b, long* c) { divided(a, b, c); }
KERNEL divide_unsigned_long(const u64* a, const u64* b, u64* c) { divided(a, b, c); }
KERNEL divide_int(const int* a, const int* b, int* c) { divided(a, b, c); }
KERNEL divide_short(const short* a, const short* b, short* c) { divided(a, b, c); }
KERNEL divide_byte(const u8* a, const u8* b, u8* c) {
  divided(a, b, c);
  c[ME] += a[ME] * b[ME];
}
KERNEL integers(const unsigned* a, unsigned* b, const u64* c, u64* d) {
  const unsigned x = a[ME];
  const u64 y = c[ME];
  b[ME] = __builtin_clz(x | 1) + __builtin_ctz(x | 1) + __builtin_popcount(x) + __builtin_bitreverse32(x) +
          __builtin_bswap32(x) + __builtin_rotateleft32(x, 7) + (x & 0xffff) * (b[ME] & 0xffff);
  d[ME] = __builtin_clzll(y | 1) + __builtin_ctzll(y | 1) + __builtin_popcountll(y) + __builtin_bitreverse64(y) +
          __builtin_bswap64(y) + (u64)(((__int128)(long)y * (long)d[ME]) >> 64) + (u64)((long)(int)x * (int)b[ME]);
}
KERNEL saturated(const int* a, int* b, const short* c, short* d) {
  b[ME] = __builtin_elementwise_add_sat(a[ME], b[ME]) + __builtin_elementwise_abs(a[ME]) +
          (int)__builtin_elementwise_sub_sat((unsigned)a[ME], (unsigned)b[ME]);
  d[ME] = __builtin_elementwise_add_sat(c[ME], d[ME]) + __builtin_elementwise_sub_sat((u16)c[ME], (u16)d[ME]);
}
KERNEL dots(const int* a, const int* b, int* c) { c[ME] = __builtin_amdgcn_sdot4(a[ME], b[ME], c[ME], false); }
KERNEL differences(const u8* a, const u8* b, unsigned* c) {
  unsigned s = 0;
  for (int j = 0; j < 8; j++) s += __builtin_elementwise_abs((int)a[ME * 8 + j] - (int)b[ME * 8 + j]);
  c[ME] = s;
}
KERNEL floats(const float* a, const float* b, float* c) {
  const float x = a[ME], y = b[ME];
  c[ME] = x / y + __builtin_sqrtf(x) + __builtin_floorf(y) + __builtin_roundevenf(x) + __builtin_truncf(y) +
          __builtin_copysignf(x, y) + __builtin_ldexpf(x, ME) + __builtin_fabsf(x - y) + __builtin_roundf(x) +
          __builtin_amdgcn_fmed3f(x, y, 1.f) + __builtin_fmaxf(__builtin_fmaxf(x, y), c[ME]);
}
KERNEL doubles(const double* a, const double* b, double* c) {
  const double x = a[ME], y = b[ME];
  c[ME] = x / y + __builtin_sqrt(x) + __builtin_floor(y) + __builtin_fma(x, y, 1.0) + __builtin_fmax(x, y) + __builtin_round(x);
}
KERNEL halves(const _Float16* a, const _Float16* b, _Float16* c, float* d) {
  c[ME] = a[ME] / b[ME] + __builtin_elementwise_sqrt(a[ME]) + __builtin_elementwise_floor(a[ME] * b[ME] + a[ME]);
  d[ME] = (float)a[ME] * (float)b[ME] + d[ME];
}
KERNEL pairs(const vec<_Float16, 2>* a, vec<_Float16, 2>* b, const vec<short, 2>* c, vec<short, 2>* d) {
  b[ME] = a[ME] * b[ME] + a[ME] - __builtin_elementwise_max(a[ME], b[ME]);
  d[ME] = c[ME] * d[ME] + (c[ME] >> (short)3) - d[ME];
}
KERNEL brain_floats(const __bf16* x, const __bf16* g, vec<__bf16, 2>* y, int n) {
  for (int i = ME; i < n; i += 256) {
    const float a = x[i], b = g[i];
    y[i] = (vec<__bf16, 2>){(__bf16)(a / (1.f + __builtin_amdgcn_exp2f(-a * 1.4426950f)) * b), (__bf16)b} * y[i];
  }
}
KERNEL conversions(const double* a, float* b, _Float16* c, long* d, u64* e) {
  b[ME] = (float)a[ME] + (float)d[ME] + (float)e[ME] + (float)(int)b[ME] + (float)(unsigned)b[ME];
  c[ME] = (_Float16)a[ME] + (_Float16)d[ME];
  d[ME] = (long)a[ME] + (long)b[ME], e[ME] = (u64)b[ME] + (u64)a[ME];
}
KERNEL eight_bits(const float* x, unsigned* y) {
  unsigned r = __builtin_amdgcn_cvt_pk_fp8_f32(x[ME], x[ME + 1], 0, false);
  r = __builtin_amdgcn_cvt_pk_fp8_f32(x[ME + 2], x[ME + 3], r, true);
  const vec<float, 2> v = __builtin_amdgcn_cvt_pk_f32_fp8(r, true);
  y[ME] = r + __builtin_bit_cast(unsigned, v[0] + v[1] + __builtin_amdgcn_cvt_f32_bf8(r, 2));
}
