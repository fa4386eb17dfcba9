// moe_backward for the player of histories: launches of moe_forward, and backwards of what those have left. What must come
// out: moe_backward_check.h.
#pragma once
#define WITH_BACKWARD
#include "moe_backward_copies.h"
#include "moe_check.h"

// Launch 1 is a forward. Behind a forward mostly comes its backward, behind a backward mostly another forward; if not, the
// same backward once more, which finds neither x nor pre in the rings.
inline bool is_backward(u32 launch) {
  bool back = false;
  for (u32 i = 2; i <= launch; i++) back = mix(H.seed, 'B', i) % 4 ? !back : back;
  return back;
}
inline u32 forward_of(u32 launch) {
  while (is_backward(launch)) launch--;
  return launch;
}
inline u32 launch_of(const Shape& s) {
  u32 launch = 1;
  while (launch < LAUNCHES && &H.shapes[launch] != &s) launch++;
  return launch;
}

constexpr u32 OWN_LD = 5 * 24 + 2 * MOE_WIDE, GRADIENTS = 5, PIECES = MOE_ROW_CAP + MOE_OWNED, COPY_RING = 2 * RING;
struct MoeBackwardRank {
  u64 *dy_ring, *landing, *x_copy;  // seen by peers
  u64 *dout, *dx, *dpre, *dx_rows, *dweights, *dlogits, *partials, *own_left, *own_right, *own_dx, *pieces;
  u64 *dy_copy, *h_copy, *dpre_copy;
  u64 *to[GRADIENTS], *sums[GRADIENTS];
  CopyParams params;
  u32 launch;  // that is prepared
};
constinit inline MoeBackwardRank backward_ranks[MAX_RANKS]{};

struct BackwardPart {
  const char* name;
  u64* MoeBackwardRank::* at;
  u32 words;  // the most
};
constexpr BackwardPart BACKWARD_PARTS[] = {
    {"dy_ring", &MoeBackwardRank::dy_ring, RING * WIDE},
    {"landing", &MoeBackwardRank::landing, MOE_TOKENS * MOE_TOP_K * WIDE},
    {"x_copy", &MoeBackwardRank::x_copy, COPY_RING * WIDE},
    {"dy_copy", &MoeBackwardRank::dy_copy, COPY_RING * WIDE},
    {"h_copy", &MoeBackwardRank::h_copy, COPY_RING * WIDE},
    {"dpre_copy", &MoeBackwardRank::dpre_copy, COPY_RING * 2 * WIDE},
    {"dout", &MoeBackwardRank::dout, MOE_TOKENS * WIDE},
    {"dx", &MoeBackwardRank::dx, MOE_TOKENS * WIDE},
    {"dpre", &MoeBackwardRank::dpre, RING * 2 * WIDE},
    {"dx_rows", &MoeBackwardRank::dx_rows, RING * WIDE},
    {"dweights", &MoeBackwardRank::dweights, MOE_TOKENS * MOE_TOP_K},
    {"dlogits", &MoeBackwardRank::dlogits, MOE_TOKENS * 12},
    {"partials", &MoeBackwardRank::partials, MOE_TOKENS * (MOE_TOP_K + 1) * TEAM},
    {"own_left", &MoeBackwardRank::own_left, MOE_TOKENS * OWN_LD / 4},
    {"own_right", &MoeBackwardRank::own_right, OWN_LD * WIDE},
    {"own_dx", &MoeBackwardRank::own_dx, MOE_TOKENS * MOE_WIDE / 2},
    {"pieces", &MoeBackwardRank::pieces, 4 + 3 * PIECES + 3 * (6 * PIECES + 8)},
};
constexpr const char* GRADIENT_NAMES[] = {"d_router", "d_gate_up", "d_down", "d_shared_gate_up", "d_shared_down"};
constexpr u32 GRADIENT_WORDS[] = {24 * MOE_WIDE / 2, MOE_OWNED * MOE_WIDE * MOE_WIDE, MOE_OWNED * MOE_WIDE * MOE_WIDE / 2,
                                  MOE_WIDE * MOE_WIDE, MOE_WIDE * MOE_WIDE / 2};  // as FP32
constexpr MoeGradient MoeBackwardParams::* GRADIENT_OF[] = {
    &MoeBackwardParams::d_router, &MoeBackwardParams::d_gate_up, &MoeBackwardParams::d_down, &MoeBackwardParams::d_shared_gate_up,
    &MoeBackwardParams::d_shared_down};

inline void backward_memory(u32 me) {
  moe_memory(me);
  MoeBackwardRank& r = backward_ranks[me];
  for (const BackwardPart& part : BACKWARD_PARTS) r.*part.at = target::new_data(part.words);
  for (u32 i = 0; i < GRADIENTS; i++) {
    r.to[i] = target::new_data(GRADIENT_WORDS[i]);
    r.sums[i] = target::new_data(GRADIENT_WORDS[i]);
  }
}

inline u32 backward_words(u32 launch, u32 rows) {
  const MoeCase c = moe_case(forward_of(launch));
  return MoeBackwardWords::HEADS + MAX_RANKS + 3 * rows + 9 * c.row_cap;
}
inline u32 backward_counters(const Shape& s) {
  const u32 launch = launch_of(s), of = forward_of(launch);
  if (launch == of) return moe_counters(s);
  u32 rows = 0;
  for (u32 q = 0; q < H.s.ranks; q++) rows = most_in(rows, H.shapes[of].m.tile_rows(q));
  return backward_words(launch, rows);
}

inline CopyParams backward_params(u32 me, u32 launch) {
  const u32 of = forward_of(launch);
  const MoeCase c = moe_case(of);
  const MoeBackwardRank& r = backward_ranks[me];
  Random own(mix(H.seed, me, launch));
  CopyParams p{};
  (MoeParams&)p = moe_ranks[me].params;
  p.g = group(me, launch);
  p.counters = counters(me, launch, backward_counters(H.shapes[launch]));
  const auto offset = [&](const u64* at) { return (u64)(at - moe_ranks[me].counts) / 2; };
  p.dy_at = offset(r.dy_ring);
  p.dx_at = offset(r.landing);
  p.dout = (Vec16*)r.dout;
  p.dx = (Vec16*)r.dx;
  p.dpre = (Vec16*)r.dpre;
  p.dx_rows = (Vec16*)r.dx_rows;
  p.dweights = r.dweights;
  p.dlogits = (Vec16*)r.dlogits;
  p.partials = r.partials;
  p.own_left = (Vec16*)r.own_left;
  p.own_right = (Vec16*)r.own_right;
  p.own_dx = (Vec16*)r.own_dx;
  p.pieces = r.pieces;
  for (u32 i = 0; i < GRADIENTS; i++) {
    const u32 into = own.below(4);
    p.*GRADIENT_OF[i] = {r.to[i], into == SET_BF16 || into == ADD_BF16 ? r.sums[i] : nullptr, into, 0};
  }
  p.aux_grad = c.aux ? 0.5f * own.below(3) : 0;
  p.round_rows = c.round_rows;
  p.replays_all = is_backward(launch - 1) || mix(H.seed, 'R', launch) % 4 == 0;
  p.router_ld = (p.router_rows + 7) / 8 * 8;
  p.router_copies = c.parts == 1 ? 2 : 5;
  p.own_ld = p.router_copies * p.router_ld + 2 * c.S;
  p.piece_cap = PIECES;
  p.tile_n = most_in(target::GATED, 4 * (2 + 2 * own.below(2)));
  p.tile_m = 8;
  const auto columns = [&](u32 width) { return (width + p.tile_n - 1) / p.tile_n; };
  const auto rows = [&](u32 width) { return (width + p.tile_m - 1) / p.tile_m; };
  p.cols_h = columns(c.H), p.cols_i = columns(c.I), p.cols_2i = columns(2 * c.I), p.cols_s = columns(c.S);
  p.rows_h = rows(c.H), p.rows_2i = rows(2 * c.I), p.rows_2s = rows(2 * c.S), p.rows_r = rows(p.router_rows);
  p.side_by_side = own.below(3);
  p.movers = own.below(H.wgs + 1);
  p.senders = own.below(H.wgs + 1);
  // Whether products are of copies is the layer's; in how many parts they are made, a rank's own business.
  p.quants = mix(H.seed, 'Q', launch) % 2 ? 1 + own.below(3) : 0;
  p.lead = mix(H.seed, 'T', launch) % 5;
  p.tile_k = c.tile_m + mix(H.seed, 'Z', launch) % 2;
  p.x_copy_at = offset(r.x_copy);
  p.dy_copy = (Vec16*)r.dy_copy;
  p.h_copy = (Vec16*)r.h_copy;
  p.dpre_copy = (Vec16*)r.dpre_copy;
  return p;
}

inline bool backward_names(u32 me, const void* address, char* out, size_t bytes) {
  const MoeBackwardRank& r = backward_ranks[me];
  for (const BackwardPart& part : BACKWARD_PARTS)
    if (name_part(me, address, out, bytes, part.name, r.*part.at, part.words)) return true;
  for (u32 i = 0; i < GRADIENTS; i++)
    if (name_part(me, address, out, bytes, GRADIENT_NAMES[i], r.to[i], GRADIENT_WORDS[i]) ||
        name_part(me, address, out, bytes, "sums", r.sums[i], GRADIENT_WORDS[i]))
      return true;
  return moe_names(me, address, out, bytes);
}
