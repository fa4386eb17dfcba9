"""Oracles in NumPy float64, written from the mathematics and not from the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ag_gemm(shards: Sequence[np.ndarray], b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C = concat(shards) @ b.T, and the sum of magnitudes |A| @ |b|.T that bounds what rounding can do.

    Args: shards: every rank's [rows, K]; b: [N, K]. Returns: two float64 [M, N].
    """
    a = np.concatenate([np.asarray(shard, np.float64) for shard in shards])
    b = np.asarray(b, np.float64)
    return a @ b.T, np.abs(a) @ np.abs(b).T
