// bulk_ag_mxfp8: entry point. What it computes and why it ends: schedule/bulk_ag.h.
// Oracle: kosmos_raw/numerics/oracles.py::product, of dequantised operands.
#include "bulk_ag.h"  // defines: BulkAgMxfp8

#include "../target/run.h"
KOSMOS_KERNEL(bulk_ag_mxfp8, BulkAgMxfp8)
