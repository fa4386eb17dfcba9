// moe_backward_mxfp8: entry point. What it computes and why it ends: schedule/moe_backward.h.
// Oracle: kosmos_raw/numerics/moe/layer.py.
#include "moe_backward.h"  // defines: MoeBackwardMxfp8

#include "../target/run.h"
KOSMOS_KERNEL(moe_backward_mxfp8, MoeBackwardMxfp8)
