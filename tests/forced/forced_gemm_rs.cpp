// gemm_rs under forced interleavings, alone and between launches of ag_gemm, as a library for tests/forced/forced.py.
#define MUTATIONS(X)                                                                                                   \
  X(POISONS_WITHOUT_WAIT) X(REDUCES_BEFORE_START) X(ONE_BUFFER) X(NEVER_POISONS) X(POISONS_BY_THIS_SHAPE)              \
  X(TURNS_ARE_EPOCHS) X(ALL_ARE_MOVERS) X(NOBODY_REDUCES) X(ANNOUNCES_LATE) X(BUILDS_AFTER_REDUCING)                   \
  X(JOINS_TOO_EARLY) X(FORGETS_LAST_BAND) X(TRUSTS_THE_HINT) X(STORES_INTO_CACHES) X(STORES_A_SENTINEL) X(STORES_BESIDE)  \
  X(REDUCES_UNMADE_BANDS) X(ASKS_FOR_THE_SLICE) X(ASKS_BEFORE_START)
#include "../../hip_kernels/kernels/ag_gemm.hip"
#include "gathered.h"
#include "gemm_rs_mutants.h"

static void prepare_mutant(u32 me, u32 launch) {
  const u32 M = H.shape(me, launch).M();
  gemm_rs_prepare(me, launch);
  GemmRsParams& p = gemm_rs_ranks[me].params;
  switch (H.s.mutation) {
    case ONE_BUFFER: p.staging.buffer_words = 0; break;
    case NEVER_POISONS: p.staging.dirty_words = 0; break;
    case POISONS_BY_THIS_SHAPE: p.staging.dirty_words = M * p.N / 8; break;
    case TURNS_ARE_EPOCHS: p.staging.turn = p.g.epoch; break;
    case ALL_ARE_MOVERS: p.movers = p.max_movers = H.wgs; break;
    case ASKS_FOR_THE_SLICE: p.slices = 2, p.movers = p.max_movers = H.wgs - 1; break;
    case NOBODY_REDUCES: p.movers = p.max_movers = 0; break;
  }
}

static void run_mutant(u32 me, target::Box& box, bool decides) {
  const GemmRsParams& p = gemm_rs_ranks[me].params;
  switch (H.s.mutation) {
    case POISONS_WITHOUT_WAIT: return run_wg<Scheduled<GemmRs, DoesNotWaitFor<GemmRsSchedule, POISON>>>(p, box, decides);
    case REDUCES_BEFORE_START: return run_wg<Scheduled<GemmRs, ReducesBeforeStart>>(p, box, decides);
    case ANNOUNCES_LATE: return run_wg<Scheduled<GemmRs, AnnouncesLate<GemmRsSchedule>>>(p, box, decides);
    case BUILDS_AFTER_REDUCING: return run_wg<Scheduled<GemmRs, BuildsAfterReducing>>(p, box, decides);
    case JOINS_TOO_EARLY: return run_wg<Scheduled<GemmRs, JoinsTooEarly>>(p, box, decides);
    case FORGETS_LAST_BAND: return run_wg<Scheduled<GemmRs, ForgetsLastBand>>(p, box, decides);
    case REDUCES_UNMADE_BANDS: return run_wg<Scheduled<GemmRs, ReducesUnmadeBands>>(p, box, decides);
    case ASKS_FOR_THE_SLICE: return run_wg<Scheduled<GemmRs, AsksForTheSlice>>(p, box, decides);
    case ASKS_BEFORE_START: return run_wg<Scheduled<GemmRs, AsksBeforeStart>>(p, box, decides);
    case TRUSTS_THE_HINT: return run_wg<TrustsTheHint>(p, box, decides);
    case STORES_INTO_CACHES: return run_wg<StoresIntoCaches>(p, box, decides);
    case STORES_A_SENTINEL: return run_wg<StoresASentinel>(p, box, decides);
    case STORES_BESIDE: return run_wg<StoresBeside<GemmRs>>(p, box, decides);
    default: return run_wg<GemmRs>(p, box, decides);
  }
}

struct Beside : Gathered<TN> {
  static void run(u32 me, target::Box& box, bool decides) { run_wg<AgGemm>(ranks[me].params, box, decides); }
};

constexpr Operator MUTANT = {"gemm_rs",  gemm_rs_memory,   prepare_mutant, gemm_rs_check,
                             run_mutant, gemm_rs_counters, gemm_rs_names};
const Operator operators[] = {MUTANT, operator_of<Beside>("ag_gemm")};
const u32 num_operators = 2;

#include "library.h"
