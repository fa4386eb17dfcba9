// bulk_ag under forced interleavings, as a library for tests/forced/forced.py.
#define MUTATIONS(X) X(NEVER_DRAINS) X(PULLS_BEFORE_START) X(BUILDERS_NEVER_PULL) X(STORES_BESIDE)
#include "../../hip_kernels/kernels/bulk_ag.hip"
#include "bulk.h"

struct BulkAgRank {
  u64 *shard, *gathered;
  Product product;
  BulkAgParams params;
};
constinit static BulkAgRank ranks[MAX_RANKS]{};
constexpr u32 ALL = MAX_ROWS * target::MAX_K / 4;

static void give_memory(u32 me) {
  ranks[me].shard = target::new_data(ALL);
  ranks[me].gathered = target::new_data(ALL);
  product_memory(ranks[me].product);
}

static u32 counter_words(const Shape& s) { return 1 + MAX_RANKS + H.s.ranks * s.m.tile_rows_max; }

static void prepare(u32 me, u32 launch) {
  const Shape& s = H.shape(me, launch);
  BulkAgRank& r = ranks[me];
  Random dice(mix(H.seed, me, launch));
  r.product.M = dice.below(7);
  r.product.N = 1 + dice.below(MAX_COLS);
  r.product.K = r.product.lda = 8 + 8 * dice.below(2);
  r.product.ldb = (r.product.N + 7) / 8 * 8;
  BulkAgParams p{};
  p.g = group(me, launch);
  p.counters = counters(me, launch, counter_words(s));
  for (u32 q = 0; q < H.s.ranks; q++) p.shard_of[q] = (const Vec16*)ranks[q].shard;
  p.gathered = (Vec16*)r.gathered;
  p.a = (const Vec16*)r.product.a;
  p.b = (const Vec16*)r.product.b;
  p.c = r.product.c;
  p.m = s.m;
  p.width = s.K;
  p.M = r.product.M, p.N = r.product.N, p.K = r.product.K, p.ldc = r.product.ldb;
  p.tile_n = s.tile_n > 8 ? 16 : 8;
  p.movers = 1 + dice.below(H.wgs - 1);
  p.policy = H.s.policy;
  r.params = p;
  const u32 words = p.width / 4;
  fill(r.shard, s.m.rows(me) * words, ALL, [=](u32 i) { return input_word('x', me, launch, i); });
  fill(r.gathered, s.M() * words, ALL, [](u32) { return NOBODY_WROTE; });
  for (u32 i = s.m.first[me] * words; i < s.m.first[me + 1] * words; i++)  // own rows are not gathered
    W.data_words[r.gathered - W.data + i].usable = false;
  product_inputs(r.product, me, launch, p.M);
  fill(p.c, p.M * p.ldc / 4, 2 * MATRIX_WORDS, [](u32) { return NOBODY_WROTE; });
}

static void check(u32 me, u32 launch) {
  const BulkAgRank& r = ranks[me];
  const BulkAgParams& p = r.params;
  check_matrix(me, launch, p.c, p.M, p.N, p.ldc,
               [&](u32 row, u32 col) { return product_at(r.product, me, launch, row, col, false); });
  for (u32 q = 0; q < H.s.ranks; q++)  // own rows are not written
    if (q != me)
      check_matrix(me, launch, r.gathered + p.m.first[q] * (p.width / 4), p.m.rows(q), p.width, p.width,
                   [&](u32 row, u32 col) { return element('x', q, launch, row * p.width + col); });
}

static bool name_address(u32 me, const void* address, char* out, size_t bytes) {
  return name_part(me, address, out, bytes, "shard", ranks[me].shard, ALL) ||
         name_part(me, address, out, bytes, "gathered", ranks[me].gathered, ALL) ||
         product_names(ranks[me].product, me, address, out, bytes);
}

// --- broken on purpose

// One WG stays until the own shard has been read.
struct NeverDrains : BulkAgSchedule {
  using BulkAgSchedule::BulkAgSchedule;
  Work next_work() {
    const Work w = BulkAgSchedule::next_work();
    return w.kind == DRAIN ? Work{} : w;
  }
};
// A pull waits for its source to have begun.
struct PullsBeforeStart : BulkAgSchedule {
  using BulkAgSchedule::BulkAgSchedule;
  bool wait_inputs(const Work& w) const { return w.kind == PULL || BulkAgSchedule::wait_inputs(w); }
};
// Movers pull before they build; whoever builds first must still pull.
struct BuildersNeverPull : BulkAgSchedule {
  using BulkAgSchedule::BulkAgSchedule;
  void begin() {
    BulkAgSchedule::begin();
    mover = mover && target::wg() == 0;
  }
};
template <class S> struct With : BulkAg {
  using Schedule = S;
};
struct StoresBeside : BulkAg {
  static void store(const Params& p, const Work& w, u32 row, u32 column, u64 v) { BulkAg::store(p, w, row, column + 4, v); }
};

static void run(u32 me, target::Box& box, bool decides) {
  const BulkAgParams& p = ranks[me].params;
  switch (H.s.mutation) {
    case NEVER_DRAINS: return run_wg<With<NeverDrains>>(p, box, decides);
    case PULLS_BEFORE_START: return run_wg<With<PullsBeforeStart>>(p, box, decides);
    case BUILDERS_NEVER_PULL: return run_wg<With<BuildersNeverPull>>(p, box, decides);
    case STORES_BESIDE: return run_wg<StoresBeside>(p, box, decides);
    default: return run_wg<BulkAg>(p, box, decides);
  }
}

const Operator operators[] = {{"bulk_ag", give_memory, prepare, check, run, counter_words, name_address}};
const u32 num_operators = 1;

#include "library.h"
