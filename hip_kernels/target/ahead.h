// What targets have in common that decide ahead of what is worked on, and wait for a tile's inputs when they come to them.
#pragma once
#include "../schedule/group.h"

namespace target {
// What must be there before a work is begun. A schedule may tell more of a tile than wait_inputs, which waits for all:
//   wait_part(w, i)    part i of its operands, of part_k() columns of A
//   wait_to_store(w)   what storing its result takes
// A tile is begun with its first part, and its target waits for the rest where that is needed.
template <class S> DEVICE inline bool wait_to_begin(const S& s, const Work& w) {
  if constexpr (requires { s.wait_part(w, 0u); }) {
    if (is_tile(w.kind)) return s.wait_part(w, 0);
  } else if constexpr (requires { s.wait_to_store(w); }) {
    if (is_tile(w.kind)) return true;
  }
  return s.wait_inputs(w);
}
}  // namespace target
