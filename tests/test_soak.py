"""A sample of what `make soak` does: every operator again and again, with ranks and workgroups that come late."""

from __future__ import annotations

import pytest

from kosmos_raw.build import gfx950
from kosmos_raw.checks.operators import CHECKED
from tests import soak

EMULATED = pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))


@pytest.mark.parametrize(
    ("device", "ranks", "calls"),
    [
        ("cpu", 4, 10),
        pytest.param("emulated-caches", 2, 2, marks=[pytest.mark.emulated, EMULATED]),
    ],
)
def test_a_sample_passes(device, ranks, calls, monkeypatch):
    monkeypatch.setenv(soak.EMULATOR, "")  # and put back after the test
    assert soak.soak(device, ranks, calls) == [[]] * len(CHECKED)


def test_the_matrix_has_what_it_says():
    every = [case for ranks in soak.RANKS for case in soak.cases("gemm_rs", ranks, 50)]
    shapes = {(case.ranks, case.m) for case in every}
    assert {(4, 10), (4, 3), (3, 1000)} < shapes and {ranks for ranks, _ in shapes} == {2, 3, 4, 5, 8}
    assert all(any(m % r == 0 for q, m in shapes if q == r) for r in soak.RANKS)
    assert {case.policy for case in every} == {"one_way", "fixed", "two_way"}
    assert all(case.iters * case.repeats == 50 and case.delay_us for case in every)
