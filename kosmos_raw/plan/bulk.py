"""What one launch of bulk_ag or bulk_rs will use. The rows that move and the product beside them are independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .crew import KERNELS, Crew, Grid
from .gemm_rs import LEAST_SLICE
from .heuristics import parts_that_fit
from .shapes import VECTOR, Cut, Plan, round_up


@dataclass(frozen=True)
class BulkPlan(Plan):
    """`rows` x `width` are moved; the product is `gemm_m` x n, contracted over k."""

    width: int
    gemm_m: int

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
    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/gather.h lists them)."""
        return self.gather_words

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
    policy: str = "one_way",
    movers: int | None = None,
) -> BulkAgPlan:
    """The plan for gathering rows[q] x `width` of each rank beside a product of `shape` (M, N, K).

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every, (m, n, k) = "bulk_ag", tuple(int(r) for r in rows), shape
    crew = Crew.choose(op, shape, len(every), grid, policy, movers)
    tile = grid.tile((m,), n, k, crew.movers)
    return BulkAgPlan(op, every, n, k, tile, grid.workgroups, crew, width, m)


def plan_bulk_rs(
    rows: Sequence[int],
    width: int,
    shape: tuple[int, int, int],
    grid: Grid,
    *,
    policy: str = "one_way",
    movers: int | None = None,
    max_movers: int | None = None,
    split: int | None = None,
) -> BulkRsPlan:
    """The plan for reducing sum(rows) x `width`, rows[q] for rank q, beside a product of `shape` (M, N, K).

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every, (m, n, k) = "bulk_rs", tuple(int(r) for r in rows), shape
    crew = Crew.choose(op, shape, len(every), grid, policy, movers, max_movers)
    tile = grid.tile((m,), n, k, crew.movers)
    if split is None:
        split = parts_that_fit(KERNELS[op], m, n, tile, grid.workgroups)
    slices = max(1, min(4 * crew.max_movers, max(every) * width * 2 // LEAST_SLICE))
    return BulkRsPlan(op, every, n, k, tile, grid.workgroups, crew, width, m, slices, Cut.of(k, split))
