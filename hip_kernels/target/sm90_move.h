// sm_90a: moving through the ring, which is idle while a WG moves. The loaders bring pieces into its stages by TMA, as they
// bring operands; what becomes of them is the publisher's (copies, by TMA too) or the workers' business (sums). So the
// whole ring is on its way at a time, no register is needed for it, and a fence waits for nothing but what it is about.
#pragma once
#include "../work/move.h"
#include "../work/reduce.h"
#include "sm90_tile.h"

namespace target {
constexpr u32 A_WORDS = TILE_M * TILE_K * 2 / 16;                         // 16 bytes each, of a stage: A's loader fills them
template <class M> constexpr u32 STAGE_WORDS = M::STAGE_BYTES / 16;      // B's loader fills the rest
template <class M> INLINE u32 stage_at(const RingAt<M>& at, u32 shared) { return shared + at.stage * M::STAGE_BYTES; }

// A Block in stages. One that follows without gaps is lines of one word each, of which any number are moved at a time.
template <class M> struct BlockStages {
  Block b;
  INLINE explicit BlockStages(const Block& block) : b(block) {
    if (b.words == b.pitch) b.lines *= b.words, b.words = b.pitch = 1;
  }
  INLINE u32 first_lines() const { return A_WORDS / b.words; }  // of a stage, by A's loader
  INLINE u32 lines() const { return first_lines() + (STAGE_WORDS<M> - A_WORDS) / b.words; }
  INLINE u32 count() const { return (b.lines + lines() - 1) / lines(); }

  struct Part {
    u32 line, lines, at;  // at: bytes from the stage's begin
  };
  INLINE Part part(u32 stage, bool second) const {
    const u32 line = stage * lines() + (second ? first_lines() : 0), room = second ? lines() - first_lines() : first_lines();
    const u32 left = line < b.lines ? b.lines - line : 0;
    return {line, left < room ? left : room, second ? A_WORDS * 16 : 0};
  }
  // Calls each(words from the block's begin, bytes from the stage's begin, bytes) for whatever follows without gaps.
  template <class Each> INLINE void runs(const Part& p, Each each) const {
    const u32 bytes = b.words * 16, at_once = b.pitch == 1 ? p.lines : 1;
    for (u32 i = 0; i < p.lines; i += at_once) each((u64)(p.line + i) * b.pitch, p.at + i * bytes, at_once * bytes);
  }
};

// The words of a REDUCE in stages, each in equal parts for all ranks.
template <class M> struct AddendStages {
  const Addends& a;
  u32 ranks, words;  // of one rank in a stage
  INLINE AddendStages(const Addends& a, u32 ranks) : a(a), ranks(ranks), words(STAGE_WORDS<M> / ranks / CUT_WORDS * CUT_WORDS) {}
  INLINE u32 count() const { return (u32)((a.end - a.begin + words - 1) / words); }
  INLINE u32 in(u32 stage) const {
    const u64 left = a.end - a.begin - (u64)stage * words;
    return left < words ? (u32)left : words;
  }
};

template <class Op> INLINE constexpr bool pulls() {
  return requires(const typename Op::Params& p, const Work& w) { Op::pulled(p, w); };
}
template <class Op> INLINE constexpr bool adds() {
  return requires(const typename Op::Schedule& s, const Work& w) { Op::addends(s, w); };
}

// Stages of the ring that a work goes through.
template <class Op> INLINE u32 ring_steps(const typename Op::Schedule& s, const Work& w) {
  using M = MadeOf<Op>;
  if (is_tile(w.kind)) {
    const TileOperands t = Op::operands(s.p, w);
    return M::slices(t.cols) * k_steps(t);
  }
  if constexpr (pulls<Op>()) {
    if (w.kind == PULL) return BlockStages<M>(Op::pulled(s.p, w)).count();
  }
  if constexpr (adds<Op>()) {
    if (w.kind == REDUCE) return AddendStages<M>(Op::addends(s, w), s.p.g.ranks).count();
  }
  return 0;
}

// One thread for the first part of each stage (A's loader), another one for the second. `before(k)`: see load_tile.
template <class Op, bool IS_A, class M, class Before>
INLINE void load_moved(const typename Op::Schedule& s, const Work& w, u32 shared, RingAt<M>& at, Before before) {
  if constexpr (pulls<Op>()) {
    if (w.kind == PULL) {
      const BlockStages<M> stages(Op::pulled(s.p, w));
      const u32 count = stages.count();
      for (u32 k = 0; k < count; k++) {
        before(k, count);
        const auto part = stages.part(k, !IS_A);
        const u32 loaded = begin_stage(at, shared, part.lines * stages.b.words * 16), to = stage_at(at, shared);
        stages.runs(part, [&](u64 word, u32 put, u32 bytes) { load_bytes(to + put, stages.b.from + word, bytes, loaded); });
        at.advance();
      }
    }
  }
  if constexpr (adds<Op>()) {
    if (w.kind == REDUCE) {
      const Addends a = Op::addends(s, w);
      const AddendStages<M> stages(a, s.p.g.ranks);
      const u32 count = stages.count(), mine = (stages.ranks + IS_A) / 2;  // every other rank's
      for (u32 k = 0; k < count; k++) {
        before(k, count);
        const u32 bytes = stages.in(k) * 16, loaded = begin_stage(at, shared, mine * bytes);
        const u64 word = a.offset + a.begin + (u64)k * stages.words;
        for (u32 q = !IS_A; q < stages.ranks; q += 2)
          load_bytes(stage_at(at, shared) + q * stages.words * 16, a.of[q] + word, bytes, loaded);
        at.advance();
      }
    }
  }
}

// The publisher: what has come goes where it belongs. When it returns, the ring is free again, but stores are on their way.
// Calls settle() when those of the block before are done, for there is one of these on its way too.
template <class M, class Settle>
INLINE void store_moved(const BlockStages<M>& stages, u32 shared, RingAt<M>& at, Settle settle) {
  const u32 count = stages.count();
  u32 last = 0;
  for (u32 k = 0; k < count; k++) {
    const u32 stage = stage_at(at, shared), read = shared + READ_AT + at.stage * 8;
    wait(shared + LOADED_AT + at.stage * 8, at.parity);
    for (u32 second = 0; second < 2; second++)
      stages.runs(stages.part(k, second),
                  [&](u64 word, u32 put, u32 bytes) { store_bytes(stages.b.to + word, stage + put, bytes); });
    commit_stores();
    if (k) {
      wait_stores_read<1>();
      arrive_times(last, STAGE_READERS);
    } else {
      wait_stores<1>();
      settle();
    }
    last = read;
    at.advance();
  }
  if (!count) return;
  wait_stores_read<0>();
  arrive_times(last, STAGE_READERS);
}

// The workers: sums of what has come.
template <bool STAGED, class M>
INLINE void add_moved(const Group& g, const Work& w, const Addends& a, u32 shared, RingAt<M>& at) {
  const AddendStages<M> stages(a, g.ranks);
  for (u32 k = 0, count = stages.count(); k < count; k++) {
    const u32 stage = stage_at(at, shared), words = stages.in(k);
    const u64 first = a.begin + (u64)k * stages.words;
    wait(shared + LOADED_AT + at.stage * 8, at.parity);
    for (u32 i = lane(); i < words; i += WORKERS) {
      Vec16 v[MAX_RANKS];
#pragma unroll
      for (u32 q = 0; q < MAX_RANKS; q++) v[q] = q < g.ranks ? load_shared(stage + (q * stages.words + i) * 16) : Vec16{};
      if (STAGED && !all_arrived(v, g.ranks) && !read_words<true>(v, g, w, a, first + i)) continue;
      write(a.to + first + i, add_words(v, g.ranks));
    }
    __syncwarp();
    if (lane() % 32 == 0) arrive(shared + READ_AT + at.stage * 8);
    at.advance();
  }
}
}  // namespace target
