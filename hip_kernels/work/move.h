// DOING IT, data movement: the same loops for 512 lanes, 256 or one. Never asks what comes next.
#pragma once
#include "../schedule/gather.h"  // defines: Pulls

// Copies words [begin, end), all lanes together. Several loads are in flight before the first store: a pull pays the
// round trip of a link once a batch.
DEVICE inline void copy_words(Vec16* to, const Vec16* from, u64 begin, u64 end) {
  constexpr u32 BATCH = target::COPY_BATCH;
  const u64 step = target::lanes();
  u64 i = begin + target::lane();
  for (; i + (BATCH - 1) * step < end; i += BATCH * step) {
    Vec16 v[BATCH];
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) v[j] = target::read(from + i + j * step);
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) target::write(to + i + j * step, v[j]);
  }
  if constexpr (BATCH > 8) {  // a lane has registers to spare: the rest too at one go
    Vec16 v[BATCH];
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      v[j] = {};  // or compilers keep what was there before, in registers, through all other work
      if (i + j * step < end) v[j] = target::read(from + i + j * step);
    }
#pragma unroll
    for (u32 j = 0; j < BATCH; j++)
      if (i + j * step < end) target::write(to + i + j * step, v[j]);
  } else {
    for (; i < end; i += step) target::write(to + i, target::read(from + i));
  }
}

// `lines` of `words`, each so many words behind the one before. Lanes go through all words as if they followed each other.
DEVICE inline void copy_lines(Vec16* to, u32 to_pitch, const Vec16* from, u32 from_pitch, u32 lines, u32 words) {
  if (to_pitch == words && from_pitch == words) return copy_words(to, from, 0, (u64)lines * words);
  constexpr u32 BATCH = target::COPY_BATCH;
  const u32 step = target::lanes(), all = lines * words;
  for (u32 i = target::lane(); i < all; i += BATCH * step) {
    Vec16 v[BATCH];
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      const u32 at = i + j * step;
      v[j] = {};  // as above
      if (at < all) v[j] = target::read(from + (u64)(at / words) * from_pitch + at % words);
    }
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      const u32 at = i + j * step;
      if (at < all) target::write(to + (u64)(at / words) * to_pitch + at % words, v[j]);
    }
  }
}

// What a PULL copies: lines of `words`, each `pitch` words behind the one before, in both places.
struct Block {
  Vec16* to;
  const Vec16* from;
  u32 lines, words, pitch;
};

DEVICE inline void copy_block(const Block& b) {
  target::moved((u64)b.lines * b.words * 16);
  copy_lines(b.to, b.pitch, b.from, b.pitch, b.lines, b.words);
}

// The rows and columns of one PULL from a shard to their place in the gathered matrix, of `words` 16-byte words a row.
DEVICE inline Block block_of(const Work& w, const Pulls& cut, const Chunks& m, u32 words, Vec16* gathered, const Vec16* shard) {
  const u32 slice = w.part % cut.slices, column = w.part / cut.slices * cut.slab_words, rows = m.rows_in(w.chunk, w.row);
  const u32 begin = rows * slice / cut.slices, end = rows * (slice + 1) / cut.slices, left = words - column;
  const u64 at = ((u64)w.row * m.tile_m + begin) * words + column;
  return {gathered + m.first[w.chunk] * (u64)words + at, shard + at, end - begin, left < cut.slab_words ? left : cut.slab_words,
          words};
}
