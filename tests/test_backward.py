"""ag_gemm_dgrad, bulk_ag and bulk_rs on the CPU device: values, bits, split contractions, accumulation, errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.checks.operators import Case
from kosmos_raw.checks.validate import merge, run_all
from tests import programs
from tests.test_gemm_rs import SHAPES

BF16 = ml_dtypes.bfloat16
OPS = ("ag_gemm_dgrad", "bulk_ag", "bulk_rs")


@pytest.mark.parametrize("policy", ["one_way", "fixed", "two_way"])
@pytest.mark.parametrize("op", OPS)
def test_matches_oracle(op, policy):
    for ranks in range(1, 9):
        cases = [
            Case(rows, n, k, op, policy, movers=movers if ranks > 1 else None, arena=i % 2 == 0, seed=ranks, iters=1)
            for i, (rows, n, k) in enumerate(SHAPES)
            if len(rows) == ranks
            for movers in (None, 3)
        ]
        outcomes = kr.launch(run_all, cases, ranks=ranks, mode="threads", workgroups=4)
        for case, *of_ranks in zip(cases, *outcomes, strict=True):
            outcome = merge(of_ranks)
            assert outcome.passed and outcome.bitwise_repeat, (case, outcome.problems)


@pytest.mark.parametrize("op", OPS)
def test_processes_match_oracle(op):
    cases = [Case((250, 251, 249, 250), 130, 72, op), Case((0, 3, 300, 1), 96, 40, op, "fixed", arena=True)]
    for outcomes in zip(*kr.launch(run_all, cases, ranks=4, mode="processes"), strict=True):
        assert merge(outcomes).passed, merge(outcomes).problems


def _accumulates(comm):
    """Three micro batches into one float32 buffer and one bf16 buffer, and a buffer that is no plain array."""
    rng = np.random.default_rng(comm.rank)
    total = np.zeros((21, 37), np.float32)
    whole, small, odd = total.copy(), total.astype(BF16), np.zeros((21, 74), np.float32)[:, ::2]
    for _ in range(3):
        a, b = programs.ternary(rng, (50, 21)), programs.ternary(rng, (50, 37))
        for c in (whole, small, odd):
            assert kr.gemm_wgrad(comm, a, b, c=c, accumulate=True) is c
        total += a.astype(np.float32).T @ b.astype(np.float32)
        assert np.array_equal(
            kr.gemm_wgrad(comm, a, b).astype(np.float32), a.astype(np.float32).T @ b.astype(np.float32)
        )
    return all(np.array_equal(c.astype(np.float32), total) for c in (whole, small, odd))


def test_weight_gradients_accumulate():
    assert kr.launch(_accumulates, ranks=2, mode="threads") == [True, True]


def _bad(comm):
    x, a, b = np.ones((4, 8), BF16), np.ones((6, 16), BF16), np.ones((16, 8), BF16)
    wrong = {
        "dgrad_k": lambda: kr.ag_gemm_dgrad(comm, a, b[:8]),
        "dgrad_split": lambda: kr.ag_gemm_dgrad(comm, a, b, split=0),
        "gathered": lambda: kr.ag_gemm_dgrad(comm, a, b, gathered=np.ones((6, 16), BF16)),
        "bulk_ag_rows": lambda: kr.bulk_ag(comm, x, a, b, rows=[1, 1, 1]),
        "bulk_ag_gathered": lambda: kr.bulk_ag(comm, x, a, b, gathered=np.ones((4, 8), BF16)),
        "bulk_rs_k": lambda: kr.bulk_rs(comm, x, a, b),
        "bulk_rs_add": lambda: kr.bulk_rs(comm, x, b, b, accumulate=True),
        "bulk_rs_c": lambda: kr.bulk_rs(comm, x, b, b, c=np.ones((8, 8), np.float64)),
        "bulk_rs_overlap": lambda: kr.bulk_rs(comm, x, b, b, c=b[:8]),
    }
    return {name: str(programs.error_of(call)[1]) for name, call in wrong.items()}


def test_bad_arguments_are_explained():
    wants = {
        "dgrad_k": "want the same K in a's second and b's first",
        "dgrad_split": "split is 0",
        "gathered": "gathered has shape (6, 16), want (18, 16)",
        "bulk_ag_rows": "x has 4 rows",
        "bulk_ag_gathered": "gathered has shape (4, 8), want (12, 8)",
        "bulk_rs_k": "want the same K",
        "bulk_rs_add": "give the array c",
        "bulk_rs_c": "float64",
        "bulk_rs_overlap": "c overlaps a",
    }
    for messages in kr.launch(_bad, ranks=3, mode="threads"):
        for name, text in wants.items():
            assert text in messages[name], (name, messages[name])
