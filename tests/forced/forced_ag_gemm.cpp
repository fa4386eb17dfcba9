// ag_gemm under forced interleavings, as a library for tests/forced/forced.py.
#define MUTATIONS(X)                                                                                                   \
  X(NO_READS_DONE_WAIT) X(NO_SLICES_LANDED_WAIT) X(ALL_ARE_MOVERS) X(NONE_IS_MOVER) X(COUNTS_BEFORE_RELEASE)           \
  X(FIRST_PULL_REPORTS_READS) X(ONE_SLICE_TOO_FEW) X(ONE_SLICE_TOO_MANY) X(DRAINS_EMPTY_SHARDS) X(NEVER_DRAINS)        \
  X(ANNOUNCES_LATE) X(ANNOUNCES_EPOCH_FIRST) X(ONE_FINGERPRINT) X(BUILDS_BEFORE_IT_MOVES) X(COMPARES_UNSIGNED)         \
  X(FORGETS_PEERS) X(POLLS_IN_DEVICE_SCOPE) X(BUILDS_UNREADY) X(KEEPS_TO_ITS_QUEUE) X(QUEUES_OVERLAP) X(STORES_BESIDE) \
  X(WAITS_FOR_FIRST_SLAB) X(COUNTS_SLABS_TOGETHER) X(MOVES_TWICE) X(ALL_MOVE_BESIDE)
#include "gathered.h"
#include "ag_gemm_mutants.h"

struct Mutant : Gathered<TN> {
  static void give_memory(u32 me) {
    Gathered::give_memory(me);
    const Rank& r = H.ranks[me];
    if (H.s.mutation == NO_READS_DONE_WAIT) target::make_blind(r.signals->reads_done, MAX_RANKS);
    if (H.s.mutation == NO_SLICES_LANDED_WAIT) target::make_blind(r.counters, 2 * COUNTERS_PER_SET);
  }
  static void prepare(u32 me, u32 launch) {
    Gathered::prepare(me, launch);
    if (H.s.mutation == ALL_ARE_MOVERS) ranks[me].params.movers = H.wgs;
    if (H.s.mutation == NONE_IS_MOVER) ranks[me].params.movers = 0;
  }
  template <class S> static void with(u32 me, target::Box& box, bool decides) {
    run_wg<Scheduled<AgGemm, S>>(ranks[me].params, box, decides);
  }
  static void run(u32 me, target::Box& box, bool decides) {
    switch (H.s.mutation) {
      case COUNTS_BEFORE_RELEASE: return with<CountsBeforeRelease>(me, box, decides);
      case FIRST_PULL_REPORTS_READS: return with<FirstPullReportsReads>(me, box, decides);
      case ONE_SLICE_TOO_FEW: return with<WrongSlices<-1>>(me, box, decides);
      case ONE_SLICE_TOO_MANY: return with<WrongSlices<1>>(me, box, decides);
      case WAITS_FOR_FIRST_SLAB: return with<WaitsForFirstSlab>(me, box, decides);
      case COUNTS_SLABS_TOGETHER: return with<CountsSlabsTogether>(me, box, decides);
      case MOVES_TWICE: return with<MovesTwice>(me, box, decides);
      case ALL_MOVE_BESIDE: return with<AllMoveBeside>(me, box, decides);
      case DRAINS_EMPTY_SHARDS: return with<DrainsEmptyShards>(me, box, decides);
      case NEVER_DRAINS: return with<NeverDrains<AgGemmSchedule>>(me, box, decides);
      case ANNOUNCES_LATE: return with<AnnouncesLate<AgGemmSchedule>>(me, box, decides);
      case ANNOUNCES_EPOCH_FIRST: return with<AnnouncesEpochFirst>(me, box, decides);
      case BUILDS_BEFORE_IT_MOVES: return with<BuildsBeforeItMoves>(me, box, decides);
      case KEEPS_TO_ITS_QUEUE: return with<KeepsToItsQueue>(me, box, decides);
      case QUEUES_OVERLAP: return with<QueuesOverlap>(me, box, decides);
      case BUILDS_UNREADY: return with<BuildsUnready<AgGemmSchedule>>(me, box, decides);
      case COMPARES_UNSIGNED: return with<ComparesUnsigned>(me, box, decides);
      case FORGETS_PEERS: return with<ForgetsPeers>(me, box, decides);
      case POLLS_IN_DEVICE_SCOPE: return with<PollsInDeviceScope>(me, box, decides);
      case STORES_BESIDE: return run_wg<StoresBeside<AgGemm>>(ranks[me].params, box, decides);
      case ONE_FINGERPRINT: return with<OneFingerprint>(me, box, decides);
      default: return with<AgGemmSchedule>(me, box, decides);
    }
  }
};

const Operator operators[] = {operator_of<Mutant>("ag_gemm")};
const u32 num_operators = 1;

#include "library.h"
