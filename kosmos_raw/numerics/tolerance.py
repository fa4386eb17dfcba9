"""How far a result may be from the exact one: bounds that follow from the arithmetic, not from experience."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BF16_HALF_ULP = 2.0**-8  # rounding to 8 significant bits, relative to the value
BF16_TINY = 2.0**-134  # half the smallest subnormal
FP32_EPS = 2.0**-24


def gemm_bound(exact: np.ndarray, magnitude: np.ndarray, k: int) -> np.ndarray:
    """The largest error, element by element, of a sum of k products in FP32, in any order, rounded once to BF16.

    `magnitude` is |A| @ |B|.T: each of the k - 1 additions errs by at most FP32_EPS of a partial sum that it bounds.
    (Products of two BF16 values are exact in FP32.)
    """
    accumulation = max(k, 1) * FP32_EPS * magnitude
    return accumulation + BF16_HALF_ULP * (np.abs(exact) + accumulation) + BF16_TINY


def sum_bound(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(exact sum, largest error) of bf16 arrays that are added in FP32 and rounded once."""
    exact = np.sum([np.asarray(x, np.float64) for x in parts], axis=0)
    error = len(parts) * FP32_EPS * np.sum([np.abs(np.asarray(x, np.float64)) for x in parts], axis=0)
    return exact, error + BF16_HALF_ULP * (np.abs(exact) + error) + BF16_TINY


def reduced_bound(products: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """(exact sum, largest error) of products that are each rounded to BF16, added in FP32 and rounded once more.

    `products` are (exact, magnitude) of every rank, as `gemm_bound` wants them.
    """
    exact = np.sum([e for e, _ in products], axis=0)
    errors = np.sum([gemm_bound(e, magnitude, k) for e, magnitude in products], axis=0)
    largest = np.sum([np.abs(e) for e, _ in products], axis=0) + errors  # of any partial sum
    errors = errors + len(products) * FP32_EPS * largest
    return exact, errors + BF16_HALF_ULP * (np.abs(exact) + errors) + BF16_TINY


@dataclass(frozen=True)
class Comparison:
    """A result beside the exact one."""

    max_abs_error: float
    rel_error: float  # Frobenius norm of the error over that of the exact result
    over_bound: float  # largest |error| / bound over the elements; at most 1 is right
    worst: tuple[int, ...]  # where that is
    got: float
    wanted: float

    @property
    def passed(self) -> bool:
        return self.over_bound <= 1.0


def compare(got: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> Comparison:
    """Compares element by element. A NaN or infinity where the exact value is finite counts as infinitely wrong."""
    got = np.asarray(got).astype(np.float64)
    if got.shape != exact.shape:
        raise ValueError(f"compare: got has shape {got.shape}, want {exact.shape}")
    if got.size == 0:
        return Comparison(0.0, 0.0, 0.0, (), 0.0, 0.0)
    error = np.abs(got - exact)
    error[~np.isfinite(error)] = np.inf
    ratio = np.zeros_like(error)  # where both are 0 it is right, and where only the bound is, infinitely wrong
    with np.errstate(divide="ignore"):
        np.divide(error, bound, out=ratio, where=error > 0)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    norm = float(np.linalg.norm(exact))
    return Comparison(
        max_abs_error=float(error.max()),
        rel_error=float(np.linalg.norm(error)) / norm if norm else float(error.max()),
        over_bound=float(ratio[worst]),
        worst=worst,
        got=float(got[worst]),
        wanted=float(exact[worst]),
    )
