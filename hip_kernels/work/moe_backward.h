// DOING IT, what is no product in the backward of an MoE layer, and what epilogues make of sums.
#pragma once
#include "../schedule/moe_backward.h"
#include "moe.h"
#include "moe_backward_plan.h"

// h, and the gradients of gate and up from that of h, of values as the forward has kept them.
struct Gated {
  float h, gate, up;
};
template <class L> DEVICE inline Gated swiglu_gradient(float gate, float up, float dh, const L& limit) {
  const float g = limit.gate(gate), u = limit.up(up), s = fast_sigmoid(g), silu = g * s;
  const float slope = target::fma(silu, 1.f - s, s);
  return {silu * u, limit.cuts_gate(gate) ? 0 : dh * u * slope, limit.cuts_up(up) ? 0 : dh * silu};
}

// Where four neighbours of one of both lie in a matrix whose columns (or rows) alternate in blocks of GATED.
DEVICE inline u64 gate_at(u64 i) { return i / target::GATED * 2 * target::GATED + i % target::GATED; }

// Rows of dH: h and dpre are made of them. Pointers and words (of 8 bytes, from row to row) are of the tile's first row.
struct DSwigluToPlain;
struct DSwigluTo {
  const u64* pre;
  u64 *dpre, *h;
  u32 pre_words, dpre_words, h_words;
  u32 column;             // the tile's first one, of h
  const Vec16* weights;   // of rows, which are not in dH yet: every weight_ld'th of these logits; null: 1
  u64 weight_at;
  u32 weight_ld;
  float limit;

  DEVICE u64 at(u32 column_in) const { return gate_at(column + column_in) / 4; }
  DEVICE Vec16 was(u32 row, u32 column_in) const {
    const u64* from = pre + (u64)row * pre_words + at(column_in);
    return {target::read(from), target::read(from + target::GATED / 4)};
  }
  DEVICE void put(u32 row, u32 column_in, const float (&sums)[4], const Vec16& was) const {
    put(row, column_in, sums, was, weights ? sigmoid(float_at(weights, weight_at + (u64)row * weight_ld)) : 1.f, Limit{limit});
  }
  using Plain = DSwigluToPlain;  // kernels/tile_operands.h
  DEVICE bool is_plain() const { return !weights && limit == float_of(FP32_INFINITY); }
  template <class L>
  DEVICE void put(u32 row, u32 column_in, const float (&sums)[4], const Vec16& was, float weight, const L& limit) const {
    Gated x[4];
    for (u32 i = 0; i < 4; i++)
      x[i] = swiglu_gradient(bf16_at(was, i), bf16_at(was, 4 + i), sums[i] * weight, limit);
    const u64 kept = pack_bf16(x[0].h, x[1].h, x[2].h, x[3].h);  // as the forward has rounded it
    float y[4];
    for (u32 i = 0; i < 4; i++) y[i] = weight * from_bf16(kept >> 16 * i & 0xffff);
    target::write(h + (u64)row * h_words + (column + column_in) / 4, weight == 1.f ? kept : pack_bf16(y[0], y[1], y[2], y[3]));
    u64* to = dpre + (u64)row * dpre_words + at(column_in);
    target::write(to, pack_bf16(x[0].gate, x[1].gate, x[2].gate, x[3].gate));
    target::write(to + target::GATED / 4, pack_bf16(x[0].up, x[1].up, x[2].up, x[3].up));
  }
};
struct DSwigluToPlain {
  const DSwigluTo& to;
  DEVICE Vec16 was(u32 row, u32 column) const { return to.was(row, column); }
  DEVICE void put(u32 row, u32 column, const float (&sums)[4], const Vec16& was) const { to.put(row, column, sums, was, 1.f, NoLimit()); }
};

// A gradient of weights, from row `row` and column `column` on. begins, ends: whether nothing comes before, behind these sums
// in the same elements. What is made in turns and rounded to BF16 is FP32 (`sums`) until the last one.
struct GradientTo {
  SumsTo to;
  const Vec16* sums;  // what earlier turns have made and the last one adds; else null
  GradientTo() = default;
  DEVICE GradientTo(const MoeGradient& g, u64 first, u32 ld, u32 row, u32 column, u32 separated, bool begins, bool ends)
      : to{g.to, first + column, ld, (Into)g.into, row, separated}, sums(nullptr) {
    if (is_f32(to.into)) to.into = begins ? to.into : ADD_F32;
    else if (!ends) to.c = g.sums, to.into = begins ? SET_F32 : ADD_F32;
    else if (!begins) sums = (const Vec16*)g.sums;
  }
  DEVICE Vec16 was(u32 row, u32 column) const { return sums ? target::read(sums + to.at(row, column) / 4) : to.was(row, column); }
  DEVICE void put(u32 row, u32 column, const float (&four)[4], const Vec16& was) const {
    if (!sums) return to.put(row, column, four, was);
    float x[4];
    for (u32 j = 0; j < 4; j++) x[j] = four[j] + float_of_four(was, j);
    to.put(row, column, x, to.was(row, column));
  }
  template <class F> DEVICE void visit(F f) const {
    if (sums) f(*this);
    else to.visit(f);
  }
};

// Either of them.
struct MoeSumsTo {
  bool is_gradient;
  GradientTo gradient;
  DSwigluTo dh;
  DEVICE explicit MoeSumsTo(const GradientTo& to) : is_gradient(true), gradient(to), dh() {}
  DEVICE explicit MoeSumsTo(const DSwigluTo& to) : is_gradient(false), gradient(), dh(to) {}
  DEVICE Vec16 was(u32 row, u32 column) const { return is_gradient ? gradient.was(row, column) : dh.was(row, column); }
  DEVICE void put(u32 row, u32 column, const float (&four)[4], const Vec16& was) const {
    if (is_gradient) gradient.put(row, column, four, was);
    else dh.put(row, column, four, was);
  }
  template <class F> DEVICE void visit(F f) const {
    if (is_gradient) gradient.visit(f);
    else f(dh);
  }
};

struct MoeGradients {
  const MoeBackwardParams& p;
  const MoeRouting& r;
  const Router router;
  const MoeRows rows;
  DEVICE explicit MoeGradients(const MoeBackwardParams& p) : p(p), r(p.routing), router(p), rows(p) {}

  DEVICE u64 slot_row(u32 v) const { return (u64)(v % p.x_slots) * p.layout.tile_m; }  // its first, of every ring
  DEVICE Vec16* ring_dy(u32 q, u32 v) const { return p.arena_of[q] + p.dy_at + slot_row(v) * rows.words; }

  // dOut of this rank's tokens in a tile row, weighted where the fold weights; and x of them where it is not there any more.
  DEVICE void push(const Work& w, bool with_x) const {
    const bool inputs = r.weigh_inputs;
    if (with_x) rows.dispatch(p.g.rank, w.row, w.part, p.x, p.list, rows.ring_x(w.chunk, w.row), inputs);
    rows.dispatch(p.g.rank, w.row, w.part, p.dout, p.list, ring_dy(w.chunk, w.row), !inputs);
  }
  // Rows of dX of rank d in tile row v, back to it.
  DEVICE void send(const Work& w) const { rows.send(w, p.dx_rows + slot_row(w.row) * rows.words, p.arena_of[w.chunk] + p.dx_at); }

  DEVICE Vec16* landing() const { return p.arena_of[p.g.rank] + p.dx_at; }

  // ---- DWEIGHT: a block of tokens
  // Inner products over a row: each lane of a team adds every so many words, and one of them their sums. Products of a token: of
  // its choices, and of the shared expert's output if that has a gate.
  DEVICE bool gated() const { return p.S && p.gate_column != NOBODY; }
  DEVICE u32 dots() const { return r.top_k + gated(); }
  DEVICE u64 partial_at(u64 dot, u32 lane) const { return dot * TEAM + lane; }
  // Of x with up to N rows, null where there is none; `dot` is the first one's number. All of WIDE words are on their way at a time.
  template <u32 N> DEVICE void multiply(const Vec16* x, const Vec16* const (&y)[N], u64 dot, u32 place, u32 lanes) const {
    constexpr u32 WIDE = MoeRows::FOLD_WIDE;
    float sum[N] = {};
    for (u32 first = place; first < rows.words; first += WIDE * lanes) {
      Vec16 a[WIDE], b[N][WIDE];
#pragma unroll
      for (u32 m = 0; m < WIDE; m++) {
        const u32 c = first + m * lanes;
        a[m] = c < rows.words ? target::read(x + c) : Vec16{};
#pragma unroll
        for (u32 j = 0; j < N; j++) b[j][m] = y[j] && c < rows.words ? target::read(y[j] + c) : Vec16{};
      }
#pragma unroll
      for (u32 j = 0; j < N; j++)
        for (u32 m = 0; m < WIDE && first + m * lanes < rows.words; m++)
          for (u32 i = 0; i < 8; i++) sum[j] = target::fma(bf16_at(a[m], i), bf16_at(b[j][m], i), sum[j]);
    }
#pragma unroll
    for (u32 j = 0; j < N; j++)
      if (y[j]) target::write(p.partials + partial_at(dot + j, place), number_and_float(0, sum[j]));
  }
  DEVICE void add_products(u32 begin, u32 n) const {
    constexpr u32 BATCH = 8;
    const u32 D = dots(), k = r.top_k;
    const Vec16* of_choices = r.weigh_inputs ? landing() : rows.combine(p.g.rank);
    each_row(n, [&](u32 i, u32 place, u32 lanes) {
      const u64 t = begin + i, at = t * rows.words;
      for (u32 first = 0; first < k; first += BATCH) {
        const Vec16* y[BATCH];
#pragma unroll
        for (u32 j = 0; j < BATCH; j++)
          y[j] = first + j < k ? of_choices + target::read(p.row_of_slot + t * k + first + j) * rows.words : nullptr;
        multiply((r.weigh_inputs ? p.x : p.dout) + at, y, t * D + first, place, lanes);
      }
      const Vec16* shared[1] = {p.shared_y + at};
      if (gated()) multiply(p.dout + at, shared, t * D + k, place, lanes);
    });
    target::barrier();
  }
  DEVICE float product(u64 dot) const {
    float sum = 0;
    for (u32 part = 0; part < team_lanes(); part++) sum += float_in(target::read(p.partials + partial_at(dot, part)));
    return sum;
  }

  // ---- through weights and scores to logits (facts: numerics/moe/routing.py)
  DEVICE bool routed() const { return p.given != EXPERTS_AND_WEIGHTS; }
  // Softmax over the chosen logits: nothing of what weights are made of reaches other logits.
  DEVICE bool of_chosen_alone() const { return r.score == SOFTMAX && r.normalise && r.eps == 0; }
  DEVICE float aux_of(u32 e) const {  // dL / d(expert e's share of the scores), of any token
    return r.aux_scale == 0 ? 0.f : p.aux_grad * r.aux_scale * (float)number_in(target::read(p.aux_sums + e));
  }
  DEVICE u64* token_word(u64 t) const { return p.partials + partial_at(t * dots(), 0); }

  // One token, by one lane: of its choices' scores. What is left for a logit is in two numbers of the token.
  DEVICE void finish_token(u64 t) const {
    const u32 k = r.top_k;
    float sum = 0, along = 0, gate = 0;
    if (gated()) gate = product(t * dots() + k);
    for (u32 j = 0; j < k; j++) {
      const float dw = product(t * dots() + j);
      target::write(p.dweights + t * k + j, two_floats(0, dw));
      if (!routed()) continue;
      const float v = router.score((u32)t, number_in(target::read(p.choices + t * k + j)));
      sum += v;
      along = target::fma(dw, v, along);
    }
    float shift = 0, total = 1;
    if (routed()) {
      sum += r.eps;
      for (u32 j = 0; j < k; j++) {
        const float dw = float_in(target::read(p.dweights + t * k + j));
        const float v = router.score((u32)t, number_in(target::read(p.choices + t * k + j)));
        float dv = r.scale * (r.normalise ? (dw - along / sum) / sum : dw);
        if (of_chosen_alone()) dv *= v;  // of the logit itself
        else if (r.score == SOFTMAX) shift = target::fma(dv, v, shift);
        target::write(p.dweights + t * k + j, two_floats(dv, dw));
      }
      float all = 0, aux = 0;
      for (u32 e = 0; r.aux_scale != 0 && e < router.experts; e++) {
        const float s = router.score((u32)t, e);
        all += s;
        aux = target::fma(aux_of(e), s, aux);
      }
      if (r.aux_scale != 0) {
        total = r.score == SOFTMAX ? 1.f : all + r.eps;
        shift = r.score == SOFTMAX ? shift + aux : aux / total;
      }
    }
    target::write(token_word(t), two_floats(shift, total));
    if (gated()) target::write(token_word(t) + 1, number_and_float(0, gate));
  }

  DEVICE float dlogit(u64 t, u32 e) const {
    if (gated() && e == p.gate_column) {
      const float s = sigmoid(float_at(p.logits, t * p.logit_ld + e));
      return s * (1.f - s) * float_in(target::read(token_word(t) + 1));
    }
    if (!routed() || e >= router.experts) return 0;
    float of_score = 0, of_logit = 0;
    for (u32 j = 0; j < r.top_k; j++)
      if (number_in(target::read(p.choices + t * r.top_k + j)) == e)
        (of_chosen_alone() ? of_logit : of_score) = float_of((u32)target::read(p.dweights + t * r.top_k + j));
    const u64 word = target::read(token_word(t));
    const float shift = float_of((u32)word), s = router.score((u32)t, e);
    if (r.score == SOFTMAX) return of_logit + s * (of_score + aux_of(e) - shift);
    const float ds = of_score + (aux_of(e) - shift) / float_in(word);
    if (r.score == SIGMOID) return ds * s * (1.f - s);
    return s > 0 ? ds * sigmoid(router.logit((u32)t, e)) / (2.f * s) : 0.f;
  }
  // Four neighbouring logits of a token: FP32, and as what the next products multiply: the nearest BF16, then what it lacks.
  DEVICE void store_dlogits(u64 t, u32 e) const {
    float x[4], rest[4];
    for (u32 j = 0; j < 4; j++) x[j] = dlogit(t, e + j);
    if (e < p.router_rows) target::write(p.dlogits + (t * p.router_rows + e) / 4, four_floats(x));
    const u64 high = pack_bf16(x[0], x[1], x[2], x[3]);
    for (u32 j = 0; j < 4; j++) rest[j] = x[j] - from_bf16(high >> 16 * j & 0xffff);
    const u64 low = pack_bf16(rest[0], rest[1], rest[2], rest[3]);
    for (u32 copy = 0; copy < p.router_copies; copy++)
      target::write((u64*)p.own_left + (t * p.own_ld + copy * p.router_ld + e) / 4, copy % 2 ? low : high);
  }

  DEVICE void dweight(u32 b) const {
    const u32 begin = b * p.block, left = p.tokens - begin, n = left < p.block ? left : p.block, fours = p.router_ld / 4;
    add_products(begin, n);
    for (u32 t = target::lane(); t < n; t += target::lanes()) finish_token(begin + t);
    target::barrier();
    for (u32 i = target::lane(); i < n * fours; i += target::lanes()) store_dlogits(begin + i / fours, i % fours * 4);
  }

  // A block of tokens: rows of dX that have come back, in the order of choices, and what router and shared expert give.
  DEVICE void fold(u32 b) const {
    constexpr u32 WIDE = MoeRows::FOLD_WIDE;
    const u32 begin = b * p.block, left = p.tokens - begin, words = rows.words;
    each_row(left < p.block ? left : p.block, [&](u32 i, u32 place, u32 lanes) {
      const u64 t = begin + i;
      for (u32 c = place; c < words; c += WIDE * lanes) {
        float sum[WIDE][8] = {};
        rows.add_rows(sum, t, landing(), r.weigh_inputs, c, lanes);
        for (u32 m = 0; m < WIDE && c + m * lanes < words; m++) {
          const u64 at = t * words + c + m * lanes;
          for (u32 half = 0; p.own_ld && half < 2; half++) {
            float own[4];
            floats_at(p.own_dx, at * 8 + half * 4, own);
            for (u32 j = 0; j < 4; j++) sum[m][half * 4 + j] += own[j];
          }
          target::write(p.dx + at, eight_bf16(sum[m]));
        }
      }
    });
  }
};
