// DOING IT, PLAN of moe_backward: the main queue, from the tables that the forward has left. One lane: a few words a piece.
#pragma once
#include "../schedule/moe_backward_queue.h"
#include "sum.h"

struct MoeBackwardPlanner {
  const MoeBackwardParams& p;
  const MoeLayout& l;
  const MoeBackwardQueue queue;
  u32 pieces = 0, segments = 0, entries = 0;
  DEVICE explicit MoeBackwardPlanner(const MoeBackwardParams& p) : p(p), l(p.layout), queue(p) {}

  using Segment = MoeBackwardQueue::Segment;
  DEVICE void add(Kind kind, u32 piece, u32 count) {
    if (!count) return;
    queue.put(segments++, Segment{entries, count, kind, piece});
    entries += count;
  }
  DEVICE void add_rows(Kind kind, u32 piece) { add(kind, piece, queue.tiles(kind, queue.piece(piece).blocks)); }
  DEVICE void add_weights(Kind kind, u32 piece) { add(kind, piece, queue.tiles(kind, 1)); }

  // Of round r, from the last expert down: `e` is where the round above has ended. Returns their number.
  DEVICE u32 add_pieces(u32 r, u32& e) {
    const u32 bottom = r * p.round_rows, me = p.g.rank, before = pieces;
    u32 end = bottom + p.round_rows < l.rows() ? bottom + p.round_rows : l.rows();
    while (end > bottom) {
      while (l.tile_base(e) >= end) e--;  // experts without rows begin where the next one does
      const u32 base = l.tile_base(e), first = base > bottom ? base : bottom, last = base + l.tiles(e);
      const u32 missing = end == last ? l.tiles(e) * l.tile_m - l.expert_rows(e) : 0;
      queue.put(pieces++, MoePiece{first, end - first, e - l.first_expert(me), (end - first) * l.tile_m - missing, end == last, first == base});
      end = first;
    }
    return pieces - before;
  }
  DEVICE void add_round(u32 r, u32& e, bool first_round) {
    const u32 begin = pieces, n = add_pieces(r, e);
    const bool again = p.replays_all || (r + p.x_slots / p.round_rows) * p.round_rows < l.rows();
    // The pieces' own work comes in three stages, each a piece behind the one before.
    const u32 end = begin + n;
    u32 behind = 0, added = begin;  // behind: entries of DGRAD2 behind those of `added`, whose WGRAD2 comes next
    for (u32 i = begin; i < end + 2; i++) {
      if (i < end) add_rows(QUANT, i);
      if (again && i > begin && i <= end) add_rows(GEMM1, i - 1);
      if (i < begin + 2) continue;
      const u32 made = i - 2;
      add_rows(DGRAD2, made);
      if (made > added) behind += dgrad2_of(made);
      while (added < made && behind >= p.lead) {
        add_weights(WGRAD2, added);
        behind -= dgrad2_of(++added);
      }
    }
    while (added < end) add_weights(WGRAD2, added++);
    if (first_round) add_router();
    for (u32 i = begin; i < end; i++) {
      add_rows(DGRAD1, i);
      if (!p.quants) add_weights(WGRAD1, i);
    }
    for (u32 i = begin; p.quants && i < end; i++) add_weights(WGRAD1, i);
  }
  DEVICE u32 dgrad2_of(u32 piece) const { return queue.tiles(DGRAD2, queue.piece(piece).blocks); }
  DEVICE void add_router() {
    const u32 rows = (p.tokens + l.tile_m - 1) / l.tile_m;
    if (p.own_ld) add(OWN_DX, 0, rows * p.cols_h);
    if (p.router_ld) add(ROUTER_DW, 0, 2 * p.rows_r * p.cols_h);
  }
  DEVICE static bool adds(const MoeGradient& g) { return g.into == ADD_BF16 || g.into == ADD_F32; }

  DEVICE void plan() {
    if (target::lane() != 0) return;
    const u32 me = p.g.rank, rows = l.rows(), own = l.first_expert(me + 1);
    u32 e = own - 1;
    const bool late = p.routing.weigh_inputs;
    for (u32 r = (rows + p.round_rows - 1) / p.round_rows, first = r; r--;) add_round(r, e, r + 1 == first && !late);
    if (!rows && !late) add_router();
    for (u32 f = l.first_expert(me); f < own; f++) {
      if (l.expert_rows(f)) continue;
      queue.put(pieces, MoePiece{rows, 0, f - l.first_expert(me), 0, 1, 1});
      if (!adds(p.d_down)) add_weights(WGRAD2, pieces);
      if (!adds(p.d_gate_up)) add_weights(WGRAD1, pieces);
      pieces++;
    }
    if (late) add_router();
    add(FOLD, 0, (p.tokens + p.block - 1) / p.block);
    target::write(p.pieces + MoeBackwardQueue::N_PIECES, (u64)pieces);
    target::write(p.pieces + MoeBackwardQueue::N_SEGMENTS, (u64)segments);
    add(LEAVE, 0, ~0u - entries);
  }
};
