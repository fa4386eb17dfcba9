// Rows dealt to ranks, in any way: equal, ragged, none. A tile row never crosses a chunk.
#pragma once
#include "../target/target.h"

struct Chunks {
  u32 first[MAX_RANKS + 1];  // rank q owns rows first[q] .. first[q + 1] of the gathered matrix
  u32 tile_m;                // rows of a tile row; the last one of a chunk may be short
  u32 tile_rows_max;         // tile rows of the longest chunk
  u32 zero;
  DEVICE u32 rows(u32 q) const { return first[q + 1] - first[q]; }
  DEVICE u32 tile_rows(u32 q) const { return (rows(q) + tile_m - 1) / tile_m; }
  DEVICE u32 rows_in(u32 q, u32 row) const {
    const u32 left = rows(q) - row * tile_m;
    return left < tile_m ? left : tile_m;
  }
};
static_assert(sizeof(Chunks) == 48);
