// What a launch of moe_forward is told, its signals and its counters.
#pragma once
#include "moe_layout.h"
#include "mx.h"

constexpr u32 MAX_SCANS = 8;
constexpr u32 TEAM = 16;  // lanes that move, add or multiply a row between them (work/rows.h), or one
constexpr u32 MAX_TEAM = 16, MAX_GROUPS = 2 * MAX_TEAM, TOKEN_WORDS = 2 + MAX_GROUPS;  // work/route.h

// Behind Signals, in the same memory: epochs again, one writer a slot. No shape moves a slot: whatever layers follow each
// other, and whoever of them is ahead, nobody finds one signal in another one's place.
struct MoeSignals {
  Signals common;
  u32 counts_in[MAX_RANKS][MAX_SCANS];  // rank q has written a part of its counts
  u32 sorted_in[MAX_RANKS];             // PULL: rank q's list and x are complete
  u32 landed[MAX_RANKS];                // owner q has sent all of this rank's rows
  // Of tile row v; as many follow as there may be tile rows.
  struct Row {
    u32 arrived[MAX_RANKS];  // source q has pushed its rows of this rank's tile row v
    u32 freed[MAX_RANKS];    // owner q has read its tile row v, so what takes its slot may be pushed
  } rows[1];
};

// A layer's matrices. Widths: H of tokens, I of experts, S of the shared expert, each as rounded up by the host. Matrices of
// gate and up hold them in alternating blocks of target::GATED rows: so one tile has both, and its epilogue makes h.
struct MoeWeights {
  const Vec16* router;        // [router_parts * router_rows][H] bf16: an FP32 router in three parts (work/route.h)
  const Vec16* bias;          // [experts] fp32, added for the selection alone; null = none
  const Vec16* gate_up;       // [experts of this rank][2 I][H] bf16
  const Vec16* down;          // [experts of this rank][H][I] bf16
  const Vec16* shared_gate_up;  // [2 S][H] bf16
  const Vec16* shared_down;   // [H][S] bf16
};

// What the caller gives of each token's choices.
enum Given : u32 { NO_CHOICES, EXPERTS, EXPERTS_AND_WEIGHTS };

// How scores become choices (work/route.h).
enum Score : u32 { SOFTMAX, SIGMOID, SQRT_SOFTPLUS };
struct MoeRouting {
  u32 top_k;
  u32 score;
  u32 normalise;
  u32 groups, top_groups, group_top;  // top_groups of `groups` groups by the sum of their group_top best; groups = 1: all
  float eps;                          // added to sums that are divided by
  float scale;                        // of the weights, after normalising
  float aux_scale;                    // of sum(count * score) in the auxiliary loss; 0: none is made
  u32 weigh_inputs;                   // rows are weighted before GEMM1, not in the fold
};

struct MoeParams {
  Group g;
  Counters counters;          // words: see the accessors of MoeWords
  MoeLayout layout;
  Vec16* arena_of[MAX_RANKS];
  // Offsets in every rank's arena, in words of 16 bytes.
  u64 counts_at;              // [2][counts_words] by epoch parity, u64 [ranks][experts] in front
  u64 counts_words;           // from one copy to the other, the same for all shapes
  u64 x_at;                   // [x_slots * tile_m][H] bf16, ring of received rows
  u64 combine_at;             // [tokens * top_k][H] bf16, in the order of the rank's send list
  u64 source_at, list_at;     // PULL alone: x and list where peers can read them
  const Vec16* x;             // [tokens][H] bf16
  Vec16* out;                 // [tokens][H] bf16
  MoeWeights weights;
  Vec16 *pre, *h, *y;         // rings: [h_slots * tile_m] [2 I], [I], [y_slots * tile_m][H]; pre may be null
  Vec16 *shared_pre, *shared_h, *shared_y;  // [tokens] [2 S], [S], [H]
  Vec16 *logits, *scores;     // [tokens][logit_ld], [tokens][experts rounded up to 4] fp32
  u64* choices;               // [tokens][top_k]: expert, weight << 32. The caller may give them, see Given
  u64* token_scratch;         // [tokens][TOKEN_WORDS] of TOPK
  u64* places;                // [blocks][experts]: of a block, its rows; since SCAN, where they begin in the expert's list
  u64* aux_parts;             // [blocks][experts]: count, sum of scores << 32
  u64* aux_sums;              // [experts]: the same over all blocks
  u64* aux_loss;              // [1] fp32 << 32
  u64* list;                  // [tokens * top_k]: token * top_k + slot, by expert, then by token
  u64* row_of_slot;           // [tokens][top_k]: the inverse
  u64* scan_room;             // [lanes, or ranks if they are more] scratch of PLAN
  MoeRouting routing;
  float clamp;                // of gate (above) and up (both sides) before SwiGLU; infinity: none
  u32 tokens, block;          // tokens of a block of TOPK, SORT and FOLD; divides tile_m
  u32 H, I, S;
  u32 router_rows, router_parts;  // columns of logits: so many for each part; a multiple of 4
  u32 logit_ld;               // of all parts
  u32 gate_column;            // of logits, that gates the shared expert; NOBODY: none
  u32 given;                  // a Given
  u32 tile_n;
  u32 columns0, columns1, columns2, shared_columns;  // tiles of a row of logits; of GEMM1; of H; of SHARED1
  u32 scans;                  // parts of the counts, 1 .. MAX_SCANS, the same on all ranks
  u32 x_slots, h_slots, y_slots;  // tile rows of the rings
  u32 lag;                    // steps from GEMM1 to GEMM2
  u32 side_by_side;           // tile rows of a step that are worked on together
  u32 movers, senders;        // WGs that look for rows to push (pull), and to send back, before they build
  u32 crew, crew_tiles;       // of them, WGs that build no more than so many tiles; crew < WGs
};
static_assert(sizeof(MoeParams) == 656 && sizeof(MoeRouting) == 40 && sizeof(MoeWeights) == 48);

// In MXFP8: experts' products alone. Widths of H and I are multiples of 128 there, of tokens' rows `depth` is; weights.gate_up
// and weights.down are not used, and rows of x in the ring are a copy whose scales are apart.
struct MoeMxfp8 {
  u64 x_scales_at;  // offset in every rank's arena, in words of 16 bytes
  MxCopy gate_up;   // [experts of this rank * 2 I, depth]
  MxCopy down;      // [experts of this rank * depth, I]: H lines of each, up to `depth`
  MxCopy h;         // ring as h
  u32 depth;        // H, up to a multiple of 128
  u32 zero;
};
struct MoeMxfp8Params : MoeParams {
  MoeMxfp8 mx;
};
static_assert(sizeof(MoeMxfp8Params) == sizeof(MoeParams) + 88);

// Counters of one set, and slots of signals, by name.
struct MoeWords {
  const MoeParams& p;
  DEVICE explicit MoeWords(const MoeParams& p) : p(p) {}

  enum Head : u32 { FRONT, MAIN, MOVES, SENDS, SHARED, TOPK_DONE, SORT_DONE, PLAN_DONE, HEADS };
  DEVICE u32* head(u32 i) const { return p.counters.current(p.g) + i; }
  DEVICE u32* sent_to(u32 d) const { return head(HEADS + d); }
  DEVICE u32* routed(u32 t) const { return head(HEADS + MAX_RANKS + t); }
  DEVICE u32* shared1_done(u32 t) const { return routed(token_rows() + t); }
  DEVICE u32* shared2_done(u32 t) const { return routed(2 * token_rows() + t); }
  DEVICE u32* gemm1_done(u32 v) const { return routed(3 * token_rows() + v); }
  DEVICE u32* gemm2_done(u32 v) const { return gemm1_done(p.layout.row_cap + v); }
  DEVICE u32* sent(u32 v) const { return gemm1_done(2 * p.layout.row_cap + v); }
  DEVICE u32* pulled(u32 v) const { return gemm1_done(3 * p.layout.row_cap + v); }

  DEVICE MoeSignals& signals(u32 q) const { return *(MoeSignals*)p.g.signals_of[q]; }
  DEVICE MoeSignals& own() const { return signals(p.g.rank); }
  DEVICE u32* arrived(u32 at, u32 v, u32 q) const { return &signals(at).rows[v].arrived[q]; }
  DEVICE u32* freed(u32 at, u32 o, u32 v) const { return &signals(at).rows[v].freed[o]; }

  DEVICE u32 blocks() const { return (p.tokens + p.block - 1) / p.block; }
  DEVICE u32 token_rows() const { return (p.tokens + p.layout.tile_m - 1) / p.layout.tile_m; }
};
