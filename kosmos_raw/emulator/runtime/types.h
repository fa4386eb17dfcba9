// Words of every size, and their bits. No C++ standard library: building it takes minutes on a bare machine.
#pragma once
#include <stddef.h>
#include <string.h>

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using i16 = short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;
using half = _Float16;

#define NOINLINE __attribute__((noinline))
#define INLINE inline __attribute__((always_inline))

template <int BYTES> struct Bits;
template <> struct Bits<1> { using type = u8; };
template <> struct Bits<2> { using type = u16; };
template <> struct Bits<4> { using type = u32; };
template <> struct Bits<8> { using type = u64; };

template <class T> INLINE auto to_bits(T x) { return __builtin_bit_cast(typename Bits<sizeof(T)>::type, x); }
template <class T, class U> INLINE T from_bits(U bits) {
  return __builtin_bit_cast(T, (typename Bits<sizeof(T)>::type)bits);
}

template <class T> INLINE T smaller(T a, T b) { return b < a ? b : a; }
template <class T> INLINE T larger(T a, T b) { return a < b ? b : a; }
INLINE int lowest_bit(u64 x) { return __builtin_ctzll(x); }
// Bits [first, first + count) set; count may be 64.
INLINE u64 bit_run(int first, int count) { return (count >= 64 ? ~0ull : (1ull << count) - 1) << first; }

template <class T> INLINE T read_as(const void* from) {
  T x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class T> INLINE void write_as(void* to, T x) { memcpy(to, &x, sizeof x); }

// Small and fast; every wave and every worker has its own, seeded from the run's seed.
struct Random {
  u32 state = 1;
  void seed(u64 a, u64 b) {
    u64 x = a * 0x9e3779b97f4a7c15ull + b + 0x632be59bd9b4e019ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    state = (u32)(x >> 32) | 1;
  }
  u32 next() {
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
  }
  bool one_in(u32 n) { return n && next() % n == 0; }
};
