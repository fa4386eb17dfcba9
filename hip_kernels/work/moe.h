// DOING IT, rows of an MoE layer: to the owners of their experts, back, and the fold. And what an epilogue makes of sums.
#pragma once
#include "bf16.h"
#include "move.h"
#include "moe_plan.h"

// Rows of `words` words that follow each other at `to`. key(row) says which row that is, NOBODY: one of zeros; from(key) where
// it lies; change(key, v) is made of each word. Keys of all words that a lane has on their way are there before any word is
// asked for: else each word would wait for the key of the next.
template <class Key, class From, class Change>
DEVICE inline void gather_rows(Vec16* to, u32 rows, u32 words, Key key, From from, Change change) {
  constexpr u32 BATCH = target::COPY_BATCH;
  const u32 all = rows * words, step = target::lanes(), rows_a_step = step / words, columns_a_step = step % words;
  u32 row = target::lane() / words, column = target::lane() % words;
  for (u32 i = target::lane(); i < all; i += BATCH * step) {
    u32 keys[BATCH], columns[BATCH];
    Vec16 v[BATCH];
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      keys[j] = i + j * step < all ? key(row) : NOBODY;
      columns[j] = column;
      row += rows_a_step;
      column += columns_a_step;
      if (column >= words) {
        column -= words;
        row++;
      }
    }
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) v[j] = keys[j] == NOBODY ? Vec16{} : target::read(from(keys[j]) + columns[j]);
#pragma unroll
    for (u32 j = 0; j < BATCH; j++)
      if (i + j * step < all) target::write(to + i + j * step, keys[j] == NOBODY ? v[j] : change(keys[j], v[j]));
  }
}

DEVICE inline Vec16 weighted(const Vec16& v, float weight) {
  float x[8];
  for (u32 i = 0; i < 8; i++) x[i] = weight * bf16_at(v, i);
  return eight_bf16(x);
}

struct MoeRows {
  const MoeParams& p;
  const MoeLayout& l;
  const u32 words;  // of a row of H
  DEVICE explicit MoeRows(const MoeParams& p) : p(p), l(p.layout), words(p.H / 8) {}

  DEVICE Vec16* ring_x(u32 q, u32 v) const { return p.arena_of[q] + p.x_at + (u64)(v % p.x_slots) * l.tile_m * words; }
  DEVICE Vec16* ring_y(u32 v) const { return p.y + (u64)(v % p.y_slots) * l.tile_m * words; }
  DEVICE Vec16* combine(u32 q) const { return p.arena_of[q] + p.combine_at; }

  // Rows of source q for tile row v of their owner, and the padding of their group: place(first, rows, key, from, change). `first`
  // is where they begin in the tile row; the rest is as gather_rows wants it.
  template <class Place>
  DEVICE void place_rows(u32 q, u32 v, u32 e, const Vec16* x, const u64* list, bool weigh, Place place) const {
    const u32 tile = l.tile_of(e, v), k = p.routing.top_k, real = l.count(q, e), base = l.send_base(q, e);
    const MoeLayout::Rows rows = l.padded_rows_in(q, e, tile);
    place(
        l.start(q, e) + rows.begin - tile * l.tile_m, rows.end - rows.begin,
        [&](u32 row) { return rows.begin + row < real ? (u32)target::read(list + base + rows.begin + row) : NOBODY; },
        [&](u32 slot) { return x + (u64)(slot / k) * words; },
        [&](u32 slot, const Vec16& word) {
          return weigh ? weighted(word, float_in(target::read(p.choices + slot))) : word;
        });
  }
  // Into a ring, in which the tile row is at `ring`.
  DEVICE void dispatch(u32 q, u32 v, u32 e, const Vec16* x, const u64* list, Vec16* ring, bool weigh) const {
    place_rows(q, v, e, x, list, weigh, [&](u32 first, u32 rows, auto key, auto from, auto change) {
      gather_rows(ring + (u64)first * words, rows, words, key, from, change);
    });
  }
  // Of a PUSH or PULL: to(owner, source, x, list).
  template <class To> DEVICE void moved(const Work& w, To to) const {
    const bool pull = w.kind == PULL;
    const Vec16* arena = p.arena_of[w.chunk];
    to(pull ? p.g.rank : w.chunk, pull ? w.chunk : p.g.rank, pull ? arena + p.source_at : p.x,
       pull ? (const u64*)(arena + p.list_at) : p.list);
  }
  DEVICE void dispatch(const Work& w) const {
    moved(w, [&](u32 owner, u32 source, const Vec16* x, const u64* list) {
      dispatch(source, w.row, w.part, x, list, ring_x(owner, w.row), p.routing.weigh_inputs);
    });
  }

  // Rows of rank d in tile row v, which is at `ring`, back to it: into a buffer in the order of its send list.
  DEVICE void send(const Work& w) const { send(w, ring_y(w.row), combine(w.chunk)); }
  DEVICE void send(const Work& w, const Vec16* ring, Vec16* to) const {
    const u32 d = w.chunk, e = w.part, tile = l.tile_of(e, w.row);
    const MoeLayout::Rows rows = l.real_rows_in(d, e, tile);
    const Vec16* from = ring + (u64)(l.start(d, e) + rows.begin - tile * l.tile_m) * words;
    copy_words(to + (u64)(l.send_base(d, e) + rows.begin) * words, from, 0, (u64)(rows.end - rows.begin) * words);
  }

  // A block of tokens: each one's rows by its weights, in the order of its choices, and the shared expert's; rounded once.
  // Several rows of a lane are on their way at a time.
  DEVICE void fold(u32 b) const {
    constexpr u32 BATCH = 8;
    const u32 begin = b * p.block, left = p.tokens - begin, n = left < p.block ? left : p.block, k = p.routing.top_k;
    const Vec16* rows = combine(p.g.rank);
    for (u32 i = target::lane(); i < n * words; i += target::lanes()) {
      const u64 t = begin + i / words, at = t * words + i % words;
      const Vec16 shared = p.S ? target::read(p.shared_y + at) : Vec16{};
      float sum[8] = {};
      for (u32 first = 0; first < k; first += BATCH) {
        u32 row[BATCH];
        float weight[BATCH];
        Vec16 y[BATCH];
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) {
          const u64 slot = t * k + first + j;
          row[j] = first + j < k ? (u32)target::read(p.row_of_slot + slot) : NOBODY;
          weight[j] = first + j < k && !p.routing.weigh_inputs ? float_in(target::read(p.choices + slot)) : 1.f;
        }
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) y[j] = row[j] == NOBODY ? Vec16{} : target::read(rows + (u64)row[j] * words + i % words);
#pragma unroll
        for (u32 j = 0; j < BATCH; j++)
          if (row[j] != NOBODY) add(sum, y[j], weight[j]);
      }
      if (p.S) add(sum, shared, p.gate_column == NOBODY ? 1.f : sigmoid(float_at(p.logits, t * p.logit_ld + p.gate_column)));
      target::write(p.out + at, eight_bf16(sum));
    }
  }
  DEVICE static void add(float (&sum)[8], const Vec16& y, float weight) {
    for (u32 c = 0; c < 8; c++) sum[c] = target::fma(weight, bf16_at(y, c), sum[c]);
  }
};

// Four columns of h from sums of gate and up: those are rounded, and kept if the backward wants them; h is made of what is
// kept, so that forward and backward agree. pre: [rows][2 width] in blocks of GATED, h: [rows][width]; column is of h.
struct SwigluTo {
  Vec16 *pre, *h;
  u64 first;          // the tile's first row
  u32 width, column;  // column: the tile's first one, of h
  float limit;
  DEVICE void put(u32 row, u32 column_in, const float (&gate)[4], const float (&up)[4]) const {
    const u64 g = pack_bf16(gate[0], gate[1], gate[2], gate[3]), u = pack_bf16(up[0], up[1], up[2], up[3]);
    const u64 at = (first + row) * width;
    const u32 c = column + column_in;
    if (pre) {
      u64* to = (u64*)pre + (2 * at + c / target::GATED * 2 * target::GATED + c % target::GATED) / 4;
      target::write(to, g);
      target::write(to + target::GATED / 4, u);
    }
    float x[4];
    for (u32 i = 0; i < 4; i++) x[i] = swiglu(from_bf16(g >> 16 * i & 0xffff), from_bf16(u >> 16 * i & 0xffff), limit);
    target::write((u64*)h + (at + c) / 4, pack_bf16(x[0], x[1], x[2], x[3]));
  }
};
