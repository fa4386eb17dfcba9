// moe_forward under forced interleavings, as a library for tests/forced/forced.py.
#define MUTATIONS(X)                                                                                                   \
  X(PLANS_WITHOUT_COUNTS) X(ONE_COUNTS_BUFFER) X(SAYS_NOTHING_OF_NOTHING) X(COMPARES_EQUAL) X(TOPK_BEFORE_LOGITS)      \
  X(SCAN_BEFORE_TOPK) X(PUSH_BEFORE_SORT) X(PASSES_THE_GATE) X(SORTS_BACKWARDS) X(GEMM1_BEFORE_ROWS)                   \
  X(LEAVES_PADDING) X(PUSH_WITHOUT_CREDIT) X(CREDITS_FIRST_COLUMN) X(CREDITS_OLD_SOURCES) X(CREDITS_BY_ONE_WORD)       \
  X(CREDITS_MOVE_WITH_THE_SHAPE)                                                                                        \
  X(GEMM1_BEFORE_ITS_SLOT) X(GEMM2_BEFORE_GEMM1) X(GEMM2_BEFORE_ITS_SLOT) X(SEND_BEFORE_GEMM2)                         \
  X(SENDS_AFTER_ONE_COLUMN) X(ALL_GEMM1_FIRST) X(TILES_BEFORE_MOVES) X(TILES_BEFORE_SENDS) X(LEAVES_BEFORE_MOVES)      \
  X(FOLDS_BEFORE_SENDS) X(CREW_WAITS_FOR_SENDS) X(CREW_WAITS_FOR_CREDIT) X(X_RING_TOO_SHORT) X(H_RING_TOO_SHORT)       \
  X(Y_RING_TOO_SHORT) X(FOLD_BEFORE_ROWS) X(FORGETS_WHAT_IS_DEALT) X(SAW_IT_BEFORE) X(LANDS_EARLY) X(SHARED2_BEFORE_SHARED1) X(FOLD_BEFORE_SHARED)               \
  X(PULL_BEFORE_SORT) X(PULL_BEFORE_ITS_SLOT) X(NOBODY_BUILDS) X(FOLDS_BACKWARDS) X(STORES_BESIDE)
#define OWN_SIGNALS 2112
#include "moe_mutants.h"

static_assert(OWN_SIGNALS >= MOE_SIGNALS + MOE_ROW_CAP * MAX_RANKS);  // what is more, for a mutant

static void prepare_mutant(u32 me, u32 launch) {
  moe_prepare(me, launch);
  MoeParams& p = moe_ranks[me].params;
  const u32 G = p.layout.step_rows;
  switch (H.s.mutation) {
    case ONE_COUNTS_BUFFER: p.counts_words = 0; break;
    case ALL_GEMM1_FIRST: p.lag = p.layout.row_cap; break;
    case X_RING_TOO_SHORT: p.x_slots = G > 1 ? G - 1 : p.x_slots; break;
    case H_RING_TOO_SHORT:
      if (G > 1 && p.h_slots >= 2 * G) p.lag = 1, p.h_slots = 2 * G - 1;
      break;
    case Y_RING_TOO_SHORT: p.y_slots = G > 1 ? G - 1 : p.y_slots; break;
    case NOBODY_BUILDS: p.crew = H.wgs; break;
  }
}

static void run_mutant(u32 me, target::Box& box, bool decides) {
  const MoeParams& p = moe_ranks[me].params;
  switch (H.s.mutation) {
    case PLANS_WITHOUT_COUNTS: return run_wg<With<Impatient<all_of<PLAN>>>>(p, box, decides);
    case SAYS_NOTHING_OF_NOTHING: return run_wg<With<SaysNothingOfNothing>>(p, box, decides);
    case COMPARES_EQUAL: return run_wg<With<ComparesEqual>>(p, box, decides);
    case TOPK_BEFORE_LOGITS: return run_wg<With<Impatient<all_of<TOPK>>>>(p, box, decides);
    case SCAN_BEFORE_TOPK: return run_wg<With<Impatient<all_of<SCAN>>>>(p, box, decides);
    case PUSH_BEFORE_SORT: return run_wg<With<Impatient<one_of<PUSH, 0>>>>(p, box, decides);
    case PASSES_THE_GATE: return run_wg<With<PassesTheGate>>(p, box, decides);
    case SORTS_BACKWARDS: return run_wg<SortsBackwards>(p, box, decides);
    case GEMM1_BEFORE_ROWS: return run_wg<With<Impatient<rows_of_gemm1>>>(p, box, decides);
    case LEAVES_PADDING: return run_wg<LeavesPadding>(p, box, decides);
    case PUSH_WITHOUT_CREDIT: return run_wg<With<Impatient<one_of<PUSH, 1>>>>(p, box, decides);
    case CREDITS_FIRST_COLUMN: return run_wg<With<CreditsFirstColumn>>(p, box, decides);
    case CREDITS_OLD_SOURCES: return run_wg<With<CreditsOldSources>>(p, box, decides);
    case CREDITS_BY_ONE_WORD: return run_wg<With<CreditsByOneWord>>(p, box, decides);
    case CREDITS_MOVE_WITH_THE_SHAPE: return run_wg<With<CreditsMoveWithTheShape>>(p, box, decides);
    case GEMM1_BEFORE_ITS_SLOT: return run_wg<With<Impatient<slot_of_gemm1>>>(p, box, decides);
    case GEMM2_BEFORE_GEMM1: return run_wg<With<Impatient<one_of<GEMM2, 0>>>>(p, box, decides);
    case GEMM2_BEFORE_ITS_SLOT: return run_wg<With<Impatient<one_of<GEMM2, 1>>>>(p, box, decides);
    case SEND_BEFORE_GEMM2: return run_wg<With<Impatient<all_of<SEND>>>>(p, box, decides);
    case SENDS_AFTER_ONE_COLUMN: return run_wg<With<SendsAfterOneColumn>>(p, box, decides);
    case TILES_BEFORE_MOVES: return run_wg<With<Lawless<MOVES_BEFORE_TILES>>>(p, box, decides);
    case TILES_BEFORE_SENDS: return run_wg<With<Lawless<SENDS_BEFORE_TILES>>>(p, box, decides);
    case LEAVES_BEFORE_MOVES: return run_wg<With<Lawless<MOVES_BEFORE_LEAVING>>>(p, box, decides);
    case FOLDS_BEFORE_SENDS: return run_wg<With<Lawless<SENDS_BEFORE_FOLDS>>>(p, box, decides);
    case CREW_WAITS_FOR_SENDS: return run_wg<With<Lawless<READY_SENDS>>>(p, box, decides);
    case CREW_WAITS_FOR_CREDIT: return run_wg<With<Lawless<READY_MOVES>>>(p, box, decides);
    case FOLD_BEFORE_ROWS: return run_wg<With<Impatient<rows_of_fold>>>(p, box, decides);
    case FORGETS_WHAT_IS_DEALT: return run_wg<With<ForgetsWhatIsDealt<MoeSchedule>>>(p, box, decides);
    case SAW_IT_BEFORE: return run_wg<With<SawItBefore<MoeSchedule>>>(p, box, decides);
    case LANDS_EARLY: return run_wg<With<LandsEarly>>(p, box, decides);
    case SHARED2_BEFORE_SHARED1: return run_wg<With<Impatient<all_of<SHARED2>>>>(p, box, decides);
    case FOLD_BEFORE_SHARED: return run_wg<With<Impatient<shared_of_fold>>>(p, box, decides);
    case PULL_BEFORE_SORT: return run_wg<With<Impatient<one_of<PULL, 0>>>>(p, box, decides);
    case PULL_BEFORE_ITS_SLOT: return run_wg<With<Impatient<one_of<PULL, 1>>>>(p, box, decides);
    case FOLDS_BACKWARDS: return run_wg<FoldsBackwards>(p, box, decides);
    case STORES_BESIDE: return run_wg<StoresBeside<MoeForward>>(p, box, decides);
    default: return run_wg<MoeForward>(p, box, decides);
  }
}

constexpr Operator MUTANT = {"moe_forward", moe_memory, prepare_mutant, moe_check, run_mutant, moe_counters, moe_names};
const Operator operators[] = {MUTANT};
const u32 num_operators = 1;

#include "library.h"
