// gemm_rs_push: entry point. What it computes and why it ends: schedule/gemm_rs_push.h.
// Oracle: kosmos_raw/numerics/oracles.py::gemm_rs.
#include "gemm_rs_push.h"  // defines: GemmRsPush

#include "../target/run.h"
KOSMOS_KERNEL(gemm_rs_push, GemmRsPush)
