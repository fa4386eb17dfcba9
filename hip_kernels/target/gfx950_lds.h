// gfx950: one operand of the GEMM tile, from global memory through LDS to the matrix instructions' registers.
//
// Two buffers, one a K step of 128 bytes; in each a half of 128 rows of either operand is 16 KiB. Direct loads fill them: no
// register is held while data is on its way, but a load writes 1 KiB of LDS in the order of its lanes. So a swizzle must
// be in the lane's GLOBAL address, and again in the address from which a fragment is read.
#pragma once
#include "target.h"

namespace target {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
using U32x2 = vec<u32, 2>;
using U32x4 = vec<u32, 4>;
using I32x4 = vec<int, 4>;
using Bf16x4 = vec<__bf16, 4>;
using Bf16x8 = vec<__bf16, 8>;

#define LDS __attribute__((address_space(3)))
using LdsBytes = LDS unsigned char;

constexpr u32 STEP_BYTES = 128;     // of a line, in a K step
constexpr u32 HALF_BYTES = 16384;   // 128 rows of one operand, one K step
constexpr u32 BUFFER_BYTES = 32768, B_BYTES = 65536, OPERAND_BYTES = 131072;  // A [buffer][half], then B
constexpr u32 NOWHERE = 1u << 31;   // a lane offset past the end of every buffer descriptor

// ---- order. Unlike barrier() in gfx950.h, these wait for what they name and nothing else.
DEVICE inline void no_motion() {
  asm volatile("" ::: "memory");
  __builtin_amdgcn_sched_barrier(0);
}
DEVICE inline void meet() {
  no_motion();
  __builtin_amdgcn_s_barrier();
  no_motion();
}
// All but the N youngest loads and stores of this wave are complete. In asm: the compiler does not know the direct loads.
template <int N> DEVICE inline void wait_memory() { asm volatile("s_waitcnt vmcnt(%0)" ::"n"(N) : "memory"); }
// lgkmcnt(0), of all LDS reads and writes. The builtin, or the compiler waits again, among the multiplications.
DEVICE inline void wait_lds() {
  asm volatile("" ::: "memory");
  __builtin_amdgcn_s_waitcnt(0xc07f);
}
// Arithmetic on what this returns stays where it is written. Else the compiler moves the address arithmetic of rare
// branches out of the main loop, and keeps the results in registers that the loop does not have.
DEVICE inline u32 rare(u32 x) {
  asm volatile("" : "+v"(x));
  return x;
}

// ---- direct loads
DEVICE inline I32x4 buffer(const void* p, u32 bytes) {
  const u64 a = (u64)p;
  return {(int)from_elected((u32)a), (int)from_elected((u32)(a >> 32) & 0xffff), (int)from_elected(bytes), 0x00020000};
}
DEVICE inline void advance(I32x4& b, u64 bytes) {
  const u64 a = ((u64)(u32)b[1] << 32 | (u32)b[0]) + bytes;
  b[0] = (int)(u32)a;
  b[1] = (int)(u32)(a >> 32);
}

#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winline-asm"  // m0 as a clobber
// 16 bytes a lane to `to` + 16 * lane. In asm, or compilers wait for all of them before LDS reads that might meet them.
// `to` must be a pointer there, or the LDS array counts as never written and its reads are deleted. m0 needs one other
// instruction before it is used.
DEVICE inline void load_to_lds(I32x4 from, u32 offset, LdsBytes* to) {
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tbuffer_load_dwordx4 %1, %2, 0 offen lds" ::"s"(to), "v"(offset), "s"(from)
               : "memory", "m0");
}
// The same for some lanes; the others write zero. No branch: the load is issued, and counted, even for no lane at all.
DEVICE inline void load_some_to_lds(I32x4 from, u32 offset, LdsBytes* to, u32 l, u64 lanes) {
  u64 all;
  asm volatile("s_mov_b32 m0, %1\n\ts_mov_b64 %0, exec\n\ts_mov_b64 exec, %4\n\t"
               "buffer_load_dwordx4 %2, %3, 0 offen lds\n\t"
               "s_andn2_b64 exec, %0, %4\n\tds_write_b128 %5, %6\n\ts_mov_b64 exec, %0"
               : "=&s"(all) : "s"(to), "v"(offset), "s"(from), "s"(lanes), "v"(to + l * 16), "v"(U32x4{})
               : "memory", "m0", "scc");
}
// The same of 4 bytes a lane.
DEVICE inline void load_word_to_lds(I32x4 from, u32 offset, LdsBytes* to) {
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tbuffer_load_dword %1, %2, 0 offen lds" ::"s"(to), "v"(offset), "s"(from)
               : "memory", "m0");
}
DEVICE inline void load_some_words_to_lds(I32x4 from, u32 offset, LdsBytes* to, u32 l, u32 other, u64 lanes) {
  u64 all;
  asm volatile("s_mov_b32 m0, %1\n\ts_mov_b64 %0, exec\n\ts_mov_b64 exec, %4\n\t"
               "buffer_load_dword %2, %3, 0 offen lds\n\t"
               "s_andn2_b64 exec, %0, %4\n\tds_write_b32 %5, %6\n\ts_mov_b64 exec, %0"
               : "=&s"(all) : "s"(to), "v"(offset), "s"(from), "s"(lanes), "v"(to + l * 4), "v"(other)
               : "memory", "m0", "scc");
}
#pragma clang diagnostic pop

// How an operand lies. ALONG_K: contiguous along K, and an LDS line is one row's 128 bytes of K; else an LDS line is one k of
// 128 rows. SHARE: rows of a half that a wave multiplies. ROWS: of a matrix instruction, 16 or 32. (B's "rows" are columns.)
// BYTES: of an element, 2, or with ALONG_K 1 as well: a fragment is 16 bytes of a line then too, and two make what an
// instruction takes.
template <bool ALONG_K, u32 SHARE, u32 ROWS, u32 BYTES = 2> struct Form {
  static_assert(ALONG_K || BYTES == 2);
  static constexpr u32 DEPTH = ROWS / 8, BLOCKS = SHARE / ROWS;  // fragments of a half: along K, along rows
  static constexpr u32 LINE = ALONG_K ? 128 : 256, LINES = 1024 / LINE, CHUNKS = LINE / 16;  // LINES, CHUNKS: of a load
  static constexpr u32 PLACES = ALONG_K ? 1 : BLOCKS;  // where a lane reads, that are no constant apart: fragment_at

  // Which row of the tile is row j of the share of `slice` in a half. Slices lie so that a load reads long lines.
  static DEVICE u32 row_of(u32 half, u32 slice, u32 j) {
    return ALONG_K ? slice * 2 * SHARE + half * SHARE + j : half * 128 + slice * SHARE + j;
  }
  // XORed to the number of a 16-byte chunk in LDS line `line`. tests/gfx950/kernels/banks.h: no bank conflicts.
  static DEVICE constexpr u32 swizzle(u32 line) {
    if constexpr (ALONG_K) return line >> 1 & 7;
    else return ROWS == 16 ? ((line & 3) | (line >> 1 & 4)) << 1 : (line & 3) << 2;
  }
  static DEVICE u32 line_of(u32 wave, u32 l, u32 which) { return (wave + 8 * which) * LINES + l / CHUNKS; }
  static DEVICE u32 chunk_of(u32 l, u32 line) { return l % CHUNKS ^ swizzle(line); }

  // Where in a half lane l reads: of ALONG_K, fragment n along K of the first block of rows; else the first fragment along K
  // of block n. The others are a constant away.
  static DEVICE constexpr u32 fragment_at(u32 slice, u32 l, u32 n) {
    if constexpr (ALONG_K) {
      const u32 line = l % ROWS, chunk = l / ROWS + n * (64 / ROWS);
      return (slice * SHARE + line) * LINE + (chunk ^ swizzle(line)) * 16;
    } else {
      // A transposing read: of 16 lanes, lane i gives the address of k = i / 4, rows 4 * (i % 4) .. + 3, and gets the four
      // k of row i. Two such reads make eight k.
      const u32 group = l / 16, i = l % 16, k = 8 * (ROWS == 16 ? group : group / 2) + i / 4;
      const u32 row = slice * SHARE + n * ROWS + (ROWS == 16 ? 0 : group % 2 * 16) + i % 4 * 4;
      return k * LINE + (row / 8 ^ swizzle(k)) * 16 + row % 8 * 2;
    }
  }
  static constexpr u32 FRAGMENTS = ALONG_K ? DEPTH : BLOCKS;

  // Of the lane's load `which` of a half, from the tile's first element. Rows past the tile's end read the last ones: what
  // they give is not stored.
  static DEVICE u32 offset_of(u32 half, u32 which, u32 rows, u32 ld, u32 wave, u32 l) {
    const u32 line = line_of(wave, l, which), chunk = chunk_of(l, line);
    if constexpr (ALONG_K) {
      const u32 row = row_of(half, line / SHARE, line % SHARE);
      return (row < rows ? row : rows - 1) * ld * BYTES + chunk * 16;
    } else {
      const u32 row = row_of(half, chunk * 8 / SHARE, chunk * 8 % SHARE);
      return (line * ld + (row < rows ? row : (rows - 1) / 8 * 8)) * 2;
    }
  }
  // Whether that load brings something, in a K step of which only `left` k are there.
  static DEVICE bool is_real(u32 which, i32 left, u32 wave, u32 l) {
    const u32 line = line_of(wave, l, which);
    return (i32)(ALONG_K ? chunk_of(l, line) * (16 / BYTES) : line) < left;
  }
  // 16 bytes of K of one row a lane.
  static DEVICE U32x4 read(LdsBytes* const* fragment, u32 half, u32 m, u32 k, u32 buffer) {
    if constexpr (ALONG_K) {
      // Fragment k lies where the first one does, but for bits that the swizzle turns too: no register for each.
      LdsBytes* at = (LdsBytes*)((u32)fragment[0] ^ (buffer | k * (1024 / ROWS)));
      return *(LDS U32x4*)(at + half * HALF_BYTES + m * ROWS * LINE);
    } else {
      LdsBytes* at = fragment[m] + buffer + half * HALF_BYTES + k * (512 / ROWS) * LINE;
      const Bf16x4 lo = __builtin_amdgcn_ds_read_tr16_b64_v4bf16((LDS Bf16x4*)at);
      const Bf16x4 hi = __builtin_amdgcn_ds_read_tr16_b64_v4bf16((LDS Bf16x4*)(at + 4 * LINE));
      return __builtin_bit_cast(U32x4, __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7));
    }
  }
};

// One operand's way, but for its form.
template <u32 PLACES> struct OperandLoads {
  I32x4 from;          // descriptor of the tile, moved to the K step to be loaded next
  u64 step_bytes;      // from one K step to the next
  u32 offset[2][2];    // of the lane's loads: [half][which]
  LdsBytes* to;        // the wave's first 1 KiB
  LdsBytes* fragment[PLACES];  // where the lane reads

  // No tile follows: loads go on, so that their count stays the same, but fetch nothing.
  DEVICE void turn_off() { from[2] = 0; }
  DEVICE void load(u32 half, u32 buffer) const {
    for (u32 i = 0; i < 2; i++) load_to_lds(from, offset[half][i], to + buffer + half * HALF_BYTES + i * 8192);
  }
  template <class F> DEVICE void read_as(LdsBytes* lds, u32 slice, u32 l) {
#pragma unroll
    for (u32 n = 0; n < F::PLACES; n++) fragment[n] = lds + F::fragment_at(slice, l, n);
  }
  template <class F> DEVICE void turn_as(u32 rows, u32 ld, u32 wave, u32 l) {
    for (u32 half = 0; half < 2; half++)
      for (u32 i = 0; i < 2; i++) offset[half][i] = F::offset_of(half, i, rows, ld, wave, l);
  }
  // A K step of which only `left` k are there. The others become zero by LDS writes: whether a direct load past the end
  // writes zero, or anything, is not documented. They are complete at the wait_lds that ends every load part.
  template <class Real> DEVICE void load_real(u32 half, u32 buffer, u32 l, Real real) const {
    for (u32 i = 0; i < 2; i++) {
      LdsBytes* at = to + buffer + half * HALF_BYTES + i * 8192;
      load_some_to_lds(from, offset[half][i], at, l, __builtin_amdgcn_ballot_w64(real(i)));
    }
  }
};

// An operand of one form.
template <bool ALONG_K, u32 SHARE, u32 ROWS, u32 BYTES = 2>
struct Operand : Form<ALONG_K, SHARE, ROWS, BYTES>, OperandLoads<Form<ALONG_K, SHARE, ROWS, BYTES>::PLACES> {
  using F = Form<ALONG_K, SHARE, ROWS, BYTES>;
  static constexpr u32 STEP = STEP_BYTES / BYTES;  // k of a K step
  static constexpr bool ANY = false, ALONG = ALONG_K;

  DEVICE void place(LdsBytes* lds, u32 wave, u32 slice, u32 l) {
    this->to = lds + wave * 1024;
    this->template read_as<F>(lds, slice, l);
  }
  // Turns to a tile whose first element is at p.
  DEVICE void turn(const void* p, u32 rows, u32 ld, u32 wave, u32 l, bool) {
    this->from = buffer(p, NOWHERE);
    this->step_bytes = ALONG_K ? STEP_BYTES : (u64)STEP_BYTES * ld;
    this->template turn_as<F>(rows, ld, wave, rare(l));
  }
  DEVICE void load_end(u32 half, u32 buffer, i32 left, u32 wave, u32 l) const {
    l = rare(l);
    this->load_real(half, buffer, l, [&](u32 i) { return F::is_real(i, left, wave, l); });
  }
  template <bool> DEVICE U32x4 read(u32 half, u32 m, u32 k, u32 buffer) const { return F::read(this->fragment, half, m, k, buffer); }
};

// One whose form may be another one for each tile: loads turn to the next tile's before reads do.
template <u32 SHARE, u32 ROWS> struct AnyOperand : OperandLoads<SHARE / ROWS> {
  using Along = Form<true, SHARE, ROWS>;
  using Across = Form<false, SHARE, ROWS>;
  static constexpr u32 DEPTH = Along::DEPTH, BLOCKS = Along::BLOCKS, STEP = STEP_BYTES / 2;
  static constexpr bool ANY = true, ALONG = true;
  static_assert(Across::DEPTH == DEPTH && Across::BLOCKS == BLOCKS);
  u32 loads_along, reads_along;  // K

  DEVICE void place(LdsBytes* lds, u32 wave, u32, u32) { this->to = lds + wave * 1024; }
  DEVICE void begin(bool along_k, u32 wave, u32 slice, u32 l) {
    reads_along = from_elected(along_k);
    l = rare(l);
    if (reads_along) this->template read_as<Along>(this->to - wave * 1024, slice, l);
    else this->template read_as<Across>(this->to - wave * 1024, slice, l);
  }
  DEVICE void turn(const void* p, u32 rows, u32 ld, u32 wave, u32 l, bool along_k) {
    this->from = buffer(p, NOWHERE);
    loads_along = from_elected(along_k);
    this->step_bytes = loads_along ? STEP_BYTES : (u64)STEP_BYTES * ld;
    l = rare(l);
    if (loads_along) this->template turn_as<Along>(rows, ld, wave, l);
    else this->template turn_as<Across>(rows, ld, wave, l);
  }
  DEVICE void load_end(u32 half, u32 buffer, i32 left, u32 wave, u32 l) const {
    l = rare(l);
    this->load_real(half, buffer, l, [&](u32 i) {
      return loads_along ? Along::is_real(i, left, wave, l) : Across::is_real(i, left, wave, l);
    });
  }
  DEVICE u32 row_of(u32 half, u32 slice, u32 j) const {
    return reads_along ? Along::row_of(half, slice, j) : Across::row_of(half, slice, j);
  }
  template <bool ALONG_K> DEVICE U32x4 read(u32 half, u32 m, u32 k, u32 buffer) const {
    return Form<ALONG_K, SHARE, ROWS>::read(this->fragment, half, m, k, buffer);
  }
};

template <bool MANY, bool ALONG_K, u32 SHARE, u32 ROWS, u32 BYTES> struct OperandOf {
  using Type = Operand<ALONG_K, SHARE, ROWS, BYTES>;
};
template <bool ALONG_K, u32 SHARE, u32 ROWS> struct OperandOf<true, ALONG_K, SHARE, ROWS, 2> {
  using Type = AnyOperand<SHARE, ROWS>;
};
}  // namespace target
