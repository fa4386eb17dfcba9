#pragma once
struct __hip_bfloat16 {
  __bf16 value;
  __device__ __hip_bfloat16() {}
  __device__ __hip_bfloat16(float x) : value((__bf16)x) {}
  __device__ operator float() const { return (float)value; }
};
