// moe_backward broken on purpose: each breaks one rule, and says which.
#pragma once
#include "moe_backward_check.h"
#include "mutants.h"

using BackwardSchedule = MoeBackwardSchedule;
template <class S> struct WithSchedule : CopyingMoeBackward {
  using Schedule = S;
};

// --- work begins without something that it needs: input i of w is not waited for ---

using SkipsInput = bool (*)(const BackwardSchedule&, const Work&, u32);
template <SkipsInput SKIPS> struct Hasty : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  bool wait_inputs(const Work& w) const {
    if (w.kind == PLAN) return SKIPS(*this, w, 0) || wait_all_started(p.g, w);
    return wait_but_for(*this, w, SKIPS);
  }
};
template <Kind KIND> bool any_of(const BackwardSchedule&, const Work& w, u32) { return w.kind == KIND; }
template <Kind KIND, u32 INDEX> bool input_of(const BackwardSchedule&, const Work& w, u32 i) { return w.kind == KIND && i == INDEX; }
template <Kind KIND> bool rows_of_peers(const BackwardSchedule& s, const Work& w, u32 i) { return w.kind == KIND && i < s.p.g.ranks; }
template <Kind KIND> bool behind_peers(const BackwardSchedule& s, const Work& w, u32 i) { return w.kind == KIND && i == s.p.g.ranks; }
template <Kind KIND> bool copies_of(const BackwardSchedule& s, const Work& w, u32 i) { return s.p.quants && rows_of_peers<KIND>(s, w, i); }
inline bool shared_weights(const BackwardSchedule&, const Work& w, u32) { return w.kind == SHARED_W2 || w.kind == SHARED_W1; }

// Rows are there when all parts of their copies are made.
struct OnePartIsEnough : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  bool wait_inputs(const Work& w) const {
    if (!p.quants || w.kind != DGRAD2) return BackwardSchedule::wait_inputs(w);
    return wait_at_least(p.g, w, quantised(w.row), 1, DEVICE_SCOPE) && wait_but_for(*this, w, copies_of<DGRAD2>);
  }
};

// The queue is read when PLAN has written it.
struct ReadsUnplanned : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  Work next_work() {
    if (target::load(head(FRONT), DEVICE_SCOPE)) planned = true;
    return BackwardSchedule::next_work();
  }
};

// --- what is published ---

// A round is free when both weight gradients have been made AND its last rows are sent.
enum Leaves : u32 { WITHOUT_SENDS, WITHOUT_WEIGHTS, FIRST_TILE, TOLD_WRONG_RANKS, ONE_WORD };
template <Leaves HOW> struct FreesEarly : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  u32 mark(u32 r) const { return p.g.epoch * 4096 + 4095 - r; }
  bool wait_inputs(const Work& w) const {
    if (HOW != ONE_WORD || w.kind != PUSH || !reuses(w.chunk, round_of(w.row))) return BackwardSchedule::wait_inputs(w);
    if (!wait_started(p.g, w, w.chunk, 1)) return false;
    if (!wait_at_least(p.g, w, freed(p.g.rank, w.chunk, 0), mark(round_of(w.row) + rounds_held()), SYSTEM_SCOPE)) return false;
    acquire_inputs(w);
    return true;
  }
  void through(u32 r, u32 rows, u32 all) const {
    const u32 held = rounds_held();
    if (r < held) return;
    target::acquire(DEVICE_SCOPE);
    target::release(DEVICE_SCOPE);
    if (target::add(round_done(r), rows, DEVICE_SCOPE) + rows != all) return;
    target::acquire(DEVICE_SCOPE);
    target::release(SYSTEM_SCOPE);
    const u32 told = HOW == TOLD_WRONG_RANKS ? r : r - held;
    u32 sources = 0;
    for (u32 v = told * p.round_rows; v < (told + 1) * p.round_rows && v < p.layout.rows(); v++) sources |= p.layout.sources_of(v);
    for (u32 q = 0; q < p.g.ranks; q++) {
      if (!(sources >> q & 1)) continue;
      if (HOW == ONE_WORD) target::store(freed(q, p.g.rank, 0), mark(r), SYSTEM_SCOPE);
      else target::store(freed(q, p.g.rank, r), p.g.epoch, SYSTEM_SCOPE);
    }
  }
  void finish(const Work& w) const {
    const bool weights = w.kind == WGRAD2 || w.kind == WGRAD1;
    if (!weights && w.kind != SEND) return BackwardSchedule::finish(w);
    const u32 times = HOW == WITHOUT_SENDS ? 2 : HOW == WITHOUT_WEIGHTS ? 1 : 3;
    if (weights) {
      const MoeBackwardQueue queue(p);
      const MoePiece x = queue.piece(w.row);
      const u32 round = round_of(x.first), end = HOW == FIRST_TILE ? 1 : queue.tiles(w.kind, 1);
      if (x.blocks && count(w.kind == WGRAD2 ? wgrad2_done(x.first) : wgrad1_done(x.first)) == end && HOW != WITHOUT_WEIGHTS)
        through(round, x.blocks, times * rows_in(round));
      return;
    }
    target::release(SYSTEM_SCOPE);
    const u32 round = round_of(w.row);
    if (target::add(sent(w.row), 1, DEVICE_SCOPE) + 1 == bits_set(p.layout.sources_of(w.row)) && HOW != WITHOUT_SENDS)
      through(round, 1, times * rows_in(round));
    if (target::add(sent_to(w.chunk), 1, DEVICE_SCOPE) + 1 != p.layout.one(MoeLayout::SENDS_TO + w.chunk)) return;
    target::acquire(DEVICE_SCOPE);
    target::release(SYSTEM_SCOPE);
    target::store(&signals(w.chunk).landed[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
// The owner of tokens is told of the last rows, not of the first.
struct LandsTooEarly : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  void finish(const Work& w) const {
    if (w.kind != SEND) return BackwardSchedule::finish(w);
    target::release(SYSTEM_SCOPE);
    if (target::add(sent(w.row), 1, DEVICE_SCOPE) + 1 == bits_set(p.layout.sources_of(w.row))) rows_are_through(round_of(w.row), 1);
    if (target::add(sent_to(w.chunk), 1, DEVICE_SCOPE) != 0) return;
    target::acquire(DEVICE_SCOPE);
    target::release(SYSTEM_SCOPE);
    target::store(&signals(w.chunk).landed[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
// Weight gradients are made when all DGRAD2 of the piece are, not when one column of them is.
struct CountsColumns : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  void finish(const Work& w) const {
    BackwardSchedule::finish(w);
    if (w.kind == DGRAD2 && w.part == 0) target::add(piece_done(piece_of(w.row)), p.cols_i, DEVICE_SCOPE);
  }
};

// Copies first, then their count.
struct CountsCopiesAtOnce : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  void finish(const Work& w) const {
    if (w.kind != QUANT) return BackwardSchedule::finish(w);
    target::add(quantised(w.row), 1, DEVICE_SCOPE);
  }
};
struct CopiesBehindTheCount : CopyingMoeBackward {
  struct Schedule : BackwardSchedule {
    using BackwardSchedule::BackwardSchedule;
    void finish(const Work& w) const {
      BackwardSchedule::finish(w);
      if (w.kind == DGRAD2) CopyingMoeBackward::make_copies(params(*this), w);
    }
  };
  static bool makes_copies(const Work&) { return false; }
};

// --- what is claimed before what. The loop is the schedule's, with a rule taken away ---

enum BackwardRule : u32 {
  PUSHES_FIRST, SENDS_FIRST, SENDS_BEFORE_PUSHES, ALL_SENT_BEFORE_FOLDS, ALL_PUSHED_BEFORE_FOLDS, DWEIGHTS_FIRST, SHARED_FIRST,
  ASKS_FOR_SENDS, ASKS_FOR_PUSHES, MOVES_FALL, SENDS_FALL, QUANT_IN_ITS_ROUND, QUANT_GUARDED,
};
template <BackwardRule WITHOUT> struct Unruly : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  Claim move() const {
    const u32 i = target::load(head(MOVES), DEVICE_SCOPE), n = p.layout.one(MoeLayout::N_MOVES);
    return i < n ? Claim{MOVES, i, p.layout.move(WITHOUT == MOVES_FALL ? i : n - 1 - i)} : Claim{};
  }
  Claim send() const {
    const u32 i = target::load(head(SENDS), DEVICE_SCOPE), n = p.layout.one(MoeLayout::N_SENDS);
    return i < n ? Claim{SENDS, i, p.layout.send(WITHOUT == SENDS_FALL ? i : n - 1 - i)} : Claim{};
  }
  Claim guard(const Work& w) const {
    const bool quant = w.kind == QUANT;
    const u32 own = quant && WITHOUT == QUANT_IN_ITS_ROUND ? LAST_KEY : quant && WITHOUT == QUANT_GUARDED ? 0 : key_of(w);
    const bool last = own == LAST_KEY;
    if (own) {
      Claim m = move(), s = send();
      if ((WITHOUT == PUSHES_FIRST && !last) || (WITHOUT == ALL_PUSHED_BEFORE_FOLDS && last)) m = {};
      if ((WITHOUT == SENDS_FIRST && !last) || (WITHOUT == ALL_SENT_BEFORE_FOLDS && last)) s = {};
      const u32 of_move = m ? key_of_push(m.work) : LAST_KEY, of_send = s ? key_of_send(s.work) : LAST_KEY;
      if (WITHOUT == SENDS_BEFORE_PUSHES && of_move < own) return m;
      if (of_send < of_move && of_send < own) return s;
      if (of_move < own) return m;
    }
    if (WITHOUT != DWEIGHTS_FIRST && (last || needs_dweights(w.kind)))
      if (const Claim c = next_dweight()) return c;
    return w.kind == OWN_DX && WITHOUT != SHARED_FIRST ? next_shared(shared_ones()) : Claim{};
  }
  Claim choose() {
    const MoeBackwardQueue queue(p);
    const u32 i = target::load(head(MAIN), DEVICE_SCOPE);
    const Work w = queue.entry(i, at);
    const bool no_tiles = w.kind == FOLD || w.kind == LEAVE;
    if (no_tiles || target::wg() < p.movers) {
      const Claim m = move();
      if (m && (WITHOUT == ASKS_FOR_PUSHES || !reuses(m.work.chunk, round_of(m.work.row)) || has_inputs_of(*this, m.work))) return m;
    }
    if (no_tiles || target::wg() < p.senders)
      if (const Claim s = send(); s && (WITHOUT == ASKS_FOR_SENDS || has_inputs_of(*this, s.work))) return s;
    if (const Claim c = guard(w)) return c;
    if (w.kind == LEAVE) return next_shared(shared_size());
    if (!has_inputs_of(*this, w))
      if (const Claim c = next_shared(WITHOUT == SHARED_FIRST ? 0 : shared_size())) return c;
    return {MAIN, i, w};
  }
  Work next_work() {
    for (;;) {
      if (aborted(p.g)) return {};
      const Claim c = planned || is_planned() ? choose() : before_plan();
      if (!c || take(c)) return c.work;
    }
  }
  Claim before_plan() const {
    if (target::load(head(FRONT), DEVICE_SCOPE) == 0) return {FRONT, 0, {PLAN, p.g.rank}};
    if (target::wg() < p.movers)
      if (const Claim c = move(); c && !reuses(c.work.chunk, round_of(c.work.row))) return c;
    return {HEADS, 0, {GATE, p.g.rank}};
  }
};

// A push into a slot that has been used waits for it, and is claimed when it is its turn.
struct DealsUsedSlots : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  void begin() {
    BackwardSchedule::begin();
    if (p.movers) moves_left = 0;
  }
};

// Slots are used again, and nobody looks what must be claimed before who waits for them.
struct ForgetsUsedSlots : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  void begin() {
    BackwardSchedule::begin();
    some_wait = false;
  }
};

// Who may block has made the sends that are dealt to it and smaller: before tiles, for slots are used again; before folds.
template <bool BEFORE_TILES> struct ForgetsDealtSends : BackwardSchedule {
  using BackwardSchedule::BackwardSchedule;
  Work next_work() {
    const u32 made = sends_made;
    const bool forgets = drawn && is_tile(in_hand.kind) == BEFORE_TILES;
    if (forgets) sends_made = 1 << 20;
    const Work w = BackwardSchedule::next_work();
    if (forgets) sends_made = made;
    return w;
  }
};

// --- the work ---

// The main queue's segments in another order: order(add, n) calls add(i) for each of the n segments.
template <class Order> void reorder(const MoeBackwardQueue& queue, Order order) {
  const u32 n = (u32)queue.at(MoeBackwardQueue::N_SEGMENTS);
  MoeBackwardQueue::Segment all[512];
  u32 m = 0, begin = 0;
  order([&](u32 i) { all[m++] = queue.segment(i); }, n);
  for (u32 i = 0; i < m; begin += all[i++].count) {
    all[i].begin = begin;
    queue.put(i, all[i]);
  }
}
// All entries of one kind stand in front of all others.
template <Kind FIRST> struct Reordered : CopyingMoeBackward {
  static void move(const Schedule& s, const Work& w) {
    CopyingMoeBackward::move(s, w);
    if (w.kind != PLAN) return;
    const MoeBackwardQueue queue(s.p);
    reorder(queue, [&](auto add, u32 n) {
      for (u32 others = 0; others < 2; others++)
        for (u32 i = 0; i < n; i++)
          if ((queue.segment(i).kind != FIRST) == others) add(i);
    });
  }
};
// Copies of a piece stand in front of what reads them.
struct QuantBehindDgrad2 : CopyingMoeBackward {
  static void move(const Schedule& s, const Work& w) {
    CopyingMoeBackward::move(s, w);
    if (w.kind != PLAN) return;
    const MoeBackwardQueue queue(s.p);
    reorder(queue, [&](auto add, u32 n) {
      for (u32 i = 0; i < n; i++) {
        const auto x = queue.segment(i);
        if (x.kind != QUANT) add(i);
        for (u32 j = 0; j < i && x.kind == DGRAD2; j++)
          if (const auto y = queue.segment(j); y.kind == QUANT && y.piece == x.piece) add(j);
      }
    });
  }
};
// An expert without rows has a gradient too.
struct ForgetsIdleExperts : CopyingMoeBackward {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != PLAN) return CopyingMoeBackward::move(s, w);
    MoeBackwardParams p = s.p;
    p.d_down.into = p.d_gate_up.into = ADD_F32;
    MoeBackwardPlanner(p).plan();
  }
};
// An expert's last tile row ends where its rows end.
struct AddsWhatIsMissing : CopyingMoeBackward {
  static TileOperands operands(const Params& p, const Work& w) {
    TileOperands t = CopyingMoeBackward::operands(p, w);
    if (w.kind == WGRAD2 || w.kind == WGRAD1) t.K = MoeBackwardQueue(p).piece(w.row).blocks * (p.quants ? p.tile_k : p.layout.tile_m);
    return t;
  }
};
// x of a round that takes slots again is pushed again.
struct KeepsOldX : CopyingMoeBackward {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != PUSH) return CopyingMoeBackward::move(s, w);
    if (s.p.quants) MoeCopies(params(s)).push_x(w);
    MoeGradients(s.p).push(w, false);
  }
};
// x of every round is pushed to where WGRAD1 of copies reads it.
struct KeepsOldXCopies : CopyingMoeBackward {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != PUSH || s.replays(w.chunk, s.round_of(w.row))) return CopyingMoeBackward::move(s, w);
    MoeBackward::move(s, w);
  }
};
// Padding is zeros.
struct LeavesGaps : CopyingMoeBackward {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != PUSH) return CopyingMoeBackward::move(s, w);
    if (s.p.quants) MoeCopies(params(s)).push_x(w);
    const MoeGradients g(s.p);
    const MoeLayout& l = s.p.layout;
    const u32 me = s.p.g.rank, e = w.part, tile = l.tile_of(e, w.row), words = g.rows.words;
    if (s.replays(w.chunk, s.round_of(w.row)))
      g.rows.dispatch(me, w.row, e, s.p.x, s.p.list, g.rows.ring_x(w.chunk, w.row), s.p.routing.weigh_inputs);
    const MoeLayout::Rows span = l.real_rows_in(me, e, tile);
    for (u32 i = span.begin; i < span.end; i++) {
      const u64 slot = target::read(s.p.list + l.send_base(me, e) + i), token = slot / s.p.routing.top_k;
      Vec16* to = g.ring_dy(w.chunk, w.row) + (u64)(l.start(me, e) + i - tile * l.tile_m) * words;
      for (u32 c = 0; c < words; c++) {
        const Vec16 v = target::read(s.p.dout + token * words + c);
        target::write(to + c, s.p.routing.weigh_inputs ? v : SourceRow{nullptr, float_in(target::read(s.p.choices + slot)), true}.weighted(v));
      }
    }
  }
};
// Of BF16 gradients that are made in turns, sums are kept in FP32.
struct RoundsEachTurn : CopyingMoeBackward {
  static MoeSumsTo sums_to(const Params& p, const Work& w) {
    MoeSumsTo to = CopyingMoeBackward::sums_to(p, w);
    if (w.kind != WGRAD2 || is_f32((Into)p.d_down.into)) return to;
    to.gradient.sums = nullptr;
    to.gradient.to.c = p.d_down.to;
    to.gradient.to.into = MoeBackwardQueue(p).piece(w.row).begins ? (Into)p.d_down.into : ADD_BF16;
    return to;
  }
};
// A gradient of logits is FP32: two BF16.
struct ForgetsTheRest : CopyingMoeBackward {
  static TileOperands operands(const Params& p, const Work& w) {
    TileOperands t = CopyingMoeBackward::operands(p, w);
    if (w.kind == ROUTER_DW && w.row) t.K = 0;
    return t;
  }
};
// Rows are added in the order of choices.
struct AddsBackwards : CopyingMoeBackward {
  static void move(const Schedule& s, const Work& w) {
    if (w.kind != FOLD) return CopyingMoeBackward::move(s, w);
    const Params& p = params(s);
    const MoeGradients g(p);
    const u32 begin = w.row * p.block, left = p.tokens - begin, n = left < p.block ? left : p.block, k = p.routing.top_k;
    for (u32 i = 0; i < n * g.rows.words; i++) {
      const u64 t = begin + i / g.rows.words, at = t * g.rows.words + i % g.rows.words;
      float sum[8] = {};
      for (u32 c = 0; p.own_ld && c < 8; c++) sum[c] += float_at(p.own_dx, at * 8 + c);
      for (u32 j = k; j-- > 0;) {
        const Vec16 y = target::read(g.landing() + target::read(p.row_of_slot + t * k + j) * g.rows.words + i % g.rows.words);
        MoeRows::add(sum, y, p.routing.weigh_inputs ? float_in(target::read(p.choices + t * k + j)) : 1.f);
      }
      target::write(p.dx + at, eight_bf16(sum));
    }
  }
};
// Not rules of the schedule, but of the tests: a store beside its place is noticed.
struct StoresRowsBeside : CopyingMoeBackward {
  static void store(const Params& p, const Work& w, u32 row, u32 column, u64 v) { CopyingMoeBackward::store(p, w, row, column + 4, v); }
};
struct StoresWeightsBeside : CopyingMoeBackward {
  static MoeSumsTo sums_to(const Params& p, const Work& w) {
    MoeSumsTo to = CopyingMoeBackward::sums_to(p, w);
    if (w.kind == WGRAD1) to.gradient.to.first += 4;
    return to;
  }
};
