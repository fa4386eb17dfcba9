// Lists of work of the MoE layers, of which WGs take the next entry: seen first, and then taken if nobody else has.
#pragma once
#include "group.h"

// Words has head(i), the counter of list i, and HEADS, their number.
template <class Words> struct MoeClaims : Words {
  using Words::Words;
  mutable u32 over = 0;  // bit i: list i was seen at its end. Of one WG, touched by next_work alone

  struct Claim {
    u32 head = Words::HEADS, at = 0;  // HEADS: nothing
    Work work;
    DEVICE explicit operator bool() const { return head != Words::HEADS; }
  };
  DEVICE bool take(const Claim& c) const { return target::swap_if(this->head(c.head), c.at, c.at + 1, DEVICE_SCOPE); }
  // The head of a list of n entries. It only rises, so who has seen the end need not look again.
  DEVICE u32 seen(u32 list, u32 n) const {
    if (over >> list & 1) return n;
    const u32 i = target::load(this->head(list), DEVICE_SCOPE);
    if (i >= n) over |= 1u << list;
    return i;
  }
  // Moves that need no credit are dealt to the movers in turn, who make them before anything else: of many WGs that try to take
  // the entry that they see, one succeeds. The number of this WG's next one, of n; n: it has none left.
  u32 dealt = 0;
  DEVICE u32 deal(u32 movers, u32 n) {
    const u32 i = dealt * movers + target::wg();
    if (target::wg() >= movers || i >= n) return n;
    dealt++;
    return i;
  }
};
