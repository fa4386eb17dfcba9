// ag_gemm_dgrad under forced interleavings, with whole and with cut contractions, as a library for tests/forced/forced.py.
#define MUTATIONS(X) X(SUMS_TOO_EARLY) X(COUNTS_PARTS_BEFORE_RELEASE) X(NEVER_DRAINS) X(STORES_BESIDE)
constexpr bool SPLIT_KERNEL = true;
#include "ag_gemm_dgrad.h"

// A sum waits for all parts of its tile.
struct SumsTooEarly : AgGemmDgradSchedule {
  using AgGemmDgradSchedule::AgGemmDgradSchedule;
  bool wait_inputs(const Work& w) const { return w.kind == SUM || AgGemmDgradSchedule::wait_inputs(w); }
};

// Sums first, then the count.
struct CountsPartsBeforeRelease : AgGemmDgradSchedule {
  using AgGemmDgradSchedule::AgGemmDgradSchedule;
  void finish(const Work& w) const {
    if (w.kind != TILE || p.split.parts == 1) return AgGemmDgradSchedule::finish(w);
    target::add(parts_done(w.chunk, w.row, w.part / p.split.parts), 1, DEVICE_SCOPE);
    target::release(DEVICE_SCOPE);
  }
};

// One WG stays until the own shard has been read, also with a queue of parts and sums.
struct DgradNeverDrains : AgGemmDgradSchedule {
  using AgGemmDgradSchedule::AgGemmDgradSchedule;
  Work next_work() {
    const Work w = AgGemmDgradSchedule::next_work();
    return w.kind == DRAIN ? Work{} : w;
  }
};

template <class Op, class S> struct Scheduled : Op {
  using Schedule = S;
};
struct DgradStoresBeside : AgGemmDgradSplit {
  static void store_f32(const Params& p, const Work& w, u32 row, u32 column, const float (&four)[4]) {
    AgGemmDgradSplit::store_f32(p, w, row, column + 4, four);
  }
};

template <class S> static void run(const AgGemmParams& p, target::Box& box, bool decides) {
  if (p.split.parts == 1) run_wg<Scheduled<AgGemmDgrad, S>>(p, box, decides);
  else run_wg<Scheduled<AgGemmDgradSplit, S>>(p, box, decides);
}

static void run_mutant(u32 me, target::Box& box, bool decides) {
  const AgGemmParams& p = dgrad_ranks[me].params;
  switch (H.s.mutation) {
    case SUMS_TOO_EARLY: return run<SumsTooEarly>(p, box, decides);
    case COUNTS_PARTS_BEFORE_RELEASE: return run<CountsPartsBeforeRelease>(p, box, decides);
    case NEVER_DRAINS: return run<DgradNeverDrains>(p, box, decides);
    case STORES_BESIDE:
      if (p.split.parts > 1) return run_wg<DgradStoresBeside>(p, box, decides);
      return run<AgGemmDgradSchedule>(p, box, decides);
    default: return run<AgGemmDgradSchedule>(p, box, decides);
  }
}

constexpr Operator MUTANT = {"ag_gemm_dgrad", dgrad_memory,   dgrad_prepare, dgrad_check,
                             run_mutant,      dgrad_counters, dgrad_names};
const Operator operators[] = {MUTANT};
const u32 num_operators = 1;

#include "library.h"
