// The main queue of moe_backward: which work its i-th entry is. PLAN writes it down once (work/moe_backward_plan.h), for it
// follows from counts; a WG looks up where it is.
//
// A ROUND is the tile rows [r * B, (r + 1) * B) of an owner, B = round_rows: what the rings give up together. Rounds are worked
// on from the LAST one down, for that is what the forward has left in its rings. A PIECE is the tile rows of one expert
// in one round: their weight gradient is one contraction, over rows that follow each other in the rings. Where weights are
// not added to, an expert without rows has a piece of none, whose gradient is zeros.
//
// Order of the queue, pieces of a round from its last expert down. What is waited for lies far ahead of who waits:
//     of each round: for each piece: QUANT in MXFP8; of the piece before REPLAY (GEMM1) if x was not kept; of the one before
//                    that DGRAD2. WGRAD2 of a piece once `lead` other entries lie behind its DGRAD2, or all of the round
//                    behind the first round's: OWN_DX and ROUTER_DW, which hide the last experts' landing
//                    for each piece: DGRAD1, then WGRAD1. In MXFP8 DGRAD1 of all of them first: their rows go back while
//                    WGRAD1, which nobody sends, is made
//     pieces without rows, folds
// With weights on inputs OWN_DX and ROUTER_DW stand before the folds: they need rows that have come back.
#pragma once
#include "chunks.h"
#include "moe_backward_params.h"

struct MoePiece {
  u32 first, blocks;  // tile rows
  u32 expert;         // of this rank, from 0
  u32 rows;           // rows, padding of groups included, without what is missing in an expert's last tile row
  u32 begins, ends;   // no piece of the expert comes before, behind it
};

struct MoeBackwardQueue {
  const MoeBackwardParams& p;
  DEVICE explicit MoeBackwardQueue(const MoeBackwardParams& p) : p(p) {}

  // `count` entries of `kind` for piece `piece`; `begin`: the number of the first.
  struct Segment {
    u32 begin, count;
    Kind kind;
    u32 piece;
  };
  enum : u32 { N_PIECES, N_SEGMENTS, HEAD, PIECE_WORDS = 3, SEGMENT_WORDS = 2 };
  // Rounds without pieces do not exist, so there are at most as many as pieces.
  DEVICE u32 segment_cap() const { return 6 * p.piece_cap + 9; }
  DEVICE u32 piece_at(u32 i) const { return HEAD + i * PIECE_WORDS; }
  DEVICE u32 segment_at(u32 i) const { return HEAD + p.piece_cap * PIECE_WORDS + i * SEGMENT_WORDS; }
  DEVICE u32 words() const { return segment_at(segment_cap()); }

  DEVICE u64 at(u32 i) const {
    const u64 w = target::read(p.pieces + i);
    return (u64)target::uniform((u32)(w >> 32)) << 32 | target::uniform((u32)w);
  }
  DEVICE MoePiece piece(u32 i) const {
    const u64 a = at(piece_at(i)), b = at(piece_at(i) + 1), c = at(piece_at(i) + 2);
    return {(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32), (u32)c & 1, (u32)c >> 1 & 1};
  }
  DEVICE Segment segment(u32 i) const {
    const u64 a = at(segment_at(i)), b = at(segment_at(i) + 1);
    return {(u32)a, (u32)(a >> 32), (Kind)(b >> 32), (u32)b};
  }
  DEVICE void put(u32 i, const MoePiece& x) const {
    target::write(p.pieces + piece_at(i), (u64)x.blocks << 32 | x.first);
    target::write(p.pieces + piece_at(i) + 1, (u64)x.rows << 32 | x.expert);
    target::write(p.pieces + piece_at(i) + 2, (u64)(x.begins | x.ends << 1));
  }
  DEVICE void put(u32 i, const Segment& s) const {
    target::write(p.pieces + segment_at(i), (u64)s.count << 32 | s.begin);
    target::write(p.pieces + segment_at(i) + 1, (u64)s.kind << 32 | s.piece);
  }

  // Tiles of a kind for a piece.
  DEVICE u32 tiles(Kind kind, u32 blocks) const {
    switch (kind) {
      case QUANT: return blocks * p.quants;
      case GEMM1: return blocks * p.cols_2i;
      case DGRAD2: return blocks * p.cols_i;
      case DGRAD1: return blocks * p.cols_h;
      case WGRAD2: return p.rows_h * p.cols_i;
      case WGRAD1: return p.rows_2i * p.cols_h;
      default: return 0;
    }
  }

  // Where a WG is: entries that it asks for only rise, and most lie in the segment of the one before. That is read once.
  struct At {
    u32 next = 0;  // segment
    Segment s = {0, 0, LEAVE, 0};
  };
  // Entry i. The last segment is of LEAVE, and has no end.
  DEVICE Work entry(u32 i, At& at) const {
    while (i - at.s.begin >= at.s.count) at.s = segment(at.next++);
    return item(at.s.kind, at.s.piece, i - at.s.begin);
  }
  DEVICE u32 side_by_side() const { return p.side_by_side ? p.side_by_side : 1; }
  // Of a matrix of weights, the number of its n-th tile: tiles that are made at a time share what they read.
  DEVICE u32 part(u32 n, u32 rows, u32 columns) const {
    const TileAt t = tile_in_groups(n, rows, columns, side_by_side());
    return t.row * columns + t.column;
  }
  // Of rows of tokens.
  DEVICE Work of_tokens(Kind kind, u32 n, u32 columns) const {
    const TileAt t = tile_in_groups(n, (p.tokens + p.layout.tile_m - 1) / p.layout.tile_m, columns, side_by_side());
    return {kind, p.g.rank, t.row, t.column};
  }
  // Tiles of rows: row is the tile row. Of weights: row is the piece (of the router: which part of the sum), part the tile.
  DEVICE Work item(Kind kind, u32 which, u32 n) const {
    const u32 me = p.g.rank;
    switch (kind) {
      case QUANT: case GEMM1: case DGRAD2: case DGRAD1: {
        const MoePiece x = piece(which);
        const TileAt t = tile_in_groups(n, x.blocks, tiles(kind, 1), side_by_side());
        return {kind, me, x.first + x.blocks - 1 - t.row, t.column};  // rows come from the last one down
      }
      case WGRAD2: return {kind, me, which, part(n, p.rows_h, p.cols_i)};
      case WGRAD1: return {kind, me, which, part(n, p.rows_2i, p.cols_h)};
      case OWN_DX: return of_tokens(kind, n, p.cols_h);
      case ROUTER_DW: return {kind, me, n / (p.rows_r * p.cols_h), n % (p.rows_r * p.cols_h)};
      case FOLD: return {kind, me, n};
      default: return {kind, me, which, n};
    }
  }
};
