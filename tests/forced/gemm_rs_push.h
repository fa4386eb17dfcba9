// gemm_rs_push for the player of histories: buffers and params.
#pragma once
#include "../../hip_kernels/kernels/gemm_rs_push.hip"
#include "reduced.h"

struct Pushed {
  // Words of 8 bytes: tiles of a chunk, whose last row may be short, from all ranks. No chunk has more tiles than signals.
  static constexpr u32 A = MAX_ROWS * target::MAX_K / 4, B = MAX_N * target::MAX_K / 4, C = MAX_ROWS * MAX_N / 4;
  static constexpr u32 INBOX = (MAX_RANKS - 1) * 10 * MAX_N / 4, PER_RANK = 8 * 3;

  struct Buffers {
    u64 *a, *b, *c, *inbox;
    u32* arrived;
    GemmRsPushParams params;
  };
  static inline constinit Buffers ranks[MAX_RANKS]{};

  static void give_memory(u32 me) {
    Buffers& r = ranks[me];
    r.a = target::new_data(A);
    r.b = target::new_data(B);
    r.c = target::new_data(C);
    r.inbox = target::new_data(INBOX);
    target::open(r.inbox, INBOX, INBOX);
    r.arrived = target::new_signals(MAX_RANKS * PER_RANK, H.base);
  }

  static u32 counter_words(const Shape&) { return 1; }

  static void prepare(u32 me, u32 launch) {
    const Shape& s = H.shape(me, launch);
    Buffers& r = ranks[me];
    Random dice(mix(H.seed, 'r', launch)), own(mix(H.seed, me, launch));  // the order is alike on all ranks, bands need not be
    GemmRsPushParams p{};
    p.g = group(me, launch);
    p.counters = counters(me, launch, counter_words(s));
    p.a = (const Vec16*)r.a;
    p.b = (const Vec16*)r.b;
    p.c = r.c;
    for (u32 q = 0; q < H.s.ranks; q++) {
      p.inbox.of[q] = (Vec16*)ranks[q].inbox;
      p.inbox.arrived_of[q] = ranks[q].arrived;
    }
    p.inbox.per_rank = PER_RANK;
    p.m = s.m;
    p.N = (s.N + 7) / 8 * 8;
    p.K = s.K;
    p.tile_n = s.tile_n < 8 ? 8 : s.tile_n / 8 * 8;
    p.band_tile_rows = 1 + own.below(3);
    p.lead = 1 + own.below(4);
    p.order = dice.below(4) ? AS_CONSUMED : RANK_ORDER;
    p.halved = own.below(1 + own_tail(p, me));
    r.params = p;
    fill(r.a, s.M() * p.K / 4, A, [=](u32 i) { return input_word('a', me, launch, i); });
    fill(r.b, p.N * p.K / 4, B, [=](u32 i) { return input_word('b', me, launch, i); });
    fill(r.c, p.m.rows(me) * p.N / 4, C, [](u32) { return NOBODY_WROTE; });
  }

  // Entries behind the last tile of a peer's rows.
  static u32 own_tail(const GemmRsPushParams& p, u32 me) {
    const GemmRsPushSchedule schedule(p);
    u32 tail = 0;
    for (u32 i = 0; i < schedule.entries(); i++) {
      const Work w = schedule.tile_at(i);
      tail = w.kind != LEAVE && w.chunk != me ? 0 : tail + 1;
    }
    return tail;
  }

  static void check(u32 me, u32 launch) {
    const GemmRsPushParams& p = ranks[me].params;
    check_reduced(me, launch, ranks[me].c, p.m, p.N, p.K);
  }

  static bool name_address(u32 me, const void* address, char* out, size_t bytes) {
    const Buffers& r = ranks[me];
    return name_part(me, address, out, bytes, "a", r.a, A) || name_part(me, address, out, bytes, "b", r.b, B) ||
           name_part(me, address, out, bytes, "c", r.c, C) || name_part(me, address, out, bytes, "inbox", r.inbox, INBOX) ||
           name_part(me, address, out, bytes, "arrived", r.arrived, MAX_RANKS * PER_RANK, 4);
  }
};
