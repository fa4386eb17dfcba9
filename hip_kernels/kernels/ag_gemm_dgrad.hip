// ag_gemm_dgrad: entry point, of a whole contraction. What it computes and why it ends: schedule/ag_gemm_dgrad.h.
// Oracle: kosmos_raw/numerics/oracles.py::product.
#include "ag_gemm_dgrad.h"  // defines: AgGemmDgrad

#include "../target/run.h"
KOSMOS_KERNEL(ag_gemm_dgrad, AgGemmDgrad)
