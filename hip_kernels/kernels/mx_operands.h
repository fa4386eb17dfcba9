// Operands of tiles of operators in MXFP8. Where the target cannot multiply that, they are BF16 that lies alike.
#pragma once
#include "../work/mx_copy.h"
#include "../work/mx_move.h"
#include "tile_operands.h"

constexpr Element MX_ELEMENT = target::MULTIPLIES_MXFP8 ? MXFP8 : BF16;

// Lines of one side, from the first that a tile reads on.
struct MxSide {
  const Vec16* lines;
  const u32* scales;
  u32 ld;  // of scales
};
// From line `line` and element k of it on, of lines of `depth`. k is a multiple of 128.
DEVICE inline MxSide mx_side(const Vec16* lines, const MxScales& s, u64 line, u32 depth, u32 k = 0) {
  return {lines + (line * depth + k) / MX_WORD, s.words + (u64)(k / MX_STEP) * s.ld + line, s.ld};
}
DEVICE inline MxSide mx_side(const MxCopy& m, u64 line, u32 k = 0) {
  return mx_side(m.elements, {m.scales, m.ld_scales, 0}, line, m.depth, k);
}
DEVICE inline TileOperands mx_operands(const MxSide& a, u32 rows, const MxSide& b, u32 cols, u32 K, u32 depth_a, u32 depth_b) {
  return {a.lines, b.lines, rows, cols, K, depth_a, depth_b, a.scales, b.scales, a.ld, b.ld};
}
DEVICE inline TileOperands mx_operands(const MxSide& a, u32 rows, const MxSide& b, u32 cols, u32 K, u32 depth) {
  return mx_operands(a, rows, b, cols, K, depth, depth);
}

// Rows of a gathered matrix that a TILE reads: own ones where they are, peers' where they were pulled to.
template <class P> DEVICE inline MxSide gathered_side(const P& p, const Work& w) {
  const u32 q = w.chunk;
  const u64 row = (u64)w.row * p.m.tile_m;
  if constexpr (!target::MULTIPLIES_MXFP8) return {p.mx.values + (p.m.first[q] + row) * (p.K / 8), nullptr, 0};
  const MxLines peers = gathered_rows(p, q);
  const bool own = q == p.g.rank;
  const Vec16 *elements = own ? p.shard_of[q] : peers.elements, *scales = own ? p.mx.scales_of[q] : peers.scales;
  return {elements + row * peers.pitch, (const u32*)scales + row, peers.ld};
}
