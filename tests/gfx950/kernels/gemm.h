// The GEMM tile of the gfx950 target by itself: C = A * B by persistent WGs, in any layout, through any of the three ways
// to take a result. Not shipped: tests/gfx950/gemm.py puts it into a copy of hip_kernels/kernels/, beside a file that
// includes it and defines LAYOUT_OF (TN, NN, NT), ROWS_OF (16, 32), HANDED (RESULT, STORE, FLOATS) and ELEMENT_OF (BF16,
// MXFP8).
#pragma once
#include "../schedule/group.h"
#include "../work/sum.h"
#include "tile_operands.h"

enum Handed { RESULT, STORE, FLOATS };

struct GemmParams {  // mirrored by tests/gfx950/gemm.py
  Group g;
  const Vec16 *a, *b;
  const u32 *scales_a, *scales_b;  // MXFP8: [K / 128, ld_scales]
  u64* c;           // [M, ldc] bf16, or float
  u64* copy;        // the same, copied tile by tile by those who see that a tile is finished; null = no copies
  u32* head;        // [1]
  u32* tiles_done;  // [tiles]
  u32 M, N, K, lda, ldb, ldc;
  u32 ld_scales_a, ld_scales_b;
  u32 K_odd;        // K of tiles with an odd number
  u32 stop_every;   // every so many tiles is not ready when it is asked for ahead; 0 = all are ready
};
static_assert(sizeof(GemmParams) == 232);

struct GemmSchedule {
  const GemmParams& p;
  DEVICE explicit GemmSchedule(const GemmParams& p) : p(p) {}
  DEVICE u32 columns() const { return (p.N + 255) / 256; }
  DEVICE u32 tiles() const { return (p.M + 255) / 256 * columns(); }
  DEVICE u32 number(const Work& w) const { return w.row * columns() + w.part; }

  DEVICE void begin() {}
  DEVICE Work next_work() {
    const u32 n = tiles(), i = target::add(p.head, 1, DEVICE_SCOPE);
    if (i < n) return {TILE, 0, i / columns(), i % columns()};
    if (p.copy && i < 2 * n) return {PULL, 0, (i - n) / columns(), (i - n) % columns()};
    return {};
  }
  DEVICE bool wait_inputs(const Work& w) const {
    if (w.kind == TILE) return true;
    if (!wait_at_least(p.g, w, p.tiles_done + number(w), 1, DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // pairs with the release in finish
    return true;
  }
  DEVICE bool ready(const Work& w) const { return w.kind == TILE && (!p.stop_every || number(w) % p.stop_every); }
  DEVICE void finish(const Work& w) const {
    if (w.kind != TILE) return;
    target::release(DEVICE_SCOPE);  // the tile, then the word that it is there
    target::store(p.tiles_done + number(w), 1, DEVICE_SCOPE);
  }
};

template <Layout L, u32 ROWS, Element E, Handed HANDED> struct GemmBase {
  using Schedule = GemmSchedule;
  using Params = GemmParams;
  static constexpr Layout LAYOUT = L;
  static constexpr u32 MFMA_ROWS = ROWS, IN_WORD = E == MXFP8 ? 16 : 8;
  static constexpr Element ELEMENT = E;

  DEVICE static u32 most(u32 left) { return left < 256 ? left : 256; }
  DEVICE static u32 rows(const Params& p, const Work& w) { return most(p.M - w.row * 256); }
  DEVICE static u32 cols(const Params& p, const Work& w) { return most(p.N - w.part * 256); }
  DEVICE static TileOperands operands(const Params& p, const Work& w) {
    const u64 row = w.row * 256, col = w.part * 256;
    const u32 K = (w.row * ((p.N + 255) / 256) + w.part) % 2 ? p.K_odd : p.K;
    const Vec16 *a = p.a + row * (L == NT ? 1 : p.lda) / IN_WORD, *b = p.b + col * (L == TN ? p.ldb : 1) / IN_WORD;
    if constexpr (E == BF16) return {a, b, rows(p, w), cols(p, w), K, p.lda, p.ldb};
    const u32 *scales_a = p.scales_a + row, *scales_b = p.scales_b + col;
    return {a, b, rows(p, w), cols(p, w), K, p.lda, p.ldb, scales_a, scales_b, p.ld_scales_a, p.ld_scales_b};
  }
  DEVICE static u64 place(const Params& p, const Work& w, u32 row, u32 column) {
    return (u64)(w.row * 256 + row) * p.ldc + w.part * 256 + column;
  }
  // Four columns at a time: 8 bytes of BF16, or 16 of FP32.
  DEVICE static void move(const Schedule& s, const Work& w) {
    const Params& p = s.p;
    constexpr u32 WORDS = HANDED == FLOATS ? 2 : 1;
    const u32 fours = (cols(p, w) + 3) / 4, n = rows(p, w) * fours;
    for (u32 i = target::lane(); i < n; i += target::lanes()) {
      const u64 at = place(p, w, i / fours, i % fours * 4) / 4 * WORDS;
      for (u32 j = 0; j < WORDS; j++) target::write(p.copy + at + j, target::read(p.c + at + j));
    }
  }
};

template <Layout L, u32 ROWS, Element E, Handed HANDED> struct Gemm : GemmBase<L, ROWS, E, RESULT> {
  using Base = GemmBase<L, ROWS, E, RESULT>;
  DEVICE static TileResult result(const GemmParams& p, const Work& w) { return {p.c + Base::place(p, w, 0, 0) / 4, p.ldc}; }
};
template <Layout L, u32 ROWS, Element E> struct Gemm<L, ROWS, E, STORE> : GemmBase<L, ROWS, E, STORE> {
  using Base = GemmBase<L, ROWS, E, STORE>;
  DEVICE static void store(const GemmParams& p, const Work& w, u32 row, u32 column, u64 four_bf16) {
    target::write(p.c + Base::place(p, w, row, column) / 4, four_bf16);
  }
};
template <Layout L, u32 ROWS, Element E> struct Gemm<L, ROWS, E, FLOATS> : GemmBase<L, ROWS, E, FLOATS> {
  using Base = GemmBase<L, ROWS, E, FLOATS>;
  DEVICE static FloatsTo sums_to(const GemmParams& p, const Work& w) { return {p.c, Base::place(p, w, 0, 0), p.ldc}; }
};

using GemmOp = Gemm<LAYOUT_OF, ROWS_OF, ELEMENT_OF, HANDED>;

#include "../target/run.h"
KOSMOS_KERNEL(gemm, GemmOp)
