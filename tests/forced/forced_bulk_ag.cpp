// bulk_ag under forced interleavings, as a library for tests/forced/forced.py.
#define MUTATIONS(X) X(NEVER_DRAINS) X(PULLS_BEFORE_START) X(BUILDERS_NEVER_PULL) X(STORES_BESIDE)
#include "../../hip_kernels/kernels/bulk_ag.hip"
#include "bulk.h"
#include "mutants.h"

// Movers pull before they build; whoever builds first must still pull.
struct BuildersNeverPull : BulkAgSchedule {
  using BulkAgSchedule::BulkAgSchedule;
  void begin() {
    BulkAgSchedule::begin();
    mover = mover && target::wg() == 0;
  }
};

struct Mutant : Bulk<BulkAgParams> {
  static u32 counter_words(const Shape& s) { return 1 + MAX_RANKS + H.s.ranks * s.m.tile_rows_max * (s.K / 8); }

  static void prepare(u32 me, u32 launch) {
    const Shape& s = H.shape(me, launch);
    Buffers& r = ranks[me];
    Random dice(mix(H.seed, me, launch));
    const u32 M = dice.below(7), N = 1 + dice.below(MAX_COLS), K = 8 + 8 * dice.below(2);
    BulkAgParams& p = r.params = base(me, launch, counter_words(s), M, N, K);
    for (u32 q = 0; q < H.s.ranks; q++) p.shard_of[q] = (const Vec16*)ranks[q].from;
    p.gathered = (Vec16*)r.to;
    p.movers = 1 + dice.below(H.wgs - !H.beside());
    p.pulls = draw_pulls(dice, s.K, true);
    p.halved = p.tile_n % 16 || dice.below(2) ? 0 : dice.below(8);
    fill_inputs(me, launch, s.m.rows(me), M, K);
    const u32 words = p.width / 4;
    fill(r.to, s.M() * words, MOVED, [](u32) { return NOBODY_WROTE; });
    target::shut(r.to + s.m.first[me] * words, s.m.rows(me) * words);  // own rows are not gathered
    fill(r.c, M * p.ldc / 4, 2 * MATRIX, [](u32) { return NOBODY_WROTE; });
  }

  static void check(u32 me, u32 launch) {
    const BulkAgParams& p = ranks[me].params;
    check_matrix(me, launch, p.c, p.M, p.N, p.ldc,
                 [&](u32 row, u32 col) { return product(me, launch, row, col, p.K, false); });
    for (u32 q = 0; q < H.s.ranks; q++)  // own rows are not written
      if (q != me)
        check_matrix(me, launch, ranks[me].to + p.m.first[q] * (p.width / 4), p.m.rows(q), p.width, p.width,
                     [&](u32 row, u32 col) { return element('x', q, launch, row * p.width + col); });
  }

  template <class S> static void with(u32 me, target::Box& box, bool decides) {
    run_wg<Scheduled<BulkAg, S>>(ranks[me].params, box, decides);
  }
  static void run(u32 me, target::Box& box, bool decides) {
    switch (H.s.mutation) {
      case NEVER_DRAINS: return with<NeverDrains<BulkAgSchedule>>(me, box, decides);
      case PULLS_BEFORE_START: return with<DoesNotWaitFor<BulkAgSchedule, PULL>>(me, box, decides);
      case BUILDERS_NEVER_PULL: return with<BuildersNeverPull>(me, box, decides);
      case STORES_BESIDE: return run_wg<StoresBeside<BulkAg>>(ranks[me].params, box, decides);
      default: return with<BulkAgSchedule>(me, box, decides);
    }
  }
};

const Operator operators[] = {operator_of<Mutant>("bulk_ag")};
const u32 num_operators = 1;

#include "library.h"
