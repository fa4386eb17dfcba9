// ag_gemm with pulls held to the rate of a link that is not there: what is pulled lands no sooner than it would come over
// NVLink, counted from the first piece of the launch. For tests/sm90/paced.py, where a rank is its own peer.
#define KOSMOS_PACED
#include "../../hip_kernels/schedule/group.h"

namespace target {
constexpr u32 LAUNCHES = 1 << 14;
constexpr u64 BYTES_PER_NS = 330, LATENCY_NS = 2000;
__device__ u64 link_begin[LAUNCHES], link_bytes[LAUNCHES];  // by epoch; a process makes no more launches

__device__ inline u64 link_due(const Group& g, u32 bytes) {
  u64 begin, now = ticks(), before;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, %2;"
               : "=l"(begin) : "l"(link_begin + g.epoch % LAUNCHES), "l"(now) : "memory");
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before) : "l"(link_bytes + g.epoch % LAUNCHES), "l"((u64)bytes) : "memory");
  return (begin ? begin : now) + (before + bytes) / BYTES_PER_NS + LATENCY_NS;
}
}  // namespace target

#include "../../hip_kernels/kernels/ag_gemm.hip"
