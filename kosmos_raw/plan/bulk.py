"""What one launch of bulk_ag or bulk_rs will use. The rows that move and the product beside them are independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..build.params import MAX_RANKS
from ..device.base import Tile
from .gemm_rs import LEAST_SLICE
from .heuristics import crew, movers_per_peer, parts_that_fit
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
    def side_by_side(self) -> int:
        """As AgGemmPlan.side_by_side."""
        return max(1, round((self.workgroups * self.tile.n / self.tile.m) ** 0.5))

    @property
    def padded_width(self) -> int:
        return round_up(self.width, VECTOR)


@dataclass(frozen=True)
class BulkAgPlan(BulkPlan):
    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/gather.h lists them)."""
        return 1 + MAX_RANKS + self.ranks * self.tile_rows_max

    @property
    def shard_bytes(self) -> int:
        """Symmetric workspace for the shard when the caller's array does not lie in the arena; equal on all ranks."""
        return max(self.rows) * self.padded_width * 2


@dataclass(frozen=True)
class BulkRsPlan(BulkPlan):
    max_movers: int
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
        """Local memory for the sums of all parts."""
        return self.cut.parts * self.gemm_m * self.padded_n * 4 if self.cut.parts > 1 else 0


def plan_bulk_ag(
    rows: Sequence[int],
    width: int,
    shape: tuple[int, int, int],
    tile: Tile,
    workgroups: int,
    *,
    policy: str = "one_way",
    movers: int | None = None,
) -> BulkAgPlan:
    """The plan for gathering rows[q] x `width` of each rank beside a product of `shape` (M, N, K)."""
    every, (m, n, k) = tuple(int(r) for r in rows), shape
    if movers is None:
        movers = crew(movers_per_peer("bulk_ag_col_dgrad", m, n, k), len(every), workgroups)
    movers = movers if len(every) > 1 else 0
    return BulkAgPlan("bulk_ag", every, n, k, tile, workgroups, movers, policy, width, m)


def plan_bulk_rs(
    rows: Sequence[int],
    width: int,
    shape: tuple[int, int, int],
    tile: Tile,
    workgroups: int,
    *,
    policy: str = "one_way",
    movers: int | None = None,
    max_movers: int | None = None,
    split: int | None = None,
) -> BulkRsPlan:
    """The plan for reducing sum(rows) x `width`, rows[q] for rank q, beside a product of `shape` (M, N, K)."""
    every, (m, n, k) = tuple(int(r) for r in rows), shape
    ranks = len(every)
    if movers is None:
        movers = crew(movers_per_peer("bulk_rs_col_wgrad", m, n, k), ranks, workgroups)
    if ranks == 1:
        movers, policy = 0, "one_way" if policy == "fixed" else policy
    if max_movers is None:
        max_movers = workgroups if ranks == 1 else max(1, min(workgroups, movers + -(-movers // 2)))
    if not max(1, movers) <= max_movers <= workgroups:
        raise ValueError(f"bulk_rs: max_movers is {max_movers}, want {max(1, movers)} to {workgroups}")
    if split is None:
        split = parts_that_fit("bulk_rs_col_wgrad", m, n, tile, workgroups)
    slices = max(1, min(4 * max_movers, max(every) * width * 2 // LEAST_SLICE))
    cut = Cut.of(k, split)
    return BulkRsPlan("bulk_rs", every, n, k, tile, workgroups, movers, policy, width, m, max_movers, slices, cut)
