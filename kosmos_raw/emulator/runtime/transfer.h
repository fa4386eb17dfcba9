// One lane's value between registers and bytes, and read-modify-write. Used by translated code (constants known to the
// compiler) and by the runtime (the same functions, the constants read from an Access).
#pragma once
#include "numbers.h"
#include "wave.h"

INLINE u32 bytes_of(Format f, u32 dwords) { return f == DWORDS ? 4 * dwords : f <= SBYTE ? 1 : 2; }

// r[i][lane] is register i of the lane. 4 and 8 byte values move whole: others may look at them at the same time.
INLINE void load_lane(Format f, u32 dwords, u32 (*r)[LANES], int lane, const u8* from) {
  u32& first = r[0][lane];
  switch (f) {
    case DWORDS:
      if (dwords == 2) {
        const u64 x = read_as<u64>(from);
        first = (u32)x;
        r[1][lane] = (u32)(x >> 32);
      } else {
        for (u32 i = 0; i < dwords; i++) r[i][lane] = read_as<u32>(from + 4 * i);
      }
      return;
    case UBYTE: first = *from; return;
    case SBYTE: first = (u32)(i32)(i8)*from; return;
    case USHORT: first = read_as<u16>(from); return;
    case SSHORT: first = (u32)(i32)read_as<i16>(from); return;
    case SHORT_LOW: first = (first & 0xffff0000u) | read_as<u16>(from); return;
    case SHORT_HIGH: first = (first & 0xffff) | (u32)read_as<u16>(from) << 16; return;
  }
}
INLINE void store_lane(Format f, u32 dwords, const u32 (*r)[LANES], int lane, u8* to) {
  const u32 first = r[0][lane];
  switch (f) {
    case DWORDS:
      if (dwords == 2) {
        write_as<u64>(to, first | (u64)r[1][lane] << 32);
      } else {
        for (u32 i = 0; i < dwords; i++) write_as(to + 4 * i, r[i][lane]);
      }
      return;
    case UBYTE: case SBYTE: *to = (u8)first; return;
    case USHORT: case SSHORT: case SHORT_LOW: write_as(to, (u16)first); return;
    case SHORT_HIGH: write_as(to, (u16)(first >> 16)); return;
  }
}

// Two halves of a word, added.
INLINE u32 add_halves(AtomicOp op, u32 a, u32 b) {
  if (op == ATOMIC_PK_ADD_F16)
    return to_f16(from_f16(a & 0xffff) + from_f16(b & 0xffff)) | to_f16(from_f16(a >> 16) + from_f16(b >> 16)) << 16;
  return to_bf16(from_bf16(a & 0xffff) + from_bf16(b & 0xffff)) | to_bf16(from_bf16(a >> 16) + from_bf16(b >> 16)) << 16;
}

template <class T, class Signed> INLINE T combine(AtomicOp op, T old, T x, T expected) {
  switch (op) {
    case ATOMIC_ADD: return old + x;
    case ATOMIC_SUB: return old - x;
    case ATOMIC_UMAX: return larger(old, x);
    case ATOMIC_UMIN: return smaller(old, x);
    case ATOMIC_SMAX: return (T)larger((Signed)old, (Signed)x);
    case ATOMIC_SMIN: return (T)smaller((Signed)old, (Signed)x);
    case ATOMIC_AND: return old & x;
    case ATOMIC_OR: return old | x;
    case ATOMIC_XOR: return old ^ x;
    case ATOMIC_SWAP: return x;
    case ATOMIC_CMPSWAP: return old == expected ? x : old;
    case ATOMIC_ADD_F32: return to_bits(from_bits<float>((u32)old) + from_bits<float>((u32)x));
    case ATOMIC_PK_ADD_F16: case ATOMIC_PK_ADD_BF16: return add_halves(op, (u32)old, (u32)x);
    case ATOMIC_INC: return old >= x ? 0 : old + 1;
    case ATOMIC_DEC: return old == 0 || old > x ? x : old - 1;
    case ATOMIC_ADD_F64: return (T)to_bits(from_bits<double>((u64)old) + from_bits<double>((u64)x));
    case ATOMIC_MIN_F64: return (T)to_bits(min_num(from_bits<double>((u64)old), from_bits<double>((u64)x)));
    case ATOMIC_MAX_F64: return (T)to_bits(max_num(from_bits<double>((u64)old), from_bits<double>((u64)x)));
  }
  return old;
}
// Real atomics: other host threads and other processes work on the same memory.
template <class T, class Signed> INLINE T read_modify_write(AtomicOp op, T* p, T x, T expected) {
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  constexpr int ORDER = __ATOMIC_SEQ_CST;
  while (!__atomic_compare_exchange_n(p, &old, combine<T, Signed>(op, old, x, expected), false, ORDER, ORDER)) {
  }
  return old;
}
// data: x, then for compare-and-swap what is expected. result: null, or where the old value goes.
INLINE void atomic_lane(AtomicOp op, u32 dwords, u8* p, const u32 (*data)[LANES], u32 (*result)[LANES], int lane) {
  if (dwords == 1) {
    const u32 old = read_modify_write<u32, i32>(op, (u32*)p, data[0][lane], op == ATOMIC_CMPSWAP ? data[1][lane] : 0);
    if (result) result[0][lane] = old;
    return;
  }
  const u64 x = data[0][lane] | (u64)data[1][lane] << 32;
  const u64 expected = op == ATOMIC_CMPSWAP ? data[2][lane] | (u64)data[3][lane] << 32 : 0;
  const u64 old = read_modify_write<u64, i64>(op, (u64*)p, x, expected);
  if (result) {
    result[0][lane] = (u32)old;
    result[1][lane] = (u32)(old >> 32);
  }
}

// ds_read_b64_tr_b16, 16 lanes at a time: result n of lane t is halfword t % 4 of the 8 bytes that lane 4 n + t / 4
// addresses (4 rows of 16 columns in, a column of 4 rows out).
template <class Address> INLINE void load_transposed_lane(u32 (*r)[LANES], int lane, const u8* lds, Address address_of) {
  u16 h[4];
  for (int n = 0; n < 4; n++) h[n] = read_as<u16>(lds + address_of((lane & ~15) + 4 * n + (lane & 15) / 4) + 2 * (lane & 3));
  r[0][lane] = h[0] | (u32)h[1] << 16;
  r[1][lane] = h[2] | (u32)h[3] << 16;
}
