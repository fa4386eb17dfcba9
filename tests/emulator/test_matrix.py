"""Matrix instructions against NumPy: the place of every element, scale and result; values differ in each lane."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from .launching import launch
from .text import compiled_module

pytestmark = pytest.mark.emulated

LANE = np.arange(64)
TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "fp8": ml_dtypes.float8_e4m3fn,
    "bf8": ml_dtypes.float8_e5m2,
    "fp6": ml_dtypes.float6_e2m3fn,
    "bf6": ml_dtypes.float6_e3m2fn,
    "fp4": ml_dtypes.float4_e2m1fn,
}
BITS = {"bf16": 16, "f16": 16, "fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}


def k_of(rows: int, depth: int, name: str) -> np.ndarray:
    """k[lane, element] of an operand."""
    groups = 64 // rows
    each = depth // groups
    group, element = LANE[:, None] // rows, np.arange(each)[None]
    if BITS[name] == 8 and each == 32:
        return element // 16 * 16 * groups + 16 * group + element % 16
    return each * group + element


def in_lanes(x: np.ndarray, name: str) -> np.ndarray:
    """[rows, depth] as bytes of each lane, 32 at most, elements packed from the low bits up."""
    rows, depth = x.shape
    codes = x[LANE[:, None] % rows, k_of(rows, depth, name)].astype(TYPES[name])
    if BITS[name] == 16:
        return codes.view(np.uint8).reshape(64, -1)
    bits = np.unpackbits(codes.view(np.uint8)[..., None], axis=-1, bitorder="little")[..., : BITS[name]]
    packed = np.packbits(bits.reshape(64, -1), axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, 32 - packed.shape[1])), constant_values=0xEE)


def result_rows(rows: int) -> np.ndarray:
    """Row of the result by [lane, register]; the column is lane % rows."""
    i = np.arange(rows * rows // 64)[None]
    lane = LANE[:, None]
    return 4 * (lane // 16) + i if rows == 16 else 8 * (i // 4) + 4 * (lane // 32) + i % 4


def from_lanes(d: np.ndarray, rows: int) -> np.ndarray:
    out = np.zeros((rows, rows), np.float32)
    out[result_rows(rows), LANE[:, None] % rows] = d
    return out


def small(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize("rows, depth", [(16, 32), (32, 16)])
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_sixteen_bit_types(name, rows, depth):
    rng = np.random.default_rng(rows)
    a, b, c = small(rng, (rows, depth)), small(rng, (rows, depth)), small(rng, (rows, rows))
    d = np.zeros((64, rows * rows // 64), np.float32)
    held = np.ascontiguousarray(c[result_rows(rows), LANE[:, None] % rows])
    launch(compiled_module("matrix"), f"{name}_{rows}", 1, 64, in_lanes(a, name), in_lanes(b, name), held, d)
    np.testing.assert_array_equal(from_lanes(d, rows), a @ b.T + c)


CASES = {
    "fp8_fp8": (0, 0),
    "fp8_bf8": (1, 2),
    "bf8_fp8": (3, 1),
    "fp4_fp4": (2, 3),
    "fp6_bf6": (0, 3),
    "fp8_fp4": (2, 0),
}


@pytest.mark.parametrize("rows, depth", [(16, 128), (32, 64)])
@pytest.mark.parametrize("case", CASES)
def test_scaled_types(case, rows, depth):
    """Every row and block has a scale of its own; bytes of the scale registers that are not asked for hold others."""
    rng = np.random.default_rng(depth)
    type_a, type_b = case.split("_")
    byte_a, byte_b = CASES[case]
    a, b, c = small(rng, (rows, depth)), small(rng, (rows, depth)), small(rng, (rows, rows))
    scale_a, scale_b = rng.integers(124, 131, (2, rows, depth // 32)).astype(np.uint8)
    held_a, held_b = rng.integers(0, 200, (2, 64, 4)).astype(np.uint8)
    held_a[LANE, byte_a] = scale_a[LANE % rows, LANE // rows]
    held_b[LANE, byte_b] = scale_b[LANE % rows, LANE // rows]
    held = np.ascontiguousarray(c[result_rows(rows), LANE[:, None] % rows])
    d = np.zeros((64, rows * rows // 64), np.float32)
    arguments = in_lanes(a, type_a), in_lanes(b, type_b), held, d, held_a, held_b
    launch(compiled_module("matrix"), f"{case}_{rows}", 1, 64, *arguments)

    def scaled(x, s):
        return x * np.exp2(s.astype(np.float64).repeat(32, axis=1) - 127)

    np.testing.assert_array_equal(from_lanes(d, rows), scaled(a, scale_a) @ scaled(b, scale_b).T + c)


def test_extreme_scales():
    """2^127 times 2^-127 is 1, a NaN scale spoils its own rows only."""
    a = np.ones((16, 128), np.float32)
    held_a, held_b = np.full((64, 4), 254, np.uint8), np.full((64, 4), 0, np.uint8)
    held_a[5, 0] = 255  # row 5, block 0
    d, c = np.zeros((64, 4), np.float32), np.zeros((64, 4), np.float32)
    launch(compiled_module("matrix"), "fp8_fp8_16", 1, 64, in_lanes(a, "fp8"), in_lanes(a, "fp8"), c, d, held_a, held_b)
    got = from_lanes(d, 16)
    assert np.isnan(got[5]).all()
    np.testing.assert_array_equal(np.delete(got, 5, axis=0), 128.0)


@pytest.mark.parametrize("low, high", [(0, 100), (27, 67), (90, 2), (254, 254), (200, 55)])
def test_scales_whose_product_is_no_float(low, high):
    """2^-150 of a large sum is a subnormal, not zero; only what is too large for the sum overflows."""
    a, c = np.full((16, 128), 448, np.float32), np.zeros((64, 4), np.float32)
    b = np.full((16, 128), 2.0**-9 if low + high > 254 else 448.0, np.float32)
    held_a, held_b = np.full((64, 4), low, np.uint8), np.full((64, 4), high, np.uint8)
    d = np.zeros((64, 4), np.float32)
    launch(compiled_module("matrix"), "fp8_fp8_16", 1, 64, in_lanes(a, "fp8"), in_lanes(b, "fp8"), c, d, held_a, held_b)
    with np.errstate(over="ignore"):
        want = np.float32(4 * np.ldexp(32.0 * 448 * float(b[0, 0]), low + high - 254))
    assert want != 0
    np.testing.assert_array_equal(d, want)


def test_every_code_of_the_eight_bit_types():
    """Each code times one, through the instruction: special values included."""
    for name, case in (("fp8", "fp8_fp8"), ("bf8", "bf8_fp8")):
        byte = CASES[case]
        codes = np.arange(256, dtype=np.uint8).view(TYPES[name]).reshape(2, 16, 8)
        for half in codes:
            a = np.zeros((16, 128), np.float32)
            for column in range(8):
                x = a.copy()
                x[:, 0] = half[:, column].astype(np.float32)
                b = np.zeros((16, 128), np.float32)
                b[:, 0] = 1
                held = [np.full((64, 4), 127, np.uint8) for _ in byte]
                d, c = np.zeros((64, 4), np.float32), np.zeros((64, 4), np.float32)
                launch(
                    compiled_module("matrix"), f"{case}_16", 1, 64, in_lanes(x, name), in_lanes(b, "fp8"), c, d, *held
                )
                np.testing.assert_array_equal(from_lanes(d, 16)[:, 0], x[:, 0])
