// DOING IT, rows of an MoE layer in MXFP8: quantised as they are moved, and as they are made.
#pragma once
#include "moe.h"
#include "mx_copy.h"

struct MoeMxfp8Rows {
  const MoeParams& p;
  const MoeMxfp8& mx;
  const MoeRows rows;
  DEVICE MoeMxfp8Rows(const MoeParams& p, const MoeMxfp8& mx) : p(p), mx(mx), rows(p) {}

  DEVICE MxCopy ring_x(u32 q) const {
    Vec16* arena = p.arena_of[q];
    return {arena + p.x_at, (u32*)(arena + mx.x_scales_at), mx.depth, p.x_slots * p.layout.tile_m};
  }
  // Rows of source q for tile row v of their owner, into its ring of x. Padding is zeros.
  DEVICE void dispatch(u32 owner, u32 q, u32 v, u32 e, const Vec16* x, const u64* list) const {
    const u64 slot_row = (u64)(v % p.x_slots) * p.layout.tile_m;
    rows.place_rows(q, v, e, x, list, p.routing.weigh_inputs, [&](u32 first, u32 n, auto source) {
      quantize_along(ring_x(owner), slot_row + first, 0, n, mx.depth / MX_BLOCK, [&](u32 row, u32 block, Vec16 (&four)[4]) {
        const SourceRow from = source(row);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          const u32 word = block * 4 + j;
          four[j] = word < rows.words ? from.weighted(from.read(word)) : Vec16{};
        }
      });
    });
  }
  DEVICE void dispatch(const Work& w) const {
    rows.moved(w, [&](u32 owner, u32 source, const Vec16* x, const u64* list) { dispatch(owner, source, w.row, w.part, x, list); });
  }

  // What GEMM1's tile has made of h, whose tile row begins with row `first` of the ring.
  DEVICE void quantize_h(const Work& w, u64 first) const {
    const u32 column = w.part * (p.tile_n / 2), columns = p.I - column < p.tile_n / 2 ? p.I - column : p.tile_n / 2;
    quantize_along(mx.h, first, column, p.layout.rows_in(w.row), columns / MX_BLOCK, [&](u32 row, u32 block, Vec16 (&four)[4]) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) four[j] = target::read(p.h + ((first + row) * p.I + column) / 8 + block * 4 + j);
    });
  }
};
