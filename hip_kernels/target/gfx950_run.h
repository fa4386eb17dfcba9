// gfx950: the loop, in which the first wave decides for all eight, and how it drives the stream of tiles.
#pragma once
#include "../schedule/trace.h"
#include "gfx950_epilogue.h"

namespace target {
// The kernel's arguments, through a pointer of which the compiler knows nothing. Else it reads all of them before the main
// loop, as none of these reads can fail, and has too few scalar registers to hold them (205 spilled in gemm_rs, now 56).
template <class Params> DEVICE inline const Params& where_they_lie(const Params&) {
  auto* p = (const __attribute__((address_space(4))) Params*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(p));
  return *(const Params*)p;
}

// Asks the schedule, in the first wave alone: a whole wave with equal values, so that no branch of a schedule diverges. The
// other waves learn what it decided from a box in LDS.
//
// In a stream the next work is claimed two K steps before a tile ends, while that tile is multiplied, and never more than
// one ahead. If it is a tile whose inputs are there, the stream goes on with it. If not, the claim is kept, the stream ends,
// and what it has made is published before anybody waits. So nothing is held back by a wait, and claiming ahead is safe.
template <class Op> struct Director {
  const typename Op::Params& p;
  LDS U32x4* const box;
  const bool decides;
  typename Op::Schedule schedule;
  Trace trace;
  Work next;             // claimed, and nobody has waited for its inputs
  Work last;             // in a stream: the tile before this one, stored but not yet published
  TileOperands loading;  // of the tile that is being loaded: from the turn on, the next one
  bool goes_on = false;  // with `next`

  DEVICE Director(const typename Op::Params& p, LDS U32x4* box)
      : p(p), box(box), decides(from_elected(lane() / WAVE) == 0), schedule(p), trace(TRACE_ROWS * wg()) {
    if (!decides) return;
    trace.place(p.g);
    schedule.begin();
  }

  DEVICE void post(const Work& w, bool streams) { *box = (U32x4){w.kind, w.chunk, w.row, w.part << 1 | (u32)streams}; }
  // True: its inputs were there when it was posted.
  DEVICE bool take(Work& w) const {
    const U32x4 b = *box;
    const u32 part = from_elected(b.w);
    w = {(Kind)from_elected(b.x), from_elected(b.y), from_elected(b.z), part >> 1};
    return part & 1;
  }
  DEVICE Work claim() {
    Work w = schedule.next_work();
    // The same in all lanes, which the compiler cannot always see; what waits and publishes then is scalar code.
    w = {(Kind)from_elected(w.kind), from_elected(w.chunk), from_elected(w.row), from_elected(w.part)};
    trace.mark(p.g, CLAIMED, w);
    return w;
  }
  DEVICE void publish(const Work& w) {
    schedule.finish(w);
    trace.mark(p.g, DONE, w);
  }

  // Between streams: publishes `w`, which all waves have done; gives the next work, whose inputs are there.
  DEVICE Work after(const Work& w, bool claimed) {
    barrier();  // stores are complete
    if (decides) {
      if (w.kind != LEAVE) publish(w);
      Work n = claimed ? next : claim();
      if (n.kind != LEAVE && !schedule.wait_inputs(n)) n = {};
      if (n.kind != LEAVE) trace.mark(p.g, READY, n);
      post(n, true);
    }
    barrier();
    Work n;
    take(n);
    return n;
  }

  // The kind of tiles is a constant, where an operator has one alone: halves are published as tiles are.
  DEVICE static Work as_tile(const Work& w) {
    if constexpr (requires { Op::epilogue(w); }) return w;
    else return {TILE, w.chunk, w.row, w.part};
  }

  // Where there are two streams, arguments are read again for each tile of MXFP8: to keep them takes the last vector register.
  template <Element E> DEVICE TileOperands operands(const Work& w) const {
    if constexpr (many_elements<Op>() && E == MXFP8) return Op::operands(where_they_lie(p), w);
    else return Op::operands(p, w);
  }

  // ---- asked by Tile::step
  template <Element E> DEVICE void look_ahead() {
    if (!decides) return;
    const Work w = claim();
    bool streams = false;
    if constexpr (requires { schedule.ready(w); })
      streams = is_tile(w.kind) && element_of<Op>(w.kind) == E && schedule.ready(w);
    if (streams) trace.mark(p.g, READY, w);
    post(w, streams);
  }
  template <class T> DEVICE void turn(T& stream) {
    goes_on = take(next);
    if (!goes_on) return stream.turn_off();
    loading = operands<T::ELEMENT>(next);
    stream.turn(loading, layout_of<Op>(next.kind));
  }
  // All waves have waited for their stores of the last tile in this one's second step, and met.
  DEVICE void finish_last() {
    if (last.kind == LEAVE || !decides) return;
    publish(as_tile(last));
  }

  // Multiplies `first` and every tile that can follow without a wait. Returns the last one, not yet published; `next` is
  // claimed, and nobody has waited for its inputs.
  template <class T> DEVICE Work stream(T& tiles, const Work& first) {
    Work now = first;
    last = {};
    loading = operands<T::ELEMENT>(now);
    tiles.start(loading, layout_of<Op>(now.kind));
    for (;;) {
      tiles.begin(layout_of<Op>(now.kind));
      const u32 rows = loading.rows, cols = loading.cols;  // `loading` will be the next tile's
      tiles.template multiply_tile<sure_stores<Op>()>(*this);
      hand_over<Op>(p, now, tiles, rows, cols);
      if constexpr (has_copies<Op>() && T::ELEMENT == MXFP8)
        if (Op::makes_copies(now)) {
          // All waves' stores. Twice, for the second group of waves is one barrier behind.
          wait_memory<0>();
          meet();
          meet();
          Op::make_copies(p, now);
        }
      if (!goes_on) break;
      last = now;
      now = next;
    }
    tiles.stop();
    return as_tile(now);
  }
};

// Where kinds of tiles differ in their elements, each has its own stream: one ends where the other begins.
template <class Op> DEVICE inline void run(const typename Op::Params& p) {
  using Tiles = Tile<layout<Op>(), mfma_rows<Op>(), element<Op>(), many_layouts<Op>()>;
  using MxTiles = Tile<TN, mfma_rows<Op>(), MXFP8>;
  __shared__ __attribute__((aligned(1024))) unsigned char lds[(many_elements<Op>() ? MxTiles::LDS_BYTES : Tiles::LDS_BYTES)];
  __shared__ U32x4 box;
  Director<Op> director(p, (LDS U32x4*)&box);
  Tiles tiles((LdsBytes*)lds);
  Work w;
  bool claimed = false;
  for (;;) {
    w = director.after(w, claimed);
    if (w.kind == LEAVE) return;
    claimed = is_tile(w.kind);
    if constexpr (many_elements<Op>())
      if (claimed && Op::element(w.kind) == MXFP8) {
        MxTiles mx_tiles((LdsBytes*)lds);
        w = director.stream(mx_tiles, w);
        continue;
      }
    if (claimed) w = director.stream(tiles, w);
    else Op::move(director.schedule, w);
  }
}
}  // namespace target

// The least number of threads is the greatest: with none given the compiler assumes 1024, and halves the registers.
#define KOSMOS_KERNEL(name, Op)                                                                                            \
  extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(512, 512))) void name##_main(const Op::Params p) {      \
    static_assert(target::WG_THREADS == 512);                                                                              \
    target::run<Op>(target::where_they_lie(p));                                                                            \
  }

// Four waves a SIMD: so two WGs share a compute unit, and one moves while the other computes.
#define KOSMOS_PLAIN_KERNEL(name, Op)                                                                                      \
  extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(512, 512), amdgpu_waves_per_eu(4)))                     \
  void name##_main(const Op::Params p) {                                                                                   \
    __shared__ __attribute__((aligned(16))) unsigned char scratch[Op::SCRATCH_BYTES];                                      \
    Op::work(p, scratch);                                                                                                  \
  }
