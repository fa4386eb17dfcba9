// DOING IT, routing: from logits to choices, the send list, and the auxiliary loss. FP32; every sum has a fixed order.
#pragma once
#include "../schedule/moe_params.h"
#include "scalar.h"

// One candidate. Order: the larger key first, then the lower index. A NaN is as good as nothing.
struct Pick {
  float key;
  u32 index;
  DEVICE bool before(const Pick& o) const { return key > o.key || (key == o.key && index < o.index); }
};

// The best candidate of [begin, end) behind `last` (NOBODY: of all). Keys are asked for again in every pass: that needs no
// list, so top_k may be any number.
template <class Key> DEVICE inline Pick next_best(u32 begin, u32 end, const Pick& last, Key key) {
  Pick best = {0, NOBODY};
  for (u32 i = begin; i < end; i++) {
    const Pick c = {key(i), i};
    if (last.index != NOBODY && !last.before(c)) continue;
    if (best.index == NOBODY || c.before(best)) best = c;
  }
  return best;
}

struct Router {
  const MoeParams& p;
  const MoeRouting& r;
  u32 experts, score_ld;
  DEVICE explicit Router(const MoeParams& p) : p(p), r(p.routing), experts(p.layout.experts), score_ld((experts + 3) / 4 * 4) {}

  DEVICE float logit(u32 t, u32 e) const { return float_at(p.logits, (u64)t * p.logit_ld + e); }
  DEVICE float score(u32 t, u32 e) const { return float_at(p.scores, (u64)t * score_ld + e); }
  DEVICE static float clean(float x) { return x == x ? x : -float_of(FP32_INFINITY); }
  // Scores rise with logits, but two of them may round to one: plain top-k looks at logits.
  DEVICE float plain_key(u32 t, u32 e) const { return clean(logit(t, e)); }
  DEVICE bool plain() const { return !p.weights.bias && r.groups == 1; }
  DEVICE float key(u32 t, u32 e) const {
    if (plain()) return plain_key(t, e);
    const float s = score(t, e);
    return clean(p.weights.bias ? s + float_at(p.weights.bias, e) : s);
  }

  // Words of a token's scratch: 0 the last choice of plain top-k, 1 what its scores are divided by.
  DEVICE u64* scratch(u32 t) const { return p.token_scratch + 2 * (u64)t; }

  // An FP32 router is three BF16 ones, each of what those before it have rounded off: columns of the first, of the second, of
  // the third. Their sum goes to the place of the first.
  DEVICE void join_parts(u32 begin, u32 end) const {
    const u32 n = p.router_rows, fours = n / 4;
    for (u32 i = target::lane(); i < (end - begin) * fours; i += target::lanes()) {
      const u64 at = (u64)(begin + i / fours) * p.logit_ld + i % fours * 4;
      float sum[4];
      for (u32 j = 0; j < 4; j++)
        sum[j] = float_at(p.logits, at + j) + (float_at(p.logits, at + n + j) + float_at(p.logits, at + 2 * n + j));
      target::write(p.logits + at / 4, four_floats(sum));
    }
    target::barrier();
  }

  DEVICE void make_scores(u32 begin, u32 end) const {
    if (r.score == SOFTMAX) {
      for (u32 t = begin + target::lane(); t < end; t += target::lanes()) {
        float most = -float_of(FP32_INFINITY), sum = 0;
        for (u32 e = 0; e < experts; e++) most = logit(t, e) > most ? logit(t, e) : most;
        for (u32 e = 0; e < experts; e++) sum += exp_of(logit(t, e) - most);
        target::write(scratch(t), two_floats(most, sum));
      }
      target::barrier();
    }
    const u32 fours = score_ld / 4;
    for (u32 i = target::lane(); i < (end - begin) * fours; i += target::lanes()) {
      const u32 t = begin + i / fours, e = i % fours * 4;
      float s[4] = {};
      for (u32 j = 0; j < 4; j++)
        if (e + j < experts) s[j] = score_of(t, logit(t, e + j));
      target::write(p.scores + ((u64)t * score_ld + e) / 4, four_floats(s));
    }
    target::barrier();
  }
  DEVICE float score_of(u32 t, float z) const {
    if (r.score == SIGMOID) return sigmoid(z);
    if (r.score == SQRT_SOFTPLUS) return target::sqrt(softplus(z));
    const u64 stats = target::read(scratch(t));
    return exp_of(z - float_of((u32)stats)) / float_in(stats);
  }

  // The groups of experts that a token may choose from, as bits.
  DEVICE u32 allowed_groups(u32 t) const {
    if (r.groups == 1) return 1;
    const u32 each = experts / r.groups;
    const auto group_score = [&](u32 g) {
      float sum = 0;
      Pick last = {0, NOBODY};
      for (u32 j = 0; j < r.group_top; j++) {
        last = next_best(g * each, (g + 1) * each, last, [&](u32 e) { return key(t, e); });
        sum += last.key;
      }
      return clean(sum);
    };
    u32 mask = 0;
    Pick last = {0, NOBODY};
    for (u32 j = 0; j < r.top_groups; j++) {
      last = next_best(0, r.groups, last, group_score);
      mask |= 1u << last.index;
    }
    return mask;
  }

  // One token, by one lane.
  DEVICE void choose(u32 t) const {
    const u32 groups = allowed_groups(t), each = experts / r.groups;
    u64* to = p.choices + (u64)t * r.top_k;
    float sum = 0;
    Pick last = {0, NOBODY};
    for (u32 j = 0; j < r.top_k; j++) {
      Pick best = {0, NOBODY};
      for (u32 g = 0; g < r.groups && p.given == NO_CHOICES; g++) {
        if (!(groups >> g & 1)) continue;
        const Pick c = next_best(g * each, (g + 1) * each, last, [&](u32 e) { return key(t, e); });
        if (c.index != NOBODY && (best.index == NOBODY || c.before(best))) best = c;
      }
      last = p.given == NO_CHOICES ? best : Pick{0, number_in(target::read(to + j))};
      const float s = score(t, last.index);
      sum += s;
      target::write(to + j, number_and_float(last.index, s));
    }
    for (u32 j = 0; j < r.top_k; j++) {
      const u64 c = target::read(to + j);
      const float w = r.normalise ? float_in(c) / (sum + r.eps) : float_in(c);
      target::write(to + j, number_and_float(number_in(c), r.scale * w));
    }
    if (r.aux_scale != 0) remember_for_aux(t);
  }

  // The loss counts the choices of plain top-k, whatever bias and groups have made of them.
  DEVICE void remember_for_aux(u32 t) const {
    Pick last = {0, NOBODY};
    for (u32 j = 0; j < r.top_k; j++) last = next_best(0, experts, last, [&](u32 e) { return plain_key(t, e); });
    float all = 0;
    for (u32 e = 0; r.score != SOFTMAX && e < experts; e++) all += score(t, e);
    target::write(scratch(t), number_and_float(last.index, last.key));
    target::write(scratch(t) + 1, number_and_float(0, r.score == SOFTMAX ? 1.f : all + r.eps));
  }

  // Of a block: how many of its rows go to each expert.
  DEVICE void count_choices(u32 b, u32 begin, u32 end) const {
    for (u32 e = target::lane(); e < experts; e += target::lanes()) {
      u32 n = 0;
      for (u64 i = (u64)begin * r.top_k; i < (u64)end * r.top_k; i++) n += number_in(target::read(p.choices + i)) == e;
      target::write(p.places + (u64)b * experts + e, (u64)n);
    }
  }
  DEVICE void add_aux(u32 b, u32 begin, u32 end) const {
    for (u32 e = target::lane(); e < experts; e += target::lanes()) {
      u32 n = 0;
      float sum = 0;
      for (u32 t = begin; t < end; t++) {
        const u64 last = target::read(scratch(t));
        n += !Pick{float_in(last), number_in(last)}.before({plain_key(t, e), e});
        sum += score(t, e) / float_in(target::read(scratch(t) + 1));
      }
      target::write(p.aux_parts + (u64)b * experts + e, number_and_float(n, sum));
    }
  }

  // TOPK: a block of tokens.
  DEVICE void block(u32 b) const {
    const u32 begin = b * p.block, left = p.tokens - begin, end = begin + (left < p.block ? left : p.block);
    if (p.router_parts > 1) join_parts(begin, end);
    if (p.given != EXPERTS_AND_WEIGHTS) {
      make_scores(begin, end);
      for (u32 t = begin + target::lane(); t < end; t += target::lanes()) choose(t);
      target::barrier();
      if (r.aux_scale != 0) add_aux(b, begin, end);
    }
    count_choices(b, begin, end);
  }

  // SCAN: where each block's rows begin in each expert's list. The sums are this rank's counts, and go to all ranks.
  DEVICE void scan(u32 part, u32 blocks) const {
    const u32 R = p.g.ranks, begin = experts * part / p.scans, end = experts * (part + 1) / p.scans;
    const u64 to = (u64)p.g.rank * experts;
    for (u32 e = begin + target::lane(); e < end; e += target::lanes()) {
      u32 rows = 0, n = 0;
      float sum = 0;
      for (u32 b = 0; b < blocks; b++) {
        const u64 at = (u64)b * experts + e;
        const u32 more = (u32)target::read(p.places + at);
        target::write(p.places + at, (u64)rows);
        rows += more;
        if (r.aux_scale == 0) continue;
        const u64 aux = target::read(p.aux_parts + at);
        n += number_in(aux);
        sum += float_in(aux);
      }
      for (u32 q = 0; q < R; q++) target::write(counts_at(q) + to + e, (u64)rows);
      if (r.aux_scale != 0) target::write(p.aux_sums + e, number_and_float(n, sum));
    }
  }
  // The copy of this launch, at rank q.
  DEVICE u64* counts_at(u32 q) const { return (u64*)(p.arena_of[q] + p.counts_at + p.g.epoch % 2 * p.counts_words); }

  // Part of PLAN, by one lane: the auxiliary loss from the sums of all experts.
  DEVICE void end_aux() const {
    if (target::lane() != 0) return;
    float loss = 0;
    for (u32 e = 0; r.aux_scale != 0 && e < experts; e++) {
      const u64 aux = target::read(p.aux_sums + e);
      loss = target::fma((float)number_in(aux), float_in(aux), loss);
    }
    target::write(p.aux_loss, number_and_float(0, r.aux_scale * loss));
  }

  // SORT: puts a block's rows into the list, by expert and then by token: a stable counting sort.
  DEVICE void sort(u32 b) const {
    const u32 begin = b * p.block, left = p.tokens - begin, first = begin * r.top_k;
    const u32 end = first + (left < p.block ? left : p.block) * r.top_k;
    const u64* counts = counts_at(p.g.rank) + (u64)p.g.rank * experts;
    for (u32 i = first + target::lane(); i < end; i += target::lanes()) {
      const u32 e = number_in(target::read(p.choices + i));
      u32 at = (u32)target::read(p.places + (u64)b * experts + e);
      for (u32 f = 0; f < e; f++) at += (u32)target::read(counts + f);
      for (u32 j = first; j < i; j++) at += number_in(target::read(p.choices + j)) == e;
      target::write(p.list + at, (u64)i);
      target::write(p.row_of_slot + i, (u64)at);
    }
  }
};
