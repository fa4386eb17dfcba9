// sm_90a: one function an instruction, for barriers in shared memory, TMA and WGMMA. Addresses of shared memory are u32.
#pragma once
#include "target.h"

#define INLINE __device__ __forceinline__

namespace target {
INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarriers: a phase ends when all arrivals, and all bytes that were announced, have come
INLINE void init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
INLINE void inits_are_visible() {  // to the copy engine too; the caller's barrier tells the other threads
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
INLINE void arrive(u32 barrier) {  // releases to the WG
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
INLINE void arrive_times(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
INLINE void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
INLINE void wait(u32 barrier, u32 parity) {  // acquires. The braces make the label local to each copy
  asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
               ::"r"(barrier), "r"(parity) : "memory");
}
INLINE bool has_passed(u32 barrier, u32 parity) {  // without waiting
  u32 passed;
  asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
               : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
  return passed;
}

// ---- TMA
struct alignas(64) TensorMap { u64 opaque[16]; };  // made by the driver: cuTensorMapEncodeTiled

// Others' stores, which this thread has acquired, come before its TMA loads; its own TMA stores, which it has waited for,
// before what it releases.
INLINE void order_with_tma() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// This lane's ordinary stores to shared memory come before TMA stores of them, by whoever has met it since.
INLINE void shared_then_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

INLINE void prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// One box: it begins with element x of line y. Outside of the matrix it is zeros, which count as bytes too.
INLINE void load_box(u32 to, const TensorMap* map, u32 barrier, u32 x, u32 y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// Bytes that follow each other, a multiple of 16, from and to addresses of such.
INLINE void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
INLINE void store_bytes(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
INLINE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Of this thread's stores, all but the YOUNGER last groups have read shared memory.
template <u32 YOUNGER> INLINE void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(YOUNGER) : "memory");
}
template <u32 YOUNGER> INLINE void wait_stores() {  // they are where they go
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(YOUNGER) : "memory");
}

// ---- WGMMA: D[64, N] += A[64, 16] B[16, N] by the four warps of a warpgroup; A and B in shared memory
// What the hardware needs to know of an operand: lines of 64 elements (128 bytes, swizzled), 8 lines a KiB. By k: a line
// holds neighbours of the other dimension, and the next 64 of them lie PANEL_BYTES on.
constexpr u32 PANEL_BYTES = 8192;
template <bool BY_K> INLINE u64 operand(u32 address) {
  constexpr u64 FIXED = (u64)(BY_K ? PANEL_BYTES >> 4 : 1) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
  return (address & 0x3ffff) >> 4 | FIXED;
}
// 16 k further on: 32 bytes in the line, or 16 lines.
template <bool BY_K> constexpr u32 OPERAND_STEP = (BY_K ? 16 * 128 : 32) >> 4;

INLINE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 YOUNGER> INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(YOUNGER) : "memory");
}

#define KOSMOS_TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define KOSMOS_60 KOSMOS_TEN() KOSMOS_TEN(1) KOSMOS_TEN(2) KOSMOS_TEN(3) KOSMOS_TEN(4) KOSMOS_TEN(5)
#define KOSMOS_8D(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KOSMOS_32D(i) KOSMOS_8D(i), KOSMOS_8D(i + 8), KOSMOS_8D(i + 16), KOSMOS_8D(i + 24)
#define KOSMOS_WGMMA(n, registers, a, b, keep, by_k_a, by_k_b, ...)                                                        \
  asm volatile("{ .reg .pred keep; setp.ne.b32 keep, %" #keep ", 0; wgmma.mma_async.sync.aligned.m64n" #n                  \
               "k16.f32.bf16.bf16 {" registers "}, %" #a ", %" #b ", keep, 1, 1, %" #by_k_a ", %" #by_k_b "; }"            \
               : __VA_ARGS__ : "l"(x), "l"(y), "r"((u32)sum), "n"((u32)A_BY_K), "n"((u32)B_BY_K))

// Starts one. d is the instruction's until wgmma_wait. sum false: what was in d does not count.
template <u32 N, bool A_BY_K, bool B_BY_K> INLINE void wgmma(float (&d)[N / 2], u64 x, u64 y, bool sum) {
  static_assert(N == 256 || N == 128);
  if constexpr (N == 256)
    KOSMOS_WGMMA(256, KOSMOS_60 KOSMOS_TEN(6) KOSMOS_TEN(7) KOSMOS_TEN(8) KOSMOS_TEN(9) KOSMOS_TEN(10) KOSMOS_TEN(11)
                 "%120, %121, %122, %123, %124, %125, %126, %127", 128, 129, 130, 131, 132,
                 KOSMOS_32D(0), KOSMOS_32D(32), KOSMOS_32D(64), KOSMOS_32D(96));
  else
    KOSMOS_WGMMA(128, KOSMOS_60 "%60, %61, %62, %63", 64, 65, 66, 67, 68, KOSMOS_32D(0), KOSMOS_32D(32));
}

#undef KOSMOS_WGMMA
#undef KOSMOS_32D
#undef KOSMOS_8D
#undef KOSMOS_60
#undef KOSMOS_TEN

// ---- results
INLINE u32 pack(float low, float high) {  // to nearest even; a NaN stays one
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// Four 8 x 8 matrices of 16-bit values, as WGMMA leaves them; lane l gives the address of row l % 8 of matrix l / 8.
INLINE void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
INLINE void load_matrices(u32 row, u32 (&v)[4]) {  // the same back
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(row) : "memory");
}
INLINE Vec16 load_shared(u32 address) {
  Vec16 v;
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "r"(address) : "memory");
  return v;
}
INLINE void store_shared(u32 address, const Vec16& v) {
  asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(address), "l"(v.lo), "l"(v.hi) : "memory");
}

// ---- registers move from the warpgroup that needs few to those that need many; every warp of a warpgroup says so
template <u32 REGISTERS> INLINE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <u32 REGISTERS> INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
}  // namespace target
