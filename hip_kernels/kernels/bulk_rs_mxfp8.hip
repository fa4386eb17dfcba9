// bulk_rs_mxfp8: entry point. What it computes and why it ends: schedule/bulk_rs.h.
// Oracle: kosmos_raw/numerics/oracles.py::product, of dequantised operands.
#include "bulk_rs.h"  // defines: BulkRsMxfp8

#include "../target/run.h"
KOSMOS_KERNEL(bulk_rs_mxfp8, BulkRsMxfp8)
