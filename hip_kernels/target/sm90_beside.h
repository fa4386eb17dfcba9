// sm_90a: a mover beside the builders of its WG. One thread and TMA pull rows through a small ring of their own while the
// others multiply, so that no SM is taken from the GEMM. (A mover that is a whole WG carries 22 GB/s: 16 of 132 SMs did not
// multiply while a link was busy.) It is the publisher's thread: in operators that move beside, tiles of a whole
// contraction have nothing to publish.
//
// Its ring is the second half of the panels of results. Workers then use one panel a warp, not two. Four lanes issue a piece
// together: a single thread that issued all was what limited a pull, not the link.
#pragma once
#include "sm90_move.h"

namespace target {
constexpr u32 RUNS = 4, RUN_BYTES = 1024;  // a piece is a run of bytes for each lane
constexpr u32 PIECES = 4, PIECE_BYTES = RUNS * RUN_BYTES;
// On their way at a time. One fewer than there are: a place in the ring then is free before it is wanted.
constexpr u32 PIECES_AHEAD = PIECES - 1;
static_assert(PIECES * PIECE_BYTES == WORKERS / 32 * WARP_PANEL);

#ifdef KOSMOS_PACED
constexpr bool PACED = true;  // a test says when pieces come: link_due
#else
constexpr bool PACED = false;
INLINE u64 link_due(const Group&, u32) { return 0; }
#endif

// Of a piece that is coming: where a lane's run goes, and (lane 0) the pull that ends with it.
struct alignas(16) Piece {
  Vec16* to[RUNS];
  u32 bytes[RUNS];
  Work ends;
  u64 due, zero;
};
constexpr u32 PIECES_AT = SLOTS_AT + SLOTS_BYTES, PIECE_BARRIERS_AT = PIECES_AT + PIECES * sizeof(Piece);
static_assert(PIECE_BARRIERS_AT + PIECES * 8 <= DYNAMIC_SHARED_BYTES && PIECES_AT % alignof(Piece) == 0);

template <class Op> INLINE constexpr bool can_pull_beside() {
  return pulls<Op>() && requires(typename Op::Schedule& s) { s.next_beside(); };
}
// What the agent does next, when it may begin: its first lane asks, the others of LANES are told.
template <u32 LANES, class S> INLINE void claim_beside(S& schedule, Trace& trace, const Group& g, u32 lane, Work& w) {
  if (lane == 0) {
    w = schedule.next_beside();
    trace.mark(g, CLAIMED, w);
    if (w.kind != LEAVE && !schedule.wait_inputs(w)) w = {};
    if (w.kind != LEAVE) trace.mark(g, READY, w);
  }
  w.kind = (Kind)__shfl_sync(LANES, (u32)w.kind, 0), w.chunk = __shfl_sync(LANES, w.chunk, 0);
  w.row = __shfl_sync(LANES, w.row, 0), w.part = __shfl_sync(LANES, w.part, 0);
}
INLINE void init_pieces(u32 shared) {
  for (u32 i = 0; i < PIECES; i++) init(shared + PIECE_BARRIERS_AT + i * 8, RUNS);
}

// A lane's runs of a Block: of all, in order, every RUNS-th.
struct RunsOf {
  Block b;
  u32 run, runs, line;  // this one and how many there are of a line; its line
  INLINE void begin(const Block& block, u32 lane) {
    b = block, run = lane, line = 0;
    if (b.words == b.pitch) b.words *= b.lines, b.lines = b.words ? 1 : 0;
    runs = (b.words + RUN_BYTES / 16 - 1) / (RUN_BYTES / 16);
    settle();
  }
  INLINE void advance() { run += RUNS, settle(); }
  INLINE void settle() {
    while (run >= runs && line < b.lines) run -= runs, line++;
  }
  INLINE u64 at() const { return (u64)line * b.pitch + run * (RUN_BYTES / 16); }
  INLINE u32 words() const {
    const u32 left = b.words - run * (RUN_BYTES / 16);
    return line >= b.lines ? 0 : left < RUN_BYTES / 16 ? left : RUN_BYTES / 16;
  }
};

// The first RUNS lanes of a warp. The first of them decides and publishes.
template <class Op> INLINE void pull_beside(const typename Op::Params& p, unsigned char* memory, u32 lane) {
  constexpr u32 ALL = (1 << RUNS) - 1;
  typename Op::Schedule schedule(p);
  Trace trace(TRACE_ROWS * wg() + 2);
  Piece* const pieces = (Piece*)(memory + PIECES_AT);
  const u32 shared = shared_address(memory), ring = shared + RESULT_AT + WORKERS / 32 * WARP_PANEL + lane * RUN_BYTES;
  u32 loaded = 0, stored = 0;  // pieces so far
  Work coming, landing;        // the pull that is loaded, and one all of whose stores are on their way
  u32 landing_since = 0;       // pieces stored after these
  u32 left = 0;                // pieces of `coming` that have not been asked for
  RunsOf runs;

  const auto begin_next = [&] {  // whether there is more to pull
    while (!left) {
      claim_beside<ALL>(schedule, trace, p.g, lane, coming);
      if (coming.kind == LEAVE) return false;
      order_with_tma();  // as for all loads: others' stores of what is loaded now
      runs.begin(Op::pulled(p, coming), lane);
      left = (runs.b.lines * runs.runs + RUNS - 1) / RUNS;
      if (!left && lane == 0) schedule.finish(coming);
    }
    return true;
  };
  const auto load_piece = [&] {
    const u32 i = loaded++ % PIECES, bytes = runs.words() * 16, barrier = shared + PIECE_BARRIERS_AT + i * 8;
    pieces[i].to[lane] = runs.b.to + runs.at(), pieces[i].bytes[lane] = bytes;
    left--;
    if (lane == 0) pieces[i].ends = left ? Work{} : coming;
    if (PACED && lane == 0) pieces[i].due = link_due(p.g, bytes * RUNS);
    wait_stores_read<1>();  // of the run that was here
    arrive_expecting(barrier, bytes);
    if (bytes) load_bytes(ring + i * PIECE_BYTES, runs.b.from + runs.at(), bytes, barrier);
    runs.advance();
  };
  const auto settle = [&] {  // when the lane's own stores of `landing` have been waited for
    order_with_tma();
    __syncwarp(ALL);
    if (lane == 0) {
      schedule.finish(landing);
      trace.mark(p.g, DONE, landing);
    }
    landing = {};
  };
  const auto store_piece = [&] {
    const u32 i = stored % PIECES;
    wait(shared + PIECE_BARRIERS_AT + i * 8, stored++ / PIECES % 2);
    while (PACED && ticks() < pieces[i].due) pause();
    if (pieces[i].bytes[lane]) store_bytes(pieces[i].to[lane], ring + i * PIECE_BYTES, pieces[i].bytes[lane]);
    commit_stores();
    const Work ends = pieces[i].ends;
    if (landing.kind != LEAVE && (ends.kind != LEAVE || ++landing_since == 2)) {
      wait_stores<1>();
      settle();
    }
    if (ends.kind != LEAVE) landing = ends, landing_since = 0;
    __syncwarp(ALL);  // all have read what lane 0 wrote of this piece
  };

  for (bool more = true; more || loaded != stored;) {
    while (more && loaded - stored < PIECES_AHEAD && (more = begin_next())) load_piece();
    __syncwarp(ALL);
    if (loaded != stored) store_piece();
  }
  wait_stores<0>();
  if (landing.kind != LEAVE) settle();
}
}  // namespace target
