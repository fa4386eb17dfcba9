// DOING IT, data movement: the same loops for 512 lanes, 256 or one. Never asks what comes next.
#pragma once
#include "../schedule/chunks.h"
#include "../target/target.h"

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
    for (u32 j = 0; j < BATCH; j++)
      if (i + j * step < end) v[j] = target::read(from + i + j * step);
#pragma unroll
    for (u32 j = 0; j < BATCH; j++)
      if (i + j * step < end) target::write(to + i + j * step, v[j]);
  } else {
    for (; i < end; i += step) target::write(to + i, target::read(from + i));
  }
}

// One of `slices` equal parts of a tile row of rank q's shard, to its place in the gathered matrix. K in elements.
DEVICE inline void pull_slice(Vec16* gathered, const Vec16* shard, const Chunks& m, u32 K, u32 q, u32 row, u32 slice, u32 slices) {
  const u64 words = K / 8, first = (u64)row * m.tile_m, n = m.rows_in(q, row) * words;
  copy_words(gathered + (m.first[q] + first) * words, shard + first * words, n * slice / slices, n * (slice + 1) / slices);
}
