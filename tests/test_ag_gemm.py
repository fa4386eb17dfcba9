"""ag_gemm on the CPU device: values, bits, memory, errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.build.params import KINDS
from kosmos_raw.checks.operators import Case
from kosmos_raw.checks.validate import merge, run_all
from kosmos_raw.numerics import oracles
from kosmos_raw.numerics.tolerance import compare, gemm_bound
from tests import programs

SHAPES = [
    # rows of every rank, N, K
    ((96,), 96, 64),
    ((1,), 1, 1),
    ((0,), 5, 8),
    ((97, 95), 100, 72),
    ((5, 0), 3, 7),
    ((0, 0), 4, 8),
    ((300, 1, 0), 130, 72),
    ((200, 200, 200), 96, 0),
    ((7, 7, 7), 0, 16),
    ((1, 0, 0, 0), 9, 300),
    ((0, 0, 0, 250), 97, 264),
    ((33, 97, 1, 0, 96), 200, 40),
    ((10,) * 6, 33, 129),
    ((64, 63, 62, 61, 60, 59, 58), 65, 8),
    ((128,) * 8, 192, 512),
    ((3, 2, 1, 0, 0, 0, 0, 0), 8, 1),
]


@pytest.mark.parametrize("policy", ["one_way", "fixed", "two_way"])
@pytest.mark.parametrize("arena", [False, True], ids=["copied", "in_arena"])
def test_matches_oracle(policy, arena):
    for ranks in range(1, 9):
        cases = [
            Case(rows, n, k, policy=policy, movers=movers if ranks > 1 else None, arena=arena, seed=ranks, iters=1)
            for rows, n, k in SHAPES
            if len(rows) == ranks
            for movers in (None, 1, 3)
        ]
        outcomes = kr.launch(run_all, cases, ranks=ranks, mode="threads", workgroups=4)
        for case, *of_ranks in zip(cases, *outcomes, strict=True):
            outcome = merge(of_ranks)
            assert outcome.passed and outcome.bitwise_repeat, (case, outcome.problems)


def test_processes_match_oracle():
    cases = [Case((250, 251, 249, 250), 130, 72, iters=3), Case((0, 3, 500, 1), 96, 40, policy="fixed")]
    for outcomes in zip(*kr.launch(run_all, cases, ranks=4, mode="processes"), strict=True):
        assert merge(outcomes).passed, merge(outcomes).problems


@pytest.mark.parametrize(("ranks", "mode"), [(4, "threads"), (3, "processes"), (8, "threads")])
def test_thousand_calls_on_one_communicator(ranks, mode):
    calls = 1000 if ranks == 4 else 200
    assert kr.launch(programs.back_to_back, calls, ranks, ranks=ranks, mode=mode) == [calls] * ranks


def test_special_values_pass_through():
    """Every bf16 pattern times one comes back as itself; NaNs come back as NaN."""
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    (c,) = kr.launch(_identity, patterns, ranks=1, mode="threads")
    nan = np.isnan(patterns.view(ml_dtypes.bfloat16).astype(np.float32))
    # A row with a NaN or infinity spreads it over the row (0 * inf is NaN); rows of finite numbers are exact, but -0.
    finite_rows = np.isfinite(patterns.view(ml_dtypes.bfloat16).astype(np.float32)).all(axis=1)
    want = patterns.copy()
    want[want == 0x8000] = 0
    assert finite_rows.sum() == 254 and nan.sum() > 0
    assert np.array_equal(c[finite_rows], want[finite_rows])
    assert (c[~finite_rows] == 0x7FC0).all()


def _identity(comm, patterns):
    return kr.ag_gemm(comm, patterns, np.eye(256, dtype=np.float32).astype(ml_dtypes.bfloat16).view(np.uint16))


def test_arrays_in_any_layout():
    (problems,) = set(kr.launch(_layouts, ranks=2, mode="threads"))
    assert problems == ()


def _layouts(comm):
    rng = np.random.default_rng(3)
    big = rng.standard_normal((40, 48)).astype(ml_dtypes.bfloat16)
    problems = []
    for name, a, b in (
        ("transposed", big[:32, :16].T, big[:10, :32]),
        ("strided", big[::2, ::3], big[5:15, :16]),
        ("reversed", big[::-1, :16], big[3:9, 16:32]),
        ("odd_start", big[1:8, 1:17], big[1:7, 3:19]),
        ("bits", big[:4, :16].view(np.uint16), big[:4, :16].view(np.uint16)),
    ):
        for out in (None, np.zeros((2 * a.shape[0], 2 * b.shape[0]), a.dtype)[:, ::2]):
            c = kr.ag_gemm(comm, a, b, out=out).view(ml_dtypes.bfloat16)
            exact, magnitude = oracles.ag_gemm([a.view(ml_dtypes.bfloat16)] * 2, b.view(ml_dtypes.bfloat16))
            if not compare(c, exact, gemm_bound(exact, magnitude, a.shape[1])).passed:
                problems.append(name)
    return tuple(problems)


def test_bad_arguments_are_explained_and_harmless():
    wants = {
        "k": ("ValueError", "same K"),
        "dims": ("ValueError", "two dimensions"),
        "dtype": ("TypeError", "float32, want bfloat16"),
        "list": ("TypeError", "a is a list"),
        "rows_count": ("ValueError", "one a rank"),
        "rows_negative": ("ValueError", "none negative"),
        "rows_own": ("ValueError", "rows says 5"),
        "out_shape": ("ValueError", "want (12, 8)"),
        "out_overlap": ("ValueError", "out overlaps a"),
        "policy": ("ValueError", "one_way, fixed, two_way"),
        "order": ("ValueError", "as_consumed, chunk_major, rank_order"),
        "movers_none": ("ValueError", "want 1 to 3"),
        "movers_all": ("ValueError", "want 1 to 3"),
        "arena": ("ArenaFull", "arena_bytes="),
    }
    for messages in kr.launch(programs.bad_arguments, ranks=3, mode="threads", workgroups=4):
        assert messages.keys() == wants.keys()
        for name, (kind, text) in wants.items():
            assert messages[name][0] == kind and text in messages[name][1], (name, messages[name])
            assert messages[name][1].startswith("ag_gemm: ")


def test_arena_arrays():
    for errors in kr.launch(programs.arena_calls, ranks=3, mode="threads"):
        assert errors[0] == ("ValueError", "free: the array does not come from this communicator's empty()")
        assert errors[1][0] == "ArenaFull" and "empty: needs 2,199,023,255,552 bytes" in errors[1][1]


def test_trace_has_the_roles():
    for events in kr.launch(programs.traced, ranks=2, mode="threads", workgroups=3):
        kinds = events[:, :, 1] >> 56 & 63
        assert events.shape == (3, 256, 2) and (events[:, 0, 0] > 0).all()
        seen = {KINDS[kind] for kind in np.unique(kinds)}
        assert seen == {"leave", "pull", "tile", "drain"}  # unused rows count as leave


def test_workgroups_that_cannot_be_resident_are_refused():
    for workgroups in (0, 1, 257):
        with pytest.raises(kr.NotAvailable, match=f"workgroups is {workgroups}, want 2 to 256"):
            kr.launch(programs.small_call, ranks=2, mode="threads", workgroups=workgroups)
