// One history: R ranks make some launches, each with other shapes and fresh data, and every element is checked.
#pragma once
#include "operator.h"

using target::W;

template <class Op> void run_wg(const typename Op::Params& p, target::Box& box, bool decides) {
  if (W.me->id % H.fibers_per_rank() >= H.wgs * (1 + H.s.run_ahead)) target::run_beside<Op>(p);
  else if (!H.s.run_ahead) target::run<Op>(p);
  else if (decides) target::decide<Op>(p, box);
  else target::work_behind<Op>(p, box);
}

// --- the host of one rank, between launches ---

inline void prepare_launch(u32 me, u32 launch) {
  Rank& r = H.ranks[me];
  operators[H.operator_of[launch]].prepare(me, launch);
  for (u32 w = 0; w < H.wgs; w++) {
    target::poke(r.boxes[w].posted, 0);
    target::poke(r.boxes[w].taken, 0);
  }
  if (H.s.log) memset(r.trace, 0, sizeof r.trace);
}

// A launch that gave up must say why, and only a history in which something is amiss may give up.
inline void check_record(u32 me, u32 launch) {
  const WaitRecord& w = H.ranks[me].record;
  const char* amiss = nullptr;
  if (H.s.kind == RIGHT) amiss = "it had no reason to";
  else if (w.rank != me || w.wg >= H.wgs || w.kind == LEAVE || w.kind >= KINDS_END) amiss = "the record is of no work";
  else if (w.reason == WAITED_TOO_LONG && (i32)(w.seen - w.want) >= 0) amiss = "what it waited for was there";
  else if (w.reason == DIFFERENT_CALL && (H.s.kind != OTHER_CALL || launch != H.odd_launch)) amiss = "calls were the same";
  else if (H.s.kind == LOST_RANK && w.reason != WAITED_TOO_LONG) amiss = "time was up";
  else if (H.s.kind == TOLD_TO_STOP_BY_HOST && w.reason != TOLD_TO_STOP) amiss = "the host told it to";
  if (!amiss) return;
  const target::Name signal((const void*)w.signal);
  target::symptom(target::WRONG_END,
                  "rank %u gave up in launch %u, but %s: reason %u wg %u kind %u chunk %u row %u part %u %s want %u seen %u",
                  me, launch, amiss, w.reason, w.wg, w.kind, w.chunk, w.row, w.part, signal.text, w.want, w.seen);
}

void log_launch(u32 me, u32 launch);

inline bool loses_a_rank() { return H.s.kind == LOST_RANK || H.s.kind == TOLD_TO_STOP_BY_HOST; }

// By the last fiber to leave: end of the launch, and the next one goes onto the stream.
inline void next_launch(u32 me, u32 launch) {
  Rank& r = H.ranks[me];
  target::begin_launch(r.stream);
  bool stop = launch == LAUNCHES || (loses_a_rank() && me == H.odd_rank && launch + 1 == H.odd_launch);
  if (launch && target::peek(r.abort)) {
    check_record(me, launch);
    stop = true;
  } else if (launch) {
    operators[H.operator_of[launch]].check(me, launch);
  }
  if (launch) log_launch(me, launch);
  if (!stop) prepare_launch(me, launch + 1);
  target::end_launch(r.stream);
  target::poke(r.launch, stop ? STOPPED : launch + 1);
}

// --- the launches ---

inline void fiber_body() {
  const u32 me = W.me->rank, in_rank = W.me->id % H.fibers_per_rank();
  Rank& r = H.ranks[me];
  if (in_rank == 0) next_launch(me, 0);
  for (u32 launch = 1;; launch++) {
    while (target::peek(r.launch) < launch) target::pause();  // the stream: a launch begins when the one before has ended
    if (*r.launch == STOPPED) return;
    target::begin_launch(r.stream);
    operators[H.operator_of[launch]].run(me, r.boxes[W.me->wg], in_rank < H.wgs);
    target::end_launch(r.stream);
    if (++r.left < H.fibers_per_rank()) continue;
    r.left = 0;
    next_launch(me, launch);
  }
}

// --- what must be true at the end, when a rank was lost or called otherwise ---

inline void check_ends() {
  bool found = false;
  for (u32 q = 0; q < H.s.ranks; q++) {
    found |= H.ranks[q].record.reason == DIFFERENT_CALL;
    if (loses_a_rank() && q != H.odd_rank && !*H.ranks[q].abort)
      target::symptom(target::WRONG_END, "rank %u did not notice that rank %u never made launch %u", q, H.odd_rank,
                      H.odd_launch);
  }
  if (H.s.kind == OTHER_CALL && !found)
    target::symptom(target::WRONG_END, "nobody noticed that rank %u made another call in launch %u", H.odd_rank,
                    H.odd_launch);
}

// Nobody can go on. Time passes, and the host of each rank may say stop; waits look at both now and then only.
inline bool on_idle() {
  if (++H.idle_rounds > 20000) return false;
  W.time += LIMIT / 16;
  if (H.s.kind == TOLD_TO_STOP_BY_HOST)
    for (u32 q = 0; q < H.s.ranks; q++) *H.ranks[q].host_abort = 1;
  target::wake_all();
  return true;
}

// --- one history ---

inline void give_all_memory(u32 me) {
  Rank& r = H.ranks[me];
  r.signals = (Signals*)target::new_signals(sizeof(Signals) / 4 + OWN_SIGNALS, H.base);
  r.counters = target::new_signals(2 * COUNTERS_PER_SET);
  r.abort = target::new_signals(1);
  r.host_abort = target::new_signals(1);
  r.launch = target::new_signals(1);
  for (target::Box& box : r.boxes) {
    box.posted = target::new_signals(1);
    box.taken = target::new_signals(1);
    box.clock = {};
  }
  r.record = {};
  r.stream = {};
  r.left = 0;
  for (u32 i = 0; i < num_operators; i++) operators[i].give_memory(me);
}

inline void name_address(const void* address, char* out, size_t bytes) {
  for (u32 q = 0; q < H.s.ranks; q++) {
    const Rank& r = H.ranks[q];
    const struct { const char* name; const void* at; u32 count; } parts[] = {
        {"started", r.signals->started, MAX_RANKS}, {"call", r.signals->call, 2 * MAX_RANKS},
        {"reads_done", r.signals->reads_done, MAX_RANKS}, {"counters", r.counters, 2 * COUNTERS_PER_SET},
        {"abort", r.abort, 1}, {"host_abort", r.host_abort, 1}, {"stream", r.launch, 1},
        {"box", r.boxes[0].posted, 2 * MAX_WGS}};
    for (const auto& part : parts)
      if (name_part(q, address, out, bytes, part.name, part.at, part.count, 4)) return;
    for (u32 i = 0; i < num_operators; i++)
      if (operators[i].name_address(q, address, out, bytes)) return;
  }
}

inline void run_history(const Setup& s, u64 seed) {
  draw_history(s, seed);
  target::begin_history(H.seed);
  W.name = name_address;
  W.body = fiber_body;
  if (s.kind != RIGHT) W.on_idle = on_idle;
  W.no_release = s.mutation == NO_RELEASE;
  W.no_acquire = s.mutation == NO_ACQUIRE;
  W.without_fence = s.without_fence;
  W.narrow_fence = s.narrow_fence;
  for (u32 q = 0; q < s.ranks; q++) give_all_memory(q);
  if (s.mutation == NO_START_WAIT)
    for (u32 q = 0; q < s.ranks; q++) target::make_blind(H.ranks[q].signals->started, MAX_RANKS);
  for (u32 q = 0; q < s.ranks; q++)
    for (u32 i = 0; i < H.fibers_per_rank(); i++) target::spawn(q, i % H.wgs);
  target::begin_fibers();
  const target::Ending ending = target::interleave();
  if (ending == target::DEADLOCKED) target::symptom(target::DEADLOCK, "deadlock");
  else if (ending == target::TOO_LONG) target::symptom(target::ENDLESS, "no end after %llu steps", target::MAX_STEPS);
  else if (s.kind != RIGHT && !W.over) check_ends();
}
