// DOING IT, MXFP8: copies of a shard moved, elements and scales; and made BF16, where the target cannot multiply them as
// they are.
#pragma once
#include "move.h"
#include "mx_copy.h"

// Lines of a matrix in MXFP8, in memory.
struct MxLines {
  Vec16* elements;
  Vec16* scales;
  u32 pitch;  // 16-byte words from line to line of elements
  u32 ld;     // words of four scales from K step to K step, a multiple of 4
};

// The lines of one PULL. Slices are cut at multiples of 4 lines, so that their scales are whole 16-byte words.
struct MxSlice {
  u32 begin, end;
  DEVICE MxSlice(u32 first, u32 lines, u32 slice, u32 slices) {
    begin = first + (u32)((u64)lines * slice / slices) / 4 * 4;
    end = slice + 1 == slices ? first + lines : first + (u32)((u64)lines * (slice + 1) / slices) / 4 * 4;
  }
};

// `depth` elements of lines begin .. end, and their scales.
DEVICE inline void copy_mxfp8(const MxLines& to, const MxLines& from, const MxSlice& s, u32 depth) {
  const u32 lines = s.end - s.begin, fours = (lines + 3) / 4, words = depth / 16, steps = depth / MX_STEP;
  target::moved((u64)(lines * words + fours * steps) * 16);
  copy_lines(to.elements + (u64)s.begin * to.pitch, to.pitch, from.elements + (u64)s.begin * from.pitch, from.pitch, lines, words);
  copy_lines(to.scales + s.begin / 4, to.ld / 4, from.scales + s.begin / 4, from.ld / 4, steps, fours);
}

// `depth` elements of lines begin .. end as BF16. to: of line 0; `ld`: elements from line to line of it, a multiple of 8.
DEVICE inline void dequantize_lines(Vec16* to, u32 ld, const MxLines& from, const MxSlice& s, u32 depth) {
  const u32 words = depth / 16, all = (s.end - s.begin) * words;
  for (u32 i = target::lane(); i < all; i += target::lanes()) {
    const u32 line = s.begin + i / words, word = i % words, step = word / 8;
    const Vec16 codes = target::read(from.elements + (u64)line * from.pitch + word);
    const u64 two_lines = target::read((const u64*)from.scales + ((u64)step * from.ld + line) / 2);
    const float scale = scale_value(two_lines >> (line % 2 * 32 + word % 8 / 2 * 8) & 255);
    Vec16* at = to + ((u64)line * ld + word * 16) / 8;
#pragma unroll
    for (u32 j = 0; j < 2; j++) target::write(at + j, dequantized(j ? codes.hi : codes.lo, scale));
  }
}

// A PULL of rows. Their gathered scales lie shard by shard, each as at its owner, so that both have one pitch.
// 4 * q: every shard before may be rounded up to 4.
DEVICE inline u64 scales_at(const Chunks& m, u32 q, u32 steps) { return ((m.first[q] + 3) / 4 + q) * (u64)steps; }
DEVICE inline u32 scales_ld(const Chunks& m, u32 q) { return (m.rows(q) + 3) / 4 * 4; }

template <class P> DEVICE inline MxLines gathered_rows(const P& p, u32 q) {
  const u32 words = p.K / 16;
  return {p.gathered + (u64)p.m.first[q] * words, p.mx.scales + scales_at(p.m, q, p.K / MX_STEP), words, scales_ld(p.m, q)};
}
template <class P> DEVICE inline void pull_rows(const P& p, const Work& w) {
  const u32 q = w.chunk;
  const MxSlice s(w.row * p.m.tile_m, p.m.rows_in(q, w.row), w.part, p.pulls.slices);
  const MxLines to = gathered_rows(p, q);
  copy_mxfp8(to, {(Vec16*)p.shard_of[q], (Vec16*)p.mx.scales_of[q], to.pitch, to.ld}, s, p.K);
  if constexpr (!target::MULTIPLIES_MXFP8) {
    target::barrier();
    dequantize_lines(p.mx.values + (u64)p.m.first[q] * (p.K / 8), p.K, to, s, p.K);
  }
}

// A PULL of lines along other ranks' rows: m deals `lines` to every rank that has any. VALUES: tiles of this launch read them.
template <bool VALUES> DEVICE inline void pull_columns(const MxColumns& c, const Chunks& m, const Work& w, u32 slices) {
  const u32 q = w.chunk, depth = c.depth(q), first = c.first[q];
  const MxSlice s(w.row * m.tile_m, m.rows_in(q, w.row), w.part, slices);
  const MxLines to = {c.gathered + first / 16, c.mx.scales + (u64)(first / MX_STEP) * (c.ld / 4), c.depth() / 16, c.ld};
  copy_mxfp8(to, {(Vec16*)c.of[q], (Vec16*)c.mx.scales_of[q], depth / 16, c.ld}, s, depth);
  if constexpr (VALUES && !target::MULTIPLIES_MXFP8) {
    target::barrier();
    dequantize_lines(c.mx.values + first / 8, c.depth(), to, s, depth);
  }
}
