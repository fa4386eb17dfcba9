// DOING IT, PLAN: from the counts of all ranks to the tables of MoeLayout. One WG, all its lanes; a barrier between steps.
#pragma once
#include "../schedule/moe_params.h"
#include "route.h"

// put(i, sum of get(0 .. i - 1)) for i < n, which says get(i) again. Returns the sum of all. `room`: a word a lane.
template <class Get, class Put> DEVICE inline u32 scan_lanes(u64* room, u32 n, Get get, Put put) {
  const u32 lanes = target::lanes(), each = (n + lanes - 1) / lanes, lane = target::lane();
  const u32 begin = lane * each < n ? lane * each : n, end = begin + each < n ? begin + each : n;
  u32 own = 0, before = 0, all = 0;
  for (u32 i = begin; i < end; i++) own += get(i);
  target::write(room + lane, (u64)own);
  target::barrier();
#pragma unroll 8
  for (u32 j = 0; j < lanes; j++) {
    const u32 sum = (u32)target::read(room + j);
    before += j < lane ? sum : 0;
    all += sum;
  }
  for (u32 i = begin; i < end; i++) before += put(i, before);
  target::barrier();
  return all;
}
template <class Each> DEVICE inline void each_lane(u32 n, Each each) {
  for (u32 i = target::lane(); i < n; i += target::lanes()) each(i);
  target::barrier();
}

struct MoePlanner {
  const MoeParams& p;
  const MoeLayout& l;
  const u32 R, E, me;
  DEVICE explicit MoePlanner(const MoeParams& p) : p(p), l(p.layout), R(p.g.ranks), E(p.layout.experts), me(p.g.rank) {}

  DEVICE void set(u32 at, u32 x) const { target::write(l.tables + at, (u64)x); }
  DEVICE u32 rows_of(u32 o) const { return l.at(MoeLayout::OWNER_BASE + o + 1) - l.at(MoeLayout::OWNER_BASE + o); }

  // Counts as they came, and where each group begins in its expert.
  DEVICE void take_counts() const {
    const u64* counts = Router(p).counts_at(me);
    each_lane(E, [&](u32 e) {
      u32 rows = 0;
      for (u32 q = 0; q < R; q++) {
        const u32 n = (u32)target::read(counts + q * E + e);
        set(l.counts_at() + q * E + e, n);
        set(l.starts_at() + q * E + e, rows);
        rows += (n + l.pad - 1) / l.pad * l.pad;
      }
      set(l.starts_at() + R * E + e, rows);
      set(l.strides_at() + e, stride((rows + l.tile_m - 1) / l.tile_m));
    });
  }
  // The first number from n / ranks on that has no divisor in common with n: so every tile is visited once.
  DEVICE u32 stride(u32 n) const {
    if (!l.strided || n <= R) return 1;
    for (u32 a = n / R;; a++) {
      u32 x = a, y = n;
      while (y) {
        const u32 rest = x % y;
        x = y;
        y = rest;
      }
      if (x == 1) return a;
    }
  }

  // Sums over all experts of all ranks, then less what came before the first of each rank.
  DEVICE void number_rows() const {
    const auto numbers = [&](u32 n, u32 to, auto get) {
      return scan_lanes(p.scan_room, n, get, [&](u32 i, u32 before) { return set(to + i, before), get(i); });
    };
    numbers(R * E, l.bases_at(), [&](u32 i) { return l.at(l.counts_at() + i); });
    const u32 all = numbers(E, l.tile_bases_at(), [&](u32 e) { return l.tiles(e); });
    each_lane(R + 1, [&](u32 q) {
      if (q < R) set(MoeLayout::RANK_BASE + q, l.at(l.bases_at() + q * E));
      set(MoeLayout::OWNER_BASE + q, l.first_expert(q) < E ? l.at(l.tile_bases_at() + l.first_expert(q)) : all);
    });
    each_lane(R * E, [&](u32 i) { set(l.bases_at() + i, l.at(l.bases_at() + i) - l.at(MoeLayout::RANK_BASE + i / E)); });
    each_lane(E, [&](u32 e) { set(l.tile_bases_at() + e, l.tile_base(e) - l.at(MoeLayout::OWNER_BASE + l.owner(e))); });
  }

  // Of tile row v of owner o: the last expert that begins there or before; experts without rows begin where the next does.
  DEVICE u32 expert_at(u32 o, u32 v) const {
    u32 e = l.first_expert(o), end = l.first_expert(o + 1);
    while (end - e > 1) {
      const u32 middle = (e + end) / 2;
      if (l.tile_base(middle) <= v) e = middle;
      else end = middle;
    }
    return e;
  }
  DEVICE bool has_rows(u32 q, u32 e, u32 v) const {
    const MoeLayout::Rows rows = l.real_rows_in(q, e, l.tile_of(e, v));
    return rows.begin < rows.end;
  }
  DEVICE void describe_own_rows() const {
    each_lane(rows_of(me), [&](u32 v) {
      const u32 e = expert_at(me, v);
      u32 sources = 0;
      for (u32 q = 0; q < R; q++) sources |= has_rows(q, e, v) << q;
      set(l.experts_at() + v, e);
      set(l.sources_of_at() + v, sources);
    });
  }

  // A list of units: for each tile row, for each rank from the next one on, those for which expert(rank, v) is one.
  template <class Expert> DEVICE u32 list(u32 rows, u32 to, u32 ends, Expert expert) const {
    const u32 per_step = l.step_rows * R;
    const auto rank_at = [&](u32 i) { return (me + 1 + i % R) % R; };
    const u32 n = scan_lanes(
        p.scan_room, rows * R, [&](u32 i) { return (u32)(expert(rank_at(i), i / R) != NOBODY); },
        [&](u32 i, u32 at) {
          if (i && i % per_step == 0) set(ends + i / per_step - 1, at);
          const u32 e = expert(rank_at(i), i / R);
          if (e != NOBODY) target::write(l.tables + to + at, MoeLayout::pack(rank_at(i), i / R, e));
          return (u32)(e != NOBODY);
        });
    if (rows && target::lane() == 0) set(ends + (rows - 1) / l.step_rows, n);
    return n;
  }
  DEVICE u32 list_moves(u32 most) const {
    const auto pushed = [&](u32 o, u32 v) {
      if (v >= rows_of(o)) return NOBODY;
      const u32 e = expert_at(o, v);
      return has_rows(me, e, v) ? e : NOBODY;
    };
    return l.pull ? list_own(l.moves_at(), l.moves_end_at()) : list(most, l.moves_at(), l.moves_end_at(), pushed);
  }
  // Of this rank's own tile rows, whoever has rows in them.
  DEVICE u32 list_own(u32 to, u32 ends) const {
    return list(rows_of(me), to, ends, [&](u32 q, u32 v) {
      return l.at(l.sources_of_at() + v) >> q & 1 ? l.at(l.experts_at() + v) : NOBODY;
    });
  }

  // How many sends each rank gets, and which ranks will send here.
  DEVICE void count_sends() const {
    const u32 each = target::lanes() / R ? target::lanes() / R : 1;  // lanes of a rank, or one of several ranks
    each_lane(R * each, [&](u32 i) {
      const u32 q = i / each;
      u32 sends = 0, owes = 0;
      for (u32 e = l.first_expert(me) + i % each; e < l.first_expert(me + 1); e += each)
        if (const u32 n = l.count(q, e)) sends += (l.start(q, e) + n - 1) / l.tile_m - l.start(q, e) / l.tile_m + 1;
      for (u32 e = l.first_expert(q) + i % each; e < l.first_expert(q + 1); e += each) owes |= l.count(me, e);
      target::write(p.scan_room + i, (u64)(owes != 0) << 32 | sends);
    });
    each_lane(R, [&](u32 q) {
      u32 sends = 0, owes = 0;
      for (u32 i = q * each; i < (q + 1) * each; i++) {
        const u64 part = target::read(p.scan_room + i);
        sends += (u32)part;
        owes |= (u32)(part >> 32);
      }
      set(MoeLayout::SENDS_TO + q, sends);
      set(MoeLayout::OWES + q, owes);
    });
  }

  DEVICE void plan() const {
    take_counts();
    number_rows();
    describe_own_rows();
    u32 most = 0;
    for (u32 o = 0; o < R; o++) most = rows_of(o) > most ? rows_of(o) : most;
    const u32 moves = list_moves(most), sends = list_own(l.sends_at(), l.sends_end_at());
    count_sends();
    if (target::lane() == 0) {
      set(MoeLayout::N_MOVES, moves);
      set(MoeLayout::N_SENDS, sends);
      set(MoeLayout::N_ROWS, rows_of(me));
      // Rows that are pushed go to all owners, so steps are those of the longest.
      set(MoeLayout::N_STEPS, ((l.pull ? rows_of(me) : most) + l.step_rows - 1) / l.step_rows);
    }
    Router(p).end_aux();
  }
};
