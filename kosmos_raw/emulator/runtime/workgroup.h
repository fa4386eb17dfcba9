// A workgroup: its waves, its LDS, and one turn of running them.
#pragma once
#include "queue.h"

constexpr u32 REGISTER_PATTERN = 0x5a5a5a5a;  // hardware clears nothing: what a kernel reads before it writes must show
constexpr u8 MEMORY_PATTERN = 0xa5;
constexpr int BUDGET = 2000;                  // backward branches in a turn
constexpr u32 MAX_WAVES = 16;

struct Launch;

struct Workgroup {
  Launch* launch;
  Workgroup* next;  // of the worker's list
  u32 index, wave_count, alive, arrived;
  u32 stalled;      // turns to sit out
  MemoryMode memory;
  u8* lds;
  Access* only_access;  // for direct loads when memory is plain
  Wave waves[MAX_WAVES];
  Stop state[MAX_WAVES];
  AccessQueue* queues[MAX_WAVES][3];
};
enum QueueKind { MEMORY_QUEUE, LDS_QUEUE, SCALAR_QUEUE };

inline AccessQueue& queue_of(Wave& w, Action action) {
  const QueueKind kind = action == SCALAR_LOAD ? SCALAR_QUEUE : is_lds(action) ? LDS_QUEUE : MEMORY_QUEUE;
  return *w.group->queues[w.index][kind];
}

// ---- services for translated code ----
inline Access& service_begin(Wave& w, Action action) {
  Workgroup& g = *w.group;
  Access* x = g.only_access;
  if (!w.plain) {
    AccessQueue& q = queue_of(w, action);
    leave_at_most(w, q, (is_lds(action) ? LDS_QUEUE_LIMIT : MEMORY_LIMIT) - 1, g.memory);
    x = &q.at(q.count);
  }
  x->action = action;
  x->returns = false;
  return *x;
}
inline void service_issue(Wave& w, Access& x) {
  if (w.plain) {
    x.done = false;
    perform(w, x, w.group->memory);
  } else {
    issue(w, queue_of(w, x.action), x, w.group->memory);
  }
}
inline void service_wait(Wave& w, u32 memory, u32 lds_and_scalar) {
  Workgroup& g = *w.group;
  leave_at_most(w, *g.queues[w.index][MEMORY_QUEUE], memory, g.memory);
  leave_at_most(w, *g.queues[w.index][LDS_QUEUE], lds_and_scalar, g.memory);
  // Scalar loads come back in any order: only a wait for all of them says anything.
  if (lds_and_scalar == 0) leave_at_most(w, *g.queues[w.index][SCALAR_QUEUE], 0, g.memory);
}
inline void service_fence(Wave& w, bool write_back, bool invalidate, Coherence scope) {
  const u32 which = (write_back ? EMULATOR_NO_DEVICE_WRITE_BACK : EMULATOR_NO_DEVICE_INVALIDATE) << (scope == SYSTEM ? 2 : 0);
  if (w.group->memory.without_fences & which) return;
  if (invalidate) w.group->memory.view.invalidate(scope);
  if (!write_back) return;
  Access& x = service_begin(w, WRITE_BACK);
  x.scope = scope;
  x.exec = 0;
  service_issue(w, x);
}

// ---- life ----
inline void* aligned(u64 bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, bytes ? bytes : 64)) abort();
  return p;
}
inline void fill_words(u32* p, u64 n, u32 word) {
  for (u64 i = 0; i < n; i++) p[i] = word;
}

struct WaveSetup {
  const KernelInfo* kernel;
  const Services* services;
  const u8* params;
  const u32* block;
  u32 group_id[3];
  u32 xcc, preempt_one_in, seed, rank;
  bool plain;
};

inline void start_wave(Workgroup& g, u32 index, const WaveSetup& s) {
  const KernelInfo& k = *s.kernel;
  Wave& w = g.waves[index];
  const u32 threads = s.block[0] * s.block[1] * s.block[2], first = index * LANES;
  w.v = (u32(*)[LANES])aligned(k.vector_registers * sizeof *w.v);
  fill_words(w.v[0], (u64)k.vector_registers * LANES, REGISTER_PATTERN);
  fill_words(w.s, SCALARS, REGISTER_PATTERN);
  w.launched_lanes = bit_run(0, (int)smaller(threads - first, (u32)LANES));
  w.set_s64(EXEC, w.launched_lanes);
  w.set_s64(0, (u64)s.params);
  u32 next = k.user_sgprs;
  for (int axis = 0; axis < 3; axis++)
    if (k.workgroup_id_dims >> axis & 1) w.s[next++] = s.group_id[axis];
  for (u32 l = 0; l < LANES; l++) {
    const u32 t = first + l;
    w.v[0][l] = t % s.block[0] | (t / s.block[0] % s.block[1]) << 10 | (t / s.block[0] / s.block[1]) << 20;
  }
  w.scratch_bytes = k.scratch_bytes;
  if (k.scratch_bytes) {
    w.scratch = (u8*)aligned((u64)k.scratch_bytes * LANES);
    memset(w.scratch, MEMORY_PATTERN, (u64)k.scratch_bytes * LANES);
  }
  w.lds = g.lds;
  w.index = index;
  w.group = &g;
  w.services = s.services;
  w.plain = s.plain;
  w.preempt_one_in = s.preempt_one_in;
  w.random.seed(s.seed, (u64)s.rank << 40 | (u64)g.index << 8 | index);
  w.xcc = s.xcc;
  w.mode = k.mode;
  w.hardware_id = (index & 15) | (index & 3) << 4 | (g.index / 8 & 15) << 8;
  w.vector_registers = k.vector_registers;
  g.state[index] = YIELDED;
  if (!s.plain)
    for (AccessQueue*& q : g.queues[index]) q = (AccessQueue*)calloc(1, sizeof(AccessQueue));
}

inline void release_workgroup(Workgroup* g) {
  for (u32 i = 0; i < g->wave_count; i++) {
    free(g->waves[i].v);
    free(g->waves[i].scratch);
    for (AccessQueue* q : g->queues[i]) free(q);
  }
  free(g->only_access);
  free(g->lds);
  free(g);
}

// ---- running ----
inline void arrive_at_barrier(Workgroup& g) {
  if (!g.alive || g.arrived < g.alive) return;
  g.arrived = 0;
  for (u32 i = 0; i < g.wave_count; i++)
    if (g.state[i] == AT_BARRIER) g.state[i] = YIELDED;
}
// Each wave that can run, once. True when some wave did more than sleep.
inline bool run_turn(Workgroup& g, const KernelInfo& k, Random& random, u32 preempt_one_in, Wave** current) {
  if (g.stalled) {
    g.stalled--;
    return true;
  }
  if (preempt_one_in && random.one_in(16)) g.stalled = random.next() % 64;
  // Every other turn a single wave, so that other workgroups run between what neighbouring waves do.
  const bool single = preempt_one_in && random.one_in(2);
  const u32 chosen = random.next() % g.wave_count;
  bool busy = false;
  for (u32 i = 0; i < g.wave_count; i++) {
    Wave& w = g.waves[i];
    if (g.state[i] == ENDED || g.state[i] == AT_BARRIER) continue;
    if ((single && i != chosen) || random.one_in(preempt_one_in)) {
      busy = true;
      continue;
    }
    w.budget = preempt_one_in ? 1 : BUDGET;
    *current = &w;
    g.state[i] = k.run(w);
    *current = nullptr;
    busy |= g.state[i] != SLEEPING;
    if (g.state[i] == ENDED) g.alive--;
    if (g.state[i] == AT_BARRIER) g.arrived++;
    arrive_at_barrier(g);
  }
  return busy;
}
// Stores arrive in the end even when nothing waits for them; else a wave that only spins could wait for its own.
inline void let_a_store_arrive(Workgroup& g, Random& random) {
  const u32 i = random.next() % g.wave_count;
  if (g.waves[i].plain || g.state[i] == ENDED) return;
  AccessQueue& q = *g.queues[i][MEMORY_QUEUE];
  if (!q.count) return;
  const Access& x = q.at(0);
  const bool store = x.action == STORE || x.action == WRITE_BACK || (x.action == ATOMIC && !x.returns);
  if (x.done || store) perform_oldest(g.waves[i], q, g.memory);
}
