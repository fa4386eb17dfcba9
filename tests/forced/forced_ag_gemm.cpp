// ag_gemm under forced interleavings, as a library for tests/forced/forced.py.
#define MUTATIONS(X)                                                                                                   \
  X(NO_READS_DONE_WAIT) X(NO_SLICES_LANDED_WAIT) X(ALL_ARE_MOVERS) X(NONE_IS_MOVER) X(COUNTS_BEFORE_RELEASE)           \
  X(FIRST_PULL_REPORTS_READS) X(ONE_SLICE_TOO_FEW) X(ONE_SLICE_TOO_MANY) X(DRAINS_EMPTY_SHARDS) X(NEVER_DRAINS)        \
  X(ANNOUNCES_LATE) X(ANNOUNCES_EPOCH_FIRST) X(ONE_FINGERPRINT) X(BUILDS_BEFORE_IT_MOVES) X(COMPARES_UNSIGNED)         \
  X(FORGETS_PEERS) X(POLLS_IN_DEVICE_SCOPE) X(STORES_BESIDE)
#include "ag_gemm.h"
#include "ag_gemm_mutants.h"

static void prepare_mutant(u32 me, u32 launch) {
  ag_gemm_prepare(me, launch);
  AgGemmParams& p = ag_gemm_ranks[me].params;
  if (H.s.mutation == ALL_ARE_MOVERS) p.movers = H.wgs;
  if (H.s.mutation == NONE_IS_MOVER) p.movers = 0;
}

static void give_mutant(u32 me) {
  ag_gemm_memory(me);
  const Rank& r = H.ranks[me];
  if (H.s.mutation == NO_READS_DONE_WAIT) target::make_blind(r.signals->reads_done, MAX_RANKS);
  if (H.s.mutation == NO_SLICES_LANDED_WAIT) target::make_blind(r.counters, 2 * COUNTERS_PER_SET);
}

static void run_mutant(u32 me, target::Box& box, bool decides) {
  const AgGemmParams& p = ag_gemm_ranks[me].params;
  switch (H.s.mutation) {
    case COUNTS_BEFORE_RELEASE: return run_wg<With<CountsBeforeRelease>>(p, box, decides);
    case FIRST_PULL_REPORTS_READS: return run_wg<With<FirstPullReportsReads>>(p, box, decides);
    case ONE_SLICE_TOO_FEW: return run_wg<With<WrongSlices<-1>>>(p, box, decides);
    case ONE_SLICE_TOO_MANY: return run_wg<With<WrongSlices<1>>>(p, box, decides);
    case DRAINS_EMPTY_SHARDS: return run_wg<With<DrainsEmptyShards>>(p, box, decides);
    case NEVER_DRAINS: return run_wg<With<NeverDrains>>(p, box, decides);
    case ANNOUNCES_LATE: return run_wg<With<AnnouncesLate>>(p, box, decides);
    case ANNOUNCES_EPOCH_FIRST: return run_wg<With<AnnouncesEpochFirst>>(p, box, decides);
    case BUILDS_BEFORE_IT_MOVES: return run_wg<With<BuildsBeforeItMoves>>(p, box, decides);
    case COMPARES_UNSIGNED: return run_wg<With<ComparesUnsigned>>(p, box, decides);
    case FORGETS_PEERS: return run_wg<With<ForgetsPeers>>(p, box, decides);
    case POLLS_IN_DEVICE_SCOPE: return run_wg<With<PollsInDeviceScope>>(p, box, decides);
    case STORES_BESIDE: return run_wg<StoresBeside>(p, box, decides);
    case ONE_FINGERPRINT: return run_wg<With<OneFingerprint>>(p, box, decides);
    default: return run_wg<AgGemm>(p, box, decides);
  }
}

constexpr Operator MUTANT = {"ag_gemm",  give_mutant,      prepare_mutant, ag_gemm_check,
                             run_mutant, ag_gemm_counters, ag_gemm_names};
const Operator operators[] = {MUTANT};
const u32 num_operators = 1;

#include "library.h"
