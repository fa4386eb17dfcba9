"""Numbers of all magnitudes, for what is quantised: noise whose columns and rows are multiplied by powers of two.

A scale moves E4M3 only where numbers are far smaller than the largest of their block; so, of noise, any 32 could share
one, and a result would hardly tell. Columns and rows of all magnitudes are that small, and count none the less if they
are in balance: in every product, one factor grows along the contraction as the other falls.
"""

from __future__ import annotations

import numpy as np

MOST = 14  # of E4M3's exponents the most with which numbers beside the largest keep some bits


def powers(rng: np.random.Generator, n: int, most: int = MOST) -> np.ndarray:
    """[n]: 2^0 to 2^most, in float64."""
    return np.asarray(2.0 ** rng.integers(most + 1, size=n))


def is_spread(dtype: str, iteration: int) -> bool:
    """Whether what is judged in this iteration is spread, or noise, of which errors of a format are known: in turn."""
    return dtype == "mxfp8" and iteration % 2 == 0
