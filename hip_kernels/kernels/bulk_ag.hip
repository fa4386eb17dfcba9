// bulk_ag: entry point. What it computes and why it ends: schedule/bulk_ag.h.
// Oracle: kosmos_raw/numerics/oracles.py::product.
#include "bulk_ag.h"  // defines: BulkAg

#include "../target/run.h"
KOSMOS_KERNEL(bulk_ag, BulkAg)
