"""What benchmarks check before they time: rows spread over a result against float64, all of it against a peer's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..numerics.bf16 import narrow, widen
from ..numerics.tolerance import compare
from ..plan.shapes import round_up

CHECKED_ROWS = 64  # of a result are compared with float64


def normal(xp: Any, lines: int, elements: int, deviation: float = 1.0) -> Any:
    """Normal bf16 bits, lines padded with zeros to 8 elements."""
    out = xp.zeros((lines, round_up(elements, 8)), np.uint16)
    step = max(1, (1 << 26) // max(1, elements))
    for i in range(0, lines if elements else 0, step):
        n = min(step, lines - i)
        out[i : i + n, :elements] = narrow(xp.random.standard_normal((n, elements), np.float32) * np.float32(deviation))
    return out


def to_float(bits: Any, dtype: Any) -> Any:
    """bf16 bits as floats."""
    return widen(bits).astype(dtype, copy=False)


def rows_to_check(xp: Any, rows: int) -> Any:
    return xp.unique(xp.linspace(0, rows - 1, min(CHECKED_ROWS, rows)).astype(int))


def close_to_exact(what: str, got: Any, exact: np.ndarray, bound: np.ndarray) -> float:
    """Compares bf16 bits with float64. Returns how much of the bound is used; raises ValueError when it is passed."""
    result = compare(to_float(got, np.float64).get(), exact, bound)
    if not result.passed:
        raise ValueError(
            f"{what}: wrong at {result.worst}: {result.got}, want {result.wanted} "
            f"({result.over_bound:.3g} of the bound)"
        )
    return result.over_bound


def close_to_peer(what: str, ours: Any, theirs: Any, k: int) -> None:
    """At most neighbours in bf16, of sums of k products of standard normal numbers. Raises ValueError."""
    step = max(1, (1 << 27) // max(1, ours.shape[1]))
    for m in range(0, len(ours), step):
        pair = (to_float(x[m : m + step], np.float32) for x in (ours, theirs))
        one, other = pair
        off = float(abs(one - other).max()) if one.size else 0.0
        if not off <= 0.06 * max(1.0, k**0.5):
            raise ValueError(f"{what}: differs from the peer's by {off}")
