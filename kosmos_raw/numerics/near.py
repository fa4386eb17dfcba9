"""Numbers with a bound: what a kernel may deliver that computes in FP32 and rounds to BF16 where it says so.

A formula written once serves twice. Given NumPy arrays it is the mathematics, in float64. Given `Near` it carries,
beside each value, the largest error that FP32 may have made of it by then, whatever the order of sums and however
products and sums are joined, so that `tolerance.compare(got, x.value, x.error)` asks what the arithmetic gives.
`bf16` is the identity for arrays; a `Near` is rounded, and its error then is how far the ends of its interval round
away: none where the whole interval rounds to one number. `mxfp8` is the same for what is quantised of BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

import ml_dtypes
import numpy as np

from .mxfp8 import BLOCK, dequantize, element_bytes, quantize, scale_bytes
from .tolerance import FP32_EPS

FP32_TINY = 2.0**-126  # below it a device may round to zero
BF16_PARTS = {1: 0.0, 2: 2.0**-17, 3: 2.0**-24}  # error of a float32 as the sum of so many BF16: relative
# A float32 of two parts times one of three: of six products, the least is left out.
BF16_PARTS[5] = BF16_PARTS[2] + BF16_PARTS[3] + 2.0**-25


class Near:
    """Values in float64, and how far each may be from what a kernel has."""

    __slots__ = ("error", "value")
    __array_ufunc__ = None  # array + Near is Near's to answer

    def __init__(self, value: np.ndarray, error: np.ndarray | float = 0.0):
        self.value = np.asarray(value, np.float64)
        error = np.asarray(error, np.float64)
        self.error = error if error.shape == self.value.shape else np.broadcast_to(error, self.value.shape)

    @staticmethod
    def of(x: Any) -> Near:
        """x as a kernel is given it: exact, or rounded to FP32 if it does not fit."""
        if isinstance(x, Near):
            return x
        x = np.asarray(x).astype(np.float64)
        return Near(x, np.abs(x - x.astype(np.float32)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def T(self) -> Near:
        return Near(self.value.T, self.error.T)

    @property
    def largest(self) -> np.ndarray:
        """Of the magnitudes that it may have."""
        return np.abs(self.value) + self.error

    def __getitem__(self, at: Any) -> Near:
        return Near(self.value[at], self.error[at])

    def __neg__(self) -> Near:
        return Near(-self.value, self.error)

    def __add__(self, other: Any) -> Near:
        other = Near.of(other)
        return _rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Any) -> Near:
        return self + -Near.of(other)

    def __rsub__(self, other: Any) -> Near:
        return Near.of(other) + -self

    def __mul__(self, other: Any) -> Near:
        other = Near.of(other)
        error = self.error * other.largest + np.abs(self.value) * other.error
        return _rounded(self.value * other.value, error)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> Near:
        other = Near.of(other)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = self.value / other.value
            least = np.abs(other.value) - other.error
            error = np.where(least > 0, (self.error + np.abs(value) * other.error) / least, np.inf)
        return _rounded(value, error)

    def __rtruediv__(self, other: Any) -> Near:
        return Near.of(other) / self

    def __matmul__(self, other: Any) -> Near:
        return _contracted([(self, Near.of(other), 1)])

    def __rmatmul__(self, other: Any) -> Near:
        return Near.of(other) @ self

    def sum(self, axis: int) -> Near:
        sums = self.value.shape[axis] * FP32_EPS * self.largest.sum(axis)
        return Near(self.value.sum(axis), self.error.sum(axis) + sums)


Array: TypeAlias = np.ndarray | Near


def _rounded(value: np.ndarray, error: np.ndarray) -> Near:
    """Once to FP32."""
    return Near(value, error + FP32_EPS * (np.abs(value) + error) + FP32_TINY)


def _monotone(f: Callable[[np.ndarray], np.ndarray], x: Near) -> Near:
    value = f(x.value)
    low, high = f(x.value - x.error), f(x.value + x.error)
    return Near(value, np.maximum(np.abs(high - value), np.abs(low - value)))


def _evaluated(f: Callable[[np.ndarray], np.ndarray], x: Near, relative: np.ndarray) -> Near:
    """A rising function that devices approximate to `relative`."""
    y = _monotone(f, x)
    return Near(y.value, y.error + relative * y.largest + FP32_TINY)


def _exp_error(x: np.ndarray) -> np.ndarray:
    """Of exp in FP32: its argument is multiplied by log2(e) first, and rounded."""
    return (8 + 3 * np.abs(x)) * FP32_EPS


@overload
def bf16(x: np.ndarray) -> np.ndarray: ...
@overload
def bf16(x: Near) -> Near: ...
def bf16(x: Array) -> Array:
    """Where a kernel rounds to BF16."""
    return x if isinstance(x, np.ndarray) else _monotone(to_bf16, x)


@overload
def mxfp8(x: np.ndarray, axis: int, groups: Sequence[int] | None = None) -> np.ndarray: ...
@overload
def mxfp8(x: Near, axis: int, groups: Sequence[int] | None = None) -> Near: ...
def mxfp8(x: Array, axis: int, groups: Sequence[int] | None = None) -> Array:
    """Where a kernel quantises a matrix of BF16 along `axis`, by rule "up".

    A rounding boundary of an element may lie in its interval, and one of the scale in that of its block's largest
    magnitude. So the error is how far an end of its interval may be rounded away by any scale that the block may get.

    Args: x: [rows, columns]; of a Near, values are BF16. groups: along `axis`, how many belong together (None: all): no
        block has some of two groups.
    Raises: ValueError: values are not BF16, or groups do not add up to what is there.
    """
    if isinstance(x, np.ndarray):
        return x
    if axis == 1:
        return mxfp8(x.T, 0, groups).T
    rows, columns = x.shape
    groups = (rows,) if groups is None else groups
    if sum(groups) != rows or not is_bf16(x):
        raise ValueError(f"mxfp8: groups is {list(groups)} of {rows}, want their sum, and values that BF16 has")
    padded = [-(-n // BLOCK) * BLOCK for n in groups]
    whole = sum(padded)
    at = np.concatenate([np.arange(n) + sum(padded[:i]) for i, n in enumerate(groups)])

    def blocks(v: np.ndarray) -> np.ndarray:
        lying = np.zeros((whole, columns), np.float32)
        lying[at] = v
        return np.ascontiguousarray(lying.reshape(whole // BLOCK, BLOCK, columns).swapaxes(1, 2))

    def matrix(v: np.ndarray) -> np.ndarray:
        return v.swapaxes(1, 2).reshape(whole, columns)[at]

    values = dequantize(*quantize(blocks(x.value)))
    errors = np.zeros_like(values)
    unsure = blocks(x.error).any(-1)
    if unsure.any():
        low, high = (blocks(v)[unsure] for v in (x.value - x.error, x.value + x.error))
        errors[unsure] = _quantisation_error(values[unsure], low, high)
    return Near(matrix(values), matrix(errors))


def _quantisation_error(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """How far from `values` a block may be that is quantised of numbers from low to high; all [n, 32]."""
    least = np.maximum(np.maximum(low, -high), 0.0)  # magnitudes
    first, last = (scale_bytes(v.view(np.uint32)).astype(int) for v in (least, np.maximum(high, -low)))
    error = np.zeros_like(values)
    # Of one scale, quantising is monotone: ends are farthest. What is too large for a scale saturates, which is as far
    # as numbers of that scale reach.
    for more in range(int((last - first).max()) + 1):
        scaled = first + more <= last
        scale = (first[scaled] + more).astype(np.uint8)[:, None]
        for end in (low[scaled], high[scaled]):
            rounded = dequantize(element_bytes(end.view(np.uint32), scale), scale)
            error[scaled] = np.maximum(error[scaled], np.abs(rounded - values[scaled]))
    return error


def product(a: Array, b: Array, parts: int) -> Array:
    """a @ b, where one of them is FP32 and is multiplied as the sum of `parts` BF16; 5: both are, of 2 and 3 parts."""
    return products((a, b, parts))


def products(*factors: tuple[Array, Array, int]) -> Array:
    """The sum of several such products, made as one contraction."""
    if all(isinstance(x, np.ndarray) for a, b, _ in factors for x in (a, b)):
        return sum(a @ b for a, b, _ in factors)  # type: ignore[return-value]
    return _contracted([(Near.of(a), Near.of(b), parts) for a, b, parts in factors])


def _contracted(factors: list[tuple[Near, Near, int]]) -> Near:
    value = inherited = magnitude = split = np.zeros(())
    for a, b, parts in factors:
        own, most = np.zeros(()), np.abs(a.value) @ np.abs(b.value)
        if a.error.any():
            own = own + a.error @ b.largest
        if b.error.any():
            own = own + np.abs(a.value) @ b.error
        value, inherited, magnitude = value + a.value @ b.value, inherited + own, magnitude + most
        split = split + BF16_PARTS[parts] * (most + own)
    terms = sum(parts * a.shape[-1] for a, _, parts in factors)
    return Near(value, inherited + split + (terms + 1) * FP32_EPS * (magnitude + inherited) + FP32_TINY)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest BF16 of the nearest FP32, ties to even; in float64."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def is_bf16(x: Array) -> bool:
    """Whether all of it can be multiplied as it is."""
    return bool(np.array_equal(value_of(x), to_bf16(value_of(x))))


def exp(x: Array) -> Array:
    return np.exp(x) if isinstance(x, np.ndarray) else _evaluated(np.exp, x, _exp_error(x.value))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    if isinstance(x, np.ndarray):
        return _sigmoid(x)
    of_exp = _exp_error(x.value) * _sigmoid(-x.value)  # exp(-x) is part of what is divided by
    return _evaluated(_sigmoid, x, of_exp + 4 * FP32_EPS)


def _sqrtsoftplus(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.logaddexp(0.0, x))


def sqrtsoftplus(x: Array) -> Array:
    """sqrt(log(1 + exp(x)))."""
    if isinstance(x, np.ndarray):
        return _sqrtsoftplus(x)
    return _evaluated(_sqrtsoftplus, x, _exp_error(np.minimum(x.value, 0.0)) + 8 * FP32_EPS)


def softmax(x: Array) -> Array:
    """Along the last axis."""
    largest = (x if isinstance(x, np.ndarray) else x.value).max(-1, keepdims=True)
    e = exp(x - largest)
    return e / e.sum(-1)[..., None]


def clip(x: Array, low: float, high: float) -> Array:
    if isinstance(x, np.ndarray):
        return np.clip(x, low, high)
    return _monotone(lambda v: np.clip(v, low, high), x)


def within(x: Array, low: float, high: float) -> Array:
    """1 where low <= x <= high, else 0."""
    if isinstance(x, np.ndarray):
        return ((low <= x) & (x <= high)).astype(np.float64)
    inside = [(low <= v) & (v <= high) for v in (x.value, x.value - x.error, x.value + x.error)]
    return Near(inside[0], (inside[0] != inside[1]) | (inside[0] != inside[2]))


def take(x: Array, ids: np.ndarray) -> Array:
    """x[t, ids[t, j]] for all t, j."""
    rows = np.arange(ids.shape[0])[:, None]
    return x[rows, ids]


def zeros(shape: tuple[int, ...], like: Array) -> Array:
    return np.zeros(shape) if isinstance(like, np.ndarray) else Near(np.zeros(shape), np.zeros(shape))


def put(target: Array, at: Any, x: Array) -> None:
    """target[at] = x; `target` is one of `zeros`."""
    if isinstance(target, np.ndarray):
        target[at] = x
        return
    x = Near.of(x)
    target.value[at] = x.value
    target.error[at] = x.error


def stack(parts: list[Array], axis: int = 0) -> Array:
    if all(isinstance(x, np.ndarray) for x in parts):
        return np.stack(parts, axis)  # type: ignore[arg-type]
    near = [Near.of(x) for x in parts]
    return Near(np.stack([x.value for x in near], axis), np.stack([x.error for x in near], axis))


def concatenate(parts: list[Array], axis: int = 0) -> Array:
    if all(isinstance(x, np.ndarray) for x in parts):
        return np.concatenate(parts, axis)  # type: ignore[arg-type]
    near = [Near.of(x) for x in parts]
    return Near(np.concatenate([x.value for x in near], axis), np.concatenate([x.error for x in near], axis))


def value_of(x: Array) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.value
