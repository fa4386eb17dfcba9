"""MoE layers on a real Hopper GPU: outputs and gradients against the float64 oracle, by every way out of a tile."""

from __future__ import annotations

import pytest

import kosmos_raw as kr
from kosmos_raw.checks import moe, moe_backward
from kosmos_raw.checks.validate import merge
from kosmos_raw.cli.validate_moe import LARGEST
from kosmos_raw.plan.moe.config import MoEConfig
from tests.test_cuda import pytestmark, share_the_gpu  # noqa: F401  (a mark, a fixture)

# Tiles of 128 x 256 of which some are whole and some are cut, in rows and in columns.
WIDE = MoEConfig(328, 304, 4, 2, score="sigmoid", shared_width=272)
ONCE = {"iters": 1, "repeats": 2}

CASES = {
    "one rank": moe.MoeCase(WIDE, (700,), **ONCE),
    "two ranks": moe.MoeCase(WIDE, (700, 413), **ONCE, into="set_f32"),
    "a limit": moe.MoeCase(MoEConfig(328, 304, 4, 2, swiglu_limit=0.5), (513,), **ONCE, into="add_bf16"),
    "gated shared": moe.MoeCase(
        MoEConfig(136, 272, 6, 3, shared_width=528, gated_shared=True), (301, 300), **ONCE, float_router=True
    ),
    "one K step": moe.MoeCase(MoEConfig(64, 32, 3, 1), (500,), **ONCE),
    "smallest rings": moe.MoeCase(WIDE, (300, 0, 413), "skewed", "smallest", **ONCE, into="add_f32"),
    "idle experts": moe.MoeCase(WIDE, (300, 150), "one_expert", **ONCE, recompute=True),
    "weights on inputs": moe.MoeCase(MoEConfig(264, 280, 5, 2, weight_on="input"), (290, 15), **ONCE),
    "mxfp8": moe.MoeCase(WIDE, (400, 301), **ONCE, dtype="mxfp8", into="add_f32"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("direction", [moe, moe_backward], ids=["forward", "backward"])
def test_moe_layers_match_oracle(direction, case: moe.MoeCase) -> None:
    given = {"mode": "threads", "device": "cuda", "arena_bytes": moe.arena_bytes(case, LARGEST)}
    outcome = merge(kr.launch(direction.run, case, ranks=case.ranks, **given))
    assert outcome.passed and outcome.bitwise_repeat, outcome.problems
