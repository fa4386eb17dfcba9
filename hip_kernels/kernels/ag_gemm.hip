// ag_gemm: entry point. What it computes and why it ends: schedule/ag_gemm.h.
// Oracle: kosmos_raw/numerics/oracles.py::ag_gemm.
#include "ag_gemm.h"  // defines: AgGemm

#include "../target/run.h"
KOSMOS_KERNEL(ag_gemm, AgGemm)
