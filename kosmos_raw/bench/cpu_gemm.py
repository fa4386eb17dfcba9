"""The CPU device's tile beside NumPy's float32 matmul, both on one core."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from ..numerics import oracles
from ..numerics.tolerance import compare, gemm_bound
from ..ops.ag_gemm import ag_gemm
from ..ranks.communicator import Communicator
from .timing import alternate

# Read by the BLAS libraries when NumPy is imported: to be set before the rank's process starts.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")


@dataclass(frozen=True)
class GemmResult:
    m: int
    n: int
    k: int
    ours_gflops: float
    numpy_gflops: float
    over_bound: float

    @property
    def ratio(self) -> float:
        return self.ours_gflops / self.numpy_gflops


def run(comm: Communicator, shapes: list[tuple[int, int, int]]) -> list[GemmResult]:
    """One rank, one WG, one core. BF16 in and out for ours, float32 for NumPy; checked before it is timed."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = []
    for m, n, k in shapes:
        rng = np.random.default_rng((m, n, k))
        a = rng.standard_normal((m, k), np.float32).astype(ml_dtypes.bfloat16)
        b = rng.standard_normal((n, k), np.float32).astype(ml_dtypes.bfloat16)
        a32, b32t = a.astype(np.float32), np.ascontiguousarray(b.astype(np.float32).T)
        out, out32 = np.empty((m, n), a.dtype), np.empty((m, n), np.float32)
        exact, magnitude = oracles.ag_gemm([a], b)
        checked = compare(ag_gemm(comm, a, b), exact, gemm_bound(exact, magnitude, k))
        if not checked.passed:
            raise ValueError(f"bench gemm: wrong result at {checked.worst}: {checked.got}, want {checked.wanted}")
        seconds = alternate(
            {
                "ours": partial(ag_gemm, comm, a, b, out=out),
                "numpy": partial(np.matmul, a32, b32t, out=out32),
            }
        )
        flop = 2.0 * m * n * k
        results.append(
            GemmResult(m, n, k, flop / seconds["ours"] / 1e9, flop / seconds["numpy"] / 1e9, checked.over_bound)
        )
    return results
