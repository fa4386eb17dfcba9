// Blocks of FP32 bits, one a lane at a time: the arithmetic of work/mxfp8.h alone.
#include "../../hip_kernels/work/quantize.h"

struct Blocks {
  struct Params {
    const u32* x;   // [blocks, 32]
    u32* elements;  // [blocks, 8], four in each
    u32* scales;    // [blocks]
    float* values;  // [blocks, 32]: what elements stand for
    u32 blocks, rule, wgs, zero;
  };
  static constexpr u32 SCRATCH_BYTES = 16;
  DEVICE static void work(const Params& p, unsigned char*) {
    for (u32 i = target::wg() * target::lanes() + target::lane(); i < p.blocks; i += p.wgs * target::lanes()) {
      u32 x[MX_BLOCK], elements[MX_BLOCK / 4];
#pragma unroll
      for (u32 j = 0; j < MX_BLOCK; j++) x[j] = p.x[i * MX_BLOCK + j];
      const u32 byte = quantize_block(x, (ScaleRule)p.rule, elements);
      p.scales[i] = byte;
#pragma unroll
      for (u32 j = 0; j < MX_BLOCK; j++) {
        p.values[i * MX_BLOCK + j] = from_e4m3(elements[j / 4] >> 8 * (j % 4) & 255) * scale_value(byte);
        if (j % 4 == 0) p.elements[i * MX_BLOCK / 4 + j / 4] = elements[j / 4];
      }
    }
  }
};

#include "../../hip_kernels/target/run.h"
KOSMOS_PLAIN_KERNEL(blocks, Blocks)
