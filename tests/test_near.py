"""Bounds that travel with values: FP32 arithmetic stays within them, and what is wrong does not."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from kosmos_raw.numerics import near
from kosmos_raw.numerics.mxfp8 import rounded
from kosmos_raw.numerics.near import Near
from kosmos_raw.numerics.tolerance import FP32_EPS, compare

F32 = np.float32


def within(got, bounded: Near) -> bool:
    return compare(got, bounded.value, bounded.error).passed


def draw(rng, *shape, bits=np.float32):
    """Random numbers of all magnitudes that FP32 arithmetic of a layer meets."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 6, shape)).astype(bits)


@pytest.mark.parametrize("seed", range(5))
def test_fp32_arithmetic_stays_within(seed):
    rng = np.random.default_rng(seed)
    a, b, c = (draw(rng, 40, 50) for _ in range(3))
    A, B, C = Near.of(a), Near.of(b), Near.of(c)
    assert within(a + b - c, A + B - C) and within((a - b) * c, (A - B) * C)
    assert within((a * b) / (c * c + F32(1)), (A * B) / (C * C + 1.0))
    assert within(F32(1) - a * F32(2.827), 1.0 - A * 2.827)
    assert within((a + b).sum(1), (A + B).sum(1)) and within((a + b)[:, ::-1].cumsum(1)[:, -1], (A + B).sum(1))
    chain, bounded, small = a, A, np.clip(b, -1, 1)
    for _ in range(20):
        chain, bounded = chain * small + c, bounded * Near.of(small) + C
    assert within(chain, bounded)


@pytest.mark.parametrize("k", [1, 7, 300])
def test_products_in_any_order(k):
    rng = np.random.default_rng(k)
    a, b = draw(rng, 9, k), draw(rng, k, 11)
    bounded = Near.of(a) @ Near.of(b)
    for order in (np.arange(k), np.arange(k)[::-1], rng.permutation(k)):
        total = np.zeros((9, 11), F32)
        for i in order:
            total = (total + np.outer(a[:, i], b[i])).astype(F32)
        assert within(total, bounded)
    assert within(a @ b, bounded)
    a2 = (a * (1 + F32(2.0**-20))).astype(F32)  # an operand that is itself inexact
    assert within(a2 @ b, Near(a, 2.0**-19 * np.abs(a)) @ b)
    if k == 1:
        assert not within(a2 @ b, Near.of(a) @ b)


def test_functions_as_devices_evaluate_them():
    """exp as 2^(x log2 e) with its argument rounded, and everything from it in FP32."""
    x = np.concatenate([np.linspace(-80, 80, 4001), np.linspace(-1e-3, 1e-3, 101)]).astype(F32)

    def exp(v):
        return np.exp2((v * F32(1.442695)).astype(F32)).astype(F32)

    X = Near.of(x)
    assert within(exp(x), near.exp(X))
    with np.errstate(over="ignore"):
        assert within(F32(1) / (F32(1) + exp(-x)), near.sigmoid(X))
    assert within(np.where(x > 20, np.sqrt(np.abs(x)), np.sqrt(np.log1p(exp(x)))), near.sqrtsoftplus(X))
    assert not within(np.sqrt(np.log(F32(1) + exp(x))), near.sqrtsoftplus(X))  # 1 + e^x is 1 where x is small
    z = x.reshape(2, -1)
    e = exp(z - z.max(1, keepdims=True))
    assert within(e / e.sum(1, keepdims=True), near.softmax(Near.of(z)))
    assert within(np.clip(x * F32(0.1), -3, 5), near.clip(X * 0.1, -3, 5))


def test_rounding_to_bf16_is_exact_or_one_of_two():
    rng = np.random.default_rng(0)
    x = draw(rng, 20000)
    rounded = near.bf16(Near.of(x))
    assert np.array_equal(rounded.value, x.astype(ml_dtypes.bfloat16).astype(np.float64)) and not rounded.error.any()
    wide = near.bf16(Near(x, 2.0**-12 * np.abs(x)))
    off = x * (1 + 2.0**-12 * rng.uniform(-1, 1, x.size)).astype(F32)
    assert within(off.astype(ml_dtypes.bfloat16), wide)
    unsure = wide.error > 0  # about as often as the interval is wide beside a step of BF16
    assert 0.05 < unsure.mean() < 0.2 and np.all(wide.error[unsure] <= 2.0**-7 * np.abs(x[unsure]) * 1.01)
    assert np.array_equal(near.bf16(np.array([1 / 3])), [1 / 3])  # the mathematics does not round


def test_bounds_are_no_wider_than_need_be():
    rng = np.random.default_rng(1)
    a, b = (near.to_bf16(rng.standard_normal((64, 64))) for _ in range(2))
    y = near.bf16(Near.of(a) @ b)
    assert (y.error > 0).mean() < 0.05  # most products round to one BF16 whatever the order of the sum
    wrong = y.value.copy()
    wrong[3, 5] = near.to_bf16(wrong[3, 5] * np.float64(1 + 2.0**-7 * 1.5))
    assert not within(wrong, y)
    assert np.all((Near.of(a) + b).error < 1.01 * FP32_EPS * (np.abs(a + b)) + 1e-37)


def test_indicators_know_when_they_are_unsure():
    x = Near(np.array([1.0, 2.0, 2.0, 3.0]), np.array([0.0, 0.0, 0.1, 0.1]))
    inside = near.within(x, -2.0, 2.0)
    assert inside.value.tolist() == [1, 1, 1, 0] and inside.error.tolist() == [0, 0, 1, 0]


def test_division_by_what_may_be_zero():
    assert np.isinf((Near.of(np.ones(1)) / Near(np.array([0.1]), np.array([0.2]))).error).all()


def test_arrays_and_bounded_numbers_mix():
    x = Near.of(np.ones((2, 3)))
    for mixed in (x + np.ones(3), np.ones(3) + x, x * np.ones(3), np.ones((4, 2)) @ x, np.ones(3) - x, 1.0 / x):
        assert isinstance(mixed, Near)
    parts = near.concatenate([x, np.zeros((1, 3))]), near.stack([x, np.zeros((2, 3))])
    assert parts[0].shape == (3, 3) and parts[1].shape == (2, 2, 3) and (-x)[0].T.shape == (3,)
    assert Near.of(np.array([2.827])).error[0] == abs(2.827 - float(F32(2.827)))


# -- quantised to MXFP8


def quantised(x, axis=1, groups=None):
    return rounded(np.ascontiguousarray(x).astype(ml_dtypes.bfloat16), axis, groups)


def blocks_of_bf16(rng, n):
    """[n, 32]: numbers of all magnitudes, many at the boundaries of elements and of scales, zeros among them."""
    x = near.to_bf16(rng.standard_normal((n, 32)) * 2.0 ** rng.integers(-16, 3, (n, 32)))
    halfway = (2 * rng.integers(8, 16, (n, 32)) + 1) * 2.0 ** rng.integers(-17, -3, (n, 32))  # between two of E4M3
    x = np.where(rng.random((n, 32)) < 0.3, halfway * rng.choice([-1, 1], (n, 32)), x)
    x[np.arange(n), rng.integers(32, size=n)] = rng.choice([-1.75, 1.75, 1.7421875, 1.7578125], n) * 4.0
    x[rng.random((n, 32)) < 0.05] = 0.0
    return near.to_bf16(x * 2.0 ** rng.integers(-140, 100, (n, 1)))


def steps_of_bf16(x, steps):
    """The BF16 numbers so many further from zero; of a step beyond zero, zero."""
    bits = np.abs(x).astype(ml_dtypes.bfloat16).view(np.uint16).astype(int)
    moved = np.maximum(bits + steps, 0).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.copysign(moved, x)


@pytest.mark.parametrize("seed", range(6))
def test_quantised_is_within_for_whatever_the_interval_holds(seed):
    rng = np.random.default_rng(seed)
    x = blocks_of_bf16(rng, 400)
    often, rarely = rng.random(x.shape) < rng.choice([0.02, 0.9]), rng.random(x.shape) < 0.02
    most = often + rarely * rng.integers(1, 300, x.shape)
    low, high = steps_of_bf16(x, -most), steps_of_bf16(x, most)
    given = Near(x, np.maximum(np.abs(low - x), np.abs(high - x)))
    bounded = near.mxfp8(given, 1)
    assert np.array_equal(bounded.value, quantised(x))
    reached = np.zeros(x.shape)
    for trial in range(60):
        toward = rng.integers(-most, most + 1)
        if trial % 2:  # to the ends, where scales change
            toward = np.where(rng.random((len(x), 1)) < 0.5, most, -most) * (rng.random(x.shape) < 0.8)
        off = np.abs(quantised(steps_of_bf16(x, toward)) - bounded.value)
        assert np.all(off <= bounded.error)
        reached = np.maximum(reached, off)
    assert (reached > 0).any() and not bounded.error[~most.any(1)].any()


def test_a_scale_in_doubt_is_no_wider_than_need_be():
    """Of a block whose largest is alone unsure, others may be what one of its two scales makes of them, and no more."""
    rng = np.random.default_rng(0)
    x = near.to_bf16(rng.standard_normal((500, 32)) * 2.0 ** rng.integers(-16, -2, (500, 32)))
    sign = rng.choice([-1.0, 1.0], 500)
    x[:, 0] = 1.75 * sign  # 448 * 2^-8
    low, high = (steps_of_bf16(x[:, :1], n) for n in (-1, 1))
    bounded = near.mxfp8(Near(x, np.where(np.arange(32), 0.0, np.abs(high - x))), 1)
    ends = [quantised(np.concatenate([end, x[:, 1:]], 1)) for end in (low, high)]
    off = np.max([np.abs(end - bounded.value) for end in ends], 0)
    assert np.array_equal(bounded.error[:, 1:], off[:, 1:]) and 0.05 < (off > 0).mean() < 0.5
    x[:, 0] = 1.5 * sign  # far from where the scale changes
    assert not near.mxfp8(Near(x, np.where(np.arange(32), 0.0, 2.0**-7)), 1).error[:, 1:].any()


def test_groups_share_no_block():
    rng = np.random.default_rng(1)
    x, groups = blocks_of_bf16(rng, 91)[:, :9], (40, 0, 19, 32)
    got = near.mxfp8(Near.of(x), 0, groups)
    assert np.array_equal(got.value, quantised(x, 0, groups)) and not np.array_equal(got.value, quantised(x, 0))
    assert np.array_equal(near.mxfp8(Near.of(x).T, 1, groups).value, got.value.T)
    starts = np.cumsum((0, *groups))
    for first, end in pairwise(starts):
        changed = x.copy()
        changed[first:end] *= 2.0**9
        others = np.r_[0:first, end:91]
        assert np.array_equal(near.mxfp8(Near.of(changed), 0, groups).value[others], got.value[others])
    empty = near.mxfp8(Near.of(np.zeros((0, 5))), 0)
    assert empty.shape == (0, 5) and near.mxfp8(Near.of(x[:, :0]), 0).shape == (91, 0)


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match=r"groups is \[3, 4\] of 8"):
        near.mxfp8(Near.of(np.ones((8, 2))), 0, (3, 4))
    with pytest.raises(ValueError, match="values that BF16 has"):
        near.mxfp8(Near.of(np.full((8, 2), 1 / 3)), 0)
    assert np.array_equal(near.mxfp8(np.full((1, 1), 1 / 3), 1), [[1 / 3]])  # the mathematics does not round
