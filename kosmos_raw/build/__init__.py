"""From hip_kernels/ to code: compile for a target, keep it in a cache, mirror the params structs."""
