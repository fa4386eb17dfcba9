"""What one launch of bulk_ag or bulk_rs will use. The rows that move and the product beside them are independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .crew import KERNELS, Crew, Grid
from .gemm_rs import LEAST_SLICE
from .heuristics import parts_that_fit
from .link import LEAST_PULL, Moved, Pulls, choose, pulls_of, reducing, saturating, table_pulls
from .shapes import VECTOR, Cut, Plan, round_up


@dataclass(frozen=True)
class BulkPlan(Plan):
    """`rows` x `width` are moved; the product is `gemm_m` x n, contracted over k."""

    width: int
    gemm_m: int
    halved: int  # tiles, the last of the queue, that are taken in halves

    @property
    def gemm_tiles(self) -> int:
        return -(-self.gemm_m // self.tile.m) * self.columns

    @property
    def queue_entries(self) -> int:
        return self.gemm_tiles + 1

    @property
    def padded_width(self) -> int:
        return round_up(self.width, VECTOR)


@dataclass(frozen=True)
class BulkAgPlan(BulkPlan):
    pulls: Pulls

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/gather.h lists them)."""
        return self.gather_words(self.pulls)

    @property
    def shard_bytes(self) -> int:
        """Symmetric workspace for the shard when the caller's array does not lie in the arena; equal on all ranks."""
        return max(self.rows) * self.padded_width * 2


@dataclass(frozen=True)
class BulkRsPlan(BulkPlan):
    slices: int
    cut: Cut

    @property
    def queue_entries(self) -> int:
        return self.gemm_tiles * (self.cut.parts + 1) + 1

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/bulk_rs.h lists them)."""
        return 4 + (self.gemm_tiles if self.cut.parts > 1 else 0)

    @property
    def x_bytes(self) -> int:
        """Symmetric workspace for X when the caller's array does not lie in the arena."""
        return self.m * self.padded_width * 2

    @property
    def padded_m(self) -> int:
        return round_up(self.gemm_m, VECTOR)

    @property
    def sums_bytes(self) -> int:
        return self.cut.sums_bytes(self.gemm_m, self.padded_n)


def plan_bulk_ag(
    rows: Sequence[int],
    width: int,
    shape: tuple[int, int, int],
    grid: Grid,
    *,
    policy: str | None = None,
    movers: int | None = None,
) -> BulkAgPlan:
    """The plan for gathering rows[q] x `width` of each rank beside a product of `shape` (M, N, K).

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every, (m, n, k) = "bulk_ag", tuple(int(r) for r in rows), shape
    ranks, words = len(every), round_up(width, VECTOR) // VECTOR
    policy = grid.policy(policy, ranks)
    beside = policy == "beside"
    crew = Crew.choose(op, shape, ranks, grid, policy, movers)
    if grid.link is None or ranks == 1 or not words:
        tile, pulls = grid.tile((m,), n, k, crew.movers), table_pulls(crew.movers, ranks, words)
        return BulkAgPlan(op, every, n, k, tile, grid.workgroups, crew, width, m, 0, pulls)
    moved = Moved(sum(every) * (ranks - 1) // ranks, words, awaited=False)
    chosen = choose(grid.link, grid.tiles, (m,), n, k, grid.workgroups, moved, movers, beside=beside)
    crew, tile = Crew.choose(op, shape, ranks, grid, policy, chosen.movers), chosen.tile
    pulls = pulls_of(chosen, ranks, words, -(-n // tile.n), grid.workgroups, beside=beside)
    return BulkAgPlan(op, every, n, k, tile, grid.workgroups, crew, width, m, chosen.halved, pulls)


def plan_bulk_rs(
    rows: Sequence[int],
    width: int,
    shape: tuple[int, int, int],
    grid: Grid,
    *,
    policy: str | None = None,
    movers: int | None = None,
    max_movers: int | None = None,
    split: int | None = None,
) -> BulkRsPlan:
    """The plan for reducing sum(rows) x `width`, rows[q] for rank q, beside a product of `shape` (M, N, K).

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every, (m, n, k) = "bulk_rs", tuple(int(r) for r in rows), shape
    ranks, words = len(every), round_up(width, VECTOR) // VECTOR
    crew, halved, least = Crew.choose(op, shape, ranks, grid, policy, movers, max_movers), 0, LEAST_SLICE
    tile = grid.tile((m,), n, k, crew.movers)
    if split is None:
        split = parts_that_fit(KERNELS[op], m, n, tile, grid.workgroups)
    if grid.link and ranks > 1 and words:
        link, least = reducing(grid.link, ranks), LEAST_PULL
        moved = Moved(max(every) * (ranks - 1), words, awaited=False)
        chosen = choose(link, grid.tiles, (m,), n, k, grid.workgroups, moved, movers, halves=split == 1)
        most = max(chosen.movers, saturating(link, grid.workgroups)) if max_movers is None else max_movers
        crew, tile = Crew.choose(op, shape, ranks, grid, policy, chosen.movers, most), chosen.tile
        halved = chosen.halved if split == 1 else 0
    slices = max(1, min(4 * crew.max_movers, max(every) * width * 2 // least))
    return BulkRsPlan(op, every, n, k, tile, grid.workgroups, crew, width, m, halved, slices, Cut.of(k, split))
