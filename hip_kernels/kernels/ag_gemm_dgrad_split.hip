// ag_gemm_dgrad_split: entry point, of a contraction that is cut in parts. What it computes and why it ends:
// schedule/ag_gemm_dgrad.h.
// Oracle: kosmos_raw/numerics/oracles.py::product.
#include "ag_gemm_dgrad.h"  // defines: AgGemmDgradSplit

#include "../target/run.h"
KOSMOS_KERNEL(ag_gemm_dgrad_split, AgGemmDgradSplit)
