// Chance that repeats: for tests.
#pragma once

namespace target {
struct Random {  // xorshift64: a history is its seed
  u64 state = 0;
  Random() = default;
  explicit Random(u64 seed) : state((seed + 1) * 0x9e3779b97f4a7c15ull | 1) {
    for (u32 i = 0; i < 4; i++) below(1);
  }
  u32 below(u32 n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (u32)((state >> 32) * n >> 32);
  }
};
}  // namespace target
