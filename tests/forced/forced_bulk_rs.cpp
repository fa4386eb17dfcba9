// bulk_rs under forced interleavings, as a library for tests/forced/forced.py.
#define MUTATIONS(X)                                                                                                   \
  X(NEVER_DRAINS) X(NO_READS_DONE_WAIT) X(REDUCES_BEFORE_START) X(FIRST_REDUCE_REPORTS) X(WAITS_FOR_WHO_GETS_NOTHING)  \
  X(SUMS_TOO_EARLY) X(ALL_ARE_MOVERS) X(MOVES_TWICE) X(TURNS_BESIDE) X(CUTS_BESIDE) X(STORES_BESIDE)
#include "../../hip_kernels/kernels/bulk_rs.hip"
#include "bulk.h"
#include "mutants.h"

// The LAST reduction tells the owners that X has been read.
struct FirstReduceReports : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  void finish(const Work& w) const {
    if (w.kind != REDUCE) return BulkRsSchedule::finish(w);
    target::release(DEVICE_SCOPE);
    if (target::add(reduces_done(), 1, DEVICE_SCOPE) != 0) return;
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&p.g.signals_of[q]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
// Who gets no rows reads nothing, and reports nothing.
struct WaitsForWhoGetsNothing : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  bool wait_inputs(const Work& w) const {
    if (w.kind != DRAIN) return BulkRsSchedule::wait_inputs(w);
    if (!wait_all_started(p.g, w)) return false;
    for (u32 q = 0; q < p.g.ranks; q++)
      if (q != p.g.rank && !wait_at_least(p.g, w, &own_signals(p.g).reads_done[q], p.g.epoch, SYSTEM_SCOPE)) return false;
    return true;
  }
};
// Where movers are agents of their own, WGs do not begin as movers as well.
struct MovesTwice : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  void begin() {
    BulkRsSchedule::begin();
    mover = target::wg() < p.movers;
  }
};
// Nor do they become such: nobody there would tell of what they have read.
struct TurnsBeside : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  Work next_work() {
    const Work w = BulkRsSchedule::next_work();
    return w.kind == LEAVE && !aborted(p.g) ? next_reduce() : w;
  }
};

struct Mutant : Bulk<BulkRsParams> {
  static void give_memory(u32 me) {
    Bulk::give_memory(me);
    if (H.s.mutation == NO_READS_DONE_WAIT) target::make_blind(H.ranks[me].signals->reads_done, MAX_RANKS);
  }

  static u32 counter_words(const Shape&) { return 4 + 3 * 3; }

  static bool is_f32(const BulkRsParams& p) { return p.into == SET_F32 || p.into == ADD_F32; }
  static bool adds(const BulkRsParams& p) { return p.into == ADD_BF16 || p.into == ADD_F32; }

  static u64 before(const BulkRsParams& p, u32 me, u32 launch, u32 word) {
    if (!adds(p)) return NOBODY_WROTE;
    if (!is_f32(p)) return input_word('c', me, launch, word);
    const auto bits = [&](u32 at) { return (u64)__builtin_bit_cast(u32, (float)element('c', me, launch, at)); };
    return bits(2 * word) | bits(2 * word + 1) << 32;
  }

  static void prepare(u32 me, u32 launch) {
    const Shape& s = H.shape(me, launch);
    Buffers& r = ranks[me];
    Random dice(mix(H.seed, me, launch));
    const u32 M = 1 + dice.below(20), N = 1 + dice.below(MAX_COLS), K = dice.below(17);
    const bool whole = K <= 8 || (H.beside() && H.s.mutation != CUTS_BESIDE);
    BulkRsParams& p = r.params = base(me, launch, counter_words(s), M, N, K);
    for (u32 q = 0; q < H.s.ranks; q++) p.x_of[q] = (const Vec16*)ranks[q].from;
    p.out = (Vec16*)r.to;
    p.split = {(float*)r.sums, whole ? 1u : 2u, whole ? K : 8};
    p.m.tile_m = 8;
    p.lda = (M + 7) / 8 * 8;
    p.movers = H.beside() + dice.below(H.wgs);
    if (p.policy == FIXED && !p.movers) p.movers = 1;
    p.max_movers = p.movers + dice.below(H.wgs);
    if (!p.max_movers) p.max_movers = 1;
    p.slices = 1 + dice.below(5);
    p.into = dice.below(4);
    p.halved = p.tile_n % 16 || dice.below(2) ? 0 : dice.below(8);
    if (H.s.mutation == ALL_ARE_MOVERS) p.movers = p.max_movers = H.wgs;
    fill_inputs(me, launch, s.M(), K, p.lda);
    fill(r.to, s.m.rows(me) * p.width / 4, MOVED, [](u32) { return NOBODY_WROTE; });
    fill(r.c, M * p.ldc / (is_f32(p) ? 2 : 4), 2 * MATRIX, [=](u32 i) { return before(p, me, launch, i); });
    fill(r.sums, p.split.parts > 1 ? p.split.parts * M * p.ldc / 2 : 0, 4 * MATRIX, [](u32) { return NOBODY_WROTE; });
  }

  static void check(u32 me, u32 launch) {
    const Buffers& r = ranks[me];
    const BulkRsParams& p = r.params;
    const auto wanted = [&](u32 row, u32 col) {
      return product(me, launch, row, col, p.lda, true) + (adds(p) ? element('c', me, launch, row * p.ldc + col) : 0);
    };
    if (is_f32(p)) {
      for (u32 at = 0; at < p.M * p.ldc; at++) {
        if (at % p.ldc >= p.N) continue;
        const float got = __builtin_bit_cast(float, (u32)(target::read(r.c + at / 2) >> at % 2 * 32));
        if (got == wanted(at / p.ldc, at % p.ldc)) continue;
        target::symptom(target::WRONG_VALUE, "rank %u launch %u row %u col %u: got %g, wanted %d", me, launch, at / p.ldc,
                        at % p.ldc, got, wanted(at / p.ldc, at % p.ldc));
        break;
      }
    } else if (adds(p)) {  // columns past N hold what was there
      for (u32 row = 0; row < p.M; row++)
        check_matrix(me, launch, r.c + row * p.ldc / 4, 1, p.N, (p.N + 3) / 4 * 4,
                     [&](u32, u32 col) { return wanted(row, col); });
    } else {
      check_matrix(me, launch, r.c, p.M, p.N, p.ldc, wanted);
    }
    check_matrix(me, launch, r.to, p.m.rows(me), p.width, p.width, [&](u32 row, u32 col) {
      i32 sum = 0;
      for (u32 q = 0; q < H.s.ranks; q++) sum += element('x', q, launch, (p.m.first[me] + row) * p.width + col);
      return sum;
    });
  }

  template <class S> static void with(u32 me, target::Box& box, bool decides) {
    run_wg<Scheduled<BulkRs, S>>(ranks[me].params, box, decides);
  }
  static void run(u32 me, target::Box& box, bool decides) {
    switch (H.s.mutation) {
      case NEVER_DRAINS: return with<NeverDrains<BulkRsSchedule>>(me, box, decides);
      case REDUCES_BEFORE_START: return with<DoesNotWaitFor<BulkRsSchedule, REDUCE>>(me, box, decides);
      case FIRST_REDUCE_REPORTS: return with<FirstReduceReports>(me, box, decides);
      case WAITS_FOR_WHO_GETS_NOTHING: return with<WaitsForWhoGetsNothing>(me, box, decides);
      case SUMS_TOO_EARLY: return with<DoesNotWaitFor<BulkRsSchedule, SUM>>(me, box, decides);
      case MOVES_TWICE: return with<MovesTwice>(me, box, decides);
      case TURNS_BESIDE: return with<TurnsBeside>(me, box, decides);
      case STORES_BESIDE: return run_wg<StoresSumsBeside<BulkRs>>(ranks[me].params, box, decides);
      default: return with<BulkRsSchedule>(me, box, decides);
    }
  }
};

const Operator operators[] = {operator_of<Mutant>("bulk_rs")};
const u32 num_operators = 1;

#include "library.h"
