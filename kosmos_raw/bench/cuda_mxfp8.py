"""The problems of cuda_problems.py in MXFP8, quantised before anything is timed; peers have them in BF16.

A weight is quantised as one of many calls, so that the BF16 which sm_90a multiplies is made of it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..numerics.tolerance import gemm_bound, reduced_bound
from ..ops.ag_gemm import ag_gemm
from ..ops.ag_gemm_grads import ag_gemm_grads
from ..ops.bulk_ag import bulk_ag
from ..ops.bulk_rs import bulk_rs
from ..ops.gemm_rs import gemm_rs
from ..ops.quantize import MxArray, depth_of, quantize_mxfp8
from ..plan.shapes import MXFP8_FORMAT
from .checking import normal, rows_to_check, to_float
from .cuda_problems import AgGemm, AgGemmDgrad, BulkAg, BulkRs, GemmRs, Problem

MOST_OFF = 0.045  # of BF16: 3.8 % on normal data (docs/mxfp8.md)

Exact = list[tuple[Any, np.ndarray, np.ndarray]]


class Quantised(Problem):
    """What all of them share. Goes before the problem in BF16."""

    dtype = "mxfp8"

    def shard(self, x: Any, axis: int) -> MxArray:
        """What peers read, in the arena."""
        room = MxArray.empty(self.comm, tuple(x.shape), axis, symmetric=True)
        self.in_arena += [room.elements, room.scales]
        made: MxArray = quantize_mxfp8(self.comm, x, axis, out=room)
        return made

    def factor(self, x: Any, axis: int, *, reused: bool = False) -> MxArray:
        """Of this rank alone. Along rows: in groups, as they are dealt."""
        made: MxArray = quantize_mxfp8(self.comm, x, axis, groups=self.groups(x, axis), reused=reused)
        return made

    def groups(self, x: Any, axis: int) -> Sequence[int] | None:
        """Rows of X, if those are all ranks' tokens."""
        return [self.rows] * self.comm.ranks if axis == 0 and x.shape[0] == self.moved_rows else None

    def values(self, x: Any, axis: int) -> Any:
        """The BF16 bits of what x is quantised to, as its lines lie."""
        return self.factor(x, axis, reused=True).values

    def multiplied(
        self, a: Any, b: Any, axes: tuple[int, int], k: int, lines: int
    ) -> tuple[Any, np.ndarray, np.ndarray]:
        """Some of the lines of a @ b, both as quantised."""
        rows = rows_to_check(self.xp, lines)
        others = self.values(b, axes[1])[: b.shape[1 - axes[1]]]
        exact, magnitude = self.products(self.values(a, axes[0])[rows], others.T)
        return rows, exact, gemm_bound(exact, magnitude, k)

    def beside_peer(self, what: str, ours: Any, theirs: Any) -> None:
        one, other = (to_float(x, np.float32) for x in (ours, theirs))
        off = float(self.xp.linalg.norm(one - other) / self.xp.linalg.norm(other))
        if not off <= MOST_OFF:
            raise ValueError(f"{what}: is {off:.1%} off the peer's BF16, want at most {MOST_OFF:.1%}")


def gathered_bytes(problem: Problem, axis: int) -> int:
    """What a rank pulls of the others' shards, quantised along an axis."""
    shape = (problem.rows, problem.width)
    one = MXFP8_FORMAT.nbytes(shape[1 - axis], depth_of(shape, axis, (problem.rows,)))
    return (problem.comm.ranks - 1) * one


class MxAgGemm(Quantised, AgGemm):
    def make(self) -> None:
        super().make()
        self.factors = self.shard(self.a, 1), self.factor(self.b, 1, reused=True)

    @property
    def link_bytes(self) -> int:
        return gathered_bytes(self, 1)

    def ours(self, **options: Any) -> None:
        ag_gemm(self.comm, *self.factors, out=self.c, **options)

    def exact(self) -> Exact:
        return [self.multiplied(self.full, self.b, (1, 1), self.shape.k, self.shape.m)]


class MxAgGemmDgrad(Quantised, AgGemmDgrad):
    """Both gradients: peers multiply twice."""

    has_async_tp = False

    def make(self) -> None:
        super().make()
        s = self.shape
        self.x_input = normal(self.xp, s.m, s.n)
        self.gradient, peer_gradient = self.result(s.k, s.n)
        self.tx, self.peer_gradient = self.tensor(self.x_input), self.tensor(peer_gradient)
        self.factors = (
            self.shard(self.a, 1),
            self.shard(self.a, 0),
            self.factor(self.b, 0, reused=True),
            self.factor(self.x_input, 0),
        )

    @property
    def link_bytes(self) -> int:
        return gathered_bytes(self, 1) + gathered_bytes(self, 0)

    def groups(self, x: Any, axis: int) -> Sequence[int] | None:
        return None if x is self.b else super().groups(x, axis)

    def ours(self, **options: Any) -> None:
        ag_gemm_grads(self.comm, *self.factors, out=self.c, c=self.gradient, **options)

    def multiply(self) -> None:
        super().multiply()
        self.torch.mm(self.gathered.t(), self.tx, out=self.peer_gradient)

    def exact(self) -> Exact:
        s = self.shape
        return [
            self.multiplied(self.full, self.b, (1, 0), s.k, s.m),
            self.multiplied(self.full, self.x_input, (0, 0), s.m, s.k),
        ]


class MxGemmRs(Quantised, GemmRs):
    def make(self) -> None:
        super().make()
        self.factors = self.factor(self.a, 1), self.factor(self.b, 1, reused=True)

    def ours(self, **options: Any) -> None:
        gemm_rs(self.comm, *self.factors, out=self.c, **options)

    def exact(self) -> Exact:
        rows = rows_to_check(self.xp, self.rows)
        a, b = self.values(self.a, 1), self.values(self.b, 1)[: self.shape.n]
        every = self.comm.allgather([self.products(a[q * self.rows + rows], b.T) for q in range(self.comm.ranks)])
        return [(rows, *reduced_bound([theirs[self.comm.rank] for theirs in every], self.shape.k))]


class MxBulkAg(Quantised, BulkAg):
    def make(self) -> None:
        super().make()
        del self.outputs[1], self.peer_outputs[1]  # X is gathered as it is quantised: see exact
        every = [self.rows] * self.comm.ranks
        self.mx_gathered = MxArray.empty(self.comm, (self.moved_rows, self.width), 0, groups=every)
        self.factors = self.shard(self.x, 0), self.factor(self.a, 1), self.factor(self.b, 0, reused=True)

    @property
    def link_bytes(self) -> int:
        return gathered_bytes(self, 0)

    def groups(self, x: Any, axis: int) -> Sequence[int] | None:
        return None if x is self.b else super().groups(x, axis)

    def ours(self, **options: Any) -> None:
        bulk_ag(self.comm, *self.factors, out=self.c, gathered=self.mx_gathered, **options)

    def exact(self) -> Exact:
        self.ours()
        want = self.factor(self.peer_gathered_bits, 0)
        for name in ("elements", "scales"):
            if bool((getattr(want, name) != getattr(self.mx_gathered, name)).any()):
                raise ValueError(f"bench {self.op} {self.shape.name}: {name} were not gathered as they are")
        return [self.multiplied(self.a, self.b, (1, 0), self.shape.k, self.shape.m)]


class MxBulkRs(Quantised, BulkRs):
    def make(self) -> None:
        super().make()
        self.factors = self.factor(self.a, 0), self.factor(self.b, 0)

    def ours(self, **options: Any) -> None:
        bulk_rs(self.comm, self.x, *self.factors, out=self.sum, c=self.c, **options)

    def exact(self) -> Exact:
        s, (summed, _) = self.shape, super().exact()
        return [summed, self.multiplied(self.a, self.b, (0, 0), s.k, s.m)]


MX_PROBLEMS: dict[str, type[Problem]] = {p.op: p for p in (MxAgGemm, MxGemmRs, MxAgGemmDgrad, MxBulkAg, MxBulkRs)}
