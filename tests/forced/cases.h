// What a history is about, drawn from its seed: ranks, operators, shapes, data, and what is wrong in it. A library for some
// operator defines MUTATIONS before.
#pragma once
#include <string.h>

#include "../../hip_kernels/schedule/gather.h"
#include "../../hip_kernels/schedule/group.h"
#include "../../hip_kernels/target/run.h"
#ifndef KOSMOS_FORCED
#include "thread_world.h"
#endif

using target::Random;

#define KINDS(X) X(RIGHT) X(OTHER_CALL) X(LOST_RANK) X(TOLD_TO_STOP_BY_HOST)
// Those that every operator has: of the protocol, and of what the host prepares.
#define COMMON_MUTATIONS(X)                                                                                            \
  X(NONE) X(NO_RELEASE) X(NO_ACQUIRE) X(NO_START_WAIT) X(NOT_CLEARED) X(CLEARS_BY_THIS_SHAPE) X(ONE_COUNTER_SET)       \
  X(SAME_FINGERPRINT)
#ifndef OWN_SIGNALS
#define OWN_SIGNALS 0  // words of an operator behind Signals
#endif
enum HistoryKind : u32 { KINDS(KOSMOS_ENUM) };
enum Mutation : u32 { COMMON_MUTATIONS(KOSMOS_ENUM) MUTATIONS(KOSMOS_ENUM) };

struct Setup {  // mirrored by forced.py
  u32 ranks, policy, run_ahead, kind, mutation;
  u32 mixed;                        // launches of other operators come between
  u32 near_wrap;                    // epochs go through 2^32
  u32 without_fence, narrow_fence;  // 1 + index; 0 = none
  u32 log;
};

constexpr u32 LAUNCHES = 5, MAX_ROWS = 24, MAX_COLS = 20, MAX_LDC = 32, MAX_WGS = 4, TRACE_EVENTS = 512;
constexpr u32 STOPPED = ~0u;                      // in Rank::launch: this rank makes no more launches
constexpr u64 LIMIT = 1 << 20;

// One launch as one rank sees it. Rows, K and tile are the same on all ranks, unless one of them makes another call.
struct Shape {
  Chunks m;
  u32 N, K, tile_n, call;
  u32 M() const { return m.first[MAX_RANKS]; }
};

struct Rank {
  Signals* signals;
  u32 *counters, *abort, *host_abort;
  u32* launch;  // the stream: which launch may run
  target::Box boxes[MAX_WGS];
  target::Clock stream;
  WaitRecord record;
  u64 trace[2 * MAX_WGS][TRACE_EVENTS][2];  // of those that decide, then of those that work behind
  u32 left;  // fibers that have left the launch
};

// What the player of histories asks of an operator. Buffers and params of each rank are its own business.
struct Operator {
  const char* name;
  void (*give_memory)(u32 me);
  void (*prepare)(u32 me, u32 launch);  // fresh inputs over the last launch's, params; what must be written is poisoned
  void (*check)(u32 me, u32 launch);    // every element
  void (*run)(u32 me, target::Box& box, bool decides);
  u32 (*counter_words)(const Shape&);
  bool (*name_address)(u32 me, const void*, char* out, size_t bytes);  // false: it is none of mine
};
extern const Operator operators[];  // what the library is about, then others that it is mixed with
extern const u32 num_operators;

struct History {
  Setup s;
  u64 seed;
  u32 wgs, base, odd_rank, odd_launch, idle_rounds;  // odd: who calls otherwise, or is lost, and in which launch
  Shape shapes[LAUNCHES + 1], odd_shape;
  u32 operator_of[LAUNCHES + 1];
  Rank ranks[MAX_RANKS];
  const Shape& shape(u32 rank, u32 launch) const {
    return s.kind == OTHER_CALL && rank == odd_rank && launch == odd_launch ? odd_shape : shapes[launch];
  }
  bool beside() const { return s.policy == BESIDE; }
  u32 fibers_per_rank() const { return wgs * (1 + s.run_ahead + beside()); }
};
constinit inline History H{};

// --- data: a function of where it is, so that nothing has to be kept ---

inline u64 mix(u64 a, u64 b, u64 c) {
  u64 x = a * 0x9e3779b97f4a7c15ull ^ (b + 1) * 0xc2b2ae3d27d4eb4full ^ (c + 1) * 0x165667b19e3779f9ull;
  x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
  return x ^ x >> 32;
}
// Four small integers, so that every sum is exact.
struct Four {
  i32 at[4];
};
inline Four four(char matrix, u32 rank, u32 launch, u32 word) {
  const u64 x = mix(H.seed, matrix << 16 | rank << 8 | launch, word);
  Four f;
  for (u32 j = 0; j < 4; j++) f.at[j] = (i32)(x >> 8 * j & 0xff) % 7 - 3;
  return f;
}
inline i32 element(char matrix, u32 rank, u32 launch, u32 at) { return four(matrix, rank, launch, at / 4).at[at % 4]; }
inline u64 input_word(char matrix, u32 rank, u32 launch, u32 word) {
  const Four f = four(matrix, rank, launch, word);
  return pack_bf16(f.at[0], f.at[1], f.at[2], f.at[3]);
}

// --- shapes ---

// Rows of each rank: equal, ragged, all on one rank, or fewer rows than ranks.
inline void deal(Random& dice, u32 R, u32* rows) {
  for (u32 q = 0; q < R; q++) rows[q] = 0;
  const u32 way = dice.below(5), most = MAX_ROWS / R < 6 ? MAX_ROWS / R : 6;
  const u32 M = 1 + dice.below(R * most), each = (M + R - 1) / R;
  switch (way) {
    case 0: for (u32 q = 0; q < R; q++) rows[q] = each; break;
    case 1: for (u32 q = 0; q < R; q++) rows[q] = q * each >= M ? 0 : M - q * each < each ? M - q * each : each; break;
    case 2: for (u32 q = 0; q < R; q++) rows[q] = dice.below(most + 1); break;
    case 3: rows[dice.below(R)] = 1 + dice.below(8); break;
    case 4: for (u32 i = 1 + dice.below(R); i--;) rows[dice.below(R)]++; break;
  }
}

inline Shape draw_shape(Random& dice, u32 R) {
  Shape s{};
  u32 rows[MAX_RANKS];
  deal(dice, R, rows);
  s.m.tile_m = 1 + dice.below(3);
  s.m.side_by_side = dice.below(4);
  for (u32 q = 0; q < MAX_RANKS; q++) {
    s.m.first[q + 1] = s.m.first[q] + (q < R ? rows[q] : 0);
    if (q < R && s.m.tile_rows(q) > s.m.tile_rows_max) s.m.tile_rows_max = s.m.tile_rows(q);
  }
  s.K = 8 + 8 * dice.below(2);
  s.N = 1 + dice.below(MAX_COLS);  // of operators whose N is the same on all ranks
  s.tile_n = 4 + 4 * dice.below(3);
  s.call = mix(H.seed, 99, dice.below(1 << 30));
  return s;
}

// How this rank cuts what it pulls of rows of K elements: its own business.
inline Pulls draw_pulls(Random& dice, u32 K, bool slabs) {
  const u32 words = K / 8, slab = slabs ? 1 + dice.below(words) : words;
  return {1 + dice.below(3), (words + slab - 1) / slab, slab, 1 + dice.below(3)};
}

// At most 8 rows a rank, 2 slabs and 3 tiles a row, and 8 queues; moe_forward has a sixth as much again.
#ifndef OWN_COUNTERS
#define OWN_COUNTERS (1 + MAX_RANKS + 8 + MAX_RANKS * 8 * 6)
#endif
constexpr u32 COUNTERS_PER_SET = OWN_COUNTERS;

inline void draw_history(const Setup& s, u64 seed) {
  H.s = s;
  H.seed = mix(seed, s.ranks * 64 + s.policy * 8 + s.run_ahead * 4 + s.kind, 0);
  Random dice(H.seed);
  H.wgs = 2 + dice.below(H.beside() && s.ranks == MAX_RANKS ? 1 : MAX_WGS - 1);  // fibers are counted
  H.base = s.near_wrap ? ~0u - 1 - dice.below(LAUNCHES) : 0;
  for (u32 e = 1; e <= LAUNCHES; e++) {
    H.shapes[e] = draw_shape(dice, s.ranks);
    H.operator_of[e] = s.mixed ? dice.below(num_operators) : 0;
    if (s.mutation == NO_START_WAIT) H.shapes[e].call = 0;  // which is not looked at either
  }
  H.odd_rank = dice.below(s.ranks);
  H.odd_launch = 1 + dice.below(LAUNCHES);
  H.odd_shape = draw_shape(dice, s.ranks);
  if (s.mutation == SAME_FINGERPRINT) H.odd_shape.call = H.shapes[H.odd_launch].call;
  H.idle_rounds = 0;
}
