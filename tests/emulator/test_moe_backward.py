"""moe_backward's gfx950 text through the package's own Python path: gradients against the float64 oracle."""

from __future__ import annotations

import pytest

import kosmos_raw as kr
from kosmos_raw import emulator
from kosmos_raw.build import gfx950
from kosmos_raw.checks import moe, moe_backward
from kosmos_raw.checks.validate import merge
from kosmos_raw.cli.validate_moe import LARGEST
from kosmos_raw.plan.moe.config import MoEConfig

from .test_moe_forward import CACHES, LATE, SMALL
from .test_moe_forward import INPUTS as TWO_STEPS
from .test_operators import emulated  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.emulated,
    pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing())),
]

INPUTS = MoEConfig(64, 280, 5, 2, score="sigmoid", weight_on="input", shared_width=16)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (moe.MoeCase(SMALL, (20, 0, 33), "one_expert", "smallest", iters=1, repeats=1, into="add_f32"), LATE),
        (moe.MoeCase(INPUTS, (290, 15), pad=32, float_router=True, iters=1, repeats=1), LATE),
        (moe.MoeCase(SMALL, (30, 40), "skewed", "smallest", iters=1, repeats=1, into="add_bf16"), CACHES),
    ],
    ids=["smallest rings", "weights on inputs, two tiles", "caches"],
)
def test_gradients(case: moe.MoeCase, options: emulator.Options, emulated) -> None:  # noqa: F811
    emulated(case.ranks, options)
    given = {"mode": "threads", "device": "cpu", "arena_bytes": moe.arena_bytes(case, LARGEST), "workgroups": 4}
    outcome = merge(kr.launch(moe_backward.run, case, ranks=case.ranks, **given))
    assert outcome.passed, outcome.problems


def test_gradients_in_mxfp8(emulated) -> None:  # noqa: F811
    """An expert of two tile rows in rings of one; two K steps along H, I and rows."""
    given = {"dtype": "mxfp8", "iters": 1, "repeats": 1, "into": "add_f32"}
    test_gradients(moe.MoeCase(TWO_STEPS, (290, 15), "one_expert", "smallest", **given), LATE, emulated)
