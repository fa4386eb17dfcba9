// ag_gemm broken on purpose: each breaks one rule of its protocol, and says which.
#pragma once
#include "../../hip_kernels/kernels/ag_gemm.hip"
#include "mutants.h"

// Rows first, then the count.
struct CountsBeforeRelease : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  void finish(const Work& w) const {
    if (w.kind == PULL) target::add(slices_landed(w.chunk, w.row, w.part / p.pulls.slices), 1, DEVICE_SCOPE);
    target::release(DEVICE_SCOPE);
    if (w.kind != PULL) return;
    if (target::add(pulls_done(w.chunk), 1, DEVICE_SCOPE) + 1 != pulls_from(w.chunk)) return;
    target::acquire(DEVICE_SCOPE);
    target::release(SYSTEM_SCOPE);
    target::store(&p.g.signals_of[w.chunk]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};

// The LAST pull from a shard tells its owner that it has been read.
struct FirstPullReportsReads : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  void finish(const Work& w) const {
    if (w.kind != PULL) return;
    target::release(DEVICE_SCOPE);
    target::add(slices_landed(w.chunk, w.row, w.part / p.pulls.slices), 1, DEVICE_SCOPE);
    if (target::add(pulls_done(w.chunk), 1, DEVICE_SCOPE) != 0) return;
    target::acquire(DEVICE_SCOPE);
    target::release(SYSTEM_SCOPE);
    target::store(&p.g.signals_of[w.chunk]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};

// A tile waits for as many slices as a slab is pulled in: `more` is how many it is wrong by.
template <int more> struct WrongSlices : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  bool wait_part(const Work& w, u32 i) const {
    if (w.chunk == p.g.rank) return true;
    if (!wait_at_least(p.g, w, slices_landed(w.chunk, w.row, i), p.pulls.slices + more, DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);
    return true;
  }
  bool wait_inputs(const Work& w) const {
    if (!is_tile(w.kind)) return AgGemmSchedule::wait_inputs(w);
    for (u32 i = 0; i < p.pulls.slabs; i++)
      if (!wait_part(w, i)) return false;
    return true;
  }
};

// Where movers are agents of their own, builders do not move as well.
struct MovesTwice : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  void begin() {
    AgGemmSchedule::begin();
    mover = peers() && target::wg() < p.movers;
  }
};

// Only the first WGs have a mover beside.
struct AllMoveBeside : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  Work next_beside() { return aborted(p.g) ? Work{} : next_pull(); }
};

// Each part of a tile is waited for, not the first alone.
struct WaitsForFirstSlab : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  bool wait_part(const Work& w, u32 i) const { return i || AgGemmSchedule::wait_part(w, i); }
  bool wait_inputs(const Work& w) const { return is_tile(w.kind) ? wait_part(w, 0) : AgGemmSchedule::wait_inputs(w); }
};

// A slab that has landed counts for itself.
struct CountsSlabsTogether : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  void finish(const Work& w) const { AgGemmSchedule::finish({w.kind, w.chunk, w.row, w.part % p.pulls.slices}); }
};

// Nobody reads, nor reports on, an empty shard.
struct DrainsEmptyShards : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  bool wait_inputs(const Work& w) const {
    if (w.kind != DRAIN) return AgGemmSchedule::wait_inputs(w);
    if (!wait_all_started(p.g, w)) return false;
    for (u32 i = 0; i < peers(); i++)
      if (!wait_at_least(p.g, w, &own_signals(p.g).reads_done[peer_at(i)], p.g.epoch, SYSTEM_SCOPE)) return false;
    return true;
  }
};

// What a peer writes is polled in system scope.
struct PollsInDeviceScope : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  bool wait_inputs(const Work& w) const {
    if (w.kind != DRAIN || !p.m.rows(p.g.rank)) return AgGemmSchedule::wait_inputs(w);
    for (u32 i = 0; i < peers(); i++)
      if (!wait_at_least(p.g, w, &own_signals(p.g).reads_done[peer_at(i)], p.g.epoch, DEVICE_SCOPE)) return false;
    return true;
  }
};

// Fingerprint first, then the epoch that makes it valid.
struct AnnouncesEpochFirst : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  void begin() {
    mover = peers() && target::wg() < p.movers;
    p.counters.clear_other(p.g);
    if (target::wg() != 0) return;
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&p.g.signals_of[q]->started[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&p.g.signals_of[q]->call[p.g.epoch % 2][p.g.rank], p.g.call, SYSTEM_SCOPE);
  }
};

// Fingerprints have two slots, for a peer may be in the next launch already.
struct OneFingerprint : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  void begin() {
    mover = peers() && target::wg() < p.movers;
    p.counters.clear_other(p.g);
    if (target::wg() != 0) return;
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&p.g.signals_of[q]->call[0][p.g.rank], p.g.call, SYSTEM_SCOPE);
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&p.g.signals_of[q]->started[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
  bool wait_inputs(const Work& w) const {
    if (w.kind != PULL && w.kind != DRAIN) return AgGemmSchedule::wait_inputs(w);
    for (u32 q = 0; q < p.g.ranks; q++) {
      if (w.kind == PULL && q != w.chunk) continue;
      if (!wait_at_least(p.g, w, &own_signals(p.g).started[q], p.g.epoch, SYSTEM_SCOPE)) return false;
      target::acquire(SYSTEM_SCOPE);
      const u32 call = target::load(&own_signals(p.g).call[0][q], SYSTEM_SCOPE);
      if (call == p.g.call) continue;
      give_up(p.g, DIFFERENT_CALL, w, &own_signals(p.g).call[0][q], p.g.call, call);
      return false;
    }
    return true;
  }
};

// Upstream before downstream: movers move before they build, for a tile that nobody has pulled blocks its WG.
struct BuildsBeforeItMoves : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  Work next_work() {
    if (aborted(p.g)) return {};
    if (const Work w = next_tile(); w.kind != LEAVE || !mover) return w;
    return next_pull();
  }
};

// Epochs are compared by signed difference.
struct ComparesUnsigned : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  bool wait_inputs(const Work& w) const {
    const u32* started = &own_signals(p.g).started[w.chunk];
    if (w.kind == PULL)
      for (Patience patience;;) {
        const u32 seen = target::load(started, SYSTEM_SCOPE);
        if (seen >= p.g.epoch) break;
        if (!patience.keep_waiting(p.g, w, started, p.g.epoch, seen)) return false;
      }
    if (w.kind != PULL) return AgGemmSchedule::wait_inputs(w);
    target::acquire(SYSTEM_SCOPE);
    return true;
  }
};

// Who finds its die's queue empty looks into all others.
struct KeepsToItsQueue : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  Work next_work() {
    if (aborted(p.g)) return {};
    if (mover)
      if (const Work w = next_pull(); w.kind != LEAVE) return w;
    mover = false;
    const u32 own = target::die() % p.queues;
    for (u32 i; (i = target::add(head(own), 1, DEVICE_SCOPE)) < entries(own);)
      if (const Work w = entry_at(own, i); w.kind != LEAVE) return w;
    return last_work();
  }
};

// Queues share no column: a tile is built once.
struct QueuesOverlap : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  Work next_work() {
    Work w = AgGemmSchedule::next_work();
    if (w.kind == TILE && w.part && w.part == first_column(queue())) w.part--;
    return w;
  }
};

// Movers go through the entries of all peers: who keeps to one leaves the others' rows where they are.
struct ForgetsPeers : AgGemmSchedule {
  using AgGemmSchedule::AgGemmSchedule;
  Work next_work() {
    const Work w = AgGemmSchedule::next_work();
    return w.kind == PULL && w.chunk != peer_at(0) ? next_work() : w;
  }
};
