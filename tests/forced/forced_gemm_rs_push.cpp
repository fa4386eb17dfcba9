// gemm_rs_push under forced interleavings, alone and between launches of ag_gemm, as a library for tests/forced/forced.py.
#define MUTATIONS(X)                                                                                                   \
  X(PUSHES_BEFORE_START) X(ADDS_BEFORE_ARRIVAL) X(SIGNALS_BEFORE_RELEASE) X(OWN_TILES_FIRST) X(NEVER_DRAINS)           \
  X(ANNOUNCES_LATE) X(ONE_SLOT) X(FORGETS_LAST_PEER) X(STORES_BESIDE)
#include "../../hip_kernels/kernels/ag_gemm.hip"
#include "gathered.h"
#include "gemm_rs_push.h"
#include "mutants.h"

// A tile is stored when its owner has left all launches in which it read what lies there.
struct PushesBeforeStart : GemmRsPushSchedule {
  using GemmRsPushSchedule::GemmRsPushSchedule;
  bool wait_to_store(const Work& w) const { return w.chunk != p.g.rank || GemmRsPushSchedule::wait_to_store(w); }
  bool wait_inputs(const Work& w) const { return is_tile(w.kind) ? wait_to_store(w) : GemmRsPushSchedule::wait_inputs(w); }
};

// An own tile waits for what all peers have of it.
struct AddsBeforeArrival : GemmRsPushSchedule {
  using GemmRsPushSchedule::GemmRsPushSchedule;
  bool wait_to_store(const Work& w) const { return w.chunk == p.g.rank || GemmRsPushSchedule::wait_to_store(w); }
  bool wait_inputs(const Work& w) const { return is_tile(w.kind) ? wait_to_store(w) : GemmRsPushSchedule::wait_inputs(w); }
};
struct ForgetsLastPeer : GemmRsPushSchedule {
  using GemmRsPushSchedule::GemmRsPushSchedule;
  bool wait_to_store(const Work& w) const {
    if (w.chunk != p.g.rank) return GemmRsPushSchedule::wait_to_store(w);
    for (u32 i = 0; i + 1 < peers(); i++)
      if (!wait_at_least(p.g, w, arrived(w, peer_at(i)), p.g.epoch, SYSTEM_SCOPE)) return false;
    target::acquire(SYSTEM_SCOPE);
    return true;
  }
  bool wait_inputs(const Work& w) const { return is_tile(w.kind) ? wait_to_store(w) : GemmRsPushSchedule::wait_inputs(w); }
};

// The tile first, then the word to its owner.
struct SignalsBeforeRelease : GemmRsPushSchedule {
  using GemmRsPushSchedule::GemmRsPushSchedule;
  void finish(const Work& w) const {
    if (w.kind != TILE || w.chunk == p.g.rank) return;
    target::store(arrived(w, p.g.rank), p.g.epoch, SYSTEM_SCOPE);
    target::release(SYSTEM_SCOPE);
  }
};

// Tiles for peers run ahead of the own.
struct OwnTilesFirst : GemmRsPushSchedule {
  using GemmRsPushSchedule::GemmRsPushSchedule;
  Work next_work() {
    if (aborted(p.g)) return {};
    for (;;) {
      const u32 i = target::add(head(), 1, DEVICE_SCOPE);
      if (i == 2 * entries()) return {DRAIN, p.g.rank};
      if (i > 2 * entries()) return {};
      const Work w = tile_at(i % entries());
      if (w.kind != LEAVE && (w.chunk == p.g.rank) == (i < entries())) return w;
    }
  }
};

// The start is announced before anything is waited for.
struct PushAnnouncesLate : GemmRsPushSchedule {
  using GemmRsPushSchedule::GemmRsPushSchedule;
  mutable bool announced = false;
  void begin() { p.counters.clear_other(p.g); }
  bool wait_inputs(const Work& w) const {
    const bool there = GemmRsPushSchedule::wait_inputs(w);
    if (!announced) announce_start(p.g);
    announced = true;
    return there;
  }
};

// Each rank has a place of its own in the inbox.
struct OneSlot : GemmRsPush {
  static Vec16* partial(const Params& p, const Work& w, u32) { return GemmRsPush::partial(p, w, !w.chunk); }
  static void store(const Params& p, const Work& w, u32 row, u32 column, u64 v) {
    if (w.chunk == p.g.rank) return GemmRsPush::store(p, w, row, column, v);
    target::write((u64*)partial(p, w, p.g.rank) + (row * p.tile_n + column) / 4, v);
  }
};

struct Mutant : Pushed {
  template <class S> static void with(u32 me, target::Box& box, bool decides) {
    run_wg<Scheduled<GemmRsPush, S>>(ranks[me].params, box, decides);
  }
  static void run(u32 me, target::Box& box, bool decides) {
    switch (H.s.mutation) {
      case PUSHES_BEFORE_START: return with<PushesBeforeStart>(me, box, decides);
      case ADDS_BEFORE_ARRIVAL: return with<AddsBeforeArrival>(me, box, decides);
      case FORGETS_LAST_PEER: return with<ForgetsLastPeer>(me, box, decides);
      case SIGNALS_BEFORE_RELEASE: return with<SignalsBeforeRelease>(me, box, decides);
      case OWN_TILES_FIRST: return with<OwnTilesFirst>(me, box, decides);
      case NEVER_DRAINS: return with<NeverDrains<GemmRsPushSchedule>>(me, box, decides);
      case ANNOUNCES_LATE: return with<PushAnnouncesLate>(me, box, decides);
      case ONE_SLOT: return run_wg<OneSlot>(ranks[me].params, box, decides);
      case STORES_BESIDE: return run_wg<StoresBeside<GemmRsPush>>(ranks[me].params, box, decides);
      default: return with<GemmRsPushSchedule>(me, box, decides);
    }
  }
};

struct Beside : Gathered<TN> {
  static void run(u32 me, target::Box& box, bool decides) { run_wg<AgGemm>(ranks[me].params, box, decides); }
};

const Operator operators[] = {operator_of<Mutant>("gemm_rs_push"), operator_of<Beside>("ag_gemm")};
const u32 num_operators = 2;

#include "library.h"
