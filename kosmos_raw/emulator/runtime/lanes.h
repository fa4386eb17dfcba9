// Vector registers: how operands are read and results written, 64 lanes at a time. Plain loops, which the compiler
// vectorises.
//
// An operand is a class (what it is) and a number (which one): V vector register, S scalar register, K constant; Neg, Abs
// and Part wrap another. So a translated instruction is one call with integers: v_add_f32<Plain, V, Neg<S>>(w, 3, 4, 17).
#pragma once
#include "numbers.h"
#include "wave.h"

template <class T> struct FromRegister {
  const u32 *low, *high;
  INLINE T operator[](int l) const {
    if constexpr (sizeof(T) == 8) return from_bits<T>(low[l] | (u64)high[l] << 32);
    else return from_bits<T>(low[l]);
  }
};
template <class T> struct SameInAllLanes {
  T x;
  INLINE T operator[](int) const { return x; }
};

struct V {
  template <class T> static INLINE auto get(const Wave& w, u64 r) {
    return FromRegister<T>{w.v[r], sizeof(T) == 8 ? w.v[r + 1] : nullptr};
  }
};
struct S {
  template <class T> static INLINE auto get(const Wave& w, u64 r) {
    return SameInAllLanes<T>{from_bits<T>(sizeof(T) == 8 ? w.s64(r) : w.s[r])};
  }
};
struct K {
  template <class T> static INLINE auto get(const Wave&, u64 bits) { return SameInAllLanes<T>{from_bits<T>(bits)}; }
};
struct Dpp {  // what begin_dpp left
  template <class T> static INLINE auto get(const Wave& w, u64) { return FromRegister<T>{w.permuted[0], w.permuted[1]}; }
};
struct Scc {
  template <class T> static INLINE auto get(const Wave& w, u64) { return SameInAllLanes<T>{from_bits<T>(w.scc)}; }
};

template <class T, class X> struct Negated {
  X x;
  INLINE T operator[](int l) const { return from_bits<T>(to_bits(x[l]) ^ (1ull << (8 * sizeof(T) - 1))); }
};
template <class X> struct Neg {
  template <class T> static INLINE auto get(const Wave& w, u64 r) {
    auto x = X::template get<T>(w, r);
    return Negated<T, decltype(x)>{x};
  }
};
template <class T, class X> struct WithoutSign {
  X x;
  INLINE T operator[](int l) const { return from_bits<T>(to_bits(x[l]) & ~(1ull << (8 * sizeof(T) - 1))); }
};
template <class X> struct Abs {
  template <class T> static INLINE auto get(const Wave& w, u64 r) {
    auto x = X::template get<T>(w, r);
    return WithoutSign<T, decltype(x)>{x};
  }
};
// Some bits of a 32-bit operand: op_sel and SDWA.
template <class T, class X, int SHIFT, int BITS, bool SIGNED> struct SomeBits {
  X x;
  INLINE T operator[](int l) const {
    const u32 up = x[l] << (32 - BITS - SHIFT);
    return from_bits<T>(SIGNED ? (u32)((i32)up >> (32 - BITS)) : up >> (32 - BITS));
  }
};
template <class X, int SHIFT, int BITS, bool SIGNED = false> struct Part {
  template <class T> static INLINE auto get(const Wave& w, u64 r) {
    auto x = X::template get<u32>(w, r);
    return SomeBits<T, decltype(x), SHIFT, BITS, SIGNED>{x};
  }
};

// to[l] = from[l] where the mask has a bit.
INLINE void copy_lanes(u32* to, const u32* from, u64 mask) {
  if (mask == ~0ull) {
    memcpy(to, from, 4 * LANES);
    return;
  }
  for (int first = 0; first < LANES; first += 32) {
    const u32 half_mask = (u32)(mask >> first);
    for (int l = 0; l < 32; l++) to[first + l] = half_mask & (1u << l) ? from[first + l] : to[first + l];
  }
}

// f(lane) into register d, where EXEC says so. All lanes are computed first: a destination may overlap a source.
template <class T, class F> INLINE void write_lanes(Wave& w, u32 d, F f) {
  alignas(64) u32 low[LANES];
  if constexpr (sizeof(T) == 8) {
    alignas(64) u32 high[LANES];
    for (int l = 0; l < LANES; l++) {
      const u64 bits = to_bits((T)f(l));
      low[l] = (u32)bits;
      high[l] = (u32)(bits >> 32);
    }
    copy_lanes(w.v[d], low, w.exec());
    copy_lanes(w.v[d + 1], high, w.exec());
  } else {
    for (int l = 0; l < LANES; l++) low[l] = to_bits((T)f(l));
    copy_lanes(w.v[d], low, w.exec());
  }
}

// What becomes of a result: as it is, scaled and clamped (output modifiers), or put into a part of the register.
struct Plain {
  template <class T, class F> static INLINE void write(Wave& w, u32 d, F f) { write_lanes<T>(w, d, f); }
};
template <int TWICE_SCALE, bool CLAMP> struct Modified {
  template <class T, class F> static INLINE void write(Wave& w, u32 d, F f) {
    write_lanes<T>(w, d, [&](int l) {
      T x = f(l) * (T)(TWICE_SCALE * 0.5);
      if (CLAMP) x = x > (T)0 ? (x < (T)1 ? x : (T)1) : (T)0;  // a NaN becomes 0
      return x;
    });
  }
};
template <int SHIFT, int BITS> struct Into {  // the rest of the register is kept
  template <class T, class F> static INLINE void write(Wave& w, u32 d, F f) {
    constexpr u32 MASK = (BITS == 32 ? ~0u : (1u << BITS) - 1) << SHIFT;
    const u32* old = w.v[d];
    write_lanes<u32>(w, d, [&](int l) { return (old[l] & ~MASK) | ((u32)to_bits((T)f(l)) << SHIFT & MASK); });
  }
};
template <int SHIFT, int BITS> struct Padded {  // the rest becomes zero
  template <class T, class F> static INLINE void write(Wave& w, u32 d, F f) {
    constexpr u32 MASK = (1u << BITS) - 1;
    write_lanes<u32>(w, d, [&](int l) { return ((u32)to_bits((T)f(l)) & MASK) << SHIFT; });
  }
};

// One bit a lane; inactive lanes give 0, as compares do.
template <class F> INLINE u64 lane_mask(const Wave& w, F f) {
  alignas(64) u8 yes[LANES];
  for (int l = 0; l < LANES; l++) yes[l] = f(l);
  u64 mask = 0;
  for (int first = 0; first < LANES; first += 8)  // eight bytes of 0 or 1, gathered into one by a multiplication
    mask |= (read_as<u64>(yes + first) * 0x0102040810204080ull >> 56) << first;
  return mask & w.exec();
}

template <class Out, class A, class B> NOINLINE void v_cndmask_b32(Wave& w, u32 d, u64 a_, u64 b_, u64 mask) {
  const auto a = A::template get<float>(w, a_), no = a;
  const auto b = B::template get<float>(w, b_);
  const u32 halves[2] = {(u32)mask, (u32)(mask >> 32)};
  Out::template write<float>(w, d, [&](int l) { return halves[l / 32] & (1u << l % 32) ? b[l] : no[l]; });
}

enum CarryOp { CARRY_ADD, CARRY_SUB, CARRY_SUBREV };
template <CarryOp OP, class A, class B>
NOINLINE void v_with_carry(Wave& w, u32 d, u32 carry_out, u64 a_, u64 b_, u64 carry_in) {
  const auto a = A::template get<u32>(w, a_);
  const auto b = B::template get<u32>(w, b_);
  alignas(64) u64 wide[LANES];
  for (int l = 0; l < LANES; l++) {
    const u64 c = carry_in >> l & 1, x = a[l], y = b[l];
    wide[l] = OP == CARRY_ADD ? x + y + c : OP == CARRY_SUB ? x - y - c : y - x - c;
  }
  const u64 carry = lane_mask(w, [&](int l) { return wide[l] >> 32 & 1; });
  write_lanes<u32>(w, d, [&](int l) { return (u32)wide[l]; });
  w.set_s64(carry_out, carry);
}

template <class T, class A, class B, class C>
NOINLINE void v_mad_wide(Wave& w, u32 d, u32 carry_out, u64 a_, u64 b_, u64 c_) {
  const auto a = A::template get<T>(w, a_);
  const auto b = B::template get<T>(w, b_);
  const auto c = C::template get<u64>(w, c_);
  const auto product = [&](int l) { return (u64)((i64)a[l] * (i64)b[l]); };  // u32 or i32, widened
  const u64 carry = lane_mask(w, [&](int l) { return product(l) + c[l] < product(l); });
  write_lanes<u64>(w, d, [&](int l) { return product(l) + c[l]; });
  w.set_s64(carry_out, carry);
}

// The first active lane; lane 0 when there is none.
INLINE u32 first_lane(const Wave& w, u32 r) { return w.v[r][w.exec() ? lowest_bit(w.exec()) : 0]; }

// Lanes with bit `step` clear take from the other register's lanes with it set, and the reverse. EXEC is not looked at.
NOINLINE inline void swap_lanes(Wave& w, u32 d, u32 x, int step) {
  for (int l = 0; l < LANES; l++) {
    if (l & step) continue;
    const u32 t = w.v[d][l + step];
    w.v[d][l + step] = w.v[x][l];
    w.v[x][l] = t;
  }
}

// ---- DPP: an operand read from another lane ----
enum DppKind {
  QUAD_PERM, ROW_SHL, ROW_SHR, ROW_ROR, ROW_MIRROR, ROW_HALF_MIRROR, ROW_NEWBCAST, ROW_BCAST15, ROW_BCAST31,
  WAVE_SHR, WAVE_SHL, WAVE_ROR, WAVE_ROL
};
inline int dpp_source(DppKind kind, int n, int lane) {  // -1: none
  const int row = lane & ~15, r = lane & 15;
  switch (kind) {
    case QUAD_PERM: return (lane & ~3) | (n >> (2 * (lane & 3)) & 3);
    case ROW_SHL: return r + n < 16 ? lane + n : -1;
    case ROW_SHR: return r >= n ? lane - n : -1;
    case ROW_ROR: return row | ((r - n) & 15);
    case ROW_MIRROR: return row | (15 - r);
    case ROW_HALF_MIRROR: return (lane & ~7) | (7 - (lane & 7));
    case ROW_NEWBCAST: return row | n;
    case ROW_BCAST15: return row ? row - 1 : -1;
    case ROW_BCAST31: return lane >= 32 ? 31 : -1;
    case WAVE_SHR: return lane - 1;
    case WAVE_SHL: return lane + 1 < LANES ? lane + 1 : -1;
    case WAVE_ROR: return (lane - 1) & 63;
    case WAVE_ROL: return (lane + 1) & 63;
  }
  return -1;
}
// For the time of one instruction: the operand permuted, and EXEC without the lanes that keep their old result. Those are
// the masked rows and banks, and, without bound_ctrl, lanes whose source is outside or inactive; with it these read zero.
struct DppScope {
  Wave& w;
  const u64 exec;
  NOINLINE DppScope(Wave& w, u32 r, int registers, DppKind kind, int n, u32 rows, u32 banks, bool zero_outside)
      : w(w), exec(w.exec()) {
    u64 writes = 0;
    for (int l = 0; l < LANES; l++) {
      const int from = dpp_source(kind, n, l);
      const bool valid = from >= 0 && (exec >> from & 1);
      for (int i = 0; i < registers; i++) w.permuted[i][l] = valid ? w.v[r + i][from] : 0;
      const bool selected = (rows >> (l >> 4) & 1) && (banks >> (l >> 2 & 3) & 1);
      if (selected && (valid || zero_outside)) writes |= 1ull << l;
    }
    w.set_s64(EXEC, exec & writes);
  }
  ~DppScope() { w.set_s64(EXEC, exec); }
};

// ---- packed operands: two halves, each chosen from either half of the source and perhaps negated ----
template <class Whole, class X, int LOW, int HIGH, int NEGATE_LOW, int NEGATE_HIGH> struct ChosenHalves {
  X x;
  INLINE Whole operator[](int l) const {
    constexpr int BITS = 4 * sizeof(Whole);
    constexpr Whole MASK = ((Whole)1 << BITS) - 1, SIGN = (Whole)1 << (BITS - 1);
    const Whole both = x[l];
    const Whole low = (both >> (LOW ? BITS : 0) & MASK) ^ (NEGATE_LOW ? SIGN : 0);
    const Whole high = (both >> (HIGH ? BITS : 0) & MASK) ^ (NEGATE_HIGH ? SIGN : 0);
    return low | high << BITS;
  }
};
template <class X, class Whole, int LOW, int HIGH, int NEGATE_LOW, int NEGATE_HIGH> struct Halves {
  static INLINE auto get(const Wave& w, u64 r) {
    auto x = X::template get<Whole>(w, r);
    return ChosenHalves<Whole, decltype(x), LOW, HIGH, NEGATE_LOW, NEGATE_HIGH>{x};
  }
};

// A move of which M0 chooses the result's or the source's register.
NOINLINE inline void v_mov_indexed(Wave& w, u32 d, u32 from, bool chosen_d, bool chosen_from) {
  const u32 n = w.s[M0] & 255, to = d + (chosen_d ? n : 0), source = from + (chosen_from ? n : 0);
  if (to >= w.vector_registers || source >= w.vector_registers)
    w.services->fault(w, "index past the last vector register", larger(to, source));
  copy_lanes(w.v[to], w.v[source], w.exec());
}

NOINLINE inline void v_swap_b32(Wave& w, u32 d, u32 x) {
  alignas(64) u32 old[LANES];
  memcpy(old, w.v[d], sizeof old);
  copy_lanes(w.v[d], w.v[x], w.exec());
  copy_lanes(w.v[x], old, w.exec());
}

template <class T, class A, class B, class C> NOINLINE void v_div_scale(Wave& w, u32 d, u32 flags, u64 a_, u64 b_, u64 c_) {
  const auto a = A::template get<T>(w, a_);
  const auto b = B::template get<T>(w, b_);
  const auto c = C::template get<T>(w, c_);
  const u64 flagged = lane_mask(w, [&](int l) { return div_scale<T>(a[l], b[l], c[l]).flag; });
  write_lanes<T>(w, d, [&](int l) { return div_scale<T>(a[l], b[l], c[l]).value; });
  w.set_s64(flags, flagged);
}
template <class T, class A, class B, class C> NOINLINE void v_div_fmas(Wave& w, u32 d, u64 a_, u64 b_, u64 c_) {
  const auto a = A::template get<T>(w, a_);
  const auto b = B::template get<T>(w, b_);
  const auto c = C::template get<T>(w, c_);
  const u64 scaled = w.s64(VCC);
  write_lanes<T>(w, d, [&](int l) { return div_fmas<T>(a[l], b[l], c[l], scaled >> l & 1); });
}
