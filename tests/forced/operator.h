// What operators share, whoever plays them: params, buffers, the judgement.
#pragma once
#include "cases.h"  // defines: H, Setup, Shape, Rank, Operator, draw_history

constexpr u64 NOBODY_WROTE = 0x7fff7fff7fff7fff;  // NaNs of a kind that no kernel writes

inline Group group(u32 me, u32 launch) {
  Rank& r = H.ranks[me];
  Group g{};
  for (u32 q = 0; q < H.s.ranks; q++) g.signals_of[q] = H.ranks[q].signals;
  g.abort = r.abort;
  g.host_abort = r.host_abort;
  g.record = &r.record;
  g.trace = H.s.log ? &r.trace[0][0][0] : nullptr;
  g.trace_events = H.s.log ? TRACE_EVENTS : 0;
  // The host's word is looked at a thousand times within the limit.
  g.limit_ticks = H.s.kind == RIGHT ? target::NEVER : H.s.kind == TOLD_TO_STOP_BY_HOST ? LIMIT << 10 : LIMIT;
  g.rank = me;
  g.ranks = H.s.ranks;
  g.epoch = H.base + launch;
  g.call = H.shape(me, launch).call;
  g.wgs = H.wgs;
  return g;
}

inline u32 words_of(u32 me, u32 launch) { return operators[H.operator_of[launch]].counter_words(H.shape(me, launch)); }

inline Counters counters(u32 me, u32 launch, u32 words) {
  Counters c = {H.ranks[me].counters, COUNTERS_PER_SET, launch > 1 ? words_of(me, launch - 1) : 0};
  switch (H.s.mutation) {
    case NOT_CLEARED: c.to_clear = 0; break;
    case CLEARS_BY_THIS_SHAPE: c.to_clear = launch > 1 ? words : 0; break;
    case ONE_COUNTER_SET: c.per_set = 0; break;
  }
  return c;
}

// The first `used` of `words` words may be touched in this launch, and get the caller's new values.
template <class Value> void fill(u64* p, u32 used, u32 words, Value value) {
  target::open(p, used, words);
  for (u32 i = 0; i < used; i++) target::write(p + i, (u64)value(i));
}

template <class Number> void unpack_input(Number (*to)[target::MAX_K], char matrix, u32 rank, u32 launch, u32 rows, u32 K) {
  for (u32 i = 0; i < rows * K / 4; i++) {
    const Four f = four(matrix, rank, launch, i);
    for (u32 j = 0; j < 4; j++) to[4 * i / K][4 * i % K + j] = f.at[j];
  }
}

template <class Value> void check_matrix(u32 me, u32 launch, const u64* c, u32 rows, u32 cols, u32 ld, Value value) {
  for (u32 row = 0; row < rows; row++)
    for (u32 word = 0; word < ld / 4; word++) {
      const u64 got = target::read(c + row * ld / 4 + word);
      if (word * 4 >= cols && got != NOBODY_WROTE) {
        target::symptom(target::WRONG_VALUE, "rank %u launch %u row %u: wrote past column %u", me, launch, row, cols);
        return;
      }
      for (u32 col = word * 4; col < word * 4 + 4 && col < cols; col++) {
        const i32 sum = value(row, col);
        const u32 bits = got >> col % 4 * 16 & 0xffff;
        if (bits == to_bf16(sum)) continue;
        target::symptom(target::WRONG_VALUE, "rank %u launch %u row %u col %u: got %g (0x%04x), wanted %d", me, launch, row,
                        col, from_bf16(bits), bits, sum);
        return;
      }
    }
}

inline bool name_part(u32 me, const void* address, char* out, size_t bytes, const char* name, const void* part, u32 count,
                      u32 size = 8) {
  const u64 i = ((const char*)address - (const char*)part) / size;
  if (address < part || i >= count) return false;
  snprintf(out, bytes, "rank %u %s[%u]", me, name, (u32)i);
  return true;
}

template <class Played> constexpr Operator operator_of(const char* name) {
  return {name,        Played::give_memory,   Played::prepare,     Played::check,
          Played::run, Played::counter_words, Played::name_address};
}
