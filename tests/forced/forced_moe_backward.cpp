// moe_backward under forced interleavings, between launches of moe_forward, as a library for tests/forced/forced.py.
#define MUTATIONS(X)                                                                                                   \
  X(PUSHES_BEFORE_START) X(PUSHES_INTO_USED_SLOTS) X(REPLAYS_BEFORE_ROWS) X(DGRAD2_BEFORE_ROWS) X(DGRAD2_BEFORE_REPLAY) \
  X(WGRAD2_BEFORE_DGRAD2) X(WGRAD2_OUT_OF_TURN) X(WGRAD1_BEFORE_DGRAD2) X(WGRAD1_OUT_OF_TURN) X(DGRAD1_BEFORE_DGRAD2)  \
  X(SENDS_BEFORE_DGRAD1) X(OWN_BEFORE_DLOGITS) X(OWN_BEFORE_SHARED) X(ROUTER_BEFORE_DLOGITS) X(ROUTER_OUT_OF_TURN)     \
  X(SHARED_W_BEFORE_D2) X(FOLDS_BEFORE_ROWS) X(FOLDS_BEFORE_OWN) X(DWEIGHTS_BEFORE_ROWS) X(READS_UNPLANNED)            \
  X(PLANS_BEFORE_START) X(FREES_WITHOUT_SENDS) X(FREES_WITHOUT_WEIGHTS) X(FREES_AFTER_ONE_TILE) X(TELLS_OLD_SOURCES)   \
  X(FREES_BY_ONE_WORD) X(LANDS_EARLY) X(COUNTS_COLUMNS) X(TILES_BEFORE_PUSHES) X(TILES_BEFORE_SENDS)                   \
  X(PUSHES_BEFORE_SENDS) X(FOLDS_BEFORE_SENDS) X(FOLDS_BEFORE_PUSHES) X(ROUTER_BEFORE_DWEIGHTS) X(OWN_BEFORE_FILLER)   \
  X(CREW_WAITS_FOR_SENDS) X(CREW_WAITS_FOR_SLOTS) X(PUSHES_RISE) X(SENDS_RISE) X(WGRAD2_FIRST) X(DGRAD1_FIRST)         \
  X(FORGETS_IDLE_EXPERTS) X(ADDS_WHAT_IS_MISSING) X(KEEPS_OLD_X) X(LEAVES_GAPS) X(ROUNDS_EACH_TURN)                    \
  X(FORGETS_THE_REST) X(ADDS_BACKWARDS) X(STORES_ROWS_BESIDE) X(STORES_WEIGHTS_BESIDE)   \
  X(QUANT_BEFORE_ROWS) X(REPLAYS_BEFORE_QUANT) X(DGRAD2_BEFORE_QUANT) X(ONE_PART_IS_ENOUGH) X(COUNTS_COPIES_AT_ONCE)     \
  X(COPIES_BEHIND_THE_COUNT) X(QUANT_BEHIND_DGRAD2) X(QUANT_AFTER_ALL) X(QUANT_BEFORE_PUSHES) X(KEEPS_OLD_X_COPIES)    \
  X(FORGETS_WHAT_IS_DEALT) X(DEALS_USED_SLOTS)
#define OWN_SIGNALS 2112
#define OWN_COUNTERS 896
#include "moe_backward_mutants.h"

static_assert(OWN_SIGNALS >= MOE_SIGNALS);

static void run_mutant(u32 me, target::Box& box, bool decides) {
  if (!is_backward(backward_ranks[me].launch)) return run_wg<MoeForward>(moe_ranks[me].params, box, decides);
  const CopyParams& p = backward_ranks[me].params;
#define HASTY(name, skips) case name: return run_wg<WithSchedule<Hasty<skips>>>(p, box, decides)
#define SCHEDULED(name, ...) case name: return run_wg<WithSchedule<__VA_ARGS__>>(p, box, decides)
#define WORKING(name, ...) case name: return run_wg<__VA_ARGS__>(p, box, decides)
  switch (H.s.mutation) {
    HASTY(PUSHES_BEFORE_START, (input_of<PUSH, 0>));
    HASTY(PUSHES_INTO_USED_SLOTS, (input_of<PUSH, 1>));
    HASTY(REPLAYS_BEFORE_ROWS, any_of<GEMM1>);
    HASTY(DGRAD2_BEFORE_ROWS, rows_of_peers<DGRAD2>);
    HASTY(DGRAD2_BEFORE_REPLAY, behind_peers<DGRAD2>);
    HASTY(WGRAD2_BEFORE_DGRAD2, (input_of<WGRAD2, 0>));
    HASTY(WGRAD2_OUT_OF_TURN, (input_of<WGRAD2, 1>));
    HASTY(WGRAD1_BEFORE_DGRAD2, (input_of<WGRAD1, 0>));
    HASTY(WGRAD1_OUT_OF_TURN, (input_of<WGRAD1, 1>));
    HASTY(DGRAD1_BEFORE_DGRAD2, any_of<DGRAD1>);
    HASTY(SENDS_BEFORE_DGRAD1, any_of<SEND>);
    HASTY(OWN_BEFORE_DLOGITS, (input_of<OWN_DX, 0>));
    HASTY(OWN_BEFORE_SHARED, (input_of<OWN_DX, 1>));
    HASTY(ROUTER_BEFORE_DLOGITS, (input_of<ROUTER_DW, 0>));
    HASTY(ROUTER_OUT_OF_TURN, (input_of<ROUTER_DW, 1>));
    HASTY(QUANT_BEFORE_ROWS, any_of<QUANT>);
    HASTY(REPLAYS_BEFORE_QUANT, copies_of<GEMM1>);
    HASTY(DGRAD2_BEFORE_QUANT, copies_of<DGRAD2>);
    HASTY(SHARED_W_BEFORE_D2, shared_weights);
    HASTY(FOLDS_BEFORE_ROWS, rows_of_peers<FOLD>);
    HASTY(FOLDS_BEFORE_OWN, behind_peers<FOLD>);
    HASTY(DWEIGHTS_BEFORE_ROWS, any_of<DWEIGHT>);
    HASTY(PLANS_BEFORE_START, any_of<PLAN>);
    SCHEDULED(READS_UNPLANNED, ReadsUnplanned);
    SCHEDULED(FREES_WITHOUT_SENDS, FreesEarly<WITHOUT_SENDS>);
    SCHEDULED(FREES_WITHOUT_WEIGHTS, FreesEarly<WITHOUT_WEIGHTS>);
    SCHEDULED(FREES_AFTER_ONE_TILE, FreesEarly<FIRST_TILE>);
    SCHEDULED(TELLS_OLD_SOURCES, FreesEarly<TOLD_WRONG_RANKS>);
    SCHEDULED(FREES_BY_ONE_WORD, FreesEarly<ONE_WORD>);
    SCHEDULED(LANDS_EARLY, LandsTooEarly);
    SCHEDULED(COUNTS_COLUMNS, CountsColumns);
    SCHEDULED(ONE_PART_IS_ENOUGH, OnePartIsEnough);
    SCHEDULED(COUNTS_COPIES_AT_ONCE, CountsCopiesAtOnce);
    SCHEDULED(QUANT_AFTER_ALL, Unruly<QUANT_IN_ITS_ROUND>);
    SCHEDULED(QUANT_BEFORE_PUSHES, Unruly<QUANT_GUARDED>);
    SCHEDULED(TILES_BEFORE_PUSHES, Unruly<PUSHES_FIRST>);
    SCHEDULED(TILES_BEFORE_SENDS, Unruly<SENDS_FIRST>);
    SCHEDULED(PUSHES_BEFORE_SENDS, Unruly<SENDS_BEFORE_PUSHES>);
    SCHEDULED(FOLDS_BEFORE_SENDS, Unruly<ALL_SENT_BEFORE_FOLDS>);
    SCHEDULED(FOLDS_BEFORE_PUSHES, Unruly<ALL_PUSHED_BEFORE_FOLDS>);
    SCHEDULED(ROUTER_BEFORE_DWEIGHTS, Unruly<DWEIGHTS_FIRST>);
    SCHEDULED(OWN_BEFORE_FILLER, Unruly<SHARED_FIRST>);
    SCHEDULED(CREW_WAITS_FOR_SENDS, Unruly<ASKS_FOR_SENDS>);
    SCHEDULED(CREW_WAITS_FOR_SLOTS, Unruly<ASKS_FOR_PUSHES>);
    SCHEDULED(FORGETS_WHAT_IS_DEALT, ForgetsWhatIsDealt<BackwardSchedule>);
    SCHEDULED(DEALS_USED_SLOTS, DealsUsedSlots);
    SCHEDULED(PUSHES_RISE, Unruly<MOVES_FALL>);
    SCHEDULED(SENDS_RISE, Unruly<SENDS_FALL>);
    WORKING(COPIES_BEHIND_THE_COUNT, CopiesBehindTheCount);
    WORKING(QUANT_BEHIND_DGRAD2, QuantBehindDgrad2);
    WORKING(KEEPS_OLD_X_COPIES, KeepsOldXCopies);
    WORKING(WGRAD2_FIRST, Reordered<WGRAD2>);
    WORKING(DGRAD1_FIRST, Reordered<DGRAD1>);
    WORKING(FORGETS_IDLE_EXPERTS, ForgetsIdleExperts);
    WORKING(ADDS_WHAT_IS_MISSING, AddsWhatIsMissing);
    WORKING(KEEPS_OLD_X, KeepsOldX);
    WORKING(LEAVES_GAPS, LeavesGaps);
    WORKING(ROUNDS_EACH_TURN, RoundsEachTurn);
    WORKING(FORGETS_THE_REST, ForgetsTheRest);
    WORKING(ADDS_BACKWARDS, AddsBackwards);
    WORKING(STORES_ROWS_BESIDE, StoresRowsBeside);
    WORKING(STORES_WEIGHTS_BESIDE, StoresWeightsBeside);
    default: return run_wg<CopyingMoeBackward>(p, box, decides);
  }
}

constexpr Operator MUTANT = {"moe_backward",    backward_memory, backward_prepare, backward_check, run_mutant,
                             backward_counters, backward_names};
const Operator operators[] = {MUTANT};
const u32 num_operators = 1;

#include "library.h"
