// Where every row of an MoE layer lies, on every rank. All of it follows from counts[source][expert], so ranks agree on it
// without a word: nothing but counts, and then rows, crosses ranks.
//
// Group (q, e): the tokens of rank q that go to expert e, in token order, padded to `pad` rows. An expert's rows are its
// groups, sources ascending. Each expert begins a tile row; an owner's tile rows are numbered v = 0, 1, ... over its experts,
// so no tile holds rows of two. `pad` divides tile_m, hence a block of padding holds a real row of the same source, and
// "q has rows in v" is one bit, whether padding counts or not.
//
// The combine buffer of rank d is in the order of d's own send list, expert by expert: row send_base(d, e) + i is row i of
// group (d, e). An owner knows that from the counts, so what it sends back is contiguous here and there.
#pragma once
#include "group.h"

constexpr u32 NOBODY = ~0u;  // no expert, no column

struct MoeLayout {
  u64* tables;    // [words()] written by PLAN (work/moe_plan.h), read by all that comes after it
  u32 rank, ranks;
  u32 experts, per_rank;  // expert e belongs to rank e / per_rank; the last ranks may own fewer, or none
  u32 tile_m, pad;
  u32 step_rows;  // tile rows of every owner that make one step of the queues
  u32 strided;    // see tile_of
  u32 pull;       // rows are pulled by their owner, not pushed by their source
  u32 row_cap, move_cap, send_cap;  // the most tile rows of an owner, and units of the two lists; as the host has sized them

  // Words of the tables. kosmos_raw/plan/moe/forward.py counts the same.
  enum : u32 {
    N_MOVES, N_SENDS, N_ROWS, N_STEPS,
    SENDS_TO,                            // [ranks] units of the list of sends, by destination
    OWES = SENDS_TO + MAX_RANKS,         // [ranks] whether that owner has rows of this rank
    RANK_BASE = OWES + MAX_RANKS,        // [ranks] of PLAN alone
    OWNER_BASE = RANK_BASE + MAX_RANKS,  // [ranks + 1] tile rows of all owners before
    HEAD = OWNER_BASE + MAX_RANKS + 1,
  };
  DEVICE u32 counts_at() const { return HEAD; }                                   // [ranks][experts]
  DEVICE u32 starts_at() const { return counts_at() + ranks * experts; }          // [ranks + 1][experts]
  DEVICE u32 bases_at() const { return starts_at() + (ranks + 1) * experts; }     // [ranks][experts]
  DEVICE u32 tile_bases_at() const { return bases_at() + ranks * experts; }       // [experts]
  DEVICE u32 strides_at() const { return tile_bases_at() + experts; }             // [experts]
  DEVICE u32 experts_at() const { return strides_at() + experts; }                // [row_cap]
  DEVICE u32 sources_of_at() const { return experts_at() + row_cap; }             // [row_cap]
  DEVICE u32 moves_end_at() const { return sources_of_at() + row_cap; }           // [row_cap] by step
  DEVICE u32 sends_end_at() const { return moves_end_at() + row_cap; }            // [row_cap] by step
  DEVICE u32 moves_at() const { return sends_end_at() + row_cap; }                // [move_cap]
  DEVICE u32 sends_at() const { return moves_at() + move_cap; }                   // [send_cap]
  DEVICE u32 words() const { return sends_at() + send_cap; }

  DEVICE u32 at(u32 i) const { return (u32)target::read(tables + i); }
  DEVICE u32 one(u32 i) const { return target::uniform(at(i)); }  // where all lanes ask for the same
  DEVICE u32 rows() const { return one(N_ROWS); }    // tile rows of this rank
  DEVICE u32 steps() const { return one(N_STEPS); }  // that moves go through
  DEVICE u32 count(u32 q, u32 e) const { return at(counts_at() + q * experts + e); }
  DEVICE u32 start(u32 q, u32 e) const { return at(starts_at() + q * experts + e); }  // of group (q, e) in its expert
  DEVICE u32 expert_rows(u32 e) const { return start(ranks, e); }                     // padding included
  DEVICE u32 send_base(u32 q, u32 e) const { return at(bases_at() + q * experts + e); }
  DEVICE u32 tile_base(u32 e) const { return at(tile_bases_at() + e); }  // of the expert's first tile row, at its owner
  DEVICE u32 expert_of(u32 v) const { return one(experts_at() + v); }    // of this rank's tile row v
  DEVICE u32 sources_of(u32 v) const { return one(sources_of_at() + v); }  // bit q: rank q has rows in this rank's tile row v
  DEVICE u32 moves_end(u32 step) const { return one(moves_end_at() + step); }
  DEVICE u32 sends_end(u32 step) const { return one(sends_end_at() + step); }

  DEVICE u32 owner(u32 e) const { return e / per_rank; }
  DEVICE u32 first_expert(u32 o) const {
    const u32 e = o * per_rank;
    return e < experts ? e : experts;
  }
  DEVICE u32 tiles(u32 e) const { return (expert_rows(e) + tile_m - 1) / tile_m; }

  // Units of the lists: rows of rank `chunk` in tile row `row`, which belongs to expert `part`.
  DEVICE static u64 pack(u32 q, u32 v, u32 e) { return (u64)q << 48 | (u64)e << 24 | v; }
  DEVICE Work unit(Kind kind, u32 i) const {
    const u64 w = target::read(tables + i);
    const u32 lo = target::uniform((u32)w), hi = target::uniform((u32)(w >> 32));
    return {kind, hi >> 16, lo & 0xffffff, lo >> 24 | (hi & 0xffff) << 8};
  }
  DEVICE Work move(u32 i) const { return unit(pull ? PULL : PUSH, moves_at() + i); }  // chunk: owner (pull: source)
  DEVICE Work send(u32 i) const { return unit(SEND, sends_at() + i); }                // chunk: destination

  // Which tile of its expert tile row v holds. Rows lie source after source; visited in that order, a short ring would take
  // a hot expert's rows over one link at a time. So an expert with more tiles than ranks is visited in strides, counted from
  // its last tile: that alone may be short, and stays the last.
  DEVICE u32 tile_of(u32 e, u32 v) const {
    const u64 j = v - tile_base(e), stride = at(strides_at() + e);
    if (stride == 1) return (u32)j;
    const u32 n = tiles(e);
    return n - 1 - (u32)((n - 1 - j) * stride % n);
  }

  // Of this rank's tile row v, padding of groups included: fewer than tile_m in an expert's last one.
  DEVICE u32 rows_in(u32 v) const {
    const u32 e = expert_of(v), left = expert_rows(e) - tile_of(e, v) * tile_m;
    return left < tile_m ? left : tile_m;
  }

  // Rows of a group, counted from its start.
  struct Rows { u32 begin, end; };
  DEVICE Rows rows_in(u32 q, u32 e, u32 tile, u32 n) const {  // n: rows of the group, with or without padding
    const u32 first = start(q, e), lo = tile * tile_m, hi = lo + tile_m;
    const auto cut = [&](u32 x) { return x <= first ? 0 : x - first < n ? x - first : n; };
    return {cut(lo), cut(hi)};
  }
  DEVICE Rows padded_rows_in(u32 q, u32 e, u32 tile) const { return rows_in(q, e, tile, start(q + 1, e) - start(q, e)); }
  DEVICE Rows real_rows_in(u32 q, u32 e, u32 tile) const { return rows_in(q, e, tile, count(q, e)); }
};
static_assert(sizeof(MoeLayout) == 56);
