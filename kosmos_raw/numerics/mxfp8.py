"""MXFP8: elements of E4M3 (OCP, at most 448), and for each 32 of them along the contraction one scale, an E8M0 byte.

Every bit here follows from integer arithmetic on the bits of FP32: what kernels, which use the float units of their
target, are judged by. Element c of a block with scale byte s stands for e4m3(c) * 2^(s - 127); byte 255 is a NaN.

Which byte a block gets, a being the largest magnitude in it:

    up     the least power of two with which no element exceeds 448: as Transformer Engine, and the default. Whether a
           exceeds it is asked of the FP32 product a * (1/448), which matters where that product is subnormal alone:
           an a of one ulp above 448 * 2^-127 still gets byte 0.
    floor  floor(log2 a) - 8, the least that the OCP specification asks for; elements above 448 saturate.
    even   as floor, of a rounded to three bits of mantissa, half up.

What is not finite: `floor` and `even` give byte 255 to a block with any NaN or infinity in it, and 0x7f to its
elements. `up` leaves NaNs out of a; each becomes 0x7f by itself. An infinity makes the byte 254 and becomes +-448;
beside it all below 2^117 is zero. A block of zeros, or of zeros and NaNs, has byte 0. Signs of zeros are kept. Nothing
flushes subnormals: not those of FP32, nor those of E4M3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np

BLOCK = 32
RULES = ("up", "floor", "even")  # hip_kernels/work/mxfp8.h
NAN, LARGEST = 0x7F, 0x7E  # of E4M3; both without the sign
INFINITY = 0x7F800000  # of FP32
RECIPROCAL = 0x924925  # significand of the FP32 nearest to 1/448, times 2^-32


def quantize(x: np.ndarray, rule: str = "up") -> tuple[np.ndarray, np.ndarray]:
    """Quantises along the last axis, which zeros pad to whole blocks.

    Args: x: float32 or bfloat16 [..., n]. rule: "up", "floor" or "even".
    Returns: elements, uint8 [..., n rounded up to 32], and scales, uint8 [..., that / 32].
    """
    bits = _bits(x)
    pad = -bits.shape[-1] % BLOCK
    bits = np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, pad)])
    blocks = bits.reshape(*bits.shape[:-1], bits.shape[-1] // BLOCK, BLOCK)
    scales = scale_bytes(blocks, rule)
    elements = element_bytes(blocks, scales[..., None])
    return elements.reshape(bits.shape), scales


def quantize_columns(
    x: np.ndarray, rule: str = "up", groups: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Quantises a matrix along its rows, and transposes it: as a product that contracts over rows wants it.

    Args: x: [rows, columns]. groups: how many rows belong together (None: all); no block has rows of two groups, and
        zeros pad each of them to whole blocks.
    Returns: elements, uint8 [columns, n], and scales, uint8 [columns, n / 32], n the sum of the padded groups.
    """
    groups = (x.shape[0],) if groups is None else tuple(groups)
    if sum(groups) != x.shape[0]:
        raise ValueError(f"quantize_columns: groups is {list(groups)}, want counts whose sum is {x.shape[0]} rows")
    starts = np.cumsum((0, *groups))
    parts = [quantize(x[a:b].T, rule) for a, b in pairwise(starts)]
    return np.concatenate([e for e, _ in parts], 1), np.concatenate([s for _, s in parts], 1)


def dequantize(elements: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What elements [..., n] and scales [..., n / 32] stand for, in float64, which holds every value of them."""
    values = elements.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    powers = np.ldexp(1.0, scales.astype(np.int64) - 127)
    powers[scales == 255] = np.nan
    return values * np.repeat(powers, BLOCK, axis=-1)


def rounded(x: np.ndarray, axis: int = 1, groups: Sequence[int] | None = None, rule: str = "up") -> np.ndarray:
    """What a matrix stands for once it is quantised along `axis`, in float64. groups: of rows, along axis 0."""
    if axis == 1:
        return dequantize(*quantize(x, rule))[:, : x.shape[1]]
    starts = np.cumsum((0, *((x.shape[0],) if groups is None else groups)))
    return np.concatenate([rounded(np.ascontiguousarray(x[a:b].T), 1, None, rule).T for a, b in pairwise(starts)])


def scale_bytes(blocks: np.ndarray, rule: str = "up") -> np.ndarray:
    """The E8M0 bytes of blocks of FP32 bits, uint32 [..., 32]."""
    if rule not in RULES:
        raise ValueError(f"mxfp8: rule is {rule!r}, want one of {', '.join(RULES)}")
    magnitudes = (blocks & 0x7FFFFFFF).astype(np.int64)
    if rule == "up":
        largest = np.where(magnitudes > INFINITY, 0, magnitudes).max(-1)
        byte, special = _up(largest), 254
    else:
        largest = magnitudes.max(-1)
        half = 1 << 19 if rule == "even" else 0
        byte, special = (largest + half >> 23) - 8, 255
    return np.where(largest >= INFINITY, special, np.clip(byte, 0, 254)).astype(np.uint8)


def _up(largest: np.ndarray) -> np.ndarray:
    """The exponent, rounded up, of the FP32 product largest * (1/448)."""
    significand, exponent = _parts(largest)
    # The product is `exact` times 2^(exponent - 182). FP32 keeps 24 bits of it, fewer below 2^-126: it drops some.
    exact = significand * RECIPROCAL
    drop = np.maximum(_bit_length(exact) - 24, 33 - exponent)
    product = _round_to_even(exact, drop)
    power = exponent - 182 + drop  # product * 2^power is the FP32 product
    ceiling = power + _bit_length(np.maximum(product, 1) - 1)  # of its log2
    return np.where(product == 0, 0, ceiling + 127)


def element_bytes(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """E4M3 of FP32 bits times 2^(127 - scale): to nearest even, saturated."""
    magnitudes = (blocks & 0x7FFFFFFF).astype(np.int64)
    significand, exponent = _parts(magnitudes)
    # In units of the smallest E4M3, 2^-9, the scaled value is significand * 2^shift.
    shift = exponent - 14 - scales.astype(np.int64)
    top = np.maximum(_bit_length(significand) + shift, 4)  # codes to 16 are units; above, four bits are kept
    code = (top - 4) * 8 + _round_to_even(significand, top - 4 - shift)
    code = np.minimum(code, LARGEST)
    code = np.where(magnitudes == INFINITY, LARGEST, code) | (blocks >> 24 & 0x80).astype(np.int64)
    return np.where((magnitudes > INFINITY) | (scales == 255), NAN, code).astype(np.uint8)


def _bits(x: np.ndarray) -> np.ndarray:
    if x.dtype == ml_dtypes.bfloat16:
        return x.view(np.uint16).astype(np.uint32) << 16
    if x.dtype != np.float32:
        raise TypeError(f"mxfp8: x has dtype {x.dtype}, want bfloat16 or float32")
    return np.ascontiguousarray(x).view(np.uint32)


def _parts(magnitudes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A finite FP32 magnitude as (significand, exponent): significand * 2^(exponent - 150)."""
    field = magnitudes >> 23
    return (magnitudes & 0x7FFFFF) | np.where(field > 0, 1 << 23, 0), np.maximum(field, 1)


def _bit_length(n: np.ndarray) -> np.ndarray:
    """Of integers from 0 to 2^49, which float64 holds exactly."""
    return np.frexp(n.astype(np.float64))[1].astype(np.int64)


def _round_to_even(n: np.ndarray, drop: np.ndarray) -> np.ndarray:
    """n * 2^-drop as an integer, n from 0 to 2^49; a negative drop shifts up."""
    kept = n << np.maximum(-drop, 0)
    drop = np.clip(drop, 0, 52)
    low = kept >> drop
    rest, half = kept - (low << drop), np.left_shift(1, np.maximum(drop, 1) - 1)
    up = (drop > 0) & ((rest > half) | ((rest == half) & (low & 1 == 1)))
    return low + up
