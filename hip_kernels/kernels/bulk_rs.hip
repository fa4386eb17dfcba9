// bulk_rs: entry point. What it computes and why it ends: schedule/bulk_rs.h.
// Oracle: kosmos_raw/numerics/oracles.py::product.
#include "bulk_rs.h"  // defines: BulkRs

#include "../target/run.h"
KOSMOS_KERNEL(bulk_rs, BulkRs)
