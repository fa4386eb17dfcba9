// moe_backward for the player of histories: its inputs, and every gradient that must come out, in plain loops. Functions of
// one number are the kernel's own. Gradients of logits are compared with those in double, and what follows from them is
// made of the kernel's: then all else is right to the bit, in the order in which it is added.
#pragma once
#include "moe_backward.h"

inline void backward_fill(u32 me, u64* MoeBackwardRank::* at, u32 used, bool input, u32 launch) {
  for (const BackwardPart& part : BACKWARD_PARTS)
    if (part.at == at)
      fill(backward_ranks[me].*at, used, part.words, [=](u32 i) { return input ? input_word('o', me, launch, i) : NOBODY_WROTE; });
}

// Elements of a gradient, and of them the value before the launch where it is added to.
inline u32 gradient_size(const MoeBackwardParams& p, u32 which) {
  const u32 owned = p.layout.first_expert(p.g.rank + 1) - p.layout.first_expert(p.g.rank);
  const u32 sizes[] = {p.router_ld ? p.router_rows * p.H : 0, owned * 2 * p.I * p.H, owned * p.H * p.I, 2 * p.S * p.H, p.H * p.S};
  return sizes[which];
}
inline bool is_wide(const MoeGradient& g) { return g.into == SET_F32 || g.into == ADD_F32; }
inline float gradient_before(u32 me, u32 launch, u32 which, u32 i) { return moe_input('A' + which, me, launch, i); }

inline void backward_prepare(u32 me, u32 launch) {
  MoeBackwardRank& r = backward_ranks[me];
  r.launch = launch;
  if (!is_backward(launch)) return moe_prepare(me, launch);
  const CopyParams& p = r.params = backward_params(me, launch);
  const MoeCase c = moe_case(forward_of(launch));
  const u32 T = p.tokens, w = c.H / 4, i = c.I / 4, k = c.top_k, ring = p.x_slots * c.tile_m, copies = p.quants ? p.x_slots * p.tile_k : 0, of = forward_of(launch);
  using B = MoeBackwardRank;
  backward_fill(me, &B::dout, T * w, true, launch);
  backward_fill(me, &B::dy_ring, ring * w, false, launch);
  backward_fill(me, &B::x_copy, copies * w, false, launch);
  backward_fill(me, &B::dy_copy, copies * w, false, launch);
  backward_fill(me, &B::h_copy, copies * i, false, launch);
  backward_fill(me, &B::dpre_copy, copies * 2 * i, false, launch);
  backward_fill(me, &B::landing, T * k * w, false, launch);
  backward_fill(me, &B::dx, T * w, false, launch);
  backward_fill(me, &B::dpre, ring * 2 * i, false, launch);
  backward_fill(me, &B::dx_rows, ring * w, false, launch);
  backward_fill(me, &B::dweights, T * k, false, launch);
  backward_fill(me, &B::dlogits, T * p.router_rows / 2, false, launch);
  backward_fill(me, &B::partials, T * (k + 1) * TEAM, false, launch);
  backward_fill(me, &B::own_left, T * p.own_ld / 4, false, launch);
  backward_fill(me, &B::own_dx, T * c.H / 2, false, launch);
  backward_fill(me, &B::pieces, MoeBackwardQueue(p).words(), false, launch);
  // What multiplies copies of dlogits, and the shared expert's weight.
  constexpr u32 PART_OF[] = {0, 0, 1, 1, 2};
  fill(r.own_right, p.own_ld * w, OWN_LD * WIDE, [&](u32 word) {
    const u32 row = word / w, copy = p.router_ld ? row / p.router_ld : 0, e = p.router_ld ? row % p.router_ld : 0;
    const u32 shared = row - p.router_copies * p.router_ld;
    if (row >= p.router_copies * p.router_ld) return input_word('s', me, of, shared * w + word % w);
    return e < p.router_rows ? input_word('r', me, of, (PART_OF[copy] * p.router_rows + e) * w + word % w) : 0;
  });
  for (u32 g = 0; g < GRADIENTS; g++) {
    const MoeGradient& to = p.*GRADIENT_OF[g];
    const u32 n = gradient_size(p, g), words = is_wide(to) ? n / 2 : n / 4;
    const bool adds = to.into == ADD_BF16 || to.into == ADD_F32;
    fill(r.to[g], words, GRADIENT_WORDS[g], [&](u32 word) {
      if (!adds) return NOBODY_WROTE;
      const auto x = [&](u32 j) { return gradient_before(me, launch, g, j); };
      return is_wide(to) ? two_floats(x(2 * word), x(2 * word + 1)) : pack_bf16(x(4 * word), x(4 * word + 1), x(4 * word + 2), x(4 * word + 3));
    });
    fill(r.sums[g], to.sums ? n / 2 : 0, GRADIENT_WORDS[g], [](u32) { return NOBODY_WROTE; });
  }
}

// --- one row of an expert, or of the shared one ---

struct RowGradient {
  float x[MOE_WIDE], dy[MOE_WIDE], h[MOE_WIDE], dpre[2 * MOE_WIDE], dx[MOE_WIDE];
};
struct Matrices {  // of an expert: where they are, and what cuts its activation
  char up, down;
  u32 rank, local;
  u32 H, I;
  float limit;
};
inline void backward_row(const Matrices& m, u32 of, float weight, RowGradient& r) {
  const u32 G = target::GATED;
  for (u32 i = 0; i < m.I; i++) {
    float dh = 0;
    for (u32 h = 0; h < m.H; h++) dh += r.dy[h] * moe_input(m.down, m.rank, of, (m.local * m.H + h) * m.I + i);
    const float g = moe_pre(r.x, m.H, m.up, m.rank, of, m.local * 2 * m.I, i, false);
    const float u = moe_pre(r.x, m.H, m.up, m.rank, of, m.local * 2 * m.I, i, true);
    const Gated d = swiglu_gradient(g, u, dh * weight, Limit{m.limit});
    r.h[i] = rounded(weight * rounded(d.h));
    r.dpre[i / G * 2 * G + i % G] = rounded(d.gate);
    r.dpre[i / G * 2 * G + G + i % G] = rounded(d.up);
  }
  for (u32 h = 0; h < m.H; h++) {
    float sum = 0;
    for (u32 c = 0; c < 2 * m.I; c++) sum += r.dpre[c] * moe_input(m.up, m.rank, of, (m.local * 2 * m.I + c) * m.H + h);
    r.dx[h] = rounded(sum);
  }
}
inline const MoeToken& token_of(const MoeTruth& truth, const MoeRowOf& row) { return truth.token[row.rank][row.token]; }

// Of a row of expert e: padding is zeros.
inline void expert_row(const MoeTruth& truth, const MoeCase& c, u32 launch, u32 e, const MoeRowOf& row, RowGradient& r) {
  const u32 of = forward_of(launch);
  moe_row(truth, c, row, r.x);
  for (u32 h = 0; h < c.H; h++) r.dy[h] = 0;
  if (row.rank != NOBODY) {
    float weight = 1;
    for (u32 j = 0; !c.weigh_inputs && j < c.top_k; j++)
      if (token_of(truth, row).choice[j].e == e) weight = token_of(truth, row).choice[j].w;
    for (u32 h = 0; h < c.H; h++) r.dy[h] = rounded(weight * moe_input('o', row.rank, launch, row.token * c.H + h));
  }
  backward_row({'g', 'd', e / c.per_rank, e % c.per_rank, c.H, c.I, c.clamp}, of, 1, r);
}

// --- gradients of weights ---

inline float gradient_got(const MoeGradient& to, const u64* at, u32 i) {
  if (is_wide(to)) return float_of((u32)(target::read(at + i / 2) >> 32 * (i % 2)));
  return from_bf16(target::read(at + i / 4) >> 16 * (i % 4) & 0xffff);
}
// Parts that are added in turn, as they are for the kernel.
struct Turns {
  float sum;
  bool any = false;
  void add(float part) { sum = any ? part + sum : part, any = true; }
};
inline bool check_gradient(u32 me, u32 launch, u32 which, u32 i, const float* parts, u32 n) {
  const MoeBackwardParams& p = backward_ranks[me].params;
  const MoeGradient& to = p.*GRADIENT_OF[which];
  const bool adds = to.into == ADD_BF16 || to.into == ADD_F32;
  const float before = gradient_before(me, launch, which, i), got = gradient_got(to, backward_ranks[me].to[which], i);
  Turns turns;
  if (is_wide(to) && adds) turns.add(before);
  for (u32 j = 0; j < n; j++) turns.add(parts[j]);
  float want = turns.any ? turns.sum : 0;
  if (!is_wide(to)) want = rounded(adds ? want + before : want);
  if (bits_of(got) == bits_of(want) || (got == 0 && want == 0)) return true;
  return moe_wrong(me, launch, GRADIENT_NAMES[which], i, 0, got, want), false;
}

inline RowGradient rows_of_expert[MAX_RANKS][MAX_RANKS * MOE_TOKENS * 3];  // checks of ranks may take turns
inline bool check_expert_weights(const MoeTruth& truth, const MoeCase& c, u32 me, u32 launch) {
  const MoeBackwardParams& p = backward_ranks[me].params;
  const MoeLayout& l = p.layout;
  RowGradient* rows = rows_of_expert[me];
  const u32 first = l.first_expert(me), end = l.first_expert(me + 1), G = target::GATED;
  u32 base = 0;
  for (u32 e = first; e < end; e++) {
    const u32 tiles = (truth.num_rows[e] + c.tile_m - 1) / c.tile_m;
    u32 n = 0, starts[MOE_ROW_CAP + 1], rounds = 0;  // rows as they are visited, and where a round's begin; from the last round
    for (u32 top = base + tiles; top > base;) {
      const u32 bottom = (top - 1) / c.round_rows * c.round_rows, from = bottom > base ? bottom : base;
      starts[rounds++] = n;
      for (u32 v = from; v < top; v++)
        for (u32 i = 0, tile = l.tile_of(e, v); i < c.tile_m && tile * c.tile_m + i < truth.num_rows[e]; i++)
          expert_row(truth, c, launch, e, truth.rows[e][tile * c.tile_m + i], rows[n++]);
      top = from;
    }
    starts[rounds] = n;
    base += tiles;
    const auto check = [&](u32 which, u32 i, auto product) {
      float parts[MOE_ROW_CAP];
      for (u32 r = 0; r < rounds; r++) {
        parts[r] = 0;
        for (u32 j = starts[r]; j < starts[r + 1]; j++) parts[r] += product(rows[j]);
      }
      return check_gradient(me, launch, which, i, parts, rounds);
    };
    for (u32 h = 0; h < c.H; h++)
      for (u32 i = 0; i < c.I; i++) {
        if (!check(2, ((e - first) * c.H + h) * c.I + i, [&](const RowGradient& r) { return r.dy[h] * r.h[i]; })) return false;
        for (u32 up = 0; up < 2; up++) {
          const u32 column = i / G * 2 * G + up * G + i % G;
          const auto product = [&](const RowGradient& r) { return r.dpre[column] * r.x[h]; };
          if (!check(1, ((e - first) * 2 * c.I + up * c.I + i) * c.H + h, product)) return false;
        }
      }
  }
  return true;
}

// --- a rank's own tokens ---

struct OwnRows {
  RowGradient choice[MOE_TOKENS][MOE_TOP_K], shared[MOE_TOKENS];
  float dw[MOE_TOKENS][MOE_TOP_K], dgate[MOE_TOKENS];
  float dlogits[MOE_TOKENS][24];  // as the kernel has made them
};
inline OwnRows own_rows_of[MAX_RANKS];

inline void make_own_rows(const MoeTruth& truth, const MoeCase& c, u32 me, u32 launch, u32 T, OwnRows& own) {
  const u32 of = forward_of(launch);
  for (u32 t = 0; t < T; t++) {
    const MoeToken& token = truth.token[me][t];
    float y[MOE_WIDE];
    const auto dout = [&](u32 h) { return moe_input('o', me, launch, t * c.H + h); };
    for (u32 j = 0; j < c.top_k; j++) {
      const u32 e = token.choice[j].e;
      RowGradient& r = own.choice[t][j];
      expert_row(truth, c, launch, e, {me, t}, r);
      moe_expert(r.x, c.H, c.I, 'g', 'd', e / c.per_rank, of, e % c.per_rank, c.clamp, y);
      own.dw[t][j] = 0;
      for (u32 h = 0; h < c.H; h++)
        own.dw[t][j] = c.weigh_inputs ? target::fma(token.x[h], r.dx[h], own.dw[t][j]) : target::fma(dout(h), y[h], own.dw[t][j]);
    }
    own.dgate[t] = 0;
    if (!c.S) continue;
    RowGradient& s = own.shared[t];
    for (u32 h = 0; h < c.H; h++) s.x[h] = token.x[h], s.dy[h] = dout(h);
    backward_row({'s', 't', me, 0, c.H, c.S, float_of(FP32_INFINITY)}, of, token.gate, s);
    moe_expert(s.x, c.H, c.S, 's', 't', me, of, 0, float_of(FP32_INFINITY), y);
    for (u32 h = 0; h < c.H; h++) own.dgate[t] = target::fma(dout(h), y[h], own.dgate[t]);
  }
}

// In double, from scores as the forward's truth has them.
inline void wanted_dlogits(const MoeTruth& truth, const MoeCase& c, u32 me, u32 T, u32 t, const OwnRows& own, double* out) {
  const MoeBackwardParams& p = backward_ranks[me].params;
  const MoeToken& token = truth.token[me][t];
  const u32 E = c.experts, k = c.top_k;
  for (u32 e = 0; e < p.router_rows; e++) out[e] = 0;
  if (c.gate) out[c.gate_column()] = (double)token.gate * (1 - token.gate) * own.dgate[t];
  if (c.given == EXPERTS_AND_WEIGHTS) return;
  double ds[MOE_EXPERTS] = {}, total = MOE_EPS, along = 0, all = MOE_EPS, inner = 0, counts[MOE_EXPERTS] = {};
  for (u32 j = 0; j < k; j++) {
    total += token.score[token.choice[j].e];
    along += (double)own.dw[t][j] * token.score[token.choice[j].e];
  }
  for (u32 j = 0; j < k; j++) ds[token.choice[j].e] = 2.5 * (c.normalise ? (own.dw[t][j] - along / total) / total : own.dw[t][j]);
  if (c.aux) {
    for (u32 q = 0; q < T; q++) {
      u32 picks[MOE_TOP_K];
      moe_largest(truth.token[me][q].plain_key, 0, E, k, picks);
      for (u32 j = 0; j < k; j++) counts[picks[j]] += 0.25 * p.aux_grad;
    }
    for (u32 e = 0; e < E; e++) all += token.score[e], inner += counts[e] * token.score[e];
    for (u32 e = 0; e < E; e++) ds[e] += c.score == SOFTMAX ? counts[e] : (counts[e] - inner / all) / all;
  }
  inner = 0;
  for (u32 e = 0; e < E; e++) inner += ds[e] * token.score[e];
  for (u32 e = 0; e < E; e++) {
    const double s = token.score[e], z = token.plain_key[e];
    if (c.score == SOFTMAX) out[e] = s * (ds[e] - inner);
    else if (c.score == SIGMOID) out[e] = ds[e] * s * (1 - s);
    else out[e] = s > 0 ? ds[e] * sigmoid((float)z) / (2 * s) : 0;
  }
}

inline bool check_own(const MoeTruth& truth, const MoeCase& c, u32 me, u32 launch, u32 T, OwnRows& own) {
  const MoeBackwardRank& b = backward_ranks[me];
  const MoeBackwardParams& p = b.params;
  const auto single = [](const u64* at, u64 i) { return float_of((u32)(target::read(at + i / 2) >> 32 * (i % 2))); };
  make_own_rows(truth, c, me, launch, T, own);
  for (u32 t = 0; t < T; t++) {
    double want[24], most = 1 + p.aux_grad * T;
    for (u32 j = 0; j < c.top_k; j++) {
      const float got = float_in(target::read(b.dweights + t * c.top_k + j));
      if (bits_of(got) != bits_of(own.dw[t][j])) return moe_wrong(me, launch, "dweights", t, j, got, own.dw[t][j]), false;
      most += 3 * (got < 0 ? -got : got);
    }
    most += own.dgate[t] < 0 ? -own.dgate[t] : own.dgate[t];
    wanted_dlogits(truth, c, me, T, t, own, want);
    for (u32 e = 0; e < p.router_rows; e++) {
      const float got = own.dlogits[t][e] = single(b.dlogits, t * p.router_rows + e);
      const double off = got - want[e];
      if (!(off < 1e-5 * most && -off < 1e-5 * most)) return moe_wrong(me, launch, "dlogits", t, e, got, want[e]), false;
    }
    for (u32 h = 0; h < c.H; h++) {
      float sum = 0, dx = 0;
      constexpr u32 PART_OF[] = {0, 0, 1, 1, 2};
      for (u32 copy = 0; copy < p.router_copies; copy++)
        for (u32 e = 0; e < p.router_rows; e++) {
          const float z = own.dlogits[t][e], high = rounded(z);
          const u32 row = PART_OF[copy] * p.router_rows + e;
          sum += (copy % 2 ? rounded(z - high) : high) * moe_input('r', me, forward_of(launch), row * c.H + h);
        }
      for (u32 i = 0; i < 2 * c.S; i++) sum += own.shared[t].dpre[i] * moe_input('s', me, forward_of(launch), i * c.H + h);
      for (u32 j = 0; j < c.top_k; j++) dx = target::fma(c.weigh_inputs ? truth.token[me][t].choice[j].w : 1.f, own.choice[t][j].dx[h], dx);
      const float want_dx = rounded(dx + sum), got = moe_element(b.dx, t * c.H + h);
      if (to_bf16(got) != to_bf16(want_dx) && !(got == 0 && want_dx == 0)) return moe_wrong(me, launch, "dx", t, h, got, want_dx), false;
    }
  }
  const u32 G = target::GATED;
  for (u32 h = 0; h < c.H; h++) {
    const auto x = [&](u32 t) { return truth.token[me][t].x[h]; };
    for (u32 e = 0; p.router_ld && e < p.router_rows; e++) {
      float parts[2] = {};
      for (u32 t = 0; t < T; t++) {
        const float z = own.dlogits[t][e], high = rounded(z);
        parts[0] += high * x(t);
        parts[1] += rounded(z - high) * x(t);
      }
      if (!check_gradient(me, launch, 0, e * c.H + h, parts, 2)) return false;
    }
    for (u32 i = 0; i < c.S; i++) {
      float down = 0, up[2] = {};
      for (u32 t = 0; t < T; t++) {
        down += own.shared[t].dy[h] * own.shared[t].h[i];
        for (u32 part = 0; part < 2; part++) up[part] += own.shared[t].dpre[i / G * 2 * G + part * G + i % G] * x(t);
      }
      if (!check_gradient(me, launch, 4, h * c.S + i, &down, 1)) return false;
      for (u32 part = 0; part < 2; part++)
        if (!check_gradient(me, launch, 3, (part * c.S + i) * c.H + h, &up[part], 1)) return false;
    }
  }
  return true;
}

inline void backward_check(u32 me, u32 launch) {
  const u32 of = forward_of(launch);
  if (of == launch) return moe_check(me, launch);
  const MoeCase c = moe_case(of);
  MoeTruth& truth = moe_truths[me];
  moe_make_truth(truth, c, of);
  if (check_own(truth, c, me, launch, H.shapes[of].m.rows(me), own_rows_of[me])) check_expert_weights(truth, c, me, launch);
}
