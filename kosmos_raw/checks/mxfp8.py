"""Judging operators in MXFP8: BF16 is drawn, and quantised on the device by the very call that is judged.

What must come out is the float64 product of what the quantised factors stand for, by the oracle's own bytes: the error
that is allowed is that of FP32 sums and one rounding, and a wrong byte anywhere shows, for every other iteration is of
all magnitudes (numerics/spread.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..numerics import oracles
from ..numerics.mxfp8 import quantize_columns, rounded
from ..numerics.tolerance import gemm_bound, reduced_bound, sum_bound
from ..ops.ag_gemm import ag_gemm
from ..ops.ag_gemm_grads import ag_gemm_grads
from ..ops.bulk_ag import bulk_ag
from ..ops.bulk_rs import bulk_rs
from ..ops.gemm_rs import gemm_rs
from ..ops.quantize import STEP, MxArray, depth_of, quantize_mxfp8
from ..plan.shapes import MXFP8_FORMAT, round_up
from ..ranks.communicator import Communicator
from . import operators
from .operators import Arrays, Case, Checked, Wanted


class Quantised:
    """Makes the factors of one call, and takes them back."""

    def __init__(self, comm: Communicator, case: Case):
        self.comm, self.case = comm, case
        self.taken: list[MxArray] = []

    def factor(self, x: Any, axis: int = 1, groups: Sequence[int] | None = None) -> MxArray:
        return quantize_mxfp8(self.comm, x, axis, groups=groups)

    def shard(self, x: Any, axis: int = 1) -> MxArray:
        """What peers read: where `case.arena` wants it."""
        if not self.case.arena:
            return self.factor(x, axis)
        most = max(self.case.rows)
        out = MxArray.empty(self.comm, tuple(x.shape), axis, symmetric=True, most_rows=most)
        self.taken.append(out)
        return quantize_mxfp8(self.comm, x, axis, out=out)

    def __enter__(self) -> Quantised:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.taken:
            self.comm.synchronize()
        for x in self.taken:
            x.free(self.comm)


def shard_bytes(case: Case, columns: bool, rows: bool = False) -> int:
    """Of a rank's copies in the arena, and as much again in its workspace."""
    most, form = max(case.rows), MXFP8_FORMAT
    by_row = form.nbytes(most, round_up(case.k, form.step)) if rows else 0
    by_column = form.nbytes(case.k, round_up(most, form.step)) if columns else 0
    return 2 * (by_row + by_column + 4096)


class MxAgGemm(operators.AgGemm):
    in_arena = None

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        with Quantised(comm, case) as q:
            ag_gemm(comm, q.shard(inputs["a"]), q.factor(inputs["b"]), **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        a = case.random(iteration, 0, "m", "k")
        exact, magnitude = oracles.gemm(rounded(a), rounded(self.inputs(case, rank, iteration)["b"]))
        return {"out": (exact, gemm_bound(exact, magnitude, case.k))}

    def arena_bytes(self, case: Case) -> int:
        return shard_bytes(case, columns=False, rows=True)


class MxGemmRs(operators.GemmRs):
    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        with Quantised(comm, case) as q:
            gemm_rs(comm, q.factor(inputs["a"]), q.factor(inputs["b"]), **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        own = case.own(rank)
        every = [self.inputs(case, q, iteration) for q in range(case.ranks)]
        products = [oracles.gemm(rounded(x["a"][own]), rounded(x["b"])) for x in every]
        return {"out": reduced_bound(products, case.k)}


class MxAgGemmDgrad(Checked):
    """Of a case: dY is [rows, K], W [K, N], X [M, N]; both gradients come of one call."""

    in_arena = None

    def inputs(self, case: Case, rank: int, iteration: int) -> Arrays:
        return {
            "a": case.random(iteration, 0, "m", "k")[case.own(rank)],
            "b": case.random(iteration, 1 + 2 * rank, "1/k", "n"),
            "x": case.random(iteration, 2 + 2 * rank, "1/m", "n"),
        }

    def outputs(self, case: Case, rank: int) -> dict[str, tuple[int, int]]:
        return {"out": (case.m, case.n), "c": (case.k, case.n)}

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        with Quantised(comm, case) as q:
            a, b, x = (inputs[name] for name in ("a", "b", "x"))
            by_row, by_column = q.shard(a), q.shard(a, 0)
            b, x = q.factor(b, 0), q.factor(x, 0, case.rows)
            ag_gemm_grads(comm, by_row, by_column, b, x, **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        own, a = self.inputs(case, rank, iteration), case.random(iteration, 0, "m", "k")
        data, data_size = oracles.product(rounded(a), rounded(own["b"], 0))
        weight, weight_size = oracles.product(rounded(a, 0, case.rows).T, rounded(own["x"], 0, case.rows))
        return {
            "out": (data, gemm_bound(data, data_size, case.k)),
            "c": (weight, gemm_bound(weight, weight_size, case.m)),
        }

    def arena_bytes(self, case: Case) -> int:
        return shard_bytes(case, columns=True, rows=True)


class MxBulkAg(operators.BulkAg):
    """X is gathered along its columns, bit by bit."""

    in_arena = None

    def outputs(self, case: Case, rank: int) -> dict[str, tuple[int, int]]:
        depth = depth_of((case.m, case.k), 0, case.rows)
        scales = (depth // STEP, 2 * round_up(case.k, 4))  # as words of 16 bits, as all outputs
        return {"out": (case.m, case.k), "elements": (case.k, depth // 2), "scales": scales}

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        given = {}
        if outputs is not None:
            elements, scales = (outputs[name].view(np.uint8) for name in ("elements", "scales"))
            scales = scales.reshape(len(scales), round_up(case.k, 4), 4)
            given["out"] = outputs["out"]
            given["gathered"] = MxArray(elements, scales, 0, (case.m, case.k), case.rows)
        with Quantised(comm, case) as q:
            x, a, b = q.shard(inputs["x"], 0), q.factor(inputs["a"]), q.factor(inputs["b"], 0)
            bulk_ag(comm, x, a, b, **case.options(), **given)

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        own, x = self.inputs(case, rank, iteration), case.random(iteration, 0, "m", "k")
        exact, magnitude = oracles.product(rounded(own["a"]), rounded(own["b"], 0))
        elements, scales = as_it_lies(x, case.rows)
        return {"out": (exact, gemm_bound(exact, magnitude, case.n)), "elements": elements, "scales": scales}

    def arena_bytes(self, case: Case) -> int:
        return shard_bytes(case, columns=True)


class MxBulkRs(operators.BulkRs):
    """What is added is BF16."""

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        with Quantised(comm, case) as q:
            a, b = (q.factor(inputs[name], 0, case.rows) for name in ("a", "b"))
            bulk_rs(comm, inputs["x"], a, b, **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        own = self.inputs(case, rank, iteration)
        exact, magnitude = oracles.product(rounded(own["a"], 0, case.rows).T, rounded(own["b"], 0, case.rows))
        parts = [self.inputs(case, q, iteration)["x"][case.own(rank)] for q in range(case.ranks)]
        return {"out": sum_bound(parts), "c": (exact, gemm_bound(exact, magnitude, case.m))}


def as_it_lies(x: np.ndarray, groups: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Elements and scales of an MxArray along axis 0, as words of 16 bits."""
    starts, parts, scales = np.cumsum([0, *groups]), [], []
    for first, end in pairwise(starts):
        pad = -(end - first) % STEP
        e, s = quantize_columns(np.pad(x[first:end], ((0, pad), (0, 0))))
        parts.append(e)
        scales.append(s)
    elements, by_line = np.concatenate(parts, 1), np.concatenate(scales, 1)
    lines = round_up(len(by_line), 4)
    lying = np.zeros((by_line.shape[1] // 4, lines, 4), np.uint8)
    lying[:, : len(by_line)] = by_line.reshape(len(by_line), -1, 4).transpose(1, 0, 2)
    return np.ascontiguousarray(elements).view(np.uint16), lying.reshape(len(lying), 4 * lines).view(np.uint16)


CHECKED_MXFP8: dict[str, Checked] = {
    "ag_gemm": MxAgGemm(),
    "gemm_rs": MxGemmRs(),
    "ag_gemm_dgrad": MxAgGemmDgrad(),
    "bulk_ag": MxBulkAg(),
    "bulk_rs": MxBulkRs(),
}
