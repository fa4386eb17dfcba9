// Plays histories on threads, one for each WG of each rank, for ThreadSanitizer to watch: tests/forced/threads.py.
#pragma once
#include <pthread.h>

#include "operator.h"

static thread_local bool moves_beside;
template <class Op> void run_wg(const typename Op::Params& p, target::Box&, bool) {
  if (moves_beside) target::run_beside<Op>(p);
  else target::run<Op>(p);
}

#ifdef KOSMOS_TSAN
static target::Clocks clocks_of[MAX_RANKS][2 * MAX_WGS];
#endif

struct Wg {
  u32 rank, thread_idx, launch;  // the second half of the threads moves beside
  pthread_t thread;
};

static void* wg_thread(void* self) {
  const Wg& w = *(const Wg*)self;
  target::wg_idx = w.thread_idx % H.wgs;
  moves_beside = w.thread_idx >= H.wgs;
#ifdef KOSMOS_TSAN
  target::clocks = &clocks_of[w.rank][w.thread_idx];
#endif
  operators[H.operator_of[w.launch]].run(w.rank, H.ranks[w.rank].boxes[target::wg_idx], true);
  target::leave();
  return nullptr;
}

// The stream and the host of one rank.
static void* rank_thread(void* which) {
  const u32 me = (u32)(u64)which;
  for (u32 launch = 1; launch <= LAUNCHES; launch++) {
    const Operator& op = operators[H.operator_of[launch]];
    op.prepare(me, launch);
    Wg wgs[2 * MAX_WGS];
    const u32 threads = H.wgs * (1 + H.beside());
    for (u32 w = 0; w < threads; w++) {
      wgs[w] = {me, w, launch, {}};
      if (pthread_create(&wgs[w].thread, nullptr, wg_thread, &wgs[w])) abort();
    }
    for (u32 w = 0; w < threads; w++) pthread_join(wgs[w].thread, nullptr);
    if (*H.ranks[me].abort) {
      const WaitRecord& r = H.ranks[me].record;
      target::symptom(target::WRONG_VALUE, "rank %u gave up in launch %u: reason %u kind %u chunk %u row %u part %u", me, launch,
                      r.reason, r.kind, r.chunk, r.row, r.part);
      return nullptr;
    }
    op.check(me, launch);
  }
  return nullptr;
}

static void play(const Setup& s, u64 seed) {
  draw_history(s, seed);
  target::num_data = 0;
  for (u32 q = 0; q < s.ranks; q++) {
    Rank& r = H.ranks[q];
    r.signals = (Signals*)target::new_signals(sizeof(Signals) / 4 + OWN_SIGNALS, H.base);
    r.counters = target::new_signals(2 * COUNTERS_PER_SET);
    r.abort = target::new_signals(1);
    r.host_abort = target::new_signals(1);
    r.record = {};
    for (u32 i = 0; i < num_operators; i++) operators[i].give_memory(q);
  }
  pthread_t threads[MAX_RANKS];
  for (u64 q = 0; q < s.ranks; q++)
    if (pthread_create(&threads[q], nullptr, rank_thread, (void*)q)) abort();
  for (u32 q = 0; q < s.ranks; q++) pthread_join(threads[q], nullptr);
}

#define NAME(name) #name,
static const char* const mutation_names[] = {COMMON_MUTATIONS(NAME) MUTATIONS(NAME) nullptr};

// ranks, policy, first seed, histories, mutation. Exits with 1 when a history is bad; a race ends it before, with 66.
int main(int, char** of) {
  Setup s{};
  s.ranks = (u32)atoi(of[1]);
  s.policy = (u32)atoi(of[2]);
  while (strcmp(mutation_names[s.mutation], of[5]))
    if (!mutation_names[++s.mutation]) return 2;
#ifdef KOSMOS_TSAN
  for (auto& rank : clocks_of)
    for (target::Clocks& c : rank) c = {__tsan_create_fiber(0), __tsan_create_fiber(0), 0};
  target::no_release = s.mutation == NO_RELEASE;
  target::no_acquire = s.mutation == NO_ACQUIRE;
#endif
  const u64 first = strtoull(of[3], nullptr, 10), histories = strtoull(of[4], nullptr, 10);
  for (u64 seed = first; seed < first + histories; seed++) {
    s.near_wrap = seed % 2;
    play(s, seed);
    if (!target::symptoms) continue;
    printf("bad history %llu\n", seed);
    return 1;
  }
  printf("0 bad of %llu\n", histories);
  return 0;
}
