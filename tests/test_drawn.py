"""A sample of what `make drawn` does, and what it can draw."""

from __future__ import annotations

import pytest

from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.checks.validate import Outcome
from kosmos_raw.device.base import Tile
from kosmos_raw.plan.moe.backward import plan_moe_backward
from tests import drawn

TILES = (Tile(96, 96), Tile(128, 256), Tile(256, 256))


@pytest.mark.parametrize("kind", drawn.KINDS)
def test_a_sample_passes(kind: str) -> None:
    for number in range(6):
        case = drawn.draw(kind, "cpu", 3, number)
        assert not drawn.check(kind, "cpu", case), case


def test_a_case_can_be_drawn_again() -> None:
    assert drawn.draw("moe_backward", "cuda", 1, 2) == drawn.draw("moe_backward", "cuda", 1, 2)
    assert len({drawn.draw("operator", "cpu", 1, number) for number in range(20)}) == 20


@pytest.mark.parametrize("device", drawn.DEVICES)
def test_operators_of_all_kinds_are_drawn(device: str) -> None:
    cases = [drawn.draw("operator", device, 0, number) for number in range(400)]
    assert all(isinstance(case, Case) for case in cases)
    assert {case.op for case in cases} == set(CHECKED)
    assert {case.dtype for case in cases} == {"bf16", "mxfp8"} and {case.transport for case in cases} > {"pull", "push"}
    assert {case.ranks for case in cases} == set(range(1, drawn.DEVICES[device][2] + 1))
    assert any(0 in case.rows for case in cases) and any(case.split for case in cases)
    beside = {case.dtype for case in cases if case.policy == "beside"}
    assert beside == ({"bf16"} if device == "cuda" else set())


@pytest.mark.parametrize("kind", ["moe_forward", "moe_backward"])
def test_layers_have_a_plan_on_every_device(kind: str) -> None:
    for number in range(40):
        case = drawn.draw(kind, "cuda", 0, number)
        for tile in TILES:
            plan = case.plan(tile)
            if kind == "moe_backward":
                plan_moe_backward(plan)


def test_what_fails_is_said(monkeypatch) -> None:
    case = drawn.draw("operator", "cpu", 0, 0)
    bad = Outcome(passed=False, problems=["that is wrong"])
    monkeypatch.setitem(drawn.KINDS, "operator", (drawn.operator, lambda comm, case: bad))
    assert "that is wrong" in drawn.check("operator", "cpu", case)
    monkeypatch.setitem(drawn.KINDS, "operator", (drawn.operator, lambda comm, case: 1 / 0))
    assert drawn.check("operator", "cpu", case).startswith("ZeroDivisionError")
