// ag_gemm_mxfp8: entry point. What it computes and why it ends: schedule/ag_gemm.h.
// Oracle: kosmos_raw/numerics/oracles.py::ag_gemm, of dequantised operands.
#include "ag_gemm.h"  // defines: AgGemmMxfp8

#include "../target/run.h"
KOSMOS_KERNEL(ag_gemm_mxfp8, AgGemmMxfp8)
