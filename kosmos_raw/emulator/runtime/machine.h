// The machine: its workers, the launches on it, and how a launch begins and ends.
#pragma once
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <time.h>

#include "workgroup.h"

constexpr u32 XCDS = 8, MAX_WORKERS = 64;

inline u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

struct Launch {
  Launch* next;  // of the machine's list, until it has ended
  EmulatorMachine* machine;
  const ModuleInfo* module;
  const KernelInfo* kernel;
  u8* params;
  EmulatorRange* barred;
  u32 barred_count, grid[3], block[3], rank, lds_bytes, total, started, live;
  Cache *device_cache, *near_caches;
  u32 near_count;
  Snapshot* snapshot;
  u64 began, deadline;
  bool ended, stopping;
  EmulatorReport report;
};
struct EmulatorTicket {
  Launch launch;
};

struct Worker {
  EmulatorMachine* machine;
  pthread_t thread;
  u32 index;
  Workgroup* groups;
  Random random;
  Wave* current;        // the wave whose code runs now
  sigjmp_buf escape;    // where a fault goes
  char fault[512];
};

struct EmulatorMachine {
  EmulatorOptions options;
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  Worker workers[MAX_WORKERS];
  u32 worker_count;
  Launch* launches;
  u32 to_start;         // workgroups not started yet; read without the lock
  bool closing;
  Snapshot::Range* remembered;
  u32 remembered_count;
};

struct Locked {
  pthread_mutex_t& m;
  explicit Locked(EmulatorMachine& machine) : m(machine.lock) { pthread_mutex_lock(&m); }
  ~Locked() { pthread_mutex_unlock(&m); }
};

// ---- reports ----
template <class... Values> inline void append(EmulatorReport& r, const char* format, Values... values) {
  const size_t used = strlen(r.message);
  if (used + 1 < sizeof r.message) snprintf(r.message + used, sizeof r.message - used, format, values...);
}
inline const char* what_it_does(Stop s) {
  return s == AT_BARRIER ? "at a barrier" : s == SLEEPING ? "sleeping" : s == ENDED ? "ended" : "running";
}
// One line for neighbouring waves at one place.
inline void describe_workgroup(const Workgroup& g, EmulatorReport& r) {
  const Launch& l = *g.launch;
  for (u32 i = 0; i < g.wave_count;) {
    u32 end = i + 1;
    while (end < g.wave_count && g.state[end] == g.state[i] && g.waves[end].at == g.waves[i].at) end++;
    const char* doing = what_it_does(g.state[i]);
    if (g.state[i] != ENDED) {
      append(r, "  %s rank %u WG %u wave", l.kernel->name, l.rank, g.index);
      if (end - i == 1) append(r, " %u", i);
      else append(r, "s %u-%u", i, end - 1);
      append(r, ": %s, %s:%u\n", doing, l.module->source, g.waves[i].at);
    }
    i = end;
  }
}

// ---- beginning and end of a launch; the machine is locked ----
inline Snapshot* take_snapshot(const EmulatorMachine& m, u32 users) {
  Snapshot* s = (Snapshot*)calloc(1, sizeof *s);
  s->users = users;
  s->count = m.remembered_count;
  s->ranges = (Snapshot::Range*)calloc(s->count + 1, sizeof *s->ranges);
  for (u32 i = 0; i < s->count; i++) {
    s->ranges[i] = m.remembered[i];
    const u64 bytes = s->ranges[i].end - s->ranges[i].begin;
    s->ranges[i].bytes = (u8*)aligned(bytes);
    memcpy(s->ranges[i].bytes, (const void*)s->ranges[i].begin, bytes);
  }
  return s;
}
inline void release_snapshot(Snapshot* s) {
  if (!s || --s->users) return;
  for (u32 i = 0; i < s->count; i++) free(s->ranges[i].bytes);
  free(s->ranges);
  free(s);
}
inline void make_caches(Launch& l) {
  const u32 kind = l.machine->options.caches;
  if (kind == EMULATOR_NO_CACHES) return;
  l.near_count = kind == EMULATOR_CACHES_PER_XCD ? XCDS : l.total;
  l.device_cache = (Cache*)calloc(1, sizeof(Cache));
  l.device_cache->snapshot = l.snapshot;
  l.near_caches = (Cache*)calloc(l.near_count, sizeof(Cache));
  for (u32 i = 0; i < l.near_count; i++) {
    l.near_caches[i].below = l.device_cache;
    l.near_caches[i].snapshot = l.snapshot;
  }
}
inline void end_launch(Launch& l) {
  for (u32 i = 0; i < l.near_count; i++) {  // the end of a kernel writes everything back
    l.near_caches[i].write_back();
    l.near_caches[i].release();
  }
  if (l.device_cache) {
    l.device_cache->write_back();
    l.device_cache->release();
  }
  free(l.near_caches);
  free(l.device_cache);
  free(l.params);
  free(l.barred);
  release_snapshot(l.snapshot);
  l.report.seconds = (now_ns() - l.began) * 1e-9;
  Launch** place = &l.machine->launches;
  while (*place != &l) place = &(*place)->next;
  *place = l.next;
  l.ended = true;
  pthread_cond_broadcast(&l.machine->done);
}
inline void end_if_nothing_is_left(Launch& l) {
  if (!l.ended && l.started == l.total && !l.live) end_launch(l);
}
// One launch failed: those on the same machine may wait for it for ever, so all of them stop.
inline void stop_all(EmulatorMachine& m, int status, const char* why) {
  for (Launch *l = m.launches, *next; l; l = next) {
    next = l->next;
    if (l->stopping) continue;
    l->stopping = true;
    l->report.status = status;
    append(l->report, "%s", why);
    m.to_start -= l->total - l->started;
    l->started = l->total;
    end_if_nothing_is_left(*l);
  }
}

// ---- workgroups ----
inline u32 permuted_xcc(u32 seed, u32 rank, u32 i) {
  u32 order[XCDS];
  for (u32 n = 0; n < XCDS; n++) order[n] = n;
  Random random;
  random.seed(seed, rank);
  if (seed)
    for (u32 n = XCDS - 1; n; n--) {
      const u32 k = random.next() % (n + 1), t = order[n];
      order[n] = order[k];
      order[k] = t;
    }
  return order[i % XCDS];
}
// All of a rank's workgroups share caches, so then one worker runs them, and caches need no locks.
inline u32 worker_for(const EmulatorMachine& m, const Launch& l, u32 index) {
  return (m.options.caches ? l.rank : l.rank + index) % m.worker_count;
}
inline Workgroup* make_workgroup(Launch& l, u32 index, const Services& services) {
  const EmulatorOptions& o = l.machine->options;
  Workgroup* g = (Workgroup*)aligned(sizeof(Workgroup));
  memset((void*)g, 0, sizeof *g);
  const u32 threads = l.block[0] * l.block[1] * l.block[2];
  g->launch = &l;
  g->index = index;
  g->wave_count = g->alive = (threads + LANES - 1) / LANES;
  g->lds = (u8*)aligned(l.lds_bytes);
  memset(g->lds, MEMORY_PATTERN, l.lds_bytes);
  g->only_access = (Access*)calloc(1, sizeof(Access));
  const u32 xcc = permuted_xcc(o.seed, l.rank, index);
  g->memory.late = o.late;
  g->memory.outside = o.outside;
  g->memory.without_fences = o.without_fences;
  g->memory.caches = o.caches;
  g->memory.barred = l.barred;
  g->memory.barred_count = l.barred_count;
  if (o.caches) g->memory.view = {&l.near_caches[o.caches == EMULATOR_CACHES_PER_XCD ? xcc : index], l.device_cache};
  const bool plain = !o.late && !o.caches && !l.barred_count;
  WaveSetup s = {l.kernel, &services, l.params, l.block, {}, xcc, o.preempt_one_in, o.seed, l.rank, plain};
  s.group_id[0] = index % l.grid[0];
  s.group_id[1] = index / l.grid[0] % l.grid[1];
  s.group_id[2] = index / l.grid[0] / l.grid[1];
  for (u32 i = 0; i < g->wave_count; i++) {
    start_wave(*g, i, s);
    g->waves[i].lds_bytes = l.lds_bytes;
  }
  return g;
}
