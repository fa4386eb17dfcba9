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
  DEVICE void add(Kind kind, u32 piece, u32 count, Kind side = LEAVE, u32 side_piece = 0, u32 side_count = 0) {
    if (!count && !side_count) return;
    queue.put(segments++, Segment{entries, count, side_count, kind, side, piece, side_piece});
    entries += count + side_count;
  }

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
    for (u32 i = begin; i < begin + n; i++) {
      const u32 blocks = queue.piece(i).blocks;
      add(QUANT, i, queue.tiles(QUANT, blocks));
      if (again) add(GEMM1, i, queue.tiles(GEMM1, blocks));
      add(DGRAD2, i, queue.tiles(DGRAD2, blocks), WGRAD2, i - 1, i > begin ? queue.tiles(WGRAD2, 1) : 0);
    }
    add(WGRAD2, begin + n - 1, queue.tiles(WGRAD2, 1));
    if (first_round) add_router();
    for (u32 i = begin; i < begin + n; i++)
      add(DGRAD1, i, queue.tiles(DGRAD1, queue.piece(i).blocks), WGRAD1, i, p.quants ? 0 : queue.tiles(WGRAD1, 1));
    for (u32 i = begin; p.quants && i < begin + n; i++) add(WGRAD1, i, queue.tiles(WGRAD1, 1));
  }
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
      if (!adds(p.d_down)) add(WGRAD2, pieces, queue.tiles(WGRAD2, 1));
      if (!adds(p.d_gate_up)) add(WGRAD1, pieces, queue.tiles(WGRAD1, 1));
      pieces++;
    }
    if (late) add_router();
    const u32 folds = entries;
    add(FOLD, 0, (p.tokens + p.block - 1) / p.block);
    target::write(p.pieces + MoeBackwardQueue::N_ENTRIES, (u64)entries);
    target::write(p.pieces + MoeBackwardQueue::N_BEFORE_FOLDS, (u64)folds);
    target::write(p.pieces + MoeBackwardQueue::N_PIECES, (u64)pieces);
    target::write(p.pieces + MoeBackwardQueue::N_SEGMENTS, (u64)segments);
  }
};
