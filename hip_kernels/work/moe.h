// DOING IT, rows of an MoE layer: to the owners of their experts, back, and the fold. And what an epilogue makes of sums.
#pragma once
#include "bf16.h"
#include "moe_plan.h"
#include "move.h"
#include "rows.h"

struct MoeRows {
  const MoeParams& p;
  const MoeLayout& l;
  const u32 words;  // of a row of H
  DEVICE explicit MoeRows(const MoeParams& p) : p(p), l(p.layout), words(p.H / 8) {}

  DEVICE Vec16* ring_x(u32 q, u32 v) const { return p.arena_of[q] + p.x_at + (u64)(v % p.x_slots) * l.tile_m * words; }
  DEVICE Vec16* ring_y(u32 v) const { return p.y + (u64)(v % p.y_slots) * l.tile_m * words; }
  DEVICE Vec16* combine(u32 q) const { return p.arena_of[q] + p.combine_at; }

  // Rows of source q for tile row v of their owner, and the padding of their group: place(first, rows, source). `first` is where
  // they begin in the tile row; source is as gather_rows wants it.
  template <class Place>
  DEVICE void place_rows(u32 q, u32 v, u32 e, const Vec16* x, const u64* list, bool weigh, Place place) const {
    const u32 tile = l.tile_of(e, v), k = p.routing.top_k, real = l.count(q, e), base = l.send_base(q, e);
    const MoeLayout::Rows rows = l.padded_rows_in(q, e, tile);
    place(l.start(q, e) + rows.begin - tile * l.tile_m, rows.end - rows.begin, [&](u32 row) -> SourceRow {
      if (rows.begin + row >= real) return {};
      const u32 slot = (u32)target::read(list + base + rows.begin + row);
      return {x + (u64)(slot / k) * words, weigh ? float_in(target::read(p.choices + slot)) : 1.f, weigh};
    });
  }
  // Into a ring, in which the tile row is at `ring`.
  DEVICE void dispatch(u32 q, u32 v, u32 e, const Vec16* x, const u64* list, Vec16* ring, bool weigh) const {
    place_rows(q, v, e, x, list, weigh, [&](u32 first, u32 rows, auto source) {
      gather_rows(ring + (u64)first * words, rows, words, source);
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

  // Adds to sum words c, c + step, ... of a token's rows, by the weights of its choices or as they are, in the order of choices.
  // All of several rows are on their way at a time.
  template <u32 WIDE>
  DEVICE void add_rows(float (&sum)[WIDE][8], u64 t, const Vec16* rows, bool weigh, u32 c, u32 step) const {
    constexpr u32 BATCH = 8;
    const u32 k = p.routing.top_k;
    for (u32 first = 0; first < k; first += BATCH) {
      u32 row[BATCH];
      float weight[BATCH];
      Vec16 y[BATCH][WIDE];
#pragma unroll
      for (u32 j = 0; j < BATCH; j++) {
        const u64 slot = t * k + first + j;
        row[j] = first + j < k ? (u32)target::read(p.row_of_slot + slot) : NOBODY;
        weight[j] = first + j < k && weigh ? float_in(target::read(p.choices + slot)) : 1.f;
      }
#pragma unroll
      for (u32 j = 0; j < BATCH; j++)
#pragma unroll
        for (u32 m = 0; m < WIDE; m++) {
          const u32 word = c + m * step;
          y[j][m] = row[j] == NOBODY || word >= words ? Vec16{} : target::read(rows + (u64)row[j] * words + word);
        }
#pragma unroll
      for (u32 j = 0; j < BATCH; j++)
        for (u32 m = 0; m < WIDE && row[j] != NOBODY; m++) add(sum[m], y[j][m], weight[j]);
    }
  }
  // A block of tokens: each one's rows and the shared expert's, rounded once.
  DEVICE void fold(u32 b) const {
    const u32 begin = b * p.block, left = p.tokens - begin;
    each_row(left < p.block ? left : p.block, [&](u32 i, u32 place, u32 lanes) {
      const u64 t = begin + i;
      const float gate = p.S && p.gate_column != NOBODY ? sigmoid(float_at(p.logits, t * p.logit_ld + p.gate_column)) : 1.f;
      for (u32 c = place; c < words; c += FOLD_WIDE * lanes) {
        float sum[FOLD_WIDE][8] = {};
        add_rows(sum, t, combine(p.g.rank), !p.routing.weigh_inputs, c, lanes);
        for (u32 m = 0; m < FOLD_WIDE && c + m * lanes < words; m++) {
          const u64 at = t * words + c + m * lanes;
          if (p.S) add(sum[m], target::read(p.shared_y + at), gate);
          target::write(p.out + at, eight_bf16(sum[m]));
        }
      }
    });
  }
  static constexpr u32 FOLD_WIDE = target::COPY_BATCH / 8;  // words of a lane that are folded at a time, of eight rows each
  DEVICE static void add(float (&sum)[8], const Vec16& y, float weight) {
    for (u32 c = 0; c < 8; c++) sum[c] = target::fma(weight, bf16_at(y, c), sum[c]);
  }
};

// Four columns of h from sums of gate and up: those are rounded, and kept if the backward wants them; h is made of what is
// kept, so that forward and backward agree. pre: [rows][2 width] in blocks of GATED, h: [rows][width]; column is of h.
struct SwigluToUnlimited;
struct SwigluTo {
  Vec16 *pre, *h;
  u64 first;          // the tile's first row
  u32 width, column;  // column: the tile's first one, of h
  float limit;        // infinity: none
  DEVICE void put(u32 row, u32 column_in, const float (&gate)[4], const float (&up)[4]) const {
    put(row, column_in, gate, up, Limit{limit});
  }
  using Plain = SwigluToUnlimited;  // kernels/tile_operands.h
  DEVICE bool is_plain() const { return limit == float_of(FP32_INFINITY); }
  template <class L> DEVICE void put(u32 row, u32 column_in, const float (&gate)[4], const float (&up)[4], const L& limit) const {
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
struct SwigluToUnlimited {
  const SwigluTo& to;
  DEVICE void put(u32 row, u32 column, const float (&gate)[4], const float (&up)[4]) const { to.put(row, column, gate, up, NoLimit()); }
};
