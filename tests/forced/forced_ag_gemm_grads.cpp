// ag_gemm_grads under forced interleavings, as a library for tests/forced/forced.py. Its matrices are BF16 here: who does what
// when does not depend on that, and blocks of MXFP8 are too long for this target.
#define MUTATIONS(X)                                                                                                   \
  X(WGRAD_BEFORE_COLUMNS) X(ONE_PEER_IS_ENOUGH) X(COUNTS_ABSENT_PEERS) X(COLUMNS_COUNT_AS_ROWS) X(ROWS_REPORT_READS)   \
  X(HEADS_OVER_COUNTS) X(FORGETS_COLUMNS) X(NEVER_DRAINS) X(BUILDS_UNREADY) X(STORES_BESIDE)
#include "../../hip_kernels/schedule/ag_gemm_grads.h"
#include "../../hip_kernels/work/move.h"
#include "../../hip_kernels/work/sum.h"
#include "gathered.h"
#include "mutants.h"

using S = AgGemmGradsSchedule;

struct Grads {
  using Schedule = S;
  using Params = AgGemmGradsParams;
  static constexpr u32 MOST_K = 8 * MAX_RANKS;  // of every rank 8

  static u64 first_row(const Params& p, const Work& w) {
    return (w.kind == WGRAD ? 0 : p.m.first[w.chunk]) + (u64)w.row * p.m.tile_m;
  }
  static Columns cols(const Params& p, const Work& w) { return {w, w.part, w.kind == WGRAD ? p.gradient_N : p.N, p.tile_n}; }
  static TileOperands operands(const Params& p, const Work& w) {
    const Columns to = cols(p, w);
    if (w.kind == WGRAD) {
      const u32 depth = p.columns.depth(), left = p.features - w.row * p.m.tile_m;
      return {p.columns.gathered + first_row(p, w) * (depth / 8), p.x + to.first * (depth / 8),
              left < p.m.tile_m ? left : p.m.tile_m, to.count, depth, depth, depth};
    }
    const u64 words = p.K / 8, row = (u64)w.row * p.m.tile_m;
    const Vec16* a = w.chunk == p.g.rank ? p.shard_of[w.chunk] : p.gathered + p.m.first[w.chunk] * words;
    return {a + row * words, p.b + to.first * words, p.m.rows_in(w.chunk, w.row), to.count, p.K, p.K, p.K};
  }
  static Epilogue epilogue(const Work& w) { return w.kind == WGRAD ? SUMS : ROWS; }
  static void store(const Params& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    target::write(p.c + ((first_row(p, w) + row) * p.ldc + cols(p, w).first + column) / 4, four_bf16);
  }
  static SumsTo sums_to(const Params& p, const Work& w) {
    return {p.gradient, first_row(p, w) * p.gradient_ld + cols(p, w).first, p.gradient_ld, (Into)p.into};
  }
  static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    const u32 q = w.chunk;
    if (w.kind == PULL) copy_block(block_of(w, p.pulls, p.m, p.K / 8, p.gathered, p.shard_of[q]));
    if (w.kind != PULL_COLUMNS) return;
    const u32 lines = p.column_m.rows_in(q, w.row), first = w.row * p.m.tile_m, slices = p.column_pulls.slices;
    const u32 begin = first + lines * w.part / slices, end = first + lines * (w.part + 1) / slices;
    const u32 words = p.columns.depth(q) / 8, pitch = p.columns.depth() / 8;
    copy_lines(p.columns.gathered + p.columns.first[q] / 8 + begin * pitch, pitch, p.columns.of[q] + begin * words, words,
               end - begin, words);
  }
};

// A tile of dW waits for its tile row of dY's columns.
struct WgradBeforeColumns : S {
  using S::S;
  bool wait_inputs(const Work& w) const { return w.kind == WGRAD || S::wait_inputs(w); }
  bool wait_part(const Work& w, u32 i) const { return w.kind == WGRAD || S::wait_part(w, i); }
};

// It waits for what all peers have in that row that have any rows at all: `peers` is how many it takes that for.
template <bool ALL> struct WaitsForPeers : S {
  using S::S;
  bool wait_row(const Work& w) const {
    const u32 want = (ALL ? peers() : slices_of_columns() > 0) * p.column_pulls.slices;
    if (!wait_at_least(p.g, w, columns_landed(w.row), want, DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);
    return true;
  }
  bool wait_inputs(const Work& w) const { return w.kind == WGRAD ? wait_row(w) : S::wait_inputs(w); }
  bool wait_part(const Work& w, u32 i) const { return w.kind == WGRAD ? wait_row(w) : S::wait_part(w, i); }
};

// Columns that have landed are counted apart from rows.
struct ColumnsCountAsRows : S {
  using S::S;
  void finish(const Work& w) const { S::finish(w.kind == PULL_COLUMNS ? Work{PULL, w.chunk, w.row, w.part} : w); }
};

// The last pull of columns, not of rows, tells the owner that both of its copies have been read.
struct RowsReportReads : S {
  using S::S;
  void finish(const Work& w) const {
    if (w.kind != PULL && w.kind != PULL_COLUMNS) return;
    target::release(DEVICE_SCOPE);
    target::add(counted_at(w), 1, DEVICE_SCOPE);
    if (w.kind == PULL_COLUMNS || target::add(pulls_done(w.chunk), 1, DEVICE_SCOPE) + 1 != pulls_of_rows(w.chunk)) return;
    target::acquire(DEVICE_SCOPE);
    target::release(SYSTEM_SCOPE);
    target::store(&p.g.signals_of[w.chunk]->reads_done[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};

// Heads of queues lie behind all counts.
struct HeadsOverCounts : S {
  using S::S;
  Work next_work() {
    if (aborted(p.g)) return {};
    if (mover)
      if (const Work w = next_pull(); w.kind != LEAVE) return w;
    mover = false;
    for (; emptied < p.queues; emptied++)
      for (u32 i; (i = target::add(columns_landed(0) + queue(), 1, DEVICE_SCOPE)) < entries(queue());)
        if (const Work w = entry_at(queue(), i); w.kind != LEAVE) return w;
    return last_work();
  }
};

// Movers pull both matrices.
struct ForgetsColumns : S {
  using S::S;
  Work next_work() {
    const Work w = S::next_work();
    return w.kind == PULL_COLUMNS ? next_work() : w;
  }
};

struct Mutant : Gathered<TN, AgGemmGradsParams> {
  static constexpr u32 LINES = 8, COLUMNS = LINES * 8 / 4, ALL_COLUMNS = LINES * Grads::MOST_K / 4;  // words of 8 bytes
  static constexpr u32 FACTOR = MAX_COLS * Grads::MOST_K / 4, GRADIENT = LINES * MAX_LDC / 4;
  struct More {
    u64 *columns, *gathered, *x, *gradient;
  };
  static inline constinit More more[MAX_RANKS]{};

  static void give_memory(u32 me) {
    Gathered::give_memory(me);
    more[me] = {target::new_data(COLUMNS), target::new_data(ALL_COLUMNS), target::new_data(FACTOR), target::new_data(GRADIENT)};
  }
  static u32 counter_words(const Shape& s) { return Gathered::counter_words(s) + LINES; }

  static void prepare(u32 me, u32 launch) {
    Gathered::prepare(me, launch);
    AgGemmGradsParams& p = ranks[me].params;
    More& r = more[me];
    Random common(mix(H.seed, 78, launch)), dice(mix(H.seed, 79 + me, launch));
    p.features = 1 + common.below(LINES);
    p.pulls = draw_pulls(dice, p.K, false);
    p.halved = 0;
    p.column_pulls = {1 + dice.below(3), 1, 0, 1};
    p.column_m.tile_m = p.m.tile_m;
    p.column_m.tile_rows_max = (p.features + p.m.tile_m - 1) / p.m.tile_m;
    MxColumns& c = p.columns;
    for (u32 q = 0; q < MAX_RANKS; q++) {
      const bool any = q < H.s.ranks && p.m.rows(q);
      p.column_m.first[q + 1] = p.column_m.first[q] + any * p.features;
      c.first[q + 1] = c.first[q] + any * 8;
      c.of[q] = q < H.s.ranks ? (const Vec16*)more[q].columns : nullptr;
    }
    c.gathered = (Vec16*)r.gathered;
    p.x = (const Vec16*)r.x;
    p.gradient = r.gradient;
    p.gradient_N = 1 + dice.below(MAX_COLS);
    p.gradient_ld = (p.gradient_N + 7) / 8 * 8;
    p.into = SET_BF16;
    const u32 own = c.depth(me) / 4, all = c.depth() / 4, first = c.first[me] / 4;
    fill(r.columns, p.features * own, COLUMNS, [=](u32 i) { return input_word('y', me, launch, i); });
    fill(r.x, p.gradient_N * all, FACTOR, [=](u32 i) { return input_word('x', me, launch, i); });
    fill(r.gradient, p.features * p.gradient_ld / 4, GRADIENT, [](u32) { return NOBODY_WROTE; });
    fill(r.gathered, p.features * all, ALL_COLUMNS, [=](u32 i) {  // the own columns are there
      const u32 line = i / all, word = i % all - first;
      return word < own ? input_word('y', me, launch, line * own + word) : NOBODY_WROTE;
    });
  }

  static void check(u32 me, u32 launch) {
    Gathered::check(me, launch);
    const AgGemmGradsParams& p = ranks[me].params;
    const MxColumns& c = p.columns;
    check_matrix(me, launch, more[me].gradient, p.features, p.gradient_N, p.gradient_ld, [&](u32 line, u32 col) {
      i32 sum = 0;
      for (u32 q = 0; q < H.s.ranks; q++)
        for (u32 k = 0; k < c.depth(q); k++)
          sum += element('y', q, launch, line * c.depth(q) + k) * element('x', me, launch, col * c.depth() + c.first[q] + k);
      return sum;
    });
  }

  static bool name_address(u32 me, const void* address, char* out, size_t bytes) {
    const More& r = more[me];
    return name_part(me, address, out, bytes, "columns", r.columns, COLUMNS) ||
           name_part(me, address, out, bytes, "gathered columns", r.gathered, ALL_COLUMNS) ||
           name_part(me, address, out, bytes, "x", r.x, FACTOR) ||
           name_part(me, address, out, bytes, "gradient", r.gradient, GRADIENT) ||
           Gathered::name_address(me, address, out, bytes);
  }

  template <class T> static void with(u32 me, target::Box& box, bool decides) {
    run_wg<Scheduled<Grads, T>>(ranks[me].params, box, decides);
  }
  static void run(u32 me, target::Box& box, bool decides) {
    switch (H.s.mutation) {
      case WGRAD_BEFORE_COLUMNS: return with<WgradBeforeColumns>(me, box, decides);
      case ONE_PEER_IS_ENOUGH: return with<WaitsForPeers<false>>(me, box, decides);
      case COUNTS_ABSENT_PEERS: return with<WaitsForPeers<true>>(me, box, decides);
      case COLUMNS_COUNT_AS_ROWS: return with<ColumnsCountAsRows>(me, box, decides);
      case ROWS_REPORT_READS: return with<RowsReportReads>(me, box, decides);
      case HEADS_OVER_COUNTS: return with<HeadsOverCounts>(me, box, decides);
      case FORGETS_COLUMNS: return with<ForgetsColumns>(me, box, decides);
      case NEVER_DRAINS: return with<NeverDrains<S>>(me, box, decides);
      case BUILDS_UNREADY: return with<BuildsUnready<S>>(me, box, decides);
      case STORES_BESIDE: return run_wg<StoresSumsBeside<Grads>>(ranks[me].params, box, decides);
      default: return with<S>(me, box, decides);
    }
  }
};

const Operator operators[] = {operator_of<Mutant>("ag_gemm_grads")};
const u32 num_operators = 1;

#include "library.h"
