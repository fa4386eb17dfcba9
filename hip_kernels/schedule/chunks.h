// Rows dealt to ranks, in any way: equal, ragged, none. A tile row never crosses a chunk.
#pragma once
#include "../target/target.h"

struct Chunks {
  u32 first[MAX_RANKS + 1];  // rank q owns rows first[q] .. first[q + 1] of the gathered matrix
  u32 tile_m;                // rows of a tile row; the last one of a chunk may be short
  u32 tile_rows_max;         // tile rows of the longest chunk
  u32 side_by_side;          // tile rows of the own chunk that are worked on together; 0 = one
  DEVICE u32 rows(u32 q) const { return first[q + 1] - first[q]; }
  DEVICE u32 tile_rows(u32 q) const { return (rows(q) + tile_m - 1) / tile_m; }
  DEVICE u32 rows_in(u32 q, u32 row) const {
    const u32 left = rows(q) - row * tile_m;
    return left < tile_m ? left : tile_m;
  }
};
static_assert(sizeof(Chunks) == 48);

// Where part `part` of n words begins, which lie from word `at` of memory on and are cut in `parts` nearly equal parts; part ==
// parts: where they end. Cut at whole KiB, for what is moved from between two lines of memory asks for both of them: bulk_rs
// on two H200s took 0.164 ms so, and 0.120 where its parts happened to be whole.
DEVICE inline u64 part_begin(u64 at, u64 n, u32 part, u32 parts) {
  if (part == parts) return n;
  const u64 cut = (at + n * part / parts) / target::CUT_WORDS * target::CUT_WORDS;
  return cut > at ? cut - at : 0;
}

struct TileAt { u32 row, column; };

// Tile i of `rows` tile rows, in groups of `height` of them; inside a group the row changes fastest. So tiles that are
// worked on at a time share rows of both operands, and caches need not hold a whole operand.
DEVICE inline TileAt tile_in_groups(u32 i, u32 rows, u32 columns, u32 height) {
  const u32 first = i / (height * columns) * height, left = rows - first, in = i - first * columns;
  if (left < height) height = left;
  return {first + in % height, in / height};
}
