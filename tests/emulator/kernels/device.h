// What the test kernels need of a device, without any HIP header.
#pragma once
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define DEVICE __device__ __attribute__((always_inline)) inline
#define KERNEL(threads) extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(threads, threads))) void

typedef unsigned u32;
typedef unsigned long long u64;
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

DEVICE u32 thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 wg() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE void wait_own_memory() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }
DEVICE void barrier() {
  wait_own_memory();
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
