// gemm_rs: entry point. What it computes and why it ends: schedule/gemm_rs.h.
// Oracle: kosmos_raw/numerics/oracles.py::gemm_rs.
#include "gemm_rs.h"  // defines: GemmRs

#include "../target/run.h"
KOSMOS_KERNEL(gemm_rs, GemmRs)
