// quantize_mxfp8: entry point. What it does: work/quantize.h. It waits for nobody.
// Oracle: kosmos_raw/numerics/mxfp8.py.
#include "../work/quantize.h"

struct QuantizeMxfp8 {
  using Params = QuantizeParams;
  static constexpr u32 SCRATCH_BYTES = 51712;  // read by kosmos_raw/build/report.py
  static_assert(SCRATCH_BYTES == MxScratch::BYTES);
  DEVICE static void work(const Params& p, unsigned char* scratch) { quantize(p, scratch); }
};

#include "../target/run.h"
KOSMOS_PLAIN_KERNEL(quantize_mxfp8, QuantizeMxfp8)
