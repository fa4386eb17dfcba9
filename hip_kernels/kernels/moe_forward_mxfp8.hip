// moe_forward_mxfp8: entry point. What it computes and why it ends: schedule/moe_forward.h.
// Oracle: kosmos_raw/numerics/moe/layer.py.
#include "moe_forward.h"  // defines: MoeForwardMxfp8

#include "../target/run.h"
KOSMOS_KERNEL(moe_forward_mxfp8, MoeForwardMxfp8)
