// What every kernel knows of its rank group, and the one bounded wait. Below schedule/ and work/: both use it.
#pragma once
#include "../target/target.h"

// What a WG does next. Output tiles of a GEMM come last: is_tile tells them from the rest. HALF: of a tile, see halves.h.
enum Kind : u32 {
  LEAVE, PULL, PULL_COLUMNS, DRAIN, POISON, REDUCE, SUM, TOPK, SCAN, PLAN, SORT, GATE, PUSH, SEND, FOLD, DWEIGHT, QUANT,
  TILE, HALF, WGRAD, ROUTE, SHARED1, SHARED2, GEMM1, GEMM2,
  DGRAD2, WGRAD2, DGRAD1, WGRAD1, SHARED_D2, SHARED_W2, SHARED_W1, OWN_DX, ROUTER_DW, KINDS_END,
};
DEVICE constexpr bool is_tile(Kind k) { return k >= TILE; }

// How the WGs of a kernel divide moving and building (paper Table 2). Chosen at launch.
enum Policy : u32 {
  ONE_WAY,  // who finds no more work of its own kind takes the other kind, once
  FIXED,    // it leaves instead
  TWO_WAY,  // who finds work of its own kind not ready takes the other kind for once; where all is always ready, as ONE_WAY
  BESIDE,   // all WGs build; movers are agents of their own in the first of these WGs, on targets that have such
};

// In which order tiles are taken (paper tables A.2 and A.3). Chosen at launch; the first is what is shipped, the others are
// what it is measured against.
enum Order : u32 {
  AS_CONSUMED,  // what the consumer needs first. AG: the own chunk, then peers row by row as they come. RS: band by band
  CHUNK_MAJOR,  // AG: the own chunk, then one peer's after another's. RS: each chunk completely before the next
  RANK_ORDER,   // chunk after chunk, from rank 0 on, on all ranks alike
  NOT_OWN_FIRST,  // AG: peers row by row as they come, the own rows among them
};

// One unit of work, 16 bytes, so that handing it to all lanes is one word of shared memory. The coordinates mean the same
// for every kind: whose chunk, which tile row (or band) in it, which part of that (a slice, a tile column).
struct Work {
  Kind kind = LEAVE;
  u32 chunk = 0, row = 0, part = 0;
};

// Cross-rank signals of one rank, in memory that no cache holds back. Each slot has one writer, the rank it is named by,
// and holds an epoch: compared by signed difference, never reset. (A count per epoch breaks when two launches differ in shape.)
struct Signals {
  u32 started[MAX_RANKS];     // the launch that rank q is in: its input is valid, all of its earlier launches is done
  u32 call[2][MAX_RANKS];     // by epoch parity, fingerprint of that launch: operator, rows of every rank, K, epoch
  u32 reads_done[MAX_RANKS];  // the last launch in which rank q has read all of this rank's input
};

enum GaveUp : u32 { WAITED_TOO_LONG = 1, TOLD_TO_STOP, DIFFERENT_CALL };

// The first wait that gave up. Read by kosmos_raw/errors.py, after the launch has ended.
struct WaitRecord {
  u64 signal;  // address of what it waited for
  u32 reason, rank, wg, kind, chunk, row, part, want, seen, zero;
};

struct Group {                        // mirrored by kosmos_raw/build/params.py; widest fields first
  Signals* signals_of[MAX_RANKS];     // every rank's signals; [rank] is this rank's own
  u32* abort;                         // [1] this device's memory: nonzero = leave. Cheap enough to look at before every claim
  u32* host_abort;                    // [1] host memory: looked at only while a wait is long
  WaitRecord* record;                 // [1]
  u64* trace;                         // [WGs * TRACE_ROWS][trace_events][2]: ticks, event; null = off
  u64 limit_ticks;                    // how long one wait may last
  u32 rank, ranks, epoch, call, wgs, trace_events;
};
static_assert(sizeof(Group) == 128 && sizeof(WaitRecord) == 48 && sizeof(Signals) == 16 * MAX_RANKS);

DEVICE inline const Signals& own_signals(const Group& g) { return *g.signals_of[g.rank]; }

DEVICE inline bool aborted(const Group& g) { return target::load(g.abort, DEVICE_SCOPE) != 0; }

// Makes every WG of this rank leave. The first to call it writes the record.
DEVICE inline void give_up(const Group& g, GaveUp reason, const Work& w, const u32* signal, u32 want, u32 seen) {
  if (target::add(g.abort, 1, DEVICE_SCOPE) != 0) return;
  *g.record = {(u64)signal, reason, g.rank, target::wg(), w.kind, w.chunk, w.row, w.part, want, seen, 0};
}

// How long to keep waiting for one thing.
struct Patience {
  u32 polls = 0;
  u64 start = 0, looked = 0;
  DEVICE bool keep_waiting(const Group& g, const Work& w, const u32* signal, u32 want, u32 seen) {
    if (polls++ % 64 == 0) {  // clock and abort word only now and then
      if (aborted(g)) return false;
      const u64 now = target::ticks();
      if (polls == 1) start = looked = now;
      const bool late = now - start > g.limit_ticks;
      // The host's word much more rarely: it is a trip over PCIe, and with a hundred WGs making it, pulls over NVLink
      // queue behind them (two H200s: 4 GB/s instead of 200).
      bool told = false;
      if (now - looked > g.limit_ticks / 1024) {
        looked = now;
        told = target::load(g.host_abort, SYSTEM_SCOPE) != 0;
      }
      if (late || told) {
        give_up(g, late ? WAITED_TOO_LONG : TOLD_TO_STOP, w, signal, want, seen);
        return false;
      }
    }
    target::pause();
    return true;
  }
};

// One look, which does not wait. Relaxed, as wait_at_least.
DEVICE inline bool has_reached(const u32* signal, u32 want, Scope scope) { return (i32)(target::load(signal, scope) - want) >= 0; }

// False: the wait gave up and the WG must leave. Relaxed: the caller fences once, after all that it waits for. Epochs and
// counts only grow; the difference is compared, so that wrapping round is no event.
DEVICE inline bool wait_at_least(const Group& g, const Work& w, const u32* signal, u32 want, Scope scope) {
  for (Patience patience;;) {
    const u32 seen = target::load(signal, scope);
    if ((i32)(seen - want) >= 0) return true;
    if (!patience.keep_waiting(g, w, signal, want, seen)) return false;
  }
}

// "My launch `epoch` has begun." Stored at all ranks, this one included.
DEVICE inline void announce_start(const Group& g) {
  if (target::wg() != 0) return;
  for (u32 q = 0; q < g.ranks; q++) target::store(&g.signals_of[q]->call[g.epoch % 2][g.rank], g.call, SYSTEM_SCOPE);
  // Fingerprint and everything before it, then the epoch: pairs with the acquire in wait_started.
  target::release(SYSTEM_SCOPE);
  for (u32 q = 0; q < g.ranks; q++) target::store(&g.signals_of[q]->started[g.rank], g.epoch, SYSTEM_SCOPE);
}

// Waits until ranks first .. first + count - 1 (round the end) are in this launch, and in the same call.
//
// Every operator has some WG wait for ALL ranks in every launch. So no rank leaves a launch that another has not begun, none
// is ever two launches ahead, and the fingerprints, in two slots by parity, are those of this launch.
DEVICE inline bool wait_started(const Group& g, const Work& w, u32 first, u32 count) {
  const Signals& own = own_signals(g);
  for (u32 i = 0; i < count; i++)
    if (!wait_at_least(g, w, &own.started[(first + i) % g.ranks], g.epoch, SYSTEM_SCOPE)) return false;
  target::acquire(SYSTEM_SCOPE);  // pairs with the release in announce_start
  for (u32 i = 0; i < count; i++) {
    const u32* slot = &own.call[g.epoch % 2][(first + i) % g.ranks];
    const u32 call = target::load(slot, SYSTEM_SCOPE);
    if (call == g.call) continue;
    give_up(g, DIFFERENT_CALL, w, slot, g.call, call);
    return false;
  }
  return true;
}
DEVICE inline bool wait_all_started(const Group& g, const Work& w) { return wait_started(g, w, g.rank, g.ranks); }

// Local counters come in two sets. A launch uses set epoch % 2 and clears the other one, which no WG of this launch touches
// and which the launch before has left: launches of one communicator follow each other on one stream. So queue heads restart
// at 0 without a memset, a last-one-out count, or an assumption about how often WGs over-claim.
struct Counters {
  u32* sets;     // [2][per_set]
  u32 per_set;
  u32 to_clear;  // words of the other set that the last launch used; its shape may have been another
  DEVICE u32* current(const Group& g) const { return sets + (g.epoch % 2) * per_set; }
  DEVICE void clear_other(const Group& g) const {
    u32* other = sets + ((g.epoch + 1) % 2) * per_set;
    for (u32 i = target::wg(); i < to_clear; i += g.wgs) target::store(other + i, 0, DEVICE_SCOPE);
  }
};
static_assert(sizeof(Counters) == 16);
