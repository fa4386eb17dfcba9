// moe_forward for the player of histories: random layers, their memory and params. What must come out: moe_check.h.
#pragma once
#include "../../hip_kernels/kernels/moe_forward.hip"
#include "player.h"

constexpr float MOE_EPS = 1e-20f;
constexpr u32 MOE_ROW_CAP = 84, MOE_TOKENS = 8, MOE_TOP_K = 3, MOE_EXPERTS = 16, MOE_WIDE = 16, MOE_OWNED = 3;
constexpr u32 MOE_SIGNALS = (sizeof(MoeSignals) - sizeof(Signals) + MOE_ROW_CAP * sizeof(MoeSignals::Row)) / 4;

// A layer and how it is run: alike on all ranks, but for what `own` says.
struct MoeCase {
  u32 per_rank, experts, top_k, score, groups, top_groups, group_top, parts;
  u32 H, I, S, pad, tile_m, block, step_rows, x_slots, scans, round_rows;
  Given given;
  bool bias, gate, aux, weigh_inputs, pull, strided, normalise, keep;
  enum Skew : u32 { ANY, ONE_EXPERT, DEAD_EXPERTS, ONE_RANK } skew;
  u32 hot, row_cap, move_cap, send_cap;
  float clamp;

  u32 router_rows() const { return (given == EXPERTS_AND_WEIGHTS ? gate : experts + gate) + 3 & ~3u; }
  u32 gate_column() const { return gate ? (given == EXPERTS_AND_WEIGHTS ? 0 : experts) : NOBODY; }
  // What is added to the keys of expert e, so that choices are skewed.
  float bias_of(u32 launch, u32 e) const {
    const float any = (i32)(mix(H0(), launch, e) % 5) - 2;
    switch (skew) {
      case ONE_EXPERT: return e == hot ? 1000 : any;
      case DEAD_EXPERTS: return mix(H0(), launch, 50 + e) % 2 ? -1000 : any;
      case ONE_RANK: return e / per_rank == hot / per_rank ? 1000 : any;
      default: return any;
    }
  }
  static u64 H0() { return ::H.seed; }
};

inline u32 most_in(u32 a, u32 b) { return a > b ? a : b; }

inline MoeCase moe_case(u32 launch) {
  const Shape& s = H.shapes[launch];
  const u32 R = H.s.ranks, M = s.M();
  Random dice(mix(H.seed, 'M', launch));
  MoeCase c{};
  c.per_rank = 1 + dice.below(R > 4 ? 2 : MOE_OWNED);
  c.experts = R * c.per_rank - dice.below(R > 1 ? most_in(c.per_rank, 2) + 1 : c.per_rank);
  if (!c.experts || c.experts > MOE_EXPERTS) c.experts = c.experts ? MOE_EXPERTS : 1;
  c.top_k = 1 + dice.below(c.experts < MOE_TOP_K ? c.experts : MOE_TOP_K);
  c.score = dice.below(3);
  c.groups = c.top_groups = 1;
  if (c.experts % 2 == 0 && dice.below(2)) {
    c.groups = 2;
    c.top_groups = c.top_k > c.experts / 2 ? 2 : 1 + dice.below(2);
    c.group_top = 1 + dice.below(c.experts / 2 > 1 ? 2 : 1);
  }
  c.parts = dice.below(3) ? 1 : 3;
  c.H = 8 + 8 * dice.below(2);
  constexpr u32 STEP = target::GATED < 8 ? 8 : target::GATED;
  c.I = STEP + STEP * dice.below(MOE_WIDE / STEP);
  c.S = STEP * dice.below(MOE_WIDE / STEP + 1);
  c.tile_m = s.m.tile_m;
  c.pad = dice.below(2) ? c.tile_m : 1;
  c.block = dice.below(2) ? c.tile_m : 1;
  c.step_rows = 1 + dice.below(2);
  c.scans = 1 + dice.below(2);
  c.given = dice.below(3) ? NO_CHOICES : (Given)(1 + dice.below(2));
  c.skew = (MoeCase::Skew)dice.below(4);
  c.bias = c.skew || dice.below(2);
  c.gate = c.S && dice.below(2);
  c.aux = c.given != EXPERTS_AND_WEIGHTS && dice.below(2);
  c.weigh_inputs = c.top_k == 1 && dice.below(2);
  c.pull = dice.below(3) == 0 && !c.weigh_inputs;
#ifdef WITH_BACKWARD
  c.pull = false;
#endif
  c.strided = dice.below(2);
  c.normalise = dice.below(2);
  c.keep = dice.below(2);
  c.hot = dice.below(c.experts);
  c.clamp = dice.below(2) ? 10.f : float_of(FP32_INFINITY);
  const u32 owned = c.top_k < c.per_rank ? c.top_k : c.per_rank, padding = R * c.per_rank * (c.pad - 1);
  u32 T = 0;
  for (u32 q = 0; q < R; q++) T = most_in(T, s.m.rows(q));
  c.row_cap = (M * owned + padding) / c.tile_m + c.per_rank + 1;
  c.send_cap = M * owned / c.tile_m + 2 * R * c.per_rank;
  c.move_cap = c.pull ? c.send_cap + padding / c.tile_m : (T * c.top_k + c.experts * (c.pad - 1)) / c.tile_m + 2 * c.experts;
  c.x_slots = c.step_rows + (dice.below(2) ? 0 : dice.below(c.row_cap));
#ifdef WITH_BACKWARD
  c.keep = true;
  c.round_rows = c.step_rows * (1 + dice.below(3));
  c.x_slots = c.round_rows * (1 + dice.below(3));
  if (dice.below(4) == 0) c.x_slots = (c.row_cap + c.round_rows - 1) / c.round_rows * c.round_rows;
#endif
  return c;
}

struct MoeRank {
  u64 *counts, *x_ring, *combine, *x, *list;  // seen by peers
  u64 *router, *bias, *gate_up, *down, *shared_gate_up, *shared_down, *out, *pre, *h, *y, *shared_pre, *shared_h, *shared_y;
  u64 *logits, *scores, *choices, *scratch, *places, *aux_parts, *aux_sums, *aux_loss, *row_of_slot, *room, *tables;
  MoeParams params;
};
constinit inline MoeRank moe_ranks[MAX_RANKS]{};

struct MoePart {
  const char* name;
  u64* MoeRank::* at;
  u32 words;  // the most
};
constexpr u32 WIDE = MOE_WIDE / 4, RING = 128, TABLE_WORDS = 1200, ROUTER_ROWS = 3 * (MOE_EXPERTS + 4);
constexpr MoePart MOE_PARTS[] = {
    {"counts", &MoeRank::counts, 2 * MAX_RANKS * MOE_EXPERTS},
    {"x_ring", &MoeRank::x_ring, RING * WIDE},
    {"combine", &MoeRank::combine, MOE_TOKENS * MOE_TOP_K * WIDE},
    {"x", &MoeRank::x, MOE_TOKENS * WIDE},
    {"list", &MoeRank::list, MOE_TOKENS * MOE_TOP_K},
    {"router", &MoeRank::router, ROUTER_ROWS * WIDE},
    {"bias", &MoeRank::bias, MOE_EXPERTS / 2 + 1},
    {"gate_up", &MoeRank::gate_up, MOE_OWNED * 2 * MOE_WIDE * WIDE},
    {"down", &MoeRank::down, MOE_OWNED * MOE_WIDE * WIDE},
    {"shared_gate_up", &MoeRank::shared_gate_up, 2 * MOE_WIDE * WIDE},
    {"shared_down", &MoeRank::shared_down, MOE_WIDE * WIDE},
    {"out", &MoeRank::out, MOE_TOKENS * WIDE},
    {"pre", &MoeRank::pre, RING * 2 * WIDE},
    {"h", &MoeRank::h, RING * WIDE},
    {"y", &MoeRank::y, RING * WIDE},
    {"shared_pre", &MoeRank::shared_pre, MOE_TOKENS * 2 * WIDE},
    {"shared_h", &MoeRank::shared_h, MOE_TOKENS * WIDE},
    {"shared_y", &MoeRank::shared_y, MOE_TOKENS * WIDE},
    {"logits", &MoeRank::logits, MOE_TOKENS * ROUTER_ROWS / 2},
    {"scores", &MoeRank::scores, MOE_TOKENS * MOE_EXPERTS / 2},
    {"choices", &MoeRank::choices, MOE_TOKENS * MOE_TOP_K},
    {"scratch", &MoeRank::scratch, MOE_TOKENS * TOKEN_WORDS},
    {"places", &MoeRank::places, MOE_TOKENS * MOE_EXPERTS},
    {"aux_parts", &MoeRank::aux_parts, MOE_TOKENS * MOE_EXPERTS},
    {"aux_sums", &MoeRank::aux_sums, MOE_EXPERTS},
    {"aux_loss", &MoeRank::aux_loss, 1},
    {"row_of_slot", &MoeRank::row_of_slot, MOE_TOKENS * MOE_TOP_K},
    {"room", &MoeRank::room, MAX_RANKS},
    {"tables", &MoeRank::tables, TABLE_WORDS},
};

inline void moe_memory(u32 me) {
  for (const MoePart& part : MOE_PARTS) moe_ranks[me].*part.at = target::new_data(part.words);
  // A peer may write its counts before this rank has begun; the other copy is still read then. Nobody fills it.
  target::open(moe_ranks[me].counts, 2 * MAX_RANKS * MOE_EXPERTS, 2 * MAX_RANKS * MOE_EXPERTS);
}

inline u32 moe_counters(const Shape& s) {
  // Of the launch before, which has the same shape object: its case follows from it.
  u32 launch = 1;
  while (launch < LAUNCHES && &H.shapes[launch] != &s) launch++;
  const MoeCase c = moe_case(launch);
  u32 rows = 0;
  for (u32 q = 0; q < H.s.ranks; q++) rows = most_in(rows, s.m.tile_rows(q));
  const u32 words = MoeWords::HEADS + MAX_RANKS + 3 * rows + 4 * c.row_cap;
  if (words > COUNTERS_PER_SET || c.row_cap > MOE_ROW_CAP) abort();
  return words;
}

inline void moe_crews(MoeParams& p, Random& own) {
  p.movers = own.below(H.wgs + 1);
  p.senders = own.below(H.wgs + 1);
  p.crew = p.crew_tiles = 0;
  if (H.s.policy != FIXED) return;
  const u32 way = own.below(3), most = H.wgs - 1;
  if (p.movers > most) p.movers = most;
  if (p.senders > most) p.senders = most;
  p.crew = way ? most_in(p.movers, p.senders) : p.senders;
  if (way == 2) p.crew_tiles = own.below(5);
}

inline MoeParams moe_params(u32 me, u32 launch) {
  const Shape& s = H.shape(me, launch);
  const MoeCase c = moe_case(launch);
  const MoeRank& r = moe_ranks[me];
  const u32 R = H.s.ranks, T = s.m.rows(me);
  Random own(mix(H.seed, me, launch));
  MoeParams p{};
  p.g = group(me, launch);
  p.counters = counters(me, launch, moe_counters(s));
  p.layout = {r.tables, me, R, c.experts, c.per_rank, c.tile_m, c.pad, c.step_rows, c.strided, c.pull,
              c.row_cap, c.move_cap, c.send_cap};
  for (u32 q = 0; q < R; q++) p.arena_of[q] = (Vec16*)moe_ranks[q].counts;
  const auto offset = [&](const u64* at) { return (u64)(at - r.counts) / 2; };
  p.counts_words = MAX_RANKS * MOE_EXPERTS / 2;
  p.x_at = offset(r.x_ring);
  p.combine_at = offset(r.combine);
  p.source_at = offset(r.x);
  p.list_at = offset(r.list);
  p.x = (Vec16*)r.x;
  p.out = (Vec16*)r.out;
  p.weights = {(Vec16*)r.router, c.bias ? (Vec16*)r.bias : nullptr, (Vec16*)r.gate_up, (Vec16*)r.down,
               (Vec16*)r.shared_gate_up, (Vec16*)r.shared_down};
  p.pre = c.keep ? (Vec16*)r.pre : nullptr;
  p.h = (Vec16*)r.h;
  p.y = (Vec16*)r.y;
  p.shared_pre = c.keep ? (Vec16*)r.shared_pre : nullptr;
  p.shared_h = (Vec16*)r.shared_h;
  p.shared_y = (Vec16*)r.shared_y;
  p.logits = (Vec16*)r.logits;
  p.scores = (Vec16*)r.scores;
  p.choices = r.choices;
  p.token_scratch = r.scratch;
  p.places = r.places;
  p.aux_parts = r.aux_parts;
  p.aux_sums = r.aux_sums;
  p.aux_loss = r.aux_loss;
  p.list = r.list;
  p.row_of_slot = r.row_of_slot;
  p.scan_room = r.room;
  p.routing = {c.top_k, c.score, c.normalise, c.groups, c.top_groups, c.group_top, MOE_EPS, 2.5f, c.aux ? 0.25f : 0, c.weigh_inputs};
  p.clamp = c.clamp;
  p.tokens = T;
  p.block = c.block;
  p.H = c.H, p.I = c.I, p.S = c.S;
  p.router_rows = c.router_rows();
  p.router_parts = c.parts;
  p.logit_ld = p.router_rows * c.parts;
  p.gate_column = c.gate_column();
  p.given = c.given;
  p.tile_n = 2 * target::GATED * (1 + own.below(2));
  const auto columns = [&](u32 width) { return (width + p.tile_n - 1) / p.tile_n; };
  p.columns0 = columns(p.router_rows * c.parts);
  p.columns1 = columns(2 * c.I);
  p.columns2 = columns(c.H);
  p.shared_columns = columns(2 * c.S);
  p.scans = c.scans;
  p.x_slots = c.x_slots;
  p.lag = own.below(4);
  if (own.below(4) == 0) p.lag = c.row_cap;  // all of GEMM1 before GEMM2: the paper's order
  p.h_slots = (p.lag + 1) * c.step_rows + own.below(2);
  if (p.h_slots > c.row_cap) p.h_slots = most_in(c.row_cap, c.step_rows), p.lag = p.h_slots / c.step_rows - 1;
  if (p.h_slots >= c.row_cap) p.lag = c.row_cap;
#ifdef WITH_BACKWARD
  p.h_slots = c.x_slots;
  p.lag = own.below(c.x_slots / c.step_rows);
#endif
  p.y_slots = c.step_rows + own.below(3);
  p.side_by_side = own.below(3);
  moe_crews(p, own);
  return p;
}

inline void moe_fill(u32 me, u64* MoeRank::* at, u32 used, char matrix, u32 launch) {
  for (const MoePart& part : MOE_PARTS)
    if (part.at == at) fill(moe_ranks[me].*at, used, part.words, [=](u32 i) { return input_word(matrix, me, launch, i); });
}


inline bool moe_names(u32 me, const void* address, char* out, size_t bytes) {
  for (const MoePart& part : MOE_PARTS)
    if (name_part(me, address, out, bytes, part.name, moe_ranks[me].*part.at, part.words)) return true;
  const MoeSignals& s = *(MoeSignals*)H.ranks[me].signals;
  const struct { const char* name; const void* at; u32 count; } signals[] = {
      {"counts_in", s.counts_in, MAX_RANKS * MAX_SCANS}, {"sorted_in", s.sorted_in, MAX_RANKS}, {"landed", s.landed, MAX_RANKS},
      {"rows", s.rows, MOE_ROW_CAP * 2 * MAX_RANKS}};
  for (const auto& part : signals)
    if (name_part(me, address, out, bytes, part.name, part.at, part.count, 4)) return true;
  return false;
}
