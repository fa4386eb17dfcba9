// sm_90a: a mover beside the builders of its WG. One thread and TMA pull rows through a small ring of their own while the
// others multiply, so that no SM is taken from the GEMM. (A mover that is a whole WG carries 22 GB/s: 16 of 132 SMs did not
// multiply while a link was busy.) It is the publisher's thread: in operators that pull, tiles of a whole contraction have
// nothing to publish.
//
// Its ring is the second half of the panels of results. Workers then use one panel a warp, not two.
#pragma once
#include "sm90_move.h"

namespace target {
// Of its ring. Two pieces fewer are on their way than there are: what was stored two pieces ago has left shared memory, so
// that nobody waits for a place in the ring.
constexpr u32 PIECES = 8, PIECE_BYTES = WORKERS / 32 * WARP_PANEL / PIECES, PIECES_AHEAD = PIECES - 2;

// A piece that is coming: where it goes, and the pull that ends with it.
struct alignas(16) Piece {
  Vec16* to;
  u32 bytes, zero;
  Work ends;
};
constexpr u32 PIECES_AT = SLOTS_AT + 192, PIECE_BARRIERS_AT = PIECES_AT + PIECES * sizeof(Piece);
static_assert(PIECE_BARRIERS_AT + PIECES * 8 <= DYNAMIC_SHARED_BYTES && PIECES_AT % alignof(Piece) == 0);

template <class Op> INLINE bool pulls_beside(const typename Op::Params& p) {
  if constexpr (requires(typename Op::Schedule& s) { s.next_beside(); }) return p.policy == BESIDE;
  else return false;
}
INLINE void init_pieces(u32 shared) {
  for (u32 i = 0; i < PIECES; i++) init(shared + PIECE_BARRIERS_AT + i * 8, 1);
}

template <class Op> INLINE void pull_beside(const typename Op::Params& p, unsigned char* memory) {
  typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg() + 2);
  Piece* const pieces = (Piece*)(memory + PIECES_AT);
  const u32 shared = shared_address(memory), ring = shared + RESULT_AT + WORKERS / 32 * WARP_PANEL;
  u32 loaded = 0, stored = 0;  // pieces so far
  Work coming, landing;        // the pull that is loaded, and one all of whose stores are on their way
  u32 landing_since = 0;       // pieces stored after these
  Block left = {};             // of `coming`; `at` words of its first line have been asked for
  u32 at = 0;

  const auto begin_next = [&] {  // whether there is more to pull
    while (!left.lines) {
      coming = schedule.next_beside();
      trace.mark(p.g, CLAIMED, coming);
      if (coming.kind == LEAVE || !schedule.wait_inputs(coming)) return false;
      trace.mark(p.g, READY, coming);
      order_with_tma();  // as for all loads: others' stores of what is loaded now
      left = Op::pulled(p, coming), at = 0;
      if (left.words == left.pitch) left.words *= left.lines, left.lines = left.words ? 1 : 0;
      if (!left.lines) schedule.finish(coming);
    }
    return true;
  };
  const auto load_piece = [&] {
    const u32 i = loaded++ % PIECES, rest = left.words - at, words = rest < PIECE_BYTES / 16 ? rest : PIECE_BYTES / 16;
    wait_stores_read<2>();  // of the piece that was here
    arrive_expecting(shared + PIECE_BARRIERS_AT + i * 8, words * 16);
    load_bytes(ring + i * PIECE_BYTES, left.from + at, words * 16, shared + PIECE_BARRIERS_AT + i * 8);
    Piece& piece = pieces[i];
    piece.to = left.to + at, piece.bytes = words * 16;
    at += words;
    if (at == left.words) at = 0, left.lines--, left.from += left.pitch, left.to += left.pitch;
    piece.ends = left.lines ? Work{} : coming;
  };
  const auto settle = [&] {  // when the stores of `landing` have been waited for
    order_with_tma();
    schedule.finish(landing);
    trace.mark(p.g, DONE, landing);
    landing = {};
  };
  const auto store_piece = [&] {
    const u32 i = stored % PIECES;
    const Piece& piece = pieces[i];
    wait(shared + PIECE_BARRIERS_AT + i * 8, stored++ / PIECES % 2);
    store_bytes(piece.to, ring + i * PIECE_BYTES, piece.bytes);
    commit_stores();
    const bool ends = piece.ends.kind != LEAVE;
    if (landing.kind != LEAVE && (ends || ++landing_since == 2)) {
      wait_stores<1>();
      settle();
    }
    if (ends) landing = piece.ends, landing_since = 0;
  };

  for (bool more = true; more || loaded != stored;) {
    while (more && loaded - stored < PIECES_AHEAD && (more = begin_next())) load_piece();
    if (loaded != stored) store_piece();
  }
  wait_stores<0>();
  if (landing.kind != LEAVE) settle();
}
}  // namespace target
