// Bank conflicts of the tile's fragment reads, found by the compiler: what does not hold does not compile.
//
// LDS has 64 banks of 4 bytes. A read of a wave takes several turns, and lanes are in each other's way only in one turn:
// of 16 bytes a lane, four turns of 16 lanes that are not neighbours; of 8 bytes, two of 32 lanes that are.
#pragma once
#include "../target/gfx950_lds.h"

namespace target {
constexpr u32 BANKS = 64;
// The 16 lanes of a turn: four from each of these on.
constexpr u32 FIRST_LANE[4][4] = {{0, 12, 20, 24}, {32, 44, 52, 56}, {4, 8, 16, 28}, {36, 40, 48, 60}};

DEVICE constexpr u32 lane_of_turn(u32 bytes, u32 turn, u32 i) {
  return bytes == 16 ? FIRST_LANE[turn][i / 4] + i % 4 : turn * 32 + i;
}

// The most lanes that want different words of one bank in one turn; 1 is free of conflicts.
template <bool ALONG_K, u32 SHARE, u32 ROWS> DEVICE constexpr u32 worst_conflict() {
  using O = Operand<ALONG_K, SHARE, ROWS>;
  constexpr u32 BYTES = ALONG_K ? 16 : 8, TURNS = ALONG_K ? 4 : 2;
  u32 worst = 0;
  for (u32 slice = 0; slice < 128 / SHARE; slice++)
    for (u32 n = 0; n < O::FRAGMENTS; n++)
      for (u32 turn = 0; turn < TURNS; turn++) {
        u32 in_use[BANKS] = {};
        for (u32 i = 0; i < 64 / TURNS; i++) {
          const u32 at = O::fragment_at(slice, lane_of_turn(BYTES, turn, i), n);
          for (u32 word = at / 4; word < (at + BYTES) / 4; word++)
            if (++in_use[word % BANKS] > worst) worst = in_use[word % BANKS];
        }
      }
  return worst;
}

static_assert(worst_conflict<true, 64, 32>() == 1 && worst_conflict<true, 64, 16>() == 1);
static_assert(worst_conflict<true, 32, 32>() == 1 && worst_conflict<true, 32, 16>() == 1);
static_assert(worst_conflict<false, 64, 32>() == 1 && worst_conflict<false, 64, 16>() == 1);
static_assert(worst_conflict<false, 32, 32>() == 1 && worst_conflict<false, 32, 16>() == 1);
}  // namespace target
