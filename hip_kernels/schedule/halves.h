// The last tiles of a queue are taken in halves: tiles do not come out even over WGs, and what a last wave that fills some of
// them costs, it then costs half. The part of a HALF counts half columns; half a tile's width is a multiple of 8.
#pragma once
#include "group.h"

// Columns of the product that a tile, or half of one, makes.
struct Columns {
  u32 first, count;
  DEVICE Columns(const Work& w, u32 column, u32 N, u32 tile_n) {
    const u32 width = w.kind == HALF ? tile_n / 2 : tile_n;
    first = column * width;
    count = N - first < width ? N - first : width;
  }
};

// A queue of `entries`, of which the last `halved` are taken in halves.
struct Halves {
  u32 entries, whole;
  DEVICE Halves(u32 entries, u32 halved) : entries(entries), whole(halved < entries ? entries - halved : 0) {}
  DEVICE u32 all() const { return whole + 2 * (entries - whole); }
  DEVICE u32 entry(u32 i) const { return i < whole ? i : whole + (i - whole) / 2; }
  // Entry i, which as a whole would be w. LEAVE: there is nothing in the second half.
  DEVICE Work of(u32 i, const Work& w, u32 N, u32 tile_n) const {
    if (i < whole || w.kind != TILE) return w;
    const u32 part = 2 * w.part + (i - whole) % 2;
    if (part * (tile_n / 2) < N) return {HALF, w.chunk, w.row, part};
    return {};
  }
};
