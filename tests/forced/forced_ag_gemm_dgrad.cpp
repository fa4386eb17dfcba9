// ag_gemm_dgrad under forced interleavings, with whole and with cut contractions, as a library for tests/forced/forced.py.
#define MUTATIONS(X) X(SUMS_TOO_EARLY) X(COUNTS_PARTS_BEFORE_RELEASE) X(NEVER_DRAINS) X(BUILDS_UNREADY) X(STORES_BESIDE)
#include "../../hip_kernels/kernels/ag_gemm_dgrad.h"
#include "gathered.h"
#include "mutants.h"

// Sums first, then the count.
struct CountsPartsBeforeRelease : AgGemmDgradSchedule {
  using AgGemmDgradSchedule::AgGemmDgradSchedule;
  void finish(const Work& w) const {
    if (w.kind != TILE || p.split.parts == 1) return AgGemmDgradSchedule::finish(w);
    target::add(parts_done(w.chunk, w.row, w.part / p.split.parts), 1, DEVICE_SCOPE);
    target::release(DEVICE_SCOPE);
  }
};

struct Mutant : Gathered<NN> {
  template <class S> static void with(u32 me, target::Box& box, bool decides) {
    const AgGemmParams& p = ranks[me].params;
    if (p.split.parts == 1) return run_wg<Scheduled<AgGemmDgrad, S>>(p, box, decides);
    if (H.s.mutation == STORES_BESIDE) return run_wg<StoresSumsBeside<AgGemmDgradSplit>>(p, box, decides);
    run_wg<Scheduled<AgGemmDgradSplit, S>>(p, box, decides);
  }
  static void run(u32 me, target::Box& box, bool decides) {
    switch (H.s.mutation) {
      case SUMS_TOO_EARLY: return with<DoesNotWaitFor<AgGemmDgradSchedule, SUM>>(me, box, decides);
      case COUNTS_PARTS_BEFORE_RELEASE: return with<CountsPartsBeforeRelease>(me, box, decides);
      case NEVER_DRAINS: return with<NeverDrains<AgGemmDgradSchedule>>(me, box, decides);
      case BUILDS_UNREADY: return with<BuildsUnready<AgGemmDgradSchedule>>(me, box, decides);
      default: return with<AgGemmDgradSchedule>(me, box, decides);
    }
  }
};

const Operator operators[] = {operator_of<Mutant>("ag_gemm_dgrad")};
const u32 num_operators = 1;

#include "library.h"
