"""What operators in MXFP8 make of data: scales that differ wildly, and how far the recipe is from BF16."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.checks import mxfp8
from kosmos_raw.checks.mxfp8 import Quantised
from kosmos_raw.checks.operators import CHECKED, Case
from tests.test_mxfp8_ops import check, outcomes_of

RAGGED = ((97, 40), (33, 0, 70, 5), (33, 1, 0, 40, 8, 0, 3, 65))
EVEN = ((70, 61), (24, 25, 30, 40), (20, 24, 17, 18, 20, 33, 16, 19))


@dataclass(frozen=True)
class Noise(Case):
    """Of which nothing is spread."""

    def is_spread(self, iteration: int) -> bool:
        return False


@dataclass(frozen=True)
class Wild(Noise):
    """Powers of two from block to block along both axes, and between the lines and the columns of a block."""

    def random(self, iteration: int, what: int, rows: str, columns: str) -> np.ndarray:
        plain = super().random(iteration, what, rows, columns).astype(np.float32)
        return np.ldexp(plain, self.powers(iteration, what, *plain.shape)).astype(ml_dtypes.bfloat16)

    def powers(self, iteration: int, what: int, rows: int, columns: int) -> np.ndarray:
        rng = np.random.default_rng((9, iteration, what))
        blocks = rng.integers(-12, 13, (-(-rows // 32), -(-columns // 32)))
        powers = blocks.repeat(32, 0)[:rows].repeat(32, 1)[:, :columns]
        return powers + rng.integers(-5, 6, (rows, 1)) + rng.integers(-5, 6, columns)


def case_of(kind: type[Case], rows: tuple[int, ...], op: str, n: int = 70, k: int = 200) -> Case:
    return kind(rows, n, k, op, iters=1, repeats=1, dtype="mxfp8", seed=len(rows))


@pytest.mark.parametrize("op", CHECKED)
def test_scales_that_differ_wildly(op):
    for rows in RAGGED:
        check([case_of(Wild, rows, op, 130)])


@pytest.mark.parametrize("op", CHECKED)
@pytest.mark.parametrize("axis", [1, 2], ids=["of the next line", "of the next block"])
def test_wrong_scales_of_one_factor_are_found(op, axis, monkeypatch):
    factor = Quantised.factor

    def spoiled(self: Quantised, *arguments: object) -> kr.MxArray:
        x = factor(self, *arguments)
        x.scales[:, : x.lines] = np.roll(x.scales[:, : x.lines], 1, axis)
        return x

    monkeypatch.setattr(Quantised, "factor", spoiled)
    (outcome,) = outcomes_of([case_of(Wild, RAGGED[0], op)])
    assert not outcome.passed and outcome.over_bound > 1e3


# The quantiser with groups of 64: the scale that both blocks of a pair would have if they were one.
OF_PAIR = """u32 most = largest_magnitude(x);
    for (u32 j = 0; j < MX_BLOCK; j++) {{
      const u32 other = (u32)*s.element({}, {}) << 16 & 0x7fffffff;
      most = other > most ? other : most;
    }}
    block_e4m3(x, inverse_scale(scale_byte(most, (ScaleRule)p.rule)), elements);
    {}scale_byte(most, (ScaleRule)p.rule);"""
BY_ROW, BY_COLUMN, OTHER = "const u32 byte = ", "*s.scale(line, block) = (unsigned char)", "(block ^ 1) * MX_BLOCK + j"
RIGHT = "quantize_block(x, (ScaleRule)p.rule, elements);"
WIDER = {
    "ag_gemm": (BY_ROW + RIGHT, OF_PAIR.format("row", OTHER, BY_ROW)),
    "bulk_rs": (BY_COLUMN + RIGHT, OF_PAIR.format(OTHER, "line", BY_COLUMN)),
}


@pytest.mark.parametrize("op", WIDER)
def test_wider_groups_are_found_where_magnitudes_differ(op, mutated):
    """And not in noise: there a scale that is too large costs elements of 2^-14 of the largest some bits."""
    mutated("work/quantize.h", *WIDER[op])
    noise, spread = outcomes_of([case_of(kind, (97, 95), op) for kind in (Noise, Case)])
    assert noise.passed and not spread.passed and spread.over_bound > 10


@pytest.mark.parametrize("rule", ["up", "floor"])
@pytest.mark.parametrize("op", CHECKED)
def test_error_of_the_recipe_on_gaussian_data(op, rule, monkeypatch):
    """Against the product of the BF16 factors: the square root of 2 times the error of an element, whatever K is."""
    quantize = mxfp8.quantize_mxfp8
    monkeypatch.setattr(mxfp8, "quantize_mxfp8", lambda *a, **more: quantize(*a, rule=rule, **more))
    monkeypatch.setattr(mxfp8, "rounded", lambda x, axis=1, groups=None: x.astype(np.float64))
    percent = {"up": 3.8, "floor": 4.15}[rule]
    for rows in EVEN if rule == "up" else EVEN[:1]:
        (outcome,) = outcomes_of([case_of(Noise, rows, op)])
        assert abs(100 * outcome.rel_error - percent) < 0.3, (rows, outcome.rel_error)
