"""Two BF16 numbers added in BF16 are what they are when added in FP32 and rounded: sm_90a does the one for two ranks,
all other targets and ranks do the other (hip_kernels/target/sm90_beside_sums.h, work/reduce.h)."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

INFINITY, SIGN = 0x7F80, 0x8000


def value(bits: int) -> Fraction:
    """Exactly; of infinity what would come next."""
    magnitude = bits & ~SIGN
    exponent, fraction = magnitude >> 7, magnitude & 0x7F
    found = Fraction(fraction + 128 * (exponent > 0)) * Fraction(2) ** (max(exponent, 1) - 134)
    return -found if bits & SIGN else found


def nearest(exact: Fraction) -> int:
    """Bits of the nearest BF16, of two the even one. Looked for by halving, which knows nothing of any rounding."""
    low, high = 0, INFINITY
    while high - low > 1:
        middle = (low + high) // 2
        if value(middle) <= abs(exact):
            low = middle
        else:
            high = middle
    below, above = abs(exact) - value(low), value(high) - abs(exact)
    bits = high if above < below or (above == below and low % 2) else low
    return bits | (SIGN if exact < 0 else 0)


def added_in_fp32(a: int, b: int) -> int:
    x, y = (np.array([bits], np.uint16).view(ml_dtypes.bfloat16).astype(np.float32) for bits in (a, b))
    with np.errstate(over="ignore"):
        return int((x + y).astype(ml_dtypes.bfloat16).view(np.uint16)[0])


finite = st.integers(0, 0xFFFF).filter(lambda bits: bits & ~SIGN < INFINITY)


@given(finite, finite)
@settings(max_examples=3000, deadline=None)
def test_one_rounding_is_enough(a: int, b: int) -> None:
    exact = value(a) + value(b)
    if exact:  # of zeros the sign is another matter, and the same in both
        assert added_in_fp32(a, b) == nearest(exact)


def test_where_fp32_rounds_too() -> None:
    """Exponents so far apart that FP32 rounds, at fractions next to a power of two and in the middle."""
    for gap in range(14, 30):
        for fraction in (0, 1, 0x3F, 0x40, 0x7E, 0x7F):
            for other in (0, 1, 0x40, 0x7F):
                for sign in (0, SIGN):
                    a, b = 100 << 7 | fraction, sign | (100 - gap) << 7 | other
                    assert added_in_fp32(a, b) == nearest(value(a) + value(b)), (gap, fraction, other, sign)
