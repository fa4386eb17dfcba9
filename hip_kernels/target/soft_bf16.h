// BF16 from FP32 by integers: what targets without an instruction for it do, and what the others agree with.
#pragma once

// Round to nearest even; every NaN becomes 0x7fc0, so that no target leaks a payload of its own.
DEVICE inline u32 to_bf16(float x) {
  const u32 u = __builtin_bit_cast(u32, x);
  return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
namespace target {
DEVICE inline u64 pack_in_software(float a, float b, float c, float d) {
  return (u64)(to_bf16(c) | to_bf16(d) << 16) << 32 | (to_bf16(a) | to_bf16(b) << 16);
}
}  // namespace target
