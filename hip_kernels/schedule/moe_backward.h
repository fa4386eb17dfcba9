// moe_backward, WHAT NEXT: dOut to the owners of experts, gradients of activations beside those of weights, rows of dX
// back, fold; router and shared expert included; one launch a rank, any skew, in rings that need not hold all rows
// (paper section 3.3.2). Where rows lie follows from the forward's tables; lists of moves and sends are the forward's, from
// their ends. docs/moe_backward.md draws what depends on what.
//
// Tile row v lies in slot v % x_slots of every ring. A round (moe_backward_queue.h) takes the slots of the round x_slots /
// round_rows above it, which by then has no reader left: then x, dOut and pre of it are there once more, x pushed again and
// pre made again. Other rounds find x and pre as the forward has left them.
//
// Why it cannot deadlock. All work of all ranks stands in one order, by keys that are compared from the left, rounds falling
// (n: rounds that rings hold):
//     SHARED, DWEIGHT, OWN_DX, ROUTER_DW; then SEND of round r + n: (r, 0)   PUSH(r): (r, 1)   tiles of round r: (r, 2) in the order
// of their queue; and at last SENDs of the last n rounds, FOLD.
//  (1) Every wait is for something smaller. PUSH(r) waits for all of round r + n: its tiles, and its SENDs. A tile waits for
//      PUSHes into its own round and for tiles before it in the queue. SEND(r) waits for DGRAD1 of r, FOLD for everything.
//      PLAN, and PUSHes of rounds that need no slot again, wait for ranks to start: by induction over launches they do.
//  (2) A WG begins what is not ready only when all smaller work of its rank is claimed: entries of the main queue are drawn in
//      order, and with one in hand it takes what else is smaller first (before). Pushes that need no slot again and DWEIGHTs
//      wait for nothing that may need a WG, and are claimed at any time; most such pushes are dealt to the movers, who make them
//      before anything else. Most SENDs are dealt too: with one of its own that is smaller than what it has in hand, a WG makes it
//      first, and who has none is not asked for others'.
//  (3) What is claimed because it is ready never blocks: within a launch signals only rise.
// Take the smallest unfinished work of all ranks: claimed, it runs, or is in hand of a WG that does something smaller or ready
// before; unclaimed, some WG of its rank (of what is dealt, its own) is not blocked, by (2), and comes to claim it. Claiming ahead
// adds nothing: what blocks blocks in wait_inputs, not in the work.
// With weights on inputs DWEIGHT waits for rows of dX, and its key and those behind it are just below FOLD's.
//
// Nothing of a peer is on its way into a rank's memory when its kernel ends: each arrival and each freed round was waited for.
// And no rank is told of a freed round before all have started, for tiles come after PLAN: no signal is early either.
#pragma once
#include "inputs.h"
#include "moe_backward_queue.h"
#include "moe_claims.h"

struct MoeBackwardSchedule : MoeClaims<MoeBackwardWords> {
  // The WG's only state, touched by next_work alone.
  bool planned = false, drawn = false;
  mutable bool there = false;  // the inputs of what next_work gave last have been seen; nobody need look again
  u32 entry = 0;  // of the main queue, the last one drawn; entries are drawn in order, as in moe_forward
  MoeBackwardQueue::At at;
  Work in_hand;
  mutable u32 seen_weights = NOBODY;  // piece and kind of the last weight gradient whose inputs have been seen

  DEVICE explicit MoeBackwardSchedule(const MoeBackwardParams& p) : MoeClaims(p) {}

  DEVICE void begin() {
    p.counters.clear_other(p.g);
    announce_start(p.g);
    count_dealt();  // peers need not wait for it
  }

  // ---- rounds
  DEVICE u32 rounds_held() const { return p.x_slots / p.round_rows; }
  DEVICE u32 round_of(u32 v) const { return v / p.round_rows; }
  DEVICE u32 rows_of(u32 o) const { return p.layout.one(MoeLayout::OWNER_BASE + o + 1) - p.layout.one(MoeLayout::OWNER_BASE + o); }
  // Whether round r of owner o takes slots that the launch has used before.
  DEVICE bool reuses(u32 o, u32 r) const { return (r + rounds_held()) * p.round_rows < rows_of(o); }
  DEVICE bool replays(u32 o, u32 r) const { return p.replays_all || reuses(o, r); }
  DEVICE u32 rows_in(u32 r) const {
    const u32 begin = r * p.round_rows, left = p.layout.rows() - begin;
    return left < p.round_rows ? left : p.round_rows;
  }
  DEVICE u32 piece_of(u32 v) const {  // its first tile row
    const u32 begin = round_of(v) * p.round_rows, base = target::uniform(p.layout.tile_base(p.layout.expert_of(v)));
    return begin > base ? begin : base;
  }

  // ---- claims (moe_claims.h); the main queue and shared experts are drawn from. Lists of moves and sends from their ends.
  // Of steps of which no owner's slots have been used before, moves are dealt; and sends, but for as many as there are senders, which
  // whoever is free may make. Heads count those behind.
  u32 moves_left = 0, sends_made = 0;  // sends_made: of this WG's
  bool some_wait = true;  // for slots that are used again, here or at other owners
  DEVICE void count_dealt() {
    u32 used = 0;  // tile rows of the longest owner whose slots have been
    for (u32 o = 0; p.movers && o < p.g.ranks; o++) {
      const u32 rounds = (rows_of(o) + p.round_rows - 1) / p.round_rows;
      if (rounds > rounds_held() + used / p.round_rows) used = (rounds - rounds_held()) * p.round_rows;
    }
    some_wait = used || !p.movers;
    moves_left = !p.movers ? p.layout.one(MoeLayout::N_MOVES) : used ? p.layout.moves_end(used / p.layout.step_rows - 1) : 0;
  }
  DEVICE Work next_dealt() {
    const u32 all = p.layout.one(MoeLayout::N_MOVES), n = all - moves_left, i = deal(p.movers, n);
    return i < n ? p.layout.move(all - 1 - i) : Work{};
  }
  DEVICE Claim next_move() const {
    const u32 n = moves_left, i = n ? seen(MOVES, n) : 0;
    return i < n ? Claim{MOVES, i, p.layout.move(n - 1 - i)} : Claim{};
  }
  static constexpr u32 DEALT = HEADS + 1;  // as a claim's head: the work is this WG's, who need only remember it
  DEVICE bool take(const Claim& c) {
    if (c.head == DEALT) return ++sends_made;
    return MoeClaims::take(c);
  }
  DEVICE Claim next_send() const {
    const u32 all = p.layout.one(MoeLayout::N_SENDS), n = p.senders && p.senders < all ? p.senders : all;
    const u32 mine = sends_made * p.senders + target::wg();
    if (target::wg() < p.senders && mine < all - n) return {DEALT, mine, p.layout.send(all - 1 - mine)};
    const u32 i = seen(SENDS, n);
    return i < n ? Claim{SENDS, i, p.layout.send(n - 1 - i)} : Claim{};
  }
  DEVICE Claim next_dweight() const {
    const u32 i = seen(DWEIGHTS, blocks());
    return i < blocks() ? Claim{DWEIGHTS, i, {DWEIGHT, p.g.rank, i}} : Claim{};
  }
  // The filler: depends on nothing but itself.
  DEVICE u32 shared_ones() const { return token_rows() * p.cols_s; }
  DEVICE u32 shared_size() const { return p.S ? shared_ones() + p.rows_h * p.cols_s + p.rows_2s * p.cols_h : 0; }
  DEVICE Claim next_shared(u32 end) const {
    const u32 i = seen(SHARED, shared_size());
    return i < end ? Claim{SHARED, i, shared_at(i)} : Claim{};
  }
  DEVICE Work shared_at(u32 i) const {
    const u32 ones = shared_ones(), seconds = p.rows_h * p.cols_s;
    const MoeBackwardQueue queue(p);
    if (i < ones) return queue.of_tokens(SHARED_D2, i, p.cols_s);
    if (i < ones + seconds) return {SHARED_W2, p.g.rank, 0, queue.part(i - ones, p.rows_h, p.cols_s)};
    return {SHARED_W1, p.g.rank, 0, queue.part(i - ones - seconds, p.rows_2s, p.cols_h)};
  }
  // Drawn, as the main queue is, for all WGs come for it: of those that try to take the entry that they see, one succeeds. What a
  // WG gets may be another one than it saw, and then wait for those before it, or none.
  DEVICE Work draw_shared() const {
    const u32 i = target::add(head(SHARED), 1, DEVICE_SCOPE);
    return i < shared_size() ? shared_at(i) : Work{};
  }

  DEVICE Work next_work() {
    for (;;) {
      there = false;
      const bool gone = aborted(p.g);  // asked beside what is drawn: each answer takes a round trip
      const bool ready = planned || is_planned(), front = !ready && target::load(head(FRONT), DEVICE_SCOPE) == 0;
      if (!front)
        if (const Work w = next_dealt(); w.kind != LEAVE) return gone ? Work{} : w;
      Claim c = ready ? next_free() : front ? Claim{FRONT, 0, {PLAN, p.g.rank}} : before_plan();
      const bool builds = ready && !c;
      if (builds && !drawn) draw();
      if (gone) return {};
      if (builds) c = best();
      if (!c) return c.work;  // LEAVE; or GATE, which is no claim: any number of WGs may hold it
      if (c.head == SHARED) {
        if (const Work w = draw_shared(); w.kind != LEAVE) return w;
        continue;
      }
      if (c.head == MAIN) drawn = false;
      else if (!take(c)) continue;  // another WG has just claimed it
      return c.work;
    }
  }
  DEVICE void draw() {
    entry = target::add(head(MAIN), 1, DEVICE_SCOPE);
    in_hand = MoeBackwardQueue(p).entry(entry, at);
    drawn = true;
  }
  DEVICE bool is_planned() {
    if (!target::load(head(PLAN_DONE), DEVICE_SCOPE)) return false;
    target::acquire(DEVICE_SCOPE);  // pairs with the release in finish, of PLAN: its tables are read from here on
    return planned = true;
  }
  DEVICE Claim before_plan() const {
    if (const Claim c = next_free()) return c;
    if (const Claim c = next_shared(shared_size())) return c;
    return {HEADS, 0, {GATE, p.g.rank}};
  }
  // What movers do besides dealt moves at any time, for it waits for nothing that may need a WG. Before they draw: an entry that is
  // in hand of one that does something else is waited for by all.
  DEVICE Claim next_free() const {
    return drawn || target::wg() >= p.movers || p.routing.weigh_inputs ? Claim{} : next_dweight();
  }

  // What this WG should take now, seen and not yet taken: what its crews have ready, else what comes before the entry in hand,
  // else that entry, or the filler where it would wait. Nothing: it leaves. One loop asks for inputs, for every copy of that
  // question is kilobytes of code.
  enum Stage : u32 { MOVING, SENDING, BUILDING };
  DEVICE Claim best() const {
    const bool no_tiles = in_hand.kind == FOLD || in_hand.kind == LEAVE;
#pragma unroll 1
    for (u32 stage = MOVING;; stage++) {
      Claim c = stage == MOVING ? next_of_movers(no_tiles) : stage == SENDING ? next_of_senders(no_tiles) : next_built();
      const bool asks = stage == SENDING || (stage == MOVING && c.head == MOVES && reuses(c.work.chunk, round_of(c.work.row))) ||
                        (stage == BUILDING && c.head == MAIN);
      there = c && asks && sees_inputs(c.work);
      if (there || (c && !asks) || (stage == BUILDING && !c)) return c;
      if (stage < BUILDING) continue;
      const Claim filler = next_shared(shared_size());
      return filler ? filler : c;
    }
  }
  // Tiles of one weight gradient follow each other, and need the same.
  DEVICE bool sees_inputs(const Work& w) const {
    if (w.kind != WGRAD2 && w.kind != WGRAD1) return has_inputs_of(*this, w);
    const u32 weights = 2 * w.row + (w.kind == WGRAD1);
    if (weights != seen_weights && !has_inputs_of(*this, w)) return false;
    seen_weights = weights;
    return true;
  }
  DEVICE Claim next_of_movers(bool no_tiles) const {
    if (!no_tiles && target::wg() >= p.movers) return {};
    if (const Claim c = next_move()) return c;
    return p.routing.weigh_inputs ? Claim{} : next_dweight();
  }
  DEVICE Claim next_of_senders(bool no_tiles) const { return no_tiles || target::wg() < p.senders ? next_send() : Claim{}; }
  DEVICE Claim next_built() const {
    if (const Claim c = before(in_hand)) return c;
    if (in_hand.kind != LEAVE) return {MAIN, entry, in_hand};
    return next_shared(shared_size());
  }

  // ---- guards: what must be claimed before w may block.
  enum : u32 { FIRST_ROUND = 1u << 24, LAST_KEY = ~0u };  // rounds are fewer
  DEVICE static u32 key(u32 round, u32 which) { return 4 * (FIRST_ROUND - round) + which; }
  DEVICE u32 key_of_send(const Work& w) const { return key(round_of(w.row), 0) + 4 * rounds_held(); }
  DEVICE u32 key_of_push(const Work& w) const { return key(round_of(w.row), 1); }
  DEVICE bool needs_dweights(Kind k) const { return k == OWN_DX || k == ROUTER_DW; }
  // 0: nothing need be claimed before. Of rounds' tiles that is so where nobody waits for slots.
  DEVICE u32 key_of(const Work& w) const {
    switch (w.kind) {
      case QUANT: case GEMM1: case DGRAD2: case DGRAD1: return some_wait ? key(round_of(w.row), 2) : 0;
      case WGRAD2: case WGRAD1: {
        if (!some_wait) return 0;  // each question is a round trip
        const MoePiece x = MoeBackwardQueue(p).piece(w.row);
        return x.blocks ? key(round_of(x.first), 2) : 0;
      }
      case OWN_DX: case ROUTER_DW: return p.routing.weigh_inputs ? LAST_KEY : 0;
      default: return LAST_KEY;
    }
  }
  DEVICE Claim before(const Work& w) const {
    const u32 own = key_of(w);
    if (own) {
      const Claim m = next_move(), s = next_send();
      const u32 of_move = m ? key_of_push(m.work) : LAST_KEY, of_send = s ? key_of_send(s.work) : LAST_KEY;
      if (of_send < of_move && of_send < own) return s;
      if (of_move < own) return m;
    }
    if (own == LAST_KEY || needs_dweights(w.kind))
      if (const Claim c = next_dweight()) return c;
    return w.kind == OWN_DX ? next_shared(shared_ones()) : Claim{};
  }

  // ---- waits
  DEVICE Input input(const Work& w, u32 i) const {
    const u32 R = p.g.ranks, me = p.g.rank, v = w.row;
    switch (w.kind) {
      case GATE: return i ? Input::end() : Input::local(head(PLAN_DONE), 1);
      case DWEIGHT: return p.routing.weigh_inputs && i < R ? landed(i) : Input::end();
      case PUSH:
        if (i == 0) return Input::remote(p.g, &own_signals(p.g).started[w.chunk]);
        if (i > 1 || !reuses(w.chunk, round_of(v))) return Input::end();
        return Input::remote(p.g, freed(me, w.chunk, round_of(v) + rounds_held()));
      case QUANT: return i < R ? pushed(v, i) : Input::end();
      case GEMM1: return i < R ? rows(v, i) : Input::end();
      case DGRAD2:
        if (i < R) return rows(v, i);
        return i > R || !replays(me, round_of(v)) ? Input::end() : Input::local(replayed(v), p.cols_2i);
      case WGRAD2: case WGRAD1: return of_piece(w, i);
      case DGRAD1: return i ? Input::end() : Input::local(dgrad2_done(v), p.cols_i);
      case SEND: return i ? Input::end() : Input::local(dgrad1_done(v), p.cols_h);
      case SHARED_W2: case SHARED_W1: return i ? Input::end() : Input::local(head(SHARED_DONE), shared_ones());
      case OWN_DX:
        if (i == 0) return Input::local(dlogits_done(v), p.router_ld ? blocks_in(v) : 0);
        return i > 1 || !p.S ? Input::end() : Input::local(shared_done(v), p.cols_s);
      case ROUTER_DW:
        if (i == 0) return Input::local(head(DWEIGHTS_DONE), blocks());
        return i > 1 || !v ? Input::end() : Input::local(head(ROUTER_DONE), v * p.rows_r * p.cols_h);
      case FOLD:
        if (i < R) return landed(i);
        return i > R || !p.own_ld ? Input::end() : Input::local(own_done(v * p.block / p.layout.tile_m), p.cols_h);
      default: return Input::end();
    }
  }
  DEVICE Input landed(u32 q) const {
    return p.layout.one(MoeLayout::OWES + q) ? Input::remote(p.g, &own().landed[q]) : Input::none();
  }
  DEVICE Input pushed(u32 v, u32 q) const {
    return p.layout.sources_of(v) >> q & 1 ? Input::remote(p.g, arrived(p.g.rank, v, q)) : Input::none();
  }
  // Of a tile that reads a tile row: as it was pushed, or its copies, for which somebody has waited for that.
  DEVICE Input rows(u32 v, u32 q) const {
    if (!p.quants) return pushed(v, q);
    return q ? Input::none() : Input::local(quantised(v), p.quants);
  }
  // All DGRAD2 of the piece make h and dpre; what came before in the same gradient has been added.
  DEVICE Input of_piece(const Work& w, u32 i) const {
    if (i > 1) return Input::end();
    const MoeBackwardQueue queue(p);
    const MoePiece x = queue.piece(w.row);
    if (i == 0) return x.blocks ? Input::local(piece_done(x.first), queue.tiles(DGRAD2, x.blocks)) : Input::end();
    if (x.begins) return Input::end();
    const u32 before = x.first + x.blocks;  // of the round above
    return Input::local(w.kind == WGRAD2 ? wgrad2_done(before) : wgrad1_done(before), queue.tiles(w.kind, 1));
  }
  DEVICE u32 blocks_in(u32 t) const {
    const u32 left = p.tokens - t * p.layout.tile_m;
    return ((left < p.layout.tile_m ? left : p.layout.tile_m) + p.block - 1) / p.block;
  }

  DEVICE bool ready(const Work& w) const {
    if (!there && !has_inputs_of(*this, w)) return false;
    acquire_inputs(w);
    return true;
  }
  DEVICE bool wait_inputs(const Work& w) const {
    if (w.kind == PLAN) return wait_all_started(p.g, w);
    if (w.kind == PUSH && !wait_started(p.g, w, w.chunk, 1)) return false;  // and it must be in the same call
    if (!there && !wait_inputs_of(*this, w)) return false;
    acquire_inputs(w);
    return true;
  }
  // Pairs with the releases in finish. In system scope where rows of peers are read, also if a count of this device says that
  // they are there: its dies' caches may hold what the slot held before.
  DEVICE void acquire_inputs(const Work& w) const {
    switch (w.kind) {
      case PUSH: case QUANT: case GEMM1: case DGRAD2: case WGRAD2: case WGRAD1: case DWEIGHT: case FOLD:
        return target::acquire(SYSTEM_SCOPE);
      default: return target::acquire(DEVICE_SCOPE);
    }
  }

  // ---- what is published. Data first, then the count or the signal: each pairs with acquire_inputs.
  DEVICE static u32 count(u32* c) {
    target::release(DEVICE_SCOPE);
    return target::add(c, 1, DEVICE_SCOPE) + 1;
  }
  DEVICE void finish(const Work& w) const {
    switch (w.kind) {
      case PLAN: count(head(PLAN_DONE)); return;
      case DWEIGHT:
        count(dlogits_done(w.row * p.block / p.layout.tile_m));
        count(head(DWEIGHTS_DONE));
        return;
      case PUSH:
        target::release(SYSTEM_SCOPE);
        return target::store(arrived(w.chunk, w.row, p.g.rank), p.g.epoch, SYSTEM_SCOPE);
      case QUANT: count(quantised(w.row)); return;
      case GEMM1: count(replayed(w.row)); return;
      case DGRAD2:
        count(dgrad2_done(w.row));
        count(piece_done(piece_of(w.row)));
        return;
      case WGRAD2: case WGRAD1: return piece_is_added(w);
      case DGRAD1: count(dgrad1_done(w.row)); return;
      case SEND: return rows_are_out(w);
      case SHARED_D2:
        count(shared_done(w.row));
        count(head(SHARED_DONE));
        return;
      case OWN_DX: count(own_done(w.row)); return;
      case ROUTER_DW: count(head(ROUTER_DONE)); return;
      default: return;
    }
  }
  DEVICE void piece_is_added(const Work& w) const {
    const MoeBackwardQueue queue(p);
    const MoePiece x = queue.piece(w.row);
    if (!x.blocks) return;
    if (count(w.kind == WGRAD2 ? wgrad2_done(x.first) : wgrad1_done(x.first)) == queue.tiles(w.kind, 1))
      rows_are_through(round_of(x.first), x.blocks);
  }
  // A tile row leaves its round three times: when WGRAD2 and WGRAD1 of its piece are made, and when its last rows are sent.
  // After the last one nobody reads the round's slots, and those are told who have rows in what takes them.
  DEVICE void rows_are_through(u32 r, u32 rows) const {
    if (r < rounds_held()) return;
    target::acquire(DEVICE_SCOPE);  // the other tiles' reads, then the count
    target::release(DEVICE_SCOPE);
    if (target::add(round_done(r), rows, DEVICE_SCOPE) + rows == 3 * rows_in(r)) round_is_free(r);
  }
  DEVICE void round_is_free(u32 r) const {
    target::acquire(DEVICE_SCOPE);  // the others, then the word to those who write
    target::release(SYSTEM_SCOPE);
    const u32 held = rounds_held();
    u32 sources = 0;
    for (u32 i = 0; i < p.round_rows; i++) sources |= p.layout.sources_of((r - held) * p.round_rows + i);
    for (u32 q = 0; q < p.g.ranks; q++)
      if (sources >> q & 1) target::store(freed(q, p.g.rank, r), p.g.epoch, SYSTEM_SCOPE);
  }
  // By each sender in system scope, though the last one's release would do in any model of memory: what goes to a peer
  // leaves a cache that belongs to some of a GPU's WGs only when one of those says so.
  DEVICE void row_is_out(u32 v) const {
    target::release(SYSTEM_SCOPE);
    if (target::add(sent(v), 1, DEVICE_SCOPE) + 1 == bits_set(p.layout.sources_of(v))) rows_are_through(round_of(v), 1);
  }
  DEVICE void rows_are_out(const Work& w) const {
    row_is_out(w.row);
    if (target::add(sent_to(w.chunk), 1, DEVICE_SCOPE) + 1 != p.layout.one(MoeLayout::SENDS_TO + w.chunk)) return;
    target::acquire(DEVICE_SCOPE);  // the other sends, then the word to who owns the tokens
    target::release(SYSTEM_SCOPE);
    target::store(&signals(w.chunk).landed[p.g.rank], p.g.epoch, SYSTEM_SCOPE);
  }
};
