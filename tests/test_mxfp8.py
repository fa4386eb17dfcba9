"""The oracle of MXFP8 against vectors made by another implementation (exact fractions), and what is known of it."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kosmos_raw.numerics import mxfp8

VECTORS = Path(__file__).parent / "data" / "mxfp8_vectors.csv"
COLUMN = {"up": "rceil", "floor": "floor", "even": "even"}  # of the file


@cache
def vectors() -> tuple[list[str], np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Names, FP32 bits [block, 32], and by rule what must come out: elements [block, 32], scales [block]."""
    lines = list(csv.DictReader(VECTORS.open()))

    def numbers(column: str, digits: int) -> np.ndarray:
        return np.array([[int(x[column][i : i + digits], 16) for i in range(0, len(x[column]), digits)] for x in lines])

    wanted = {
        rule: (numbers(f"{name}_e4m3", 2).astype(np.uint8), numbers(f"{name}_e8m0", 2)[:, 0].astype(np.uint8))
        for rule, name in COLUMN.items()
    }
    names = [f"{line['id']} {line['class']}: {line['note']}" for line in lines]
    return names, numbers("inputs_f32_hex", 8).astype(np.uint32), wanted


@pytest.mark.parametrize("rule", mxfp8.RULES)
def test_vectors(rule):
    names, bits, wanted = vectors()
    elements, scales = mxfp8.quantize(bits.view(np.float32), rule)
    wrong = (scales[:, 0] != wanted[rule][1]) | (elements != wanted[rule][0]).any(1)
    assert len(names) == 222 and not wrong.any(), [name for name, w in zip(names, wrong, strict=True) if w]


def blocks_of(*largest: float) -> np.ndarray:
    x = np.zeros((len(largest), 32), np.float32)
    x[:, 17] = largest
    return x


@pytest.mark.parametrize(
    ("rule", "largest", "scale", "code"),
    [
        ("floor", 957.0, 128, 0x7E),
        ("up", 957.0, 129, 0x77),
        *(("up", 448.0 * 2.0**i, 127 + i, 0x7E) for i in (-1, 0, 1)),
        *(("up", 450.0 * 2.0**i, 128 + i, 0x76) for i in (-1, 0, 1)),
        *(("floor", -x, 127, 0xFE) for x in (464.0, 465.0, 480.0, 511.0)),
        ("up", np.inf, 254, 0x7E),
        ("floor", -np.inf, 255, 0x7F),
        ("even", np.nan, 255, 0x7F),
        ("up", np.nan, 0, 0x7F),
        ("up", -0.0, 0, 0x80),
        ("up", 2.0**-127, 0, 0x38),
    ],
)
def test_one_value(rule, largest, scale, code):
    elements, scales = mxfp8.quantize(blocks_of(largest), rule)
    assert (scales[0, 0], elements[0, 17]) == (scale, code)


@pytest.mark.parametrize(
    ("value", "code"),
    [(256, 0x78), (288, 0x79), (416, 0x7D), (448, 0x7E), (272, 0x78), (304, 0x7A), (2.0**-9, 1), (2.0**-10, 0)],
)
def test_rounding(value, code):
    x = np.full((1, 32), value, np.float32)
    x[0, 0] = 448
    assert (mxfp8.quantize(x)[0][0, 1:] == code).all()


def test_dequantize_knows_every_code_and_scale():
    codes = np.arange(256, dtype=np.uint8)
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float64)
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    value = np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -value, value))
    for scale in (0, 1, 126, 127, 254):
        got = mxfp8.dequantize(codes[None], np.full((1, 8), scale, np.uint8))
        np.testing.assert_array_equal(got[0], value * 2.0 ** (scale - 127))
    assert np.signbit(mxfp8.dequantize(np.full((1, 32), 0x80, np.uint8), np.full((1, 1), 0, np.uint8))).all()
    assert np.isnan(mxfp8.dequantize(np.zeros((1, 32), np.uint8), np.full((1, 1), 255, np.uint8))).all()


def test_blocks_do_not_cross_rows():
    x = np.stack([np.full(48, 2.0**-12, np.float32), np.full(48, 448, np.float32)])
    elements, scales = mxfp8.quantize(x)
    assert elements.shape == (2, 64) and not elements[:, 48:].any()
    np.testing.assert_array_equal(mxfp8.dequantize(elements, scales)[:, :48], x)


def test_columns_are_quantised_from_the_source_and_groups_are_padded_apart():
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((77, 40)) * np.exp(3 * rng.standard_normal(40))).astype(ml_dtypes.bfloat16)
    elements, scales = mxfp8.quantize_columns(x, groups=(33, 0, 44))
    assert elements.shape == (40, 128) and scales.shape == (40, 4)
    for rows, place in ((slice(0, 33), slice(0, 64)), (slice(33, 77), slice(64, 128))):
        own, own_scales = mxfp8.quantize(np.ascontiguousarray(x[rows].T))
        np.testing.assert_array_equal(elements[:, place], own)
        np.testing.assert_array_equal(scales[:, place.start // 32 : place.stop // 32], own_scales)
    again = mxfp8.quantize_columns(mxfp8.dequantize(*mxfp8.quantize(x))[:, :40].astype(np.float32), groups=(33, 0, 44))
    assert (again[0] != elements).mean() > 0.05  # a copy made from the other copy is not the same


@pytest.mark.parametrize(("rule", "element"), [("up", 0.0267), ("floor", 0.0293), ("even", 0.0276)])
def test_error_of_gaussian_data(rule, element):
    x = np.random.default_rng(3).standard_normal((512, 512)).astype(ml_dtypes.bfloat16)
    error = mxfp8.dequantize(*mxfp8.quantize(x, rule)) - x.astype(np.float64)
    assert np.linalg.norm(error) / np.linalg.norm(x.astype(np.float64)) == pytest.approx(element, abs=0.0004)
