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

// The best of both; NOBODY is worse than all.
DEVICE inline void improve(Pick& best, const Pick& c) {
  if (c.index != NOBODY && (best.index == NOBODY || c.before(best))) best = c;
}
// The best candidate of begin, begin + step, ... below end, behind `last` (NOBODY: of all). Keys are asked for again in every
// pass: that needs no list, so top_k may be any number.
template <class Key> DEVICE inline Pick next_best(u32 begin, u32 end, u32 step, const Pick& last, Key key) {
  Pick best = {0, NOBODY};
  for (u32 i = begin; i < end; i += step) {
    const Pick c = {key(i), i};
    if (last.index == NOBODY || last.before(c)) improve(best, c);
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

  // Words of a token's scratch: 0 the last choice of plain top-k, 1 what its scores are divided by; then what each lane of
  // its team, or each group, has found: twice, for some lanes may still look at the last round's.
  DEVICE u64* scratch(u32 t) const { return p.token_scratch + TOKEN_WORDS * (u64)t; }
  DEVICE u64* found(u32 t, u32 round) const { return scratch(t) + 2 + round % 2 * MAX_TEAM; }
  // Lanes that choose for one token together. Of all lanes, as many teams as tokens in a block, or one lane.
  DEVICE u32 team() const {
    const u32 n = target::lanes() / p.block;
    return n < 1 ? 1 : n < MAX_TEAM ? n : MAX_TEAM;
  }
  // For each token of the block: each(token, place in the team), by all lanes of its team; token is NOBODY where none is left.
  // All lanes come here as often, so there may be barriers.
  template <class Each> DEVICE void each_team(u32 begin, u32 end, Each each) const {
    const u32 lanes = team(), teams = target::lanes() / lanes, mine = target::lane() / lanes;
    for (u32 first = begin; first < end; first += teams) {
      const u32 t = first + mine;
      each(mine < teams && t < end ? t : NOBODY, target::lane() % lanes);
    }
  }
  template <class Each> DEVICE static void each_token(u32 begin, u32 end, Each each) {
    for (u32 t = begin + target::lane(); t < end; t += target::lanes()) each(t);
  }

  // An FP32 router is three BF16 ones, each of what those before it have rounded off: columns of the first, of the second, of
  // the third. Their sum goes to the place of the first.
  DEVICE void join_parts(u32 begin, u32 end) const {
    const u32 n = p.router_rows;
    each_four(begin, end, n / 4, [&](u32 t, u32 e) {
      const u64 at = (u64)t * p.logit_ld + e;
      float a[4], b[4], c[4];
      floats_at(p.logits, at, a);
      floats_at(p.logits, at + n, b);
      floats_at(p.logits, at + 2 * n, c);
      for (u32 j = 0; j < 4; j++) a[j] += b[j] + c[j];
      target::write(p.logits + at / 4, four_floats(a));
    });
  }
  // each(token, the first of four columns).
  template <class Each> DEVICE static void each_four(u32 begin, u32 end, u32 fours, Each each) {
    for (u32 i = target::lane(); i < (end - begin) * fours; i += target::lanes()) each(begin + i / fours, i % fours * 4);
    target::barrier();
  }

  DEVICE void make_scores(u32 begin, u32 end) const {
    const bool softmax = r.score == SOFTMAX;
    if (softmax) find_largest(begin, end);
    each_four(begin, end, score_ld / 4, [&](u32 t, u32 e) {
      float z[4], s[4];
      floats_at(p.logits, (u64)t * p.logit_ld + e, z);  // rows of logits end no sooner than those of scores
      const float most = softmax ? float_in(target::read(scratch(t))) : 0.f;
      for (u32 j = 0; j < 4; j++) s[j] = e + j < experts ? score_of(z[j], most) : 0.f;
      target::write(p.scores + ((u64)t * score_ld + e) / 4, four_floats(s));
    });
    if (!softmax) return;
    each_token(begin, end, [&](u32 t) { target::write(scratch(t), number_and_float(0, sum_of_scores(t))); });
    target::barrier();
    each_four(begin, end, score_ld / 4, [&](u32 t, u32 e) {
      const u64 at = (u64)t * score_ld + e;
      const float sum = float_in(target::read(scratch(t)));
      float s[4];
      floats_at(p.scores, at, s);
      for (u32 j = 0; j < 4; j++) s[j] = s[j] / sum;
      target::write(p.scores + at / 4, four_floats(s));
    });
  }
  // Of a softmax, before it is divided.
  DEVICE float score_of(float z, float most) const {
    if (r.score == SIGMOID) return sigmoid(z);
    return r.score == SQRT_SOFTPLUS ? target::sqrt(softplus(z)) : exp_of(z - most);
  }
  DEVICE void find_largest(u32 begin, u32 end) const {
    each_team(begin, end, [&](u32 t, u32 place) {
      float most = -float_of(FP32_INFINITY);
      for (u32 e = place; t != NOBODY && e < experts; e += team()) most = logit(t, e) > most ? logit(t, e) : most;
      if (t != NOBODY) target::write(found(t, 0) + place, number_and_float(0, most));
    });
    target::barrier();
    each_token(begin, end, [&](u32 t) {
      float most = -float_of(FP32_INFINITY);
      for (u32 i = 0; i < team(); i++) {
        const float x = float_in(target::read(found(t, 0) + i));
        most = x > most ? x : most;
      }
      target::write(scratch(t), number_and_float(0, most));
    });
    target::barrier();
  }
  // By one lane, for sums have an order: of the experts. What rows are filled up with is zero.
  DEVICE float sum_of_scores(u32 t) const {
    float sum = 0;
#pragma unroll 4
    for (u32 e = 0; e < score_ld; e += 4) {
      float s[4];
      floats_at(p.scores, (u64)t * score_ld + e, s);
      for (u32 j = 0; j < 4; j++) sum += s[j];
    }
    return sum;
  }

  // Scores of groups of experts, and the best of them as bits.
  DEVICE void score_groups(u32 begin, u32 end) const {
    const u32 each = experts / r.groups;
    for (u32 i = target::lane(); i < (end - begin) * r.groups; i += target::lanes()) {
      const u32 t = begin + i / r.groups, g = i % r.groups;
      float sum = 0;
      Pick last = {0, NOBODY};
      for (u32 j = 0; j < r.group_top; j++) {
        last = next_best(g * each, (g + 1) * each, 1, last, [&](u32 e) { return key(t, e); });
        sum += last.key;
      }
      target::write(found(t, 0) + g, number_and_float(0, clean(sum)));
    }
    target::barrier();
  }
  DEVICE u32 best_groups(u32 t) const {
    u32 mask = 0;
    Pick last = {0, NOBODY};
    for (u32 j = 0; j < r.top_groups; j++) {
      last = next_best(0, r.groups, 1, last, [&](u32 g) { return float_in(target::read(found(t, 0) + g)); });
      mask |= 1u << last.index;
    }
    return mask;
  }

  // The top_k best experts of each token, best first, each of a team's lanes looking at some: take(token, slot, pick), by one
  // of them. `among`: the token's groups, as bits.
  template <class Among, class Key, class Take>
  DEVICE void select(u32 begin, u32 end, Among among, Key key, Take take) const {
    const u32 lanes = team(), each = experts / r.groups;
    each_team(begin, end, [&](u32 t, u32 place) {
      const bool there = t != NOBODY;
      const u32 groups = there ? among(t) : 0;
      const auto next = [&](const Pick& last) {
        Pick best = {0, NOBODY};
        for (u32 g = 0; g < r.groups; g++)
          if (groups >> g & 1) improve(best, next_best(g * each + place, (g + 1) * each, lanes, last, [&](u32 e) { return key(t, e); }));
        return best;
      };
      target::barrier();  // all have seen their groups
      Pick best = next({0, NOBODY});
      for (u32 j = 0; j < r.top_k; j++) {
        if (there) target::write(found(t, j) + place, number_and_float(best.index, best.key));
        target::barrier();
        Pick winner = {0, NOBODY};
        for (u32 i = 0; there && i < lanes; i++) {
          const u64 c = target::read(found(t, j) + i);
          improve(winner, {float_in(c), number_in(c)});
        }
        if (there && place == 0) take(t, j, winner);
        if (there && best.index == winner.index) best = next(winner);
      }
    });
    target::barrier();
  }

  // Choices of a block, and their weights; by one lane a token where it knows them already.
  DEVICE void choose(u32 begin, u32 end) const {
    const auto put = [&](u32 t, u32 j, u32 e) {
      target::write(p.choices + (u64)t * r.top_k + j, number_and_float(e, score(t, e)));
      if (j + 1 == r.top_k) weigh(t);
    };
    const bool aux = r.aux_scale != 0, chosen = p.given != NO_CHOICES;
    if (!chosen) {
      if (r.groups > 1) score_groups(begin, end);
      select(begin, end, [&](u32 t) { return r.groups > 1 ? best_groups(t) : 1u; }, [&](u32 t, u32 e) { return key(t, e); },
             [&](u32 t, u32 j, const Pick& c) {
               put(t, j, c.index);
               if (aux && plain() && j + 1 == r.top_k) last_for_aux(t, c);
             });
    } else {
      each_token(begin, end, [&](u32 t) {
        for (u32 j = 0; j < r.top_k; j++) put(t, j, number_in(target::read(p.choices + (u64)t * r.top_k + j)));
      });
    }
    // The loss counts the choices of plain top-k, whatever bias and groups have made of them.
    if (aux && (chosen || !plain()))
      select(begin, end, [](u32) { return ~0u; }, [&](u32 t, u32 e) { return plain_key(t, e); },
             [&](u32 t, u32 j, const Pick& c) {
               if (j + 1 == r.top_k) last_for_aux(t, c);
             });
    target::barrier();
  }
  DEVICE void weigh(u32 t) const {
    u64* to = p.choices + (u64)t * r.top_k;
    float sum = 0;
    for (u32 j = 0; j < r.top_k; j++) sum += float_in(target::read(to + j));
    for (u32 j = 0; j < r.top_k; j++) {
      const u64 c = target::read(to + j);
      const float w = r.normalise ? float_in(c) / (sum + r.eps) : float_in(c);
      target::write(to + j, number_and_float(number_in(c), r.scale * w));
    }
  }
  DEVICE void last_for_aux(u32 t, const Pick& last) const {
    target::write(scratch(t), number_and_float(last.index, last.key));
    target::write(scratch(t) + 1, number_and_float(0, r.score == SOFTMAX ? 1.f : sum_of_scores(t) + r.eps));
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
      choose(begin, end);
      if (r.aux_scale != 0) add_aux(b, begin, end);
    }
    count_choices(b, begin, end);
  }

  // SCAN: where each block's rows begin in each expert's list. The sums are this rank's counts, and go to all ranks.
  DEVICE void scan(u32 part, u32 blocks) const {
    const u32 R = p.g.ranks, begin = experts * part / p.scans, end = experts * (part + 1) / p.scans;
    const u64 to = (u64)p.g.rank * experts;
    constexpr u32 BATCH = 16;  // a round trip for so many blocks, not for each
    for (u32 e = begin + target::lane(); e < end; e += target::lanes()) {
      u32 rows = 0, n = 0;
      float sum = 0;
      for (u32 first = 0; first < blocks; first += BATCH) {
        const u32 left = blocks - first;
        u32 more[BATCH];
        u64 aux[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
          const u64 at = (u64)(first + i) * experts + e;
          more[i] = i < left ? (u32)target::read(p.places + at) : 0;
          aux[i] = i < left && r.aux_scale != 0 ? target::read(p.aux_parts + at) : 0;
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
          if (i < left) target::write(p.places + (u64)(first + i) * experts + e, (u64)rows);
          rows += more[i];
          n += number_in(aux[i]);
          sum += float_in(aux[i]);
        }
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
#pragma unroll 16
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
