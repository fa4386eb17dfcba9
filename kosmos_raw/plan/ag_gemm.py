"""What one launch of ag_gemm or ag_gemm_dgrad will use: crew, geometry, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .crew import KERNELS, Crew, Grid
from .heuristics import parts_that_fit, xcd_bucketing
from .shapes import Cut, Plan

MAX_QUEUES = 8  # hip_kernels/schedule/ag_gemm.h


@dataclass(frozen=True)
class AgGemmPlan(Plan):
    """All of it follows from (rows, N, K, grid, policy); equal on all ranks but for N."""

    queues: int  # of tiles: each holds a stretch of their columns

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.queues <= MAX_QUEUES:
            raise ValueError(f"{self.op}: queues is {self.queues}, want 1 to {MAX_QUEUES}")

    @property
    def kernel(self) -> str:
        return self.op

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/ag_gemm.h lists them)."""
        return self.gather_words + MAX_QUEUES

    @property
    def shard_bytes(self) -> int:
        """Symmetric workspace for the shard when the caller's array does not lie in the arena; equal on all ranks."""
        return max(self.rows) * self.padded_k * 2

    @property
    def gathered_bytes(self) -> int:
        """Local memory for the peers' rows."""
        return self.m * self.padded_k * 2 if self.ranks > 1 else 0


@dataclass(frozen=True)
class AgGemmDgradPlan(AgGemmPlan):
    """The same for ag_gemm_dgrad, whose contraction may be cut in parts."""

    cut: Cut

    @property
    def kernel(self) -> str:
        return self.op if self.cut.parts == 1 else f"{self.op}_split"

    @property
    def queue_entries(self) -> int:
        return super().queue_entries * (self.cut.parts + 1)

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/ag_gemm_dgrad.h lists them)."""
        per_tile = self.ranks * self.tile_rows_max * self.columns if self.cut.parts > 1 else 0
        return super().counter_words + per_tile

    @property
    def sums_bytes(self) -> int:
        return self.cut.sums_bytes(self.m, self.padded_n)


def queues_for(rows: Sequence[int], n: int, columns: int, grid: Grid) -> int:
    """Queues of tiles: one for each die, where Table B.3 wants that. More than there are columns would be empty."""
    if grid.dies == 1 or not xcd_bucketing(sum(rows), n, max(rows)):
        return 1
    return max(1, min(grid.dies, columns, MAX_QUEUES))


def plan_ag_gemm(
    rows: Sequence[int],
    n: int,
    k: int,
    grid: Grid,
    *,
    policy: str = "one_way",
    movers: int | None = None,
    queues: int | None = None,
) -> AgGemmPlan:
    """The plan for shards of `rows[q]` x `k` times a weight of `n` x `k`.

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every = "ag_gemm", tuple(int(r) for r in rows)
    crew = Crew.choose(op, (sum(every), n, k), len(every), grid, policy, movers)
    tile = grid.tile(every, n, k, crew.movers)
    if queues is None:
        queues = queues_for(every, n, -(-n // tile.n), grid)
    return AgGemmPlan(op, every, n, k, tile, grid.workgroups, crew, queues)


def plan_ag_gemm_dgrad(
    rows: Sequence[int],
    n: int,
    k: int,
    grid: Grid,
    *,
    policy: str = "one_way",
    movers: int | None = None,
    split: int | None = None,
    queues: int | None = None,
) -> AgGemmDgradPlan:
    """The plan for shards of `rows[q]` x `k` times a weight of `k` x `n`.

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every = "ag_gemm_dgrad", tuple(int(r) for r in rows)
    crew = Crew.choose(op, (sum(every), n, k), len(every), grid, policy, movers)
    tile = grid.tile(every, n, k, crew.movers)
    if split is None:
        split = parts_that_fit(KERNELS[op], sum(every), n, tile, grid.workgroups)
    if queues is None:
        queues = queues_for(every, n, -(-n // tile.n), grid)
    return AgGemmDgradPlan(op, every, n, k, tile, grid.workgroups, crew, queues, Cut.of(k, split))
