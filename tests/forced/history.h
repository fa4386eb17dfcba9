// One history: R ranks make some launches of ag_gemm, each with other shapes and fresh data, and every element is checked.
#pragma once
#include "cases.h"  // defines: H, Setup, Shape, Rank, draw_history

// --- the host of one rank, between launches ---

inline AgGemmParams launch_params(u32 me, u32 launch) {
  const Shape& s = H.shape(me, launch);
  Rank& r = H.ranks[me];
  Random dice(mix(H.seed, me, launch));
  AgGemmParams p{};
  for (u32 q = 0; q < H.s.ranks; q++) {
    p.g.signals_of[q] = H.ranks[q].signals;
    p.shard_of[q] = (const Vec16*)H.ranks[q].shard;
  }
  p.g.abort = r.abort;
  p.g.host_abort = r.host_abort;
  p.g.record = &r.record;
  p.g.trace = H.s.log ? &r.trace[0][0][0] : nullptr;
  p.g.trace_events = H.s.log ? TRACE_EVENTS : 0;
  p.g.limit_ticks = H.s.kind == OTHER_CALL || H.s.kind == LOST_RANK ? LIMIT : NEVER;
  p.g.rank = me;
  p.g.ranks = H.s.ranks;
  p.g.epoch = H.base + launch;
  p.g.call = s.call;
  p.g.wgs = H.wgs;
  p.counters = {r.counters, COUNTERS_PER_SET, launch > 1 ? counter_words(H.shape(me, launch - 1)) : 0};
  p.gathered = (Vec16*)r.gathered;
  p.b = (const Vec16*)r.b;
  p.c = r.c;
  p.m = s.m;
  p.N = 1 + dice.below(MAX_COLS);
  p.K = s.K;
  p.ldc = (p.N + 7) / 8 * 8 + 8 * dice.below(2);
  p.tile_n = s.tile_n;
  p.movers = 1 + dice.below(H.wgs - 1);
  p.policy = H.s.policy;
  switch (H.s.mutation) {
    case NOT_CLEARED: p.counters.to_clear = 0; break;
    case CLEARS_BY_THIS_SHAPE: p.counters.to_clear = launch > 1 ? counter_words(s) : 0; break;
    case ONE_COUNTER_SET: p.counters.per_set = 0; break;
    case ALL_ARE_MOVERS: p.movers = H.wgs; break;
    case NONE_IS_MOVER: p.movers = 0; break;
  }
  return p;
}

// The caller's new inputs, over those of the last launch; what the launch must write is poisoned.
inline void fill(u32 me, u32 launch) {
  Rank& r = H.ranks[me];
  r.params = launch_params(me, launch);
  const AgGemmParams& p = r.params;
  const Chunks& m = p.m;
  const u32 words = p.K / 4, M = H.shape(me, launch).M(), all = MAX_ROWS * target::MAX_K / 4;
  target::open(r.shard, m.rows(me) * words, all);
  target::open(r.b, p.N * words, MAX_COLS * target::MAX_K / 4);
  target::open(r.gathered, M * words, all);
  target::open(r.c, M * p.ldc / 4, MAX_ROWS * MAX_LDC / 4);
  for (u32 i = 0; i < m.rows(me) * words; i++) target::write(r.shard + i, input_word('a', me, launch, i));
  for (u32 i = 0; i < p.N * words; i++) target::write(r.b + i, input_word('b', me, launch, i));
  for (u32 i = 0; i < M * words; i++) target::write(r.gathered + i, POISON);
  for (u32 i = 0; i < M * p.ldc / 4; i++) target::write(r.c + i, POISON);
  for (u32 i = m.first[me] * words; i < m.first[me + 1] * words; i++)  // own rows are read from the shard
    W.data_words[r.gathered - W.data + i].usable = false;
  for (u32 w = 0; w < H.wgs; w++) {
    target::poke(r.boxes[w].posted, 0);
    target::poke(r.boxes[w].taken, 0);
  }
  if (H.s.log) memset(r.trace, 0, sizeof r.trace);
}

template <class Number> void unpack_input(Number (*to)[target::MAX_K], char matrix, u32 rank, u32 launch, u32 rows, u32 K) {
  for (u32 i = 0; i < rows * K / 4; i++) {
    const Four f = four(matrix, rank, launch, i);
    for (u32 j = 0; j < 4; j++) to[4 * i / K][4 * i % K + j] = f.at[j];
  }
}

// Every element, against the plain product.
inline void check_product(u32 me, u32 launch) {
  const Rank& r = H.ranks[me];
  const AgGemmParams& p = r.params;
  i32 a[MAX_ROWS][target::MAX_K] = {}, b[MAX_COLS][target::MAX_K] = {};
  for (u32 q = 0; q < H.s.ranks; q++) unpack_input(a + p.m.first[q], 'a', q, launch, p.m.rows(q), p.K);
  unpack_input(b, 'b', me, launch, p.N, p.K);
  for (u32 row = 0; row < H.shape(me, launch).M(); row++)
    for (u32 word = 0; word < p.ldc / 4; word++) {
      const u64 got = target::read(r.c + row * p.ldc / 4 + word);
      if (word * 4 >= p.N && got != POISON) {
        target::symptom(target::WRONG_VALUE, "rank %u launch %u row %u: wrote past column %u", me, launch, row, p.N);
        return;
      }
      for (u32 col = word * 4; col < word * 4 + 4 && col < p.N; col++) {
        i32 sum = 0;
        for (u32 k = 0; k < target::MAX_K; k++) sum += a[row][k] * b[col][k];
        const u32 bits = got >> col % 4 * 16 & 0xffff;
        if (bits == to_bf16(sum)) continue;
        target::symptom(target::WRONG_VALUE, "rank %u launch %u row %u col %u: got %g (0x%04x), wanted %d", me, launch, row,
                        col, from_bf16(bits), bits, sum);
        return;
      }
    }
}

// A launch that gave up must say why, and only a history in which something is amiss may give up.
inline void check_record(u32 me, u32 launch) {
  const WaitRecord& w = H.ranks[me].record;
  const char* amiss = nullptr;
  if (H.s.kind == RIGHT) amiss = "it had no reason to";
  else if (w.rank != me || w.wg >= H.wgs || w.kind == LEAVE || w.kind > DRAIN) amiss = "the record is of no work";
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
    check_product(me, launch);
  }
  if (launch) log_launch(me, launch);
  if (!stop) fill(me, launch + 1);
  target::end_launch(r.stream);
  target::poke(r.launch, stop ? STOPPED : launch + 1);
}

// --- the launches ---

template <class Op> void run_wg(const AgGemmParams& p, target::Box& box, bool decides) {
  if (!H.s.run_ahead) target::run<Op>(p);
  else if (decides) target::decide<Op>(p, box);
  else target::work_behind<Op>(p, box);
}

inline void run_schedule(const AgGemmParams& p, target::Box& box, bool decides) {
  switch (H.s.mutation) {
    case COUNTS_BEFORE_RELEASE: return run_wg<With<CountsBeforeRelease>>(p, box, decides);
    case FIRST_PULL_REPORTS_READS: return run_wg<With<FirstPullReportsReads>>(p, box, decides);
    case ONE_SLICE_TOO_FEW: return run_wg<With<WrongSlices<-1>>>(p, box, decides);
    case ONE_SLICE_TOO_MANY: return run_wg<With<WrongSlices<1>>>(p, box, decides);
    case DRAINS_EMPTY_SHARDS: return run_wg<With<DrainsEmptyShards>>(p, box, decides);
    case NEVER_DRAINS: return run_wg<With<NeverDrains>>(p, box, decides);
    case ANNOUNCES_LATE: return run_wg<With<AnnouncesLate>>(p, box, decides);
    case ANNOUNCES_EPOCH_FIRST: return run_wg<With<AnnouncesEpochFirst>>(p, box, decides);
    case BUILDS_BEFORE_IT_MOVES: return run_wg<With<BuildsBeforeItMoves>>(p, box, decides);
    case COMPARES_UNSIGNED: return run_wg<With<ComparesUnsigned>>(p, box, decides);
    case FORGETS_PEERS: return run_wg<With<ForgetsPeers>>(p, box, decides);
    case POLLS_IN_DEVICE_SCOPE: return run_wg<With<PollsInDeviceScope>>(p, box, decides);
    case STORES_BESIDE: return run_wg<StoresBeside>(p, box, decides);
    default: return run_wg<AgGemm>(p, box, decides);
  }
}

inline void fiber_body() {
  const u32 me = W.me->rank, in_rank = W.me->id % H.fibers_per_rank();
  Rank& r = H.ranks[me];
  if (in_rank == 0) next_launch(me, 0);
  for (u32 launch = 1;; launch++) {
    while (target::peek(r.launch) < launch) target::pause();  // the stream: a launch begins when the one before has ended
    if (*r.launch == STOPPED) return;
    target::begin_launch(r.stream);
    run_schedule(r.params, r.boxes[W.me->wg], in_rank < H.wgs);
    target::end_launch(r.stream);
    if (++r.left < H.fibers_per_rank()) continue;
    r.left = 0;
    next_launch(me, launch);
  }
}

// --- what must be true at the end, when a rank was lost or called otherwise ---

// Does `me` wait for rank q in this launch?
inline bool needs(u32 me, u32 q, const Shape& s) { return me != q && (s.m.rows(me) || s.m.rows(q)); }

inline void check_ends() {
  bool found = false, must_find = false;
  for (u32 q = 0; q < H.s.ranks; q++) {
    found |= H.ranks[q].record.reason == DIFFERENT_CALL;
    if (q == H.odd_rank) continue;
    must_find |= H.shapes[H.odd_launch].m.rows(H.odd_rank) || H.odd_shape.m.rows(q);  // one pulls from the other
    bool must_give_up = false;
    for (u32 e = H.odd_launch; e <= LAUNCHES; e++) must_give_up |= needs(q, H.odd_rank, H.shapes[e]);
    if (loses_a_rank() && must_give_up && !*H.ranks[q].abort)
      target::symptom(target::WRONG_END, "rank %u did not notice that rank %u never made launch %u", q, H.odd_rank,
                      H.odd_launch);
  }
  if (H.s.kind == OTHER_CALL && must_find && !found)
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

inline void give_memory(Rank& r) {
  constexpr u32 ROW_WORDS = target::MAX_K / 4;
  r.shard = target::new_data(MAX_ROWS * ROW_WORDS);
  r.gathered = target::new_data(MAX_ROWS * ROW_WORDS);
  r.b = target::new_data(MAX_COLS * ROW_WORDS);
  r.c = target::new_data(MAX_ROWS * MAX_LDC / 4);
  r.signals = (Signals*)target::new_signals(sizeof(Signals) / 4, H.base);
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
}

inline void blind_waits() {
  for (u32 q = 0; q < H.s.ranks; q++) {
    Rank& r = H.ranks[q];
    if (H.s.mutation == NO_START_WAIT) target::make_blind(r.signals->started, MAX_RANKS);
    if (H.s.mutation == NO_READS_DONE_WAIT) target::make_blind(r.signals->reads_done, MAX_RANKS);
    if (H.s.mutation == NO_SLICES_LANDED_WAIT) target::make_blind(r.counters, 2 * COUNTERS_PER_SET);
  }
}

inline void name_address(const void* address, char* out, size_t bytes) {
  const char* p = (const char*)address;
  for (u32 q = 0; q < H.s.ranks; q++) {
    const Rank& r = H.ranks[q];
    const struct { const char* name; const void* at; u32 count, size; } parts[] = {
        {"shard", r.shard, MAX_ROWS * target::MAX_K / 4, 8}, {"gathered", r.gathered, MAX_ROWS * target::MAX_K / 4, 8},
        {"b", r.b, MAX_COLS * target::MAX_K / 4, 8}, {"c", r.c, MAX_ROWS * MAX_LDC / 4, 8},
        {"started", r.signals->started, MAX_RANKS, 4}, {"call", r.signals->call, MAX_RANKS, 4},
        {"reads_done", r.signals->reads_done, MAX_RANKS, 4}, {"counters", r.counters, 2 * COUNTERS_PER_SET, 4},
        {"abort", r.abort, 1, 4}, {"host_abort", r.host_abort, 1, 4}, {"stream", r.launch, 1, 4},
        {"box", r.boxes[0].posted, 2 * MAX_WGS, 4}};
    for (const auto& part : parts) {
      const u64 i = (p - (const char*)part.at) / part.size;
      if (p >= (const char*)part.at && i < part.count) {
        snprintf(out, bytes, "rank %u %s[%u]", q, part.name, (u32)i);
        return;
      }
    }
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
  for (u32 q = 0; q < s.ranks; q++) give_memory(H.ranks[q]);
  blind_waits();
  for (u32 q = 0; q < s.ranks; q++)
    for (u32 i = 0; i < H.fibers_per_rank(); i++) target::spawn(q, i % H.wgs);
  target::begin_fibers();
  const target::Ending ending = target::interleave();
  if (ending == target::DEADLOCKED) target::symptom(target::DEADLOCK, "deadlock");
  else if (ending == target::TOO_LONG) target::symptom(target::ENDLESS, "no end after %llu steps", target::MAX_STEPS);
  else if (s.kind != RIGHT) check_ends();
}
