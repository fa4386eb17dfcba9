// moe_forward: entry point. What it computes and why it ends: schedule/moe_forward.h.
// Oracle: kosmos_raw/numerics/moe/layer.py.
#include "moe_forward.h"  // defines: MoeForward

#include "../target/run.h"
KOSMOS_KERNEL(moe_forward, MoeForward)
