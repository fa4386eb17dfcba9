"""Oracles in NumPy float64, written from the mathematics and not from the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ag_gemm(shards: Sequence[np.ndarray], b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C = concat(shards) @ b.T, and the sum of magnitudes |A| @ |b|.T that bounds what rounding can do.

    Args: shards: every rank's [rows, K]; b: [N, K]. Returns: two float64 [M, N].
    """
    return gemm(np.concatenate([np.asarray(shard, np.float64) for shard in shards]), b)


def gemm(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a @ b.T and |a| @ |b|.T, in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return a @ b.T, np.abs(a) @ np.abs(b).T


def gemm_rs(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], rows: Sequence[int], rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `rank` of sum over ranks of a[q] @ b[q].T, and the same sum of magnitudes."""
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    products = [gemm(x[own], y) for x, y in zip(a, b, strict=True)]
    return sum(exact for exact, _ in products), sum(magnitude for _, magnitude in products)  # type: ignore[return-value]


def product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a @ b and |a| @ |b|, in float64: data gradients (a is dY, b the weight), and weight gradients (a is dY.T)."""
    return gemm(a, np.asarray(b).T)
