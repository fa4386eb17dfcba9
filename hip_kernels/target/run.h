// The half of a target that knows Op: run<Op>, the GEMM tile, and what makes the entry point, KOSMOS_KERNEL or
// KOSMOS_PLAIN_KERNEL.
#pragma once
#if defined(KOSMOS_FORCED)
#include "forced_run.h"
#elif defined(__HIP__)
#include "gfx950_run.h"
#elif defined(__CUDACC__)
#include "sm90_run.h"
#else
#include "host_run.h"
#endif
