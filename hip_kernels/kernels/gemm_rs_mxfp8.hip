// gemm_rs_mxfp8: entry point. What it computes and why it ends: schedule/gemm_rs.h.
// Oracle: kosmos_raw/numerics/oracles.py::gemm_rs, of dequantised operands.
#include "gemm_rs.h"  // defines: GemmRsMxfp8

#include "../target/run.h"
KOSMOS_KERNEL(gemm_rs_mxfp8, GemmRsMxfp8)
