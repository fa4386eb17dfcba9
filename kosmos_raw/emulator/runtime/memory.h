// Memory instructions, as translated code calls them. Where memory takes effect at once (w.plain) they do it here;
// otherwise they write down an Access and hand it to the runtime, which has the caches and the late memory.
#pragma once
#include "lanes.h"
#include "transfer.h"

// ---- where each lane's data lies ----
struct Far {  // a 64-bit address in two vector registers
  static INLINE void resolve(const Wave& w, u32 a, u32, i32 offset, u64* out) {
    const u32 *low = w.v[a], *high = w.v[a + 1];
    for (int l = 0; l < LANES; l++) out[l] = (low[l] | (u64)high[l] << 32) + (i64)offset;
  }
};
struct Near {  // a scalar base and an unsigned 32-bit offset in a vector register
  static INLINE void resolve(const Wave& w, u32 a, u32 s, i32 offset, u64* out) {
    const u64 base = w.s64(s) + (i64)offset;
    for (int l = 0; l < LANES; l++) out[l] = base + w.v[a][l];
  }
};
// A pointer that may point anywhere. Windows above all host addresses stand for a workgroup's LDS and a lane's scratch.
constexpr u64 SHARED_APERTURE = 0x10000ull << 32, PRIVATE_APERTURE = 0x20000ull << 32;
struct Flat : Far {};

// Raw buffers: base and size from a descriptor of four scalars. Lanes past the end get address 0: they read zero and
// store nothing.
struct Buffer {
  u64 base;
  u32 size;
  Buffer(Wave& w, u32 descriptor) : base(w.s64(descriptor) & 0xffffffffffffull), size(w.s[descriptor + 2]) {
    const u32 stride = w.s[descriptor + 1] >> 16 & 0x3fff;
    if (stride || w.s[descriptor + 1] >> 31) w.services->fault(w, "buffer with stride or swizzle", w.s64(descriptor));
  }
  void resolve(const Wave& w, i32 a, u32 scalar_offset, u32 offset, u32 bytes, u64* out) const {  // a < 0: no vector offset
    for (int l = 0; l < LANES; l++) {
      const u32 at = (a < 0 ? 0 : w.v[a][l]) + offset;
      out[l] = (u64)at + bytes <= size ? base + at + scalar_offset : 0;
    }
  }
};

INLINE Access& describe(Wave& w, Action action, Format f, u32 dwords, Coherence scope, u32 to) {
  Access& x = w.services->begin(w, action);
  x.format = f;
  x.dwords = (u8)dwords;
  x.scope = scope;
  x.to = to;
  x.exec = w.exec();
  return x;
}

// ---- global and buffer ----
// Lanes that a flat address sends into a window: their bytes on the host. These accesses happen at once.
INLINE u64 in_windows(Wave& w, u64* address, u32 bytes) {
  u64 lanes = 0;
  each_active(w.exec(), [&](int l) {
    const u64 window = address[l] >> 32 << 32, at = address[l] & 0xffffffff;
    if (window != SHARED_APERTURE && window != PRIVATE_APERTURE) return;
    const bool shared = window == SHARED_APERTURE;
    if (at + bytes > (shared ? w.lds_bytes : w.scratch_bytes))
      w.services->fault(w, shared ? "flat access past the end of LDS, at" : "flat access past the end of scratch, at", at);
    address[l] = (u64)(shared ? w.lds : w.scratch + (u64)l * w.scratch_bytes) + at;
    lanes |= 1ull << l;
  });
  return lanes;
}
// For the time of one instruction: EXEC without some lanes.
struct Without {
  Wave& w;
  const u64 exec;
  Without(Wave& w, u64 lanes) : w(w), exec(w.exec()) { w.set_s64(EXEC, exec & ~lanes); }
  ~Without() { w.set_s64(EXEC, exec); }
};

template <Format F, int N> INLINE void load_from(Wave& w, u32 d, const u64* address, Coherence scope) {
  if (!w.plain) {
    Access& x = describe(w, LOAD, F, N, scope, d);
    memcpy(x.address, address, sizeof x.address);
    w.services->issue(w, x);
    return;
  }
  static const u8 zeros[16] = {};
  each_active(w.exec(), [&](int l) { load_lane(F, N, w.v + d, l, address[l] ? (const u8*)address[l] : zeros); });
}
template <Format F, int N> INLINE void store_to(Wave& w, u32 from, const u64* address, Coherence scope) {
  if (!w.plain) {
    Access& x = describe(w, STORE, F, N, scope, 0);
    memcpy(x.address, address, sizeof x.address);
    memcpy(x.data, w.v[from], N * sizeof w.v[0]);
    w.services->issue(w, x);
    return;
  }
  each_active(w.exec(), [&](int l) { if (address[l]) store_lane(F, N, w.v + from, l, (u8*)address[l]); });
}

template <Format F, int N, class Where>
NOINLINE void global_load(Wave& w, u32 d, u32 a, u32 s, i32 offset, Coherence scope) {
  u64 address[LANES];
  Where::resolve(w, a, s, offset, address);
  if constexpr (__is_same(Where, Flat)) {
    const u64 near = in_windows(w, address, bytes_of(F, N));
    const Without others(w, near);
    load_from<F, N>(w, d, address, scope);
    each_active(near, [&](int l) { load_lane(F, N, w.v + d, l, (const u8*)address[l]); });
    return;
  }
  load_from<F, N>(w, d, address, scope);
}
template <Format F, int N, class Where>
NOINLINE void global_store(Wave& w, u32 from, u32 a, u32 s, i32 offset, Coherence scope) {
  u64 address[LANES];
  Where::resolve(w, a, s, offset, address);
  if constexpr (__is_same(Where, Flat)) {
    const u64 near = in_windows(w, address, bytes_of(F, N));
    const Without others(w, near);
    each_active(near, [&](int l) { store_lane(F, N, w.v + from, l, (u8*)address[l]); });
    store_to<F, N>(w, from, address, scope);
    return;
  }
  store_to<F, N>(w, from, address, scope);
}
template <Format F, int N>
NOINLINE void buffer_load(Wave& w, u32 d, i32 a, u32 descriptor, u32 scalar, u32 offset, Coherence scope) {
  u64 address[LANES];
  Buffer(w, descriptor).resolve(w, a, scalar, offset, bytes_of(F, N), address);
  load_from<F, N>(w, d, address, scope);
}
template <Format F, int N>
NOINLINE void buffer_store(Wave& w, u32 from, i32 a, u32 descriptor, u32 scalar, u32 offset, Coherence scope) {
  u64 address[LANES];
  Buffer(w, descriptor).resolve(w, a, scalar, offset, bytes_of(F, N), address);
  store_to<F, N>(w, from, address, scope);
}

template <AtomicOp OP, int N, bool RETURNS, class Where>
NOINLINE void global_atomic(Wave& w, u32 d, u32 a, u32 data, u32 s, i32 offset, Coherence scope) {
  constexpr int REGISTERS = OP == ATOMIC_CMPSWAP ? 2 * N : N;
  u64 address[LANES];
  Where::resolve(w, a, s, offset, address);
  u64 near = 0;
  if constexpr (__is_same(Where, Flat)) near = in_windows(w, address, 4 * N);
  if (near && near != w.exec()) w.services->fault(w, "flat atomic of which some lanes only mean LDS or scratch", near);
  if (!w.plain && !near) {
    Access& x = describe(w, ATOMIC, DWORDS, N, scope, d);
    x.op = OP;
    x.returns = RETURNS;
    memcpy(x.address, address, sizeof x.address);
    memcpy(x.data, w.v[data], REGISTERS * sizeof w.v[0]);
    w.services->issue(w, x);
    return;
  }
  each_active(w.exec(), [&](int l) { atomic_lane(OP, N, (u8*)address[l], w.v + data, RETURNS ? w.v + d : nullptr, l); });
}

// ---- direct loads: from memory into LDS, at M0 + offset + lane * size ----
template <int N> INLINE void load_to_lds(Wave& w, u32 offset, const u64* address, Coherence scope) {
  const u32 to = w.s[M0] + offset;
  if ((u64)to + LANES * 4 * N > w.lds_bytes) w.services->fault(w, "direct load past the end of LDS, to", to);
  Access& x = describe(w, LOAD_TO_LDS, DWORDS, N, scope, to);
  memcpy(x.address, address, sizeof x.address);
  w.services->issue(w, x);
}
template <int N, class Where> NOINLINE void global_load_lds(Wave& w, u32 a, u32 s, i32 offset, Coherence scope) {
  u64 address[LANES];
  Where::resolve(w, a, s, offset, address);
  load_to_lds<N>(w, (u32)offset, address, scope);
}
template <int N> NOINLINE void buffer_load_lds(Wave& w, i32 a, u32 descriptor, u32 scalar, u32 offset, Coherence scope) {
  u64 address[LANES];
  Buffer(w, descriptor).resolve(w, a, scalar, offset, 4 * N, address);
  load_to_lds<N>(w, offset, address, scope);
}

// ---- scalar loads ----
NOINLINE inline void scalar_load(Wave& w, u32 d, u64 address, u32 dwords) {
  if (w.plain) {
    memcpy(&w.s[d], (const void*)address, 4 * dwords);
    return;
  }
  Access& x = describe(w, SCALAR_LOAD, DWORDS, dwords, WORKGROUP, d);
  x.address[0] = address;
  w.services->issue(w, x);
}

// ---- scratch: private to a lane, so nobody can see when it happens; but it counts ----
INLINE void count_in_memory_queue(Wave& w) {
  if (w.plain) return;
  Access& x = describe(w, STORE, DWORDS, 0, WORKGROUP, 0);
  x.exec = 0;
  w.services->issue(w, x);
}
INLINE u8* scratch_of(Wave& w, int lane, i32 a, u32 offset, u32 bytes) {
  const u32 at = (a < 0 ? 0 : w.v[a][lane]) + offset;
  if ((u64)at + bytes > w.scratch_bytes) w.services->fault(w, "access past the end of scratch, at", at);
  return w.scratch + (u64)lane * w.scratch_bytes + at;
}
template <Format F, int N> NOINLINE void scratch_load(Wave& w, u32 d, i32 a, u32 offset) {
  each_active(w.exec(), [&](int l) { load_lane(F, N, w.v + d, l, scratch_of(w, l, a, offset, bytes_of(F, N))); });
  count_in_memory_queue(w);
}
template <Format F, int N> NOINLINE void scratch_store(Wave& w, u32 from, i32 a, u32 offset) {
  each_active(w.exec(), [&](int l) { store_lane(F, N, w.v + from, l, scratch_of(w, l, a, offset, bytes_of(F, N))); });
  count_in_memory_queue(w);
}

// ---- LDS ----
INLINE void check_lds(Wave& w, const u32* a, u32 offset, u32 bytes) {
  const u64 past = lane_mask(w, [&](int l) { return (u64)a[l] + offset + bytes > w.lds_bytes; });
  if (past) w.services->fault(w, "access past the end of LDS, at", a[lowest_bit(past)] + offset);
}
INLINE Access& describe_lds(Wave& w, Action action, Format f, u32 dwords, u32 to, const u32* a, u32 offset) {
  Access& x = describe(w, action, f, dwords, WORKGROUP, to);
  for (int l = 0; l < LANES; l++) x.address[l] = a[l] + offset;
  return x;
}
// The address is copied first: the result may overwrite it.
template <Format F, int N> NOINLINE void lds_load(Wave& w, u32 d, u32 a, u32 offset) {
  alignas(64) u32 address[LANES];
  memcpy(address, w.v[a], sizeof address);
  check_lds(w, address, offset, bytes_of(F, N));
  if (!w.plain) {
    w.services->issue(w, describe_lds(w, LDS_LOAD, F, N, d, address, offset));
    return;
  }
  each_active(w.exec(), [&](int l) { load_lane(F, N, w.v + d, l, w.lds + address[l] + offset); });
}
template <Format F, int N> NOINLINE void lds_store(Wave& w, u32 a, u32 from, u32 offset) {
  check_lds(w, w.v[a], offset, bytes_of(F, N));
  if (!w.plain) {
    Access& x = describe_lds(w, LDS_STORE, F, N, 0, w.v[a], offset);
    memcpy(x.data, w.v[from], N * sizeof w.v[0]);
    w.services->issue(w, x);
    return;
  }
  each_active(w.exec(), [&](int l) { store_lane(F, N, w.v + from, l, w.lds + w.v[a][l] + offset); });
}
// Two values a lane by one instruction, so one entry in the queue: `returns` says that a second value lies at a distance,
// which is in data (loads) or in `to` (stores).
template <int N> NOINLINE void lds_load_two(Wave& w, u32 d, u32 a, u32 first, u32 second) {
  alignas(64) u32 address[LANES];
  memcpy(address, w.v[a], sizeof address);
  check_lds(w, address, larger(first, second), 4 * N);
  if (!w.plain) {
    Access& x = describe_lds(w, LDS_LOAD, DWORDS, N, d, address, first);
    x.data[0][0] = second - first;
    x.returns = true;
    w.services->issue(w, x);
    return;
  }
  each_active(w.exec(), [&](int l) {
    load_lane(DWORDS, N, w.v + d, l, w.lds + address[l] + first);
    load_lane(DWORDS, N, w.v + d + N, l, w.lds + address[l] + second);
  });
}
template <int N> NOINLINE void lds_store_two(Wave& w, u32 a, u32 from, u32 also_from, u32 first, u32 second) {
  check_lds(w, w.v[a], larger(first, second), 4 * N);
  if (!w.plain) {
    Access& x = describe_lds(w, LDS_STORE, DWORDS, N, second - first, w.v[a], first);
    memcpy(x.data, w.v[from], N * sizeof w.v[0]);
    memcpy(x.data + N, w.v[also_from], N * sizeof w.v[0]);
    x.returns = true;
    w.services->issue(w, x);
    return;
  }
  each_active(w.exec(), [&](int l) {
    store_lane(DWORDS, N, w.v + from, l, w.lds + w.v[a][l] + first);
    store_lane(DWORDS, N, w.v + also_from, l, w.lds + w.v[a][l] + second);
  });
}
NOINLINE inline void lds_load_transposed(Wave& w, u32 d, u32 a, u32 offset) {
  alignas(64) u32 address[LANES];
  memcpy(address, w.v[a], sizeof address);
  check_lds(w, address, offset, 8);
  if (!w.plain) {
    w.services->issue(w, describe_lds(w, LDS_LOAD_TRANSPOSED, DWORDS, 2, d, address, offset));
    return;
  }
  each_active(w.exec(), [&](int l) { load_transposed_lane(w.v + d, l, w.lds, [&](int k) { return address[k] + offset; }); });
}
template <AtomicOp OP, int N, bool RETURNS> NOINLINE void lds_atomic(Wave& w, u32 d, u32 a, u32 data, u32 offset) {
  check_lds(w, w.v[a], offset, 4 * N);
  if (!w.plain) {
    Access& x = describe_lds(w, LDS_ATOMIC, DWORDS, N, d, w.v[a], offset);
    x.op = OP;
    x.returns = RETURNS;
    memcpy(x.data, w.v[data], (OP == ATOMIC_CMPSWAP ? 2 : 1) * N * sizeof w.v[0]);
    w.services->issue(w, x);
    return;
  }
  alignas(64) u32 address[LANES];
  memcpy(address, w.v[a], sizeof address);
  each_active(w.exec(), [&](int l) {
    atomic_lane(OP, N, w.lds + address[l] + offset, w.v + data, RETURNS ? w.v + d : nullptr, l);
  });
}
// Lane exchange through the LDS hardware: no memory, but it counts.
INLINE void count_in_lds_queue(Wave& w) {
  if (w.plain) return;
  Access& x = describe(w, LDS_STORE, DWORDS, 0, WORKGROUP, 0);
  x.exec = 0;
  w.services->issue(w, x);
}
NOINLINE inline void ds_bpermute(Wave& w, u32 d, u32 a, u32 from, u32 offset) {
  const u64 exec = w.exec();
  alignas(64) u32 result[LANES];
  for (int l = 0; l < LANES; l++) {
    const u32 k = (w.v[a][l] + offset) / 4 % LANES;
    result[l] = exec >> k & 1 ? w.v[from][k] : 0;
  }
  copy_lanes(w.v[d], result, exec);
  count_in_lds_queue(w);
}
NOINLINE inline void ds_permute(Wave& w, u32 d, u32 a, u32 from, u32 offset) {
  alignas(64) u32 result[LANES] = {};
  each_active(w.exec(), [&](int l) { result[(w.v[a][l] + offset) / 4 % LANES] = w.v[from][l]; });
  copy_lanes(w.v[d], result, w.exec());
  count_in_lds_queue(w);
}
NOINLINE inline void ds_swizzle(Wave& w, u32 d, u32 from, u32 pattern) {
  const u64 exec = w.exec();
  alignas(64) u32 result[LANES];
  for (int l = 0; l < LANES; l++) {
    const u32 low = l & 31;
    const u32 k = pattern >> 15 ? (low & ~3u) | (pattern >> (2 * (l & 3)) & 3)
                                : ((low & pattern & 31) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31);
    const u32 lane = (l & 32) | k;
    result[l] = exec >> lane & 1 ? w.v[from][lane] : 0;
  }
  copy_lanes(w.v[d], result, exec);
  count_in_lds_queue(w);
}
// ds_cmpst: expected first, new value second; turned round for the atomic that memory has.
template <AtomicOp OP, int N, bool RETURNS>
NOINLINE void lds_compare_swap(Wave& w, u32 d, u32 a, u32 expected, u32 value, u32 offset) {
  check_lds(w, w.v[a], offset, 4 * N);
  alignas(64) u32 data[2 * N][LANES], address[LANES];
  memcpy(data, w.v[value], N * sizeof data[0]);
  memcpy(data + N, w.v[expected], N * sizeof data[0]);
  memcpy(address, w.v[a], sizeof address);
  if (!w.plain) {
    Access& x = describe_lds(w, LDS_ATOMIC, DWORDS, N, d, address, offset);
    x.op = OP;
    x.returns = RETURNS;
    memcpy(x.data, data, sizeof data);
    w.services->issue(w, x);
    return;
  }
  each_active(w.exec(), [&](int l) {
    atomic_lane(OP, N, w.lds + address[l] + offset, data, RETURNS ? w.v + d : nullptr, l);
  });
}
