// DOING IT, copies in MXFP8 of what moe_backward multiplies. Along rows they are for gradients of data, across them for
// gradients of weights; both are made of the same BF16. No block across has rows of two groups, for groups are padded to
// whole blocks; nor does padding enter a sum, for it is zeros.
#pragma once
#include "moe_backward.h"
#include "moe_mxfp8.h"

struct MoeMxfp8Gradients {
  const MoeBackwardMxfp8Params& p;
  const MoeLayout& l;
  const MoeGradients g;
  DEVICE explicit MoeMxfp8Gradients(const MoeBackwardMxfp8Params& p) : p(p), l(p.layout), g(p) {}

  DEVICE u32 slot_k(u32 v) const { return v % p.x_slots * p.tile_k; }  // where its rows begin in lines of columns
  // Elements that the contraction over a piece's rows has.
  DEVICE u32 depth(const MoePiece& x) const {
    if (!x.blocks) return 0;
    const u32 before = x.blocks - 1;
    return before * p.tile_k + padded_to_step(x.rows - before * l.tile_m);
  }
  DEVICE MxCopy x_columns(u32 q) const {
    Vec16* arena = p.arena_of[q];
    return {arena + p.x_columns_at, (u32*)(arena + p.x_column_scales_at), p.x_slots * p.tile_k, p.H};
  }

  // ---- PUSH: rows of dOut as they are; columns of x, quantised here; rows of x where pre is made again.
  DEVICE void push(const Work& w, bool replays) const {
    const u32 me = p.g.rank;
    g.push(w, false);
    if (replays) MoeMxfp8Rows(p, p.mx).dispatch(w.chunk, me, w.row, w.part, p.x, p.list);
    g.rows.place_rows(me, w.row, w.part, p.x, p.list, p.routing.weigh_inputs, [&](u32 first, u32 n, auto source) {
      quantize_across(x_columns(w.chunk), 0, slot_k(w.row) + first, n / MX_BLOCK, p.H / 4, [&](u32 row, u32 four) {
        const SourceRow from = source(row);
        return from.at ? from.weighted(Vec16{target::read((const u64*)from.at + four), 0}).lo : 0;
      });
    });
  }

  // ---- QUANT: a part of H of a tile row
  DEVICE void quantize_dy(const Work& w) const {
    const u32 v = w.row, n = l.rows_in(v), all = padded_to_step(n), column = w.part * p.quant_width;
    const u32 left = p.mx.depth - column, width = left < p.quant_width ? left : p.quant_width;
    const u32 real = p.H < column + width ? p.H - column : width, words = g.rows.words;
    const Vec16* from = g.ring_dy(p.g.rank, v) + column / 8;
    quantize_along(p.dy_copy, g.slot_row(v), column, n, width / MX_BLOCK, [&](u32 row, u32 block, Vec16 (&four)[4]) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const u32 word = block * 4 + j;
        four[j] = word < real / 8 ? target::read(from + (u64)row * words + word) : Vec16{};
      }
    });
    quantize_across(p.dy_columns_copy, column, slot_k(v), all / MX_BLOCK, real / 4, FoursOf{from, words, n});
    // Sources have pushed columns of x as far as they have rows.
    quantize_across(x_columns(p.g.rank), column, slot_k(v) + n, (all - n) / MX_BLOCK, real / 4, [](u32, u32) { return 0ull; });
  }

  // ---- what a tile of DGRAD2 has made of h and dpre
  DEVICE void make_copies(const Work& w) const {
    const u32 v = w.row, n = l.rows_in(v), blocks = padded_to_step(n) / MX_BLOCK, column = w.part * p.tile_n;
    const u32 width = p.I - column < p.tile_n ? p.I - column : p.tile_n;
    const Vec16 *h = p.h + (g.slot_row(v) * p.I + column) / 8, *dpre = p.dpre + (g.slot_row(v) * 2 * p.I + 2 * column) / 8;
    quantize_across(p.h_columns_copy, column, slot_k(v), blocks, width / 4, FoursOf{h, p.I / 8, n});
    quantize_across(p.dpre_columns_copy, 2 * column, slot_k(v), blocks, 2 * width / 4, FoursOf{dpre, p.I / 4, n});
    quantize_along(p.dpre_copy, g.slot_row(v), 2 * column, n, 2 * width / MX_BLOCK, [&](u32 row, u32 block, Vec16 (&four)[4]) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) four[j] = target::read(dpre + (u64)row * (p.I / 4) + block * 4 + j);
    });
  }
};
