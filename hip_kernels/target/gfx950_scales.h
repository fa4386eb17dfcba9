// gfx950: the scales of MXFP8 operands, from global memory through LDS to the byte that a matrix instruction takes.
//
// A line (a row of A, a column of B) has one word for a K step: four bytes, one for each 32 k of its 128 (work/mxfp8.h). A
// step's words are 2 KiB, one direct load of 4 bytes a lane by each wave, and they arrive with the elements of that step.
//
// An instruction takes the scale of line i and block b of its own k from lane i + ROWS * b, one byte of a register that an
// immediate chooses. So a lane needs another byte of a word than its neighbour of the next block; it picks its bytes of
// several lines' words into one register, and constants choose among those.
#pragma once
#include "../kernels/tile_operands.h"
#include "gfx950_lds.h"

namespace target {
using I32x8 = vec<int, 8>;
constexpr u32 SCALE_BYTES = 2048;  // of a K step: 256 words of A, then 256 of B
constexpr u32 UNIT_SCALES = 0x7f7f7f7f;

// Which byte of Scales::of_a or of_b is for block `block` of 16 or 32 lines and instruction k along K.
template <u32 ROWS> DEVICE constexpr u32 scale_at(u32 block, u32 k) { return ROWS == 16 ? block : block + 2 * k; }

// Of a lane it keeps nothing but the bytes that were picked: what is needed of its number is computed at every step.
template <u32 ROWS> struct Scales {
  static constexpr u32 BLOCKS = 64 / ROWS;  // of lines that share a register: a half of A, or both of B

  I32x4 from;            // descriptor of the words of this wave's load, moved to the K step to be loaded next
  u32 step_bytes;
  LdsBytes *to, *a, *b;  // where the wave's load goes; where the words of its share begin
  u32 words_a[2][BLOCKS], words_b[BLOCKS];
  u32 of_a[2], of_b;     // [half of A]

  static DEVICE u32 at(u32 buffer) { return buffer / (BUFFER_BYTES / SCALE_BYTES); }

  // first_a, first_b: the lines that this wave's share begins with.
  DEVICE void place(LdsBytes* lds, u32 wave, u32 first_a, u32 first_b) {
    to = lds + wave * 256;
    a = lds + first_a * 4;
    b = lds + SCALE_BYTES / 2 + first_b * 4;
  }
  // Waves 0 to 3 load A's words, 4 to 7 B's. Past the last line nothing is read: what comes of it is not stored.
  DEVICE void turn(const TileOperands& t, u32 wave) {
    const bool of_a = wave < 4;
    const u32 first = wave % 4 * 64, lines = of_a ? t.rows : t.cols, left = lines > first ? lines - first : 0;
    from = buffer((of_a ? t.scales_a : t.scales_b) + first, left * 4);
    step_bytes = from_elected((of_a ? t.ld_scales_a : t.ld_scales_b) * 4);
  }
  DEVICE void turn_off() { from[2] = 0; }

  DEVICE void load(u32 buffer, u32 l) const { load_word_to_lds(from, rare(l) * 4, to + at(buffer)); }
  // A K step past the end: elements are zero there, and whatever lies in memory might be a NaN.
  DEVICE void load_end(u32 buffer, i32 left, u32 l) const {
    l = rare(l);
    load_some_words_to_lds(from, l * 4, to + at(buffer), l, UNIT_SCALES, __builtin_amdgcn_ballot_w64(left > 0));
  }

  DEVICE void read(u32 buffer, u32 l) {
    const u32 lane = rare(l) % ROWS * 4 + at(buffer);
    const auto word = [&](LdsBytes* of, u32 block) { return *(LDS u32*)(of + lane + block * ROWS * 4); };
#pragma unroll
    for (u32 i = 0; i < BLOCKS; i++) {
      words_a[0][i] = word(a, i);
      words_a[1][i] = word(a, BLOCKS + i);
      words_b[i] = word(b, i);
    }
  }
  DEVICE void pick(u32 l) {
    const u32 g = rare(l) / ROWS, two = g * 0x0101 + 0x0400;  // the same byte of two words, as v_perm wants it said
    const u32 choice = ROWS == 16 ? two : two * 0x10001 + 0x02020000;
    of_a[0] = picked(words_a[0], choice);
    of_a[1] = picked(words_a[1], choice);
    of_b = picked(words_b, choice);
  }
  static DEVICE u32 picked(const u32 (&words)[BLOCKS], u32 choice) {
    const u32 two = __builtin_amdgcn_perm(words[1], words[0], choice);
    if constexpr (ROWS == 32) return two;
    else return __builtin_amdgcn_perm(__builtin_amdgcn_perm(words[3], words[2], choice), two, 0x05040100);
  }
};
}  // namespace target
