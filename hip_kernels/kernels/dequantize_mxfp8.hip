// dequantize_mxfp8: entry point. MXFP8 to BF16, for targets whose tile knows BF16 alone. It waits for nobody.
// Oracle: kosmos_raw/numerics/mxfp8.py.
#include "../work/mx_move.h"

struct DequantizeParams {  // mirrored by kosmos_raw/build/params.py
  const Vec16* elements;   // [lines, depth]
  const Vec16* scales;     // [depth / 128, ld_scales]
  Vec16* to;               // [lines, ld] bf16
  u32 lines, depth, ld_scales, ld, wgs, zero;
};
static_assert(sizeof(DequantizeParams) == 48);

struct DequantizeMxfp8 {
  using Params = DequantizeParams;
  static constexpr u32 SCRATCH_BYTES = 16;  // read by kosmos_raw/build/report.py; not used
  DEVICE static void work(const Params& p, unsigned char*) {
    const MxLines from = {(Vec16*)p.elements, (Vec16*)p.scales, p.depth / 16, p.ld_scales};
    dequantize_lines(p.to, p.ld, from, MxSlice(0, p.lines, target::wg(), p.wgs), p.depth);
  }
};

#include "../target/run.h"
KOSMOS_PLAIN_KERNEL(dequantize_mxfp8, DequantizeMxfp8)
