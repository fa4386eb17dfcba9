// Staging of a reduce-scatter: every rank stores its partial results, [M, N] BF16, into memory of its own, and the owner of
// a row pulls that row from all ranks. Data is its own signal: a word has come when it holds no sentinel any more.
//
// Each rank has two buffers. A launch uses buffer turn % 2 and poisons what the last turn has left in the other one, so that
// the next turn finds it clean. Turns count the launches that use staging, alike on all ranks; other launches may come
// between. Why this is right, whatever the shapes of the launches are:
//  (1) Nobody reads what I poison. It was read in the turn before, an earlier launch. POISON waits until all ranks have
//      started this one: they have left every earlier launch, their reads included.
//  (2) Nobody reads before I have poisoned. A reader waits until I have started its turn; my turn before, with its
//      poison, has then ended, and the start signal is a release after it.
//  (3) My partials do not meet a reader of two turns ago: (1) of the turn between, which I have left.
#pragma once
#include "group.h"

// A signalling NaN. Producers round every NaN to a quiet one, so no result of any arithmetic and no NaN of a user is taken
// for it. Compared as integers: as floats it would not even equal itself.
constexpr u64 SENTINEL = 0x7fa57fa57fa57fa5;

// Whether none of four BF16 is the sentinel: x has no halfword that is zero.
DEVICE inline bool arrived(u64 four) {
  const u64 x = four ^ SENTINEL;
  return !((x - 0x0001000100010001) & ~x & 0x8000800080008000);
}
DEVICE inline bool arrived(const Vec16& v) { return arrived(v.lo) && arrived(v.hi); }

struct Staging {
  Vec16* of[MAX_RANKS];  // every rank's [2][buffer_words], all sentinels before its first turn
  u64 buffer_words;
  u64 dirty_words;       // that the last turn may have written into the other buffer; alike on all ranks
  u32 turn;              // only its parity matters
  u32 zero;
  DEVICE u64 buffer_at() const { return turn % 2 * buffer_words; }  // of this turn
  DEVICE u64 other_at() const { return (turn + 1) % 2 * buffer_words; }
};
static_assert(sizeof(Staging) == 88);
