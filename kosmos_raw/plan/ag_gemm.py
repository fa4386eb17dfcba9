"""What one launch of ag_gemm or ag_gemm_dgrad will use: crew, geometry, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..device.base import Tile
from .crew import KERNELS, Crew, Grid
from .heuristics import parts_that_fit, xcd_bucketing
from .link import Moved, Pulls, choose, pulls_of, table_pulls, together
from .shapes import VECTOR, Cut, Plan, round_up

MAX_QUEUES = 8  # hip_kernels/schedule/ag_gemm.h


@dataclass(frozen=True)
class AgGemmPlan(Plan):
    """All of it follows from (rows, N, K, grid, policy); equal on all ranks but for N."""

    queues: int  # of tiles: each holds a stretch of their columns
    pulls: Pulls
    together: int  # tile rows of a peer whose tiles are taken together
    halved: int  # tiles, the last of the queue, that are taken in halves
    cut: Cut

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.queues <= MAX_QUEUES:
            raise ValueError(f"{self.op}: queues is {self.queues}, want 1 to {MAX_QUEUES}")

    @property
    def kernel(self) -> str:
        return self.op if self.cut.parts == 1 else f"{self.op}_split"

    @property
    def tile_entries(self) -> int:
        """Of the queue: a group of tile rows may reach past a chunk's end."""
        groups = -(-self.tile_rows_max // self.together)
        return self.ranks * groups * self.together * self.columns

    @property
    def queue_entries(self) -> int:
        pulls = self.tile_rows_max * (self.ranks - 1) * self.pulls.slabs * self.pulls.slices
        return max(self.tile_entries * (self.cut.parts + 1), pulls) + 1

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/ag_gemm.h and ag_gemm_dgrad.h list them)."""
        per_tile = self.ranks * self.tile_rows_max * self.columns if self.cut.parts > 1 else 0
        return self.gather_words(self.pulls) + MAX_QUEUES + per_tile

    @property
    def shard_bytes(self) -> int:
        """Symmetric workspace for the shard when the caller's array does not lie in the arena; equal on all ranks."""
        return max(self.rows) * self.padded_k * 2

    @property
    def gathered_bytes(self) -> int:
        """Local memory for the peers' rows."""
        return self.m * self.padded_k * 2 if self.ranks > 1 else 0

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
    policy: str | None = None,
    movers: int | None = None,
    queues: int | None = None,
) -> AgGemmPlan:
    """The plan for shards of `rows[q]` x `k` times a weight of `n` x `k`.

    Raises:
        ValueError: no such launch can run; says why.
    """
    return _plan("ag_gemm", rows, n, k, grid, policy, movers, 1, queues)


def plan_ag_gemm_dgrad(
    rows: Sequence[int],
    n: int,
    k: int,
    grid: Grid,
    *,
    policy: str | None = None,
    movers: int | None = None,
    split: int | None = None,
    queues: int | None = None,
) -> AgGemmPlan:
    """The plan for shards of `rows[q]` x `k` times a weight of `k` x `n`. `split`: into how many parts the contraction
    is cut; None chooses.

    Raises:
        ValueError: no such launch can run; says why.
    """
    return _plan("ag_gemm_dgrad", rows, n, k, grid, policy, movers, split, queues)


def _plan(
    op: str,
    rows: Sequence[int],
    n: int,
    k: int,
    grid: Grid,
    policy: str | None,
    movers: int | None,
    split: int | None,
    queues: int | None,
) -> AgGemmPlan:
    every = tuple(int(r) for r in rows)
    ranks, shape, words = len(every), (sum(every), n, k), round_up(k, VECTOR) // VECTOR
    whole = split == 1 or parts_that_fit(KERNELS[op], sum(every), n, grid.tiles[0], grid.workgroups) == 1
    policy = grid.policy(policy, ranks, whole)
    crew = Crew.choose(op, shape, ranks, grid, policy, movers)
    tile = grid.tile(every, n, k, crew.movers)

    def queues_of(tile: Tile) -> int:
        return queues_for(every, n, -(-n // tile.n), grid) if queues is None else queues

    cut = Cut.of(k, parts_that_fit(KERNELS[op], sum(every), n, tile, grid.workgroups) if split is None else split)
    if grid.link is None or ranks == 1 or cut.parts > 1 or not words:
        pulls = table_pulls(crew.movers, ranks, words)
        return AgGemmPlan(op, every, n, k, tile, grid.workgroups, crew, queues_of(tile), pulls, 1, 0, cut)
    moved = Moved(sum(every) * (ranks - 1) // ranks, words, awaited=True)
    beside = policy == "beside"
    chosen = choose(grid.link, grid.tiles, every, n, k, grid.workgroups, moved, movers, beside=beside)
    crew, tile = Crew.choose(op, shape, ranks, grid, policy, chosen.movers), chosen.tile
    pulls = pulls_of(chosen, ranks, words, -(-n // tile.n), grid.workgroups, beside=beside)
    plan = AgGemmPlan(op, every, n, k, tile, grid.workgroups, crew, queues_of(tile), pulls, 1, chosen.halved, cut)
    return replace(plan, together=together(chosen, every, plan.side_by_side))
