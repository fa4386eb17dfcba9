// gemm_rs_push_mxfp8: entry point. What it computes and why it ends: schedule/gemm_rs_push.h.
// Oracle: kosmos_raw/numerics/oracles.py::gemm_rs, of dequantised operands.
#include "gemm_rs_push.h"  // defines: GemmRsPushMxfp8

#include "../target/run.h"
KOSMOS_KERNEL(gemm_rs_push_mxfp8, GemmRsPushMxfp8)
