"""moe_forward's gfx950 text through the package's own Python path: whole layers against the float64 oracle."""

from __future__ import annotations

import pytest

import kosmos_raw as kr
from kosmos_raw import emulator
from kosmos_raw.build import gfx950
from kosmos_raw.checks import moe
from kosmos_raw.checks.validate import merge
from kosmos_raw.cli.validate_moe import LARGEST
from kosmos_raw.plan.moe.config import MoEConfig

from .test_operators import emulated  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.emulated, pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))]

SMALL = MoEConfig(72, 40, 6, 3, shared_width=24, gated_shared=True, aux_loss="batch", aux_loss_coeff=0.1)
GROUPED = MoEConfig(
    64, 16, 44, 5, score="sigmoid", expert_bias=True, groups=4, top_groups=2, aux_loss="batch", aux_loss_coeff=1
)
BIASED = MoEConfig(64, 16, 21, 4, score="sqrtsoftplus", expert_bias=True, aux_loss="batch", aux_loss_coeff=1)
WIDE = MoEConfig(4616, 16, 4, 3, shared_width=16)  # rows of more words than there are lanes
CACHES = emulator.Options(caches="workgroup", preempt=3, seed=5, threads=2)
LATE = emulator.Options(late_memory=("direct", "lds", "loads", "stores"), preempt=4, seed=1, threads=2)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (moe.MoeCase(SMALL, (20, 0, 33), "one_expert", "smallest", iters=1, repeats=1), LATE),
        (moe.MoeCase(SMALL, (290, 15), pull=True, pad=32, float_router=True, iters=1, repeats=1), LATE),
        (moe.MoeCase(GROUPED, (30, 40), "skewed", "smallest", iters=1, repeats=1), CACHES),
        (moe.MoeCase(BIASED, (40, 0, 9), pull=True, policy="fixed", iters=1, repeats=1), CACHES),
        (moe.MoeCase(WIDE, (7, 5), iters=1, repeats=1), LATE),
    ],
    ids=["smallest rings", "pull", "groups, caches", "bias, pull, fixed crews, caches", "wide"],
)
def test_layers(case: moe.MoeCase, options: emulator.Options, emulated) -> None:  # noqa: F811
    emulated(case.ranks, options)
    given = {"mode": "threads", "device": "cpu", "arena_bytes": moe.arena_bytes(case, LARGEST), "workgroups": 4}
    outcome = merge(kr.launch(moe.run, case, ranks=case.ranks, **given))
    assert outcome.passed, outcome.problems


INPUTS = MoEConfig(136, 152, 5, 2, score="sigmoid", weight_on="input", shared_width=16)  # two K steps of each product


@pytest.mark.slow  # a minute to translate; a build whose operands of SHARED2 the compiler had lost was seen here alone
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (moe.MoeCase(SMALL, (20, 0, 33), "one_expert", "smallest", dtype="mxfp8", iters=1, repeats=1), LATE),
        (moe.MoeCase(SMALL, (30, 40), "skewed", pull=True, pad=64, dtype="mxfp8", iters=1, repeats=1), CACHES),
        (moe.MoeCase(INPUTS, (290, 15), dtype="mxfp8", float_router=True, iters=1, repeats=1), LATE),
    ],
    ids=["smallest rings", "pull, caches", "weights on inputs, two tiles"],
)
def test_layers_in_mxfp8(case: moe.MoeCase, options: emulator.Options, emulated) -> None:  # noqa: F811
    test_layers(case, options, emulated)
