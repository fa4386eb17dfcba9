// bulk_rs under forced interleavings, as a library for tests/forced/forced.py.
#define MUTATIONS(X)                                                                                                   \
  X(NEVER_DRAINS) X(NO_READS_DONE_WAIT) X(REDUCES_BEFORE_START) X(FIRST_REDUCE_REPORTS) X(WAITS_FOR_WHO_GETS_NOTHING)  \
  X(SUMS_TOO_EARLY) X(ALL_ARE_MOVERS) X(STORES_BESIDE)
#include "../../hip_kernels/kernels/bulk_rs.hip"
#include "bulk.h"

struct BulkRsRank {
  u64 *x, *out;
  Product product;
  BulkRsParams params;
};
constinit static BulkRsRank ranks[MAX_RANKS]{};
constexpr u32 ALL = MAX_ROWS * target::MAX_K / 4;

static void give_memory(u32 me) {
  ranks[me].x = target::new_data(ALL);
  ranks[me].out = target::new_data(ALL);
  product_memory(ranks[me].product);
  if (H.s.mutation == NO_READS_DONE_WAIT) target::make_blind(H.ranks[me].signals->reads_done, MAX_RANKS);
}

static u32 counter_words(const Shape&) { return 4 + 3 * 3; }

static bool is_f32(const BulkRsParams& p) { return p.into == SET_F32 || p.into == ADD_F32; }
static bool adds(const BulkRsParams& p) { return p.into == ADD_BF16 || p.into == ADD_F32; }

static u64 before(const BulkRsParams& p, u32 me, u32 launch, u32 word) {
  if (!adds(p)) return NOBODY_WROTE;
  if (!is_f32(p)) return input_word('c', me, launch, word);
  const auto bits = [&](u32 at) { return (u64)__builtin_bit_cast(u32, (float)element('c', me, launch, at)); };
  return bits(2 * word) | bits(2 * word + 1) << 32;
}

static void prepare(u32 me, u32 launch) {
  const Shape& s = H.shape(me, launch);
  BulkRsRank& r = ranks[me];
  Random dice(mix(H.seed, me, launch));
  r.product.M = 1 + dice.below(20);
  r.product.N = 1 + dice.below(MAX_COLS);
  r.product.K = dice.below(17);
  r.product.lda = (r.product.M + 7) / 8 * 8;
  r.product.ldb = (r.product.N + 7) / 8 * 8;
  BulkRsParams p{};
  p.g = group(me, launch);
  p.counters = counters(me, launch, counter_words(s));
  for (u32 q = 0; q < H.s.ranks; q++) p.x_of[q] = (const Vec16*)ranks[q].x;
  p.out = (Vec16*)r.out;
  p.a = (const Vec16*)r.product.a;
  p.b = (const Vec16*)r.product.b;
  p.c = r.product.c;
  p.split = {(float*)r.product.sums, r.product.K > 8 ? 2u : 1u, 8};
  p.m = s.m;
  p.m.tile_m = 8;
  p.width = s.K;
  p.M = r.product.M, p.N = r.product.N, p.K = r.product.K, p.lda = r.product.lda, p.ldc = r.product.ldb;
  p.tile_n = s.tile_n > 8 ? 16 : 8;
  p.policy = H.s.policy;
  p.movers = dice.below(H.wgs);
  if (p.policy == FIXED && !p.movers) p.movers = 1;
  p.max_movers = p.movers + dice.below(H.wgs);
  if (!p.max_movers) p.max_movers = 1;
  p.slices = 1 + dice.below(5);
  p.into = dice.below(4);
  if (H.s.mutation == ALL_ARE_MOVERS) p.movers = p.max_movers = H.wgs;
  r.params = p;
  const u32 words = p.width / 4;
  fill(r.x, s.M() * words, ALL, [=](u32 i) { return input_word('x', me, launch, i); });
  fill(r.out, s.m.rows(me) * words, ALL, [](u32) { return NOBODY_WROTE; });
  product_inputs(r.product, me, launch, p.K);
  fill(r.product.c, p.M * p.ldc / (is_f32(p) ? 2 : 4), 2 * MATRIX_WORDS, [=](u32 i) { return before(p, me, launch, i); });
  const u32 sums = p.split.parts > 1 ? p.split.parts * p.M * p.ldc / 2 : 0;
  fill(r.product.sums, sums, 4 * MATRIX_WORDS, [](u32) { return NOBODY_WROTE; });
}

static void check(u32 me, u32 launch) {
  const BulkRsRank& r = ranks[me];
  const BulkRsParams& p = r.params;
  const auto wanted = [&](u32 row, u32 col) {
    return product_at(r.product, me, launch, row, col, true) + (adds(p) ? element('c', me, launch, row * p.ldc + col) : 0);
  };
  if (is_f32(p)) {
    for (u32 at = 0; at < p.M * p.ldc; at++) {
      if (at % p.ldc >= p.N) continue;
      const float got = __builtin_bit_cast(float, (u32)(target::read(r.product.c + at / 2) >> at % 2 * 32));
      if (got == wanted(at / p.ldc, at % p.ldc)) continue;
      target::symptom(target::WRONG_VALUE, "rank %u launch %u row %u col %u: got %g, wanted %d", me, launch, at / p.ldc,
                      at % p.ldc, got, wanted(at / p.ldc, at % p.ldc));
      break;
    }
  } else if (adds(p)) {  // columns past N hold what was there
    for (u32 row = 0; row < p.M; row++)
      check_matrix(me, launch, r.product.c + row * p.ldc / 4, 1, p.N, (p.N + 3) / 4 * 4,
                   [&](u32, u32 col) { return wanted(row, col); });
  } else {
    check_matrix(me, launch, r.product.c, p.M, p.N, p.ldc, wanted);
  }
  check_matrix(me, launch, r.out, p.m.rows(me), p.width, p.width, [&](u32 row, u32 col) {
    i32 sum = 0;
    for (u32 q = 0; q < H.s.ranks; q++) sum += element('x', q, launch, (p.m.first[me] + row) * p.width + col);
    return sum;
  });
}

static bool name_address(u32 me, const void* address, char* out, size_t bytes) {
  return name_part(me, address, out, bytes, "x", ranks[me].x, ALL) ||
         name_part(me, address, out, bytes, "out", ranks[me].out, ALL) ||
         product_names(ranks[me].product, me, address, out, bytes);
}

// --- broken on purpose

// One WG stays until X has been read by all who get rows of it.
struct NeverDrains : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  Work next_work() {
    const Work w = BulkRsSchedule::next_work();
    return w.kind == DRAIN ? Work{} : w;
  }
};
// Peers' X is read after they have begun.
struct ReducesBeforeStart : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  bool wait_inputs(const Work& w) const { return w.kind == REDUCE || BulkRsSchedule::wait_inputs(w); }
};
// The LAST reduction tells the owners that X has been read.
struct FirstReduceReports : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  void finish(const Work& w) const {
    if (w.kind != REDUCE) return BulkRsSchedule::finish(w);
    target::release(DEVICE_SCOPE);
    if (target::add(reduces_done(), 1, DEVICE_SCOPE) != 0) return;
    target::release(SYSTEM_SCOPE);
    for (u32 q = 0; q < p.g.ranks; q++) target::store(&p.g.signals_of[q]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
// Who gets no rows reads nothing, and reports nothing.
struct WaitsForWhoGetsNothing : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  bool wait_inputs(const Work& w) const {
    if (w.kind != DRAIN) return BulkRsSchedule::wait_inputs(w);
    if (!wait_all_started(p.g, w)) return false;
    for (u32 q = 0; q < p.g.ranks; q++)
      if (q != p.g.rank && !wait_at_least(p.g, w, &own_signals(p.g).reads_done[q], p.g.epoch, SYSTEM_SCOPE)) return false;
    return true;
  }
};
// A sum waits for all parts of its tile.
struct SumsTooEarly : BulkRsSchedule {
  using BulkRsSchedule::BulkRsSchedule;
  bool wait_inputs(const Work& w) const { return w.kind == SUM || BulkRsSchedule::wait_inputs(w); }
};
template <class S> struct With : BulkRs {
  using Schedule = S;
};
struct StoresBeside : BulkRs {
  static void store_f32(const Params& p, const Work& w, u32 row, u32 column, const float (&four)[4]) {
    BulkRs::store_f32(p, w, row, column + 4, four);
  }
};

static void run(u32 me, target::Box& box, bool decides) {
  const BulkRsParams& p = ranks[me].params;
  switch (H.s.mutation) {
    case NEVER_DRAINS: return run_wg<With<NeverDrains>>(p, box, decides);
    case REDUCES_BEFORE_START: return run_wg<With<ReducesBeforeStart>>(p, box, decides);
    case FIRST_REDUCE_REPORTS: return run_wg<With<FirstReduceReports>>(p, box, decides);
    case WAITS_FOR_WHO_GETS_NOTHING: return run_wg<With<WaitsForWhoGetsNothing>>(p, box, decides);
    case SUMS_TOO_EARLY: return run_wg<With<SumsTooEarly>>(p, box, decides);
    case STORES_BESIDE: return run_wg<StoresBeside>(p, box, decides);
    default: return run_wg<BulkRs>(p, box, decides);
  }
}

const Operator operators[] = {{"bulk_rs", give_memory, prepare, check, run, counter_words, name_address}};
const u32 num_operators = 1;

#include "library.h"
