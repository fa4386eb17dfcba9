// The emulator's runtime: workers that take turns at the workgroups, faults, and the C functions of emulator.h.
//
// Each worker goes round its workgroups and runs every wave that can run. With one thread and one seed a run repeats
// exactly, clocks aside.
#include <sched.h>
#include <signal.h>

#include "machine.h"

// ---- faults ----
static __thread Worker* this_worker;

__attribute__((noreturn)) static void service_fault(Wave& w, const char* what, u64 value) {
  Worker& worker = *this_worker;
  const Launch& l = *w.group->launch;
  snprintf(worker.fault, sizeof worker.fault, "%s rank %u WG %u wave %u: %s 0x%llx, %s:%u\n", l.kernel->name, l.rank,
           w.group->index, w.index, what, value, l.module->source, w.at);
  siglongjmp(worker.escape, 1);
}
static u64 service_realtime() { return now_ns() / 10; }
static const Services SERVICES = {service_begin, service_issue, service_wait,
                                  service_fence, service_fault, service_realtime};

static struct sigaction old_actions[2];
static void on_bad_address(int signal, siginfo_t* info, void*) {
  if (this_worker && this_worker->current) service_fault(*this_worker->current, "no memory at address", (u64)info->si_addr);
  sigaction(signal, &old_actions[signal == SIGBUS], nullptr);  // not ours: the instruction runs again under the old handler
}
static void catch_bad_addresses() {
  struct sigaction action = {}, current;
  action.sa_sigaction = on_bad_address;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  const int signals[2] = {SIGSEGV, SIGBUS};
  for (int signal : signals) {
    sigaction(signal, nullptr, &current);
    if (current.sa_sigaction == on_bad_address) continue;
    old_actions[signal == SIGBUS] = current;
    sigaction(signal, &action, nullptr);
  }
}

// ---- workers ----
// The next workgroup that this worker should start, counted as started; null when there is none now.
static Launch* next_to_start(Worker& worker, u32* index) {
  EmulatorMachine& m = *worker.machine;
  for (Launch* l = m.launches; l; l = l->next) {
    const u32 limit = m.options.resident_wgs ? m.options.resident_wgs : l->total;
    if (l->started == l->total || l->live >= limit || worker_for(m, *l, l->started) != worker.index) continue;
    *index = l->started++;
    l->live++;
    m.to_start--;
    return l;
  }
  return nullptr;
}
static void start_workgroups(Worker& worker) {
  EmulatorMachine& m = *worker.machine;
  Workgroup** end = &worker.groups;
  while (*end) end = &(*end)->next;
  while (__atomic_load_n(&m.to_start, __ATOMIC_RELAXED)) {
    u32 index = 0;
    Launch* l;
    {
      Locked locked(m);
      l = next_to_start(worker, &index);
    }
    if (!l) return;
    *end = make_workgroup(*l, index, SERVICES);
    end = &(*end)->next;
  }
}

static void remove_workgroup(EmulatorMachine& m, Workgroup** place) {
  Workgroup* g = *place;
  *place = g->next;
  Launch& l = *g->launch;
  Locked locked(m);
  if (l.report.status == EMULATOR_TIME_LIMIT) describe_workgroup(*g, l.report);
  for (u32 i = 0; i < g->wave_count; i++) {
    l.report.instructions += g->waves[i].instructions;
    l.report.matrix_flops += g->waves[i].matrix_flops;
    l.report.masked_barriers += g->waves[i].masked_barriers;
  }
  release_workgroup(g);
  l.live--;
  end_if_nothing_is_left(l);
}

static bool run_all(Worker& worker) {
  EmulatorMachine& m = *worker.machine;
  bool busy = false;
  for (Workgroup** place = &worker.groups; *place;) {
    Workgroup& g = **place;
    const KernelInfo& kernel = *g.launch->kernel;
    if (!g.launch->stopping) busy |= run_turn(g, kernel, worker.random, m.options.preempt_one_in, &worker.current);
    if ((m.options.late || m.options.caches) && worker.random.one_in(64)) let_a_store_arrive(g, worker.random);
    if (!g.alive || g.launch->stopping) {
      remove_workgroup(m, place);
      busy = true;
    } else {
      place = &g.next;
    }
  }
  return busy;
}

static void check_deadlines(Worker& worker) {
  EmulatorMachine& m = *worker.machine;
  const u64 now = now_ns();
  Locked locked(m);
  for (const Launch* l = m.launches; l; l = l->next) {
    if (now < l->deadline || l->stopping) continue;
    char why[256];
    snprintf(why, sizeof why, "%s of rank %u did not end in %g s; still there:\n", l->kernel->name, l->rank,
             m.options.limit_seconds);
    stop_all(m, EMULATOR_TIME_LIMIT, why);
    return;
  }
}

static bool wait_for_work(Worker& worker) {
  EmulatorMachine& m = *worker.machine;
  Locked locked(m);
  while (!worker.groups && !m.to_start && !m.closing) pthread_cond_wait(&m.work, &m.lock);
  return !m.closing;
}

// Every wave sleeps: another process has the next word, so let it have the CPU. Yielding alone would leave this one an equal share.
static void give_way(u32 idle_turns) {
  if (idle_turns == 0) return;
  if (idle_turns < 4) {
    sched_yield();
    return;
  }
  const timespec pause = {0, idle_turns < 40 ? 20000 : 200000};
  nanosleep(&pause, nullptr);
}

static void* work(void* self) {
  Worker& worker = *(Worker*)self;
  this_worker = &worker;
  if (sigsetjmp(worker.escape, 1)) {  // a wave's fault comes back here
    worker.current = nullptr;
    Locked locked(*worker.machine);
    stop_all(*worker.machine, EMULATOR_FAULT, worker.fault);
  }
  u32 idle_turns = 0;
  for (u32 turn = 1; worker.groups || wait_for_work(worker); turn++) {
    start_workgroups(worker);
    const bool busy = run_all(worker);
    idle_turns = busy ? 0 : idle_turns + 1;
    give_way(idle_turns);
    if (turn % 128 == 0 || !busy) check_deadlines(worker);
  }
  return nullptr;
}

// ---- emulator.h ----
extern "C" EmulatorMachine* emulator_create(const EmulatorOptions* options) {
  catch_bad_addresses();
  EmulatorMachine* m = (EmulatorMachine*)calloc(1, sizeof *m);
  m->options = *options;
  pthread_mutex_init(&m->lock, nullptr);
  pthread_cond_init(&m->work, nullptr);
  pthread_cond_init(&m->done, nullptr);
  m->worker_count = smaller(larger(options->threads, 1u), MAX_WORKERS);
  for (u32 i = 0; i < m->worker_count; i++) {
    Worker& w = m->workers[i];
    w.machine = m;
    w.index = i;
    w.random.seed(options->seed, 0x1000 + i);
    if (pthread_create(&w.thread, nullptr, work, &w)) {
      m->worker_count = i;
      break;
    }
  }
  return m;
}

extern "C" int emulator_remember(EmulatorMachine* m, const void* from, uint64_t bytes) {
  Locked locked(*m);
  const u64 room = (m->remembered_count + 1) * sizeof *m->remembered;
  m->remembered = (Snapshot::Range*)realloc(m->remembered, room);
  m->remembered[m->remembered_count++] = {(u64)from, (u64)from + bytes, nullptr};
  return EMULATOR_OK;
}

static const KernelInfo* find_kernel(const ModuleInfo& module, const char* name) {
  for (u32 i = 0; module.abi == ABI && i < module.count; i++)
    if (!strcmp(module.kernels[i].name, name)) return &module.kernels[i];
  return nullptr;
}
static int check(const EmulatorLaunch& l) {
  const KernelInfo* k = find_kernel(*l.module, l.kernel);
  if (!k) return EMULATOR_NO_KERNEL;
  const u64 threads = (u64)l.block[0] * l.block[1] * l.block[2], groups = (u64)l.grid[0] * l.grid[1] * l.grid[2];
  const bool fits = threads && threads <= k->max_block && threads <= MAX_WAVES * LANES && groups && groups <= 0x7fffffff;
  return fits && (u64)k->lds_bytes + l.dynamic_lds_bytes <= LDS_LIMIT ? EMULATOR_OK : EMULATOR_BAD_SHAPE;
}
static EmulatorTicket* prepare(EmulatorMachine* m, const EmulatorLaunch& from, Snapshot* snapshot) {
  EmulatorTicket* ticket = (EmulatorTicket*)calloc(1, sizeof *ticket);
  Launch& l = ticket->launch;
  l.machine = m;
  l.module = from.module;
  l.kernel = find_kernel(*from.module, from.kernel);
  const u64 room = larger((u64)from.params_bytes, (u64)l.kernel->params_bytes) + 256;  // scalar loads may read past the end
  l.params = (u8*)aligned(room);
  memset(l.params, MEMORY_PATTERN, room);
  if (from.params_bytes) memcpy(l.params, from.params, from.params_bytes);
  l.barred_count = from.barred_count;
  l.barred = (EmulatorRange*)calloc(l.barred_count + 1, sizeof *l.barred);
  if (l.barred_count) memcpy(l.barred, from.barred, l.barred_count * sizeof *l.barred);
  memcpy(l.grid, from.grid, sizeof l.grid);
  memcpy(l.block, from.block, sizeof l.block);
  l.rank = from.rank;
  l.lds_bytes = l.kernel->lds_bytes + from.dynamic_lds_bytes;
  l.total = l.grid[0] * l.grid[1] * l.grid[2];
  l.snapshot = snapshot;
  make_caches(l);
  l.began = now_ns();
  l.deadline = l.began + (u64)(m->options.limit_seconds * 1e9);
  return ticket;
}

extern "C" int emulator_launch(EmulatorMachine* m, const EmulatorLaunch* launches, uint32_t count,
                               EmulatorTicket** tickets) {
  if (!m->worker_count) return EMULATOR_NO_THREADS;
  for (u32 i = 0; i < count; i++)
    if (const int error = check(launches[i])) return error;
  Locked locked(*m);
  Snapshot* snapshot = m->options.caches && count ? take_snapshot(*m, count) : nullptr;
  Launch** end = &m->launches;
  while (*end) end = &(*end)->next;
  for (u32 i = 0; i < count; i++) {
    tickets[i] = prepare(m, launches[i], snapshot);
    *end = &tickets[i]->launch;
    end = &(*end)->next;
    m->to_start += tickets[i]->launch.total;
  }
  pthread_cond_broadcast(&m->work);
  return EMULATOR_OK;
}

extern "C" int emulator_ended(EmulatorTicket* ticket) {
  Locked locked(*ticket->launch.machine);
  return ticket->launch.ended;
}
extern "C" void emulator_wait(EmulatorTicket* ticket, EmulatorReport* report) {
  Launch& l = ticket->launch;
  {
    Locked locked(*l.machine);
    while (!l.ended) pthread_cond_wait(&l.machine->done, &l.machine->lock);
  }
  *report = l.report;
  free(ticket);
}
extern "C" void emulator_destroy(EmulatorMachine* m) {
  {
    Locked locked(*m);
    m->closing = true;
    pthread_cond_broadcast(&m->work);
  }
  for (u32 i = 0; i < m->worker_count; i++) pthread_join(m->workers[i].thread, nullptr);
  free(m->remembered);
  free(m);
}
