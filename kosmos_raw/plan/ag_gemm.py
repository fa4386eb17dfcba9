"""What one launch of ag_gemm or ag_gemm_dgrad will use: crew, geometry, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..device.base import Tile
from .crew import KERNELS, Crew, Grid, whole_if_beside
from .heuristics import parts_that_fit, xcd_bucketing
from .link import Moved, Pulls, choose, pulls_of, table_pulls, together, whole_pulls
from .shapes import BF16_FORMAT, MXFP8_FORMAT, VECTOR, Cut, Format, Plan, round_up

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
        return super().kernel if self.cut.parts == 1 else f"{self.op}_split"

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
        return self.form.nbytes(max(self.rows), self.padded_k)

    @property
    def gathered_bytes(self) -> int:
        """Local memory for the peers' rows."""
        return self.m * self.padded_k * 16 // self.form.word if self.ranks > 1 else 0

    @property
    def moved_bytes(self) -> int:
        """What all ranks together read of their peers."""
        return (self.ranks - 1) * sum(self.form.nbytes(rows, self.padded_k) for rows in self.rows)

    @property
    def sums_bytes(self) -> int:
        return self.cut.sums_bytes(self.m, self.padded_n)


@dataclass(frozen=True)
class AgGemmGradsPlan(AgGemmPlan):
    """Of MXFP8: the columns of dY are gathered too, for the weight gradient, [k, gradient_n]."""

    gradient_n: int
    column_slices: int  # of a tile row of columns, one pull each

    @property
    def kernel(self) -> str:
        return "ag_gemm_grads"

    @property
    def gradient_rows(self) -> int:
        """Tile rows of the weight gradient."""
        return -(-self.k // self.tile.m)

    @property
    def column_rows(self) -> tuple[int, ...]:
        """Lines of columns that each rank has."""
        return tuple(self.k if rows else 0 for rows in self.rows)

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each rank's columns: its rows, padded."""
        return tuple(round_up(rows, self.form.step) for rows in self.rows)

    @property
    def column_bytes(self) -> int:
        """Symmetric workspace for the columns of a shard; equal on all ranks."""
        return self.form.nbytes(self.k, max(self.depths))

    @property
    def moved_bytes(self) -> int:
        return super().moved_bytes + (self.ranks - 1) * sum(self.form.nbytes(self.k, depth) for depth in self.depths)

    @property
    def queue_entries(self) -> int:
        tiles = self.gradient_rows * -(-self.gradient_n // self.tile.n)
        return super().queue_entries + max(tiles, self.ranks * self.gradient_rows * self.column_slices)

    @property
    def counter_words(self) -> int:
        return super().counter_words + self.gradient_rows


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
    form: Format = BF16_FORMAT,
) -> AgGemmPlan:
    """The plan for shards of `rows[q]` x `k` times a weight of `n` x `k`.

    Raises:
        ValueError: no such launch can run; says why.
    """
    return _plan("ag_gemm", rows, n, k, grid, policy, movers, 1, queues, form)


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
    return _plan("ag_gemm_dgrad", rows, n, k, grid, policy, movers, split, queues, BF16_FORMAT)


def plan_ag_gemm_grads(
    rows: Sequence[int],
    n: int,
    k: int,
    gradient_n: int,
    grid: Grid,
    *,
    policy: str | None = None,
    movers: int | None = None,
    queues: int | None = None,
) -> AgGemmGradsPlan:
    """The plan for shards of `rows[q]` x `k` times a weight of `k` x `n`, and their columns times `gradient_n` others.

    Raises:
        ValueError: no such launch can run; says why.
    """
    plan = _plan("ag_gemm_dgrad", rows, n, k, grid, policy, movers, 1, queues, MXFP8_FORMAT)
    given = {f.name: getattr(plan, f.name) for f in fields(plan)}
    return AgGemmGradsPlan(**given | {"halved": 0, "gradient_n": gradient_n, "column_slices": plan.pulls.slices})


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
    form: Format,
) -> AgGemmPlan:
    every, depth = tuple(int(r) for r in rows), round_up(k, form.step)
    ranks, shape, words = len(every), (sum(every), n, k), depth // form.word
    parts = parts_that_fit(KERNELS[op], sum(every), n, grid.tiles[0], grid.workgroups) if split is None else split
    policy = grid.policy(policy, ranks, whole=parts == 1)
    crew = Crew.choose(op, shape, ranks, grid, policy, movers, dtype=form.dtype)
    split = whole_if_beside(op, policy, ranks, split)
    tile = grid.tile(every, n, k, crew.movers)

    def queues_of(tile: Tile) -> int:
        return queues_for(every, n, -(-n // tile.n), grid) if queues is None else queues

    if split is None:
        split = parts_that_fit(KERNELS[op], sum(every), n, tile, grid.workgroups)
    cut = Cut.of(k, split)
    if grid.link is None or ranks == 1 or cut.parts > 1 or not words:
        pulls = table_pulls(crew.movers, ranks, depth // VECTOR)
        return AgGemmPlan(op, every, n, k, tile, grid.workgroups, crew, queues_of(tile), pulls, 1, 0, cut, form=form)
    moved = Moved(sum(every) * (ranks - 1) // ranks, words, awaited=True)
    beside = policy == "beside"
    chosen = choose(grid.link, grid.tiles, every, n, k, grid.workgroups, moved, movers, beside=beside)
    crew, tile = Crew.choose(op, shape, ranks, grid, policy, chosen.movers), chosen.tile
    pulls = pulls_of(chosen, ranks, words, -(-n // tile.n), grid.workgroups, beside=beside)
    if form is not BF16_FORMAT:
        pulls = replace(
            whole_pulls(chosen, words), slab_words=depth // VECTOR
        )  # the one slab, as the schedule counts k
    queue, halved = queues_of(tile), chosen.halved
    plan = AgGemmPlan(op, every, n, k, tile, grid.workgroups, crew, queue, pulls, 1, halved, cut, form=form)
    return replace(plan, together=together(chosen, every, plan.side_by_side))
