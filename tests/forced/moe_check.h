// moe_forward for the player of histories: its inputs, and what must come out, layer by layer in plain loops. Functions of one
// number are the kernel's own; which rows go where, in what order they are added, and where they lie are not.
#pragma once
#include "moe_forward.h"

struct MoeToken {
  float x[MOE_WIDE];
  struct { u32 e; float w; } choice[MOE_TOP_K];
  float plain_key[MOE_EXPERTS], score[MOE_EXPERTS], gate;
};
struct MoeRowOf {  // a row of an expert's group; rank NOBODY: padding
  u32 rank, token;
};
struct MoeTruth {
  MoeToken token[MAX_RANKS][MOE_TOKENS];
  MoeRowOf rows[MOE_EXPERTS][MAX_RANKS * MOE_TOKENS * 3];
  u32 num_rows[MOE_EXPERTS];
};
inline MoeTruth moe_truths[MAX_RANKS];  // of the check of each rank; too large for a fiber's stack

inline float moe_input(char matrix, u32 rank, u32 launch, u32 element) {
  return four(matrix, rank, launch, element / 4).at[element % 4];
}

// Choices that the caller makes: k different experts, skewed as biases would.
inline u32 outside_expert(const MoeCase& c, u32 rank, u32 launch, u32 t, u32 j) {
  u32 taken = 0, best = 0;
  for (u32 i = 0; i <= j; i++) {
    i32 most = -2000;
    for (u32 e = 0; e < c.experts; e++) {
      const i32 key = (i32)c.bias_of(launch, e) + (i32)(mix(H.seed, rank << 16 | launch << 8 | t, e) % 50);
      if (!(taken >> e & 1) && key > most) most = key, best = e;
    }
    taken |= 1u << best;
  }
  return best;
}

inline void moe_prepare(u32 me, u32 launch) {
  MoeRank& r = moe_ranks[me];
  const MoeParams& p = r.params = moe_params(me, launch);
  const MoeCase c = moe_case(launch);
  const u32 T = p.tokens, w = c.H / 4, i = c.I / 4, s = c.S / 4, k = c.top_k, blocks = (T + c.block - 1) / c.block;
  const u32 first = p.layout.first_expert(me), owned = p.layout.first_expert(me + 1) - first;
  moe_fill(me, &MoeRank::x, T * w, 'x', launch);
  moe_fill(me, &MoeRank::router, p.router_rows * c.parts * w, 'r', launch);
  moe_fill(me, &MoeRank::gate_up, owned * 2 * c.I * w, 'g', launch);
  moe_fill(me, &MoeRank::down, owned * c.H * i, 'd', launch);
  moe_fill(me, &MoeRank::shared_gate_up, 2 * c.S * w, 's', launch);
  moe_fill(me, &MoeRank::shared_down, c.H * s, 't', launch);
  const auto empty = [&](u64* MoeRank::* at, u32 used) {
    for (const MoePart& part : MOE_PARTS)
      if (part.at == at) fill(r.*at, used, part.words, [](u32) { return NOBODY_WROTE; });
  };
  empty(&MoeRank::x_ring, p.x_slots * c.tile_m * w);
  empty(&MoeRank::combine, T * k * w);
  empty(&MoeRank::list, T * k);
  empty(&MoeRank::out, T * w);
  empty(&MoeRank::pre, c.keep ? p.h_slots * c.tile_m * 2 * i : 0);
  empty(&MoeRank::h, p.h_slots * c.tile_m * i);
  empty(&MoeRank::y, p.y_slots * c.tile_m * w);
  empty(&MoeRank::shared_pre, c.keep ? T * 2 * s : 0);
  empty(&MoeRank::shared_h, T * s);
  empty(&MoeRank::shared_y, c.S ? T * w : 0);
  empty(&MoeRank::logits, T * p.logit_ld / 2);
  empty(&MoeRank::scores, c.given == EXPERTS_AND_WEIGHTS ? 0 : T * ((c.experts + 3) / 4 * 2));
  empty(&MoeRank::choices, T * k);
  empty(&MoeRank::scratch, c.given == EXPERTS_AND_WEIGHTS ? 0 : T * TOKEN_WORDS);
  empty(&MoeRank::places, blocks * c.experts);
  empty(&MoeRank::aux_parts, c.aux ? blocks * c.experts : 0);
  empty(&MoeRank::aux_sums, c.aux ? c.experts : 0);
  empty(&MoeRank::aux_loss, 1);
  empty(&MoeRank::row_of_slot, T * k);
  empty(&MoeRank::room, H.s.ranks);
  empty(&MoeRank::tables, p.layout.words());
  const u32 biases = c.bias ? (c.experts + 1) / 2 : 0;
  fill(r.bias, biases, MOE_EXPERTS / 2 + 1, [&](u32 j) { return two_floats(c.bias_of(launch, 2 * j), c.bias_of(launch, 2 * j + 1)); });
  if (c.given != NO_CHOICES)
    for (u32 j = 0; j < T * k; j++)
      target::write(r.choices + j, number_and_float(outside_expert(c, me, launch, j / k, j % k), 0.5f * (1 + j % 3)));
}

// --- routing ---

// Indices of the `count` largest of keys [begin, end), the lower index first among equals.
inline void moe_largest(const float* keys, u32 begin, u32 end, u32 count, u32* out) {
  u32 taken = 0;
  for (u32 j = 0; j < count; j++) {
    u32 best = NOBODY;
    for (u32 i = begin; i < end; i++)
      if (!(taken >> i & 1) && (best == NOBODY || keys[i] > keys[best])) best = i;
    taken |= 1u << best;
    out[j] = best;
  }
}

inline void moe_route(const MoeCase& c, u32 rank, u32 launch, u32 t, MoeToken& to) {
  const u32 E = c.experts, rows = c.router_rows();
  const auto logit = [&](u32 column) {
    float z[3] = {};
    for (u32 part = 0; part < c.parts; part++)
      for (u32 h = 0; h < c.H; h++) z[part] += to.x[h] * moe_input('r', rank, launch, (part * rows + column) * c.H + h);
    return c.parts == 1 ? z[0] : z[0] + (z[1] + z[2]);
  };
  to.gate = c.gate ? sigmoid(logit(c.gate_column())) : 1;
  if (c.given == EXPERTS_AND_WEIGHTS) {
    for (u32 j = 0; j < c.top_k; j++)
      to.choice[j] = {outside_expert(c, rank, launch, t, j), 0.5f * (1 + (t * c.top_k + j) % 3)};
    return;
  }
  float most = -1e30f, sum = 0, keys[MOE_EXPERTS];
  for (u32 e = 0; e < E; e++) most = (to.plain_key[e] = logit(e)) > most ? to.plain_key[e] : most;
  for (u32 e = 0; e < E; e++) sum += exp_of(to.plain_key[e] - most);
  for (u32 e = 0; e < E; e++) {
    const float z = to.plain_key[e];
    to.score[e] = c.score == SOFTMAX ? exp_of(z - most) / sum : c.score == SIGMOID ? sigmoid(z) : target::sqrt(softplus(z));
    keys[e] = c.bias ? to.score[e] + c.bias_of(launch, e) : c.groups > 1 ? to.score[e] : z;
  }
  if (c.groups > 1) {
    float group[2];
    u32 picks[MOE_EXPERTS];
    for (u32 g = 0; g < 2; g++) {
      moe_largest(keys, g * E / 2, (g + 1) * E / 2, c.group_top, picks);
      group[g] = 0;
      for (u32 j = 0; j < c.group_top; j++) group[g] += keys[picks[j]];
    }
    if (c.top_groups == 1)
      for (u32 e = 0; e < E; e++)
        if ((e >= E / 2) != (group[1] > group[0])) keys[e] = -1e30f;
  }
  u32 picks[MOE_TOP_K];
  moe_largest(keys, 0, E, c.top_k, picks);
  for (u32 j = 0; c.given == EXPERTS && j < c.top_k; j++) picks[j] = outside_expert(c, rank, launch, t, j);
  sum = 0;
  for (u32 j = 0; j < c.top_k; j++) sum += to.score[picks[j]];
  for (u32 j = 0; j < c.top_k; j++) {
    const float s = to.score[picks[j]];
    to.choice[j] = {picks[j], 2.5f * (c.normalise ? s / (sum + MOE_EPS) : s)};
  }
}

inline float moe_aux(const MoeTruth& truth, const MoeCase& c, u32 rank, u32 T) {
  u32 n[MOE_EXPERTS] = {}, picks[MOE_TOP_K];
  float sums[MOE_EXPERTS] = {}, loss = 0;
  for (u32 b = 0; b * c.block < T; b++) {
    float part[MOE_EXPERTS] = {};
    for (u32 t = b * c.block; t < T && t < (b + 1) * c.block; t++) {
      const MoeToken& token = truth.token[rank][t];
      float all = 0;
      for (u32 e = 0; e < c.experts; e++) all += token.score[e];
      for (u32 e = 0; e < c.experts; e++) part[e] += token.score[e] / (c.score == SOFTMAX ? 1.f : all + MOE_EPS);
      moe_largest(token.plain_key, 0, c.experts, c.top_k, picks);
      for (u32 j = 0; j < c.top_k; j++) n[picks[j]]++;
    }
    for (u32 e = 0; e < c.experts; e++) sums[e] += part[e];
  }
  for (u32 e = 0; e < c.experts; e++) loss = target::fma((float)n[e], sums[e], loss);
  return 0.25f * loss;
}

// All tokens' choices, and the rows of every expert: sources ascending, tokens ascending, each group padded.
inline void moe_make_truth(MoeTruth& truth, const MoeCase& c, u32 launch) {
  const Chunks& m = H.shapes[launch].m;
  for (u32 q = 0; q < H.s.ranks; q++)
    for (u32 t = 0; t < m.rows(q); t++) {
      MoeToken& token = truth.token[q][t];
      for (u32 h = 0; h < c.H; h++) token.x[h] = moe_input('x', q, launch, t * c.H + h);
      moe_route(c, q, launch, t, token);
    }
  for (u32 e = 0; e < c.experts; e++) {
    u32& n = truth.num_rows[e] = 0;
    for (u32 q = 0; q < H.s.ranks; q++) {
      for (u32 t = 0; t < m.rows(q); t++)
        for (u32 j = 0; j < c.top_k; j++)
          if (truth.token[q][t].choice[j].e == e) truth.rows[e][n++] = {q, t};
      while (n % c.pad) truth.rows[e][n++] = {NOBODY, 0};
    }
  }
}

// --- products ---

inline float rounded(float x) { return from_bf16(to_bf16(x)); }

// The row of x that an expert gets.
inline void moe_row(const MoeTruth& truth, const MoeCase& c, const MoeRowOf& row, float* x) {
  for (u32 h = 0; h < c.H; h++) x[h] = 0;
  if (row.rank == NOBODY) return;
  const MoeToken& token = truth.token[row.rank][row.token];
  for (u32 h = 0; h < c.H; h++) x[h] = c.weigh_inputs ? rounded(token.choice[0].w * token.x[h]) : token.x[h];
}
// One element of gate and up in the interleaved weight: `column` is of h.
inline float moe_pre(const float* x, u32 H, char matrix, u32 rank, u32 launch, u32 first_row, u32 column, bool up) {
  const u32 G = target::GATED, row = first_row + column / G * 2 * G + column % G + (up ? G : 0);
  float sum = 0;
  for (u32 h = 0; h < H; h++) sum += x[h] * moe_input(matrix, rank, launch, row * H + h);
  return rounded(sum);
}
// A gated product and the one behind it. Matrices of one expert begin at those rows.
inline void moe_expert(const float* x, u32 H, u32 I, char up, char down, u32 rank, u32 launch, u32 local, float limit, float* y) {
  float h[MOE_WIDE];
  for (u32 i = 0; i < I; i++) {
    const float g = moe_pre(x, H, up, rank, launch, local * 2 * I, i, false);
    h[i] = rounded(swiglu(g, moe_pre(x, H, up, rank, launch, local * 2 * I, i, true), Limit{limit}));
  }
  for (u32 c = 0; c < H; c++) {
    float sum = 0;
    for (u32 i = 0; i < I; i++) sum += h[i] * moe_input(down, rank, launch, (local * H + c) * I + i);
    y[c] = rounded(sum);
  }
}

inline void moe_wrong(u32 me, u32 launch, const char* what, u32 row, u32 column, float got, float wanted) {
  target::symptom(target::WRONG_VALUE, "rank %u launch %u %s row %u column %u: got %g, wanted %g", me, launch, what, row, column, got, wanted);
}
inline float moe_element(const u64* base, u64 i) { return from_bf16(target::read(base + i / 4) >> 16 * (i % 4) & 0xffff); }

inline bool moe_check_out(const MoeTruth& truth, const MoeCase& c, u32 me, u32 launch, u32 t) {
  const MoeToken& token = truth.token[me][t];
  float out[MOE_WIDE] = {}, x[MOE_WIDE], y[MOE_WIDE];
  for (u32 j = 0; j < c.top_k; j++) {
    const u32 e = token.choice[j].e, owner = e / c.per_rank;
    moe_row(truth, c, {me, t}, x);
    moe_expert(x, c.H, c.I, 'g', 'd', owner, launch, e % c.per_rank, c.clamp, y);
    for (u32 h = 0; h < c.H; h++) out[h] = target::fma(c.weigh_inputs ? 1 : token.choice[j].w, y[h], out[h]);
  }
  if (c.S) {
    moe_expert(token.x, c.H, c.S, 's', 't', me, launch, 0, float_of(FP32_INFINITY), y);
    for (u32 h = 0; h < c.H; h++) out[h] = target::fma(token.gate, y[h], out[h]);
  }
  for (u32 h = 0; h < c.H; h++) {
    const float got = moe_element(moe_ranks[me].out, t * c.H + h);
    if (to_bf16(got) == to_bf16(out[h])) continue;
    moe_wrong(me, launch, "out", t, h, got, out[h]);
    return false;
  }
  return true;
}

// What the rings hold at the end: the last rows of this owner, padding included, where they belong.
inline bool moe_check_rings(const MoeTruth& truth, const MoeCase& c, u32 me, u32 launch) {
  const MoeRank& r = moe_ranks[me];
  const MoeParams& p = r.params;
  const MoeLayout& l = p.layout;
  u32 n = 0;
  for (u32 e = l.first_expert(me); e < l.first_expert(me + 1); e++) n += (truth.num_rows[e] + c.tile_m - 1) / c.tile_m;
  if (l.rows() != n) return moe_wrong(me, launch, "tile rows", 0, 0, l.rows(), n), false;
  for (u32 v = 0, e = l.first_expert(me), base = 0; v < n; v++) {
    while (v - base >= (truth.num_rows[e] + c.tile_m - 1) / c.tile_m) base += (truth.num_rows[e++] + c.tile_m - 1) / c.tile_m;
    const u32 tile = l.tile_of(e, v);  // any order of an expert's tiles will do
    for (u32 i = 0; i < c.tile_m && tile * c.tile_m + i < truth.num_rows[e]; i++) {
      float x[MOE_WIDE];
      moe_row(truth, c, truth.rows[e][tile * c.tile_m + i], x);
      for (u32 h = 0; v + p.x_slots >= n && h < c.H; h++) {
        const float got = moe_element(r.x_ring, (u64)(v % p.x_slots * c.tile_m + i) * c.H + h);
        if (got != x[h]) return moe_wrong(me, launch, "x ring", v * c.tile_m + i, h, got, x[h]), false;
      }
      for (u32 j = 0; c.keep && v + p.h_slots >= n && j < c.I; j++) {
        const u32 G = target::GATED, column = j / G * 2 * G + j % G;
        const float got = moe_element(r.pre, (u64)(v % p.h_slots * c.tile_m + i) * 2 * c.I + column);
        const float want = moe_pre(x, c.H, 'g', me, launch, (e - l.first_expert(me)) * 2 * c.I, j, false);
        if (got != want) return moe_wrong(me, launch, "pre", v * c.tile_m + i, j, got, want), false;
      }
    }
  }
  return true;
}

inline void moe_check(u32 me, u32 launch) {
  const MoeCase c = moe_case(launch);
  const u32 T = H.shapes[launch].m.rows(me);
  MoeTruth& truth = moe_truths[me];
  moe_make_truth(truth, c, launch);
  for (u32 t = 0; t < T; t++)
    if (!moe_check_out(truth, c, me, launch, t)) return;
  const float aux = c.aux ? moe_aux(truth, c, me, T) : 0, got = float_in(target::read(moe_ranks[me].aux_loss));
  if (bits_of(aux) != bits_of(got)) return moe_wrong(me, launch, "aux loss", 0, 0, got, aux);
  moe_check_rings(truth, c, me, launch);
}

inline void moe_run(u32 me, target::Box& box, bool decides) { run_wg<MoeForward>(moe_ranks[me].params, box, decides); }

constexpr Operator MOE_FORWARD = {"moe_forward", moe_memory, moe_prepare, moe_check, moe_run, moe_counters, moe_names};
