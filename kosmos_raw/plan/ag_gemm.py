"""What one launch of ag_gemm will use: crew, geometry, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..build.params import MAX_RANKS
from ..device.base import Tile
from .heuristics import crew, movers_per_peer, parts_that_fit
from .shapes import Cut, Plan, round_up


@dataclass(frozen=True)
class AgGemmPlan(Plan):
    """All of it follows from (rows, N, K, tile, WGs, policy); equal on all ranks but for N."""

    @property
    def ldc(self) -> int:
        """Elements from row to row of the C that the kernel writes."""
        return self.padded_n

    @property
    def side_by_side(self) -> int:
        """Tile rows of the own chunk worked on together: what makes one wave of tiles about square, so that it reads as
        few rows of A and B together as can be."""
        return max(1, round((self.workgroups * self.tile.n / self.tile.m) ** 0.5))

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/ag_gemm.h lists them)."""
        return 1 + MAX_RANKS + self.ranks * self.tile_rows_max

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
        """Local memory for the sums of all parts."""
        return self.cut.parts * self.m * self.padded_n * 4 if self.cut.parts > 1 else 0


def movers_for(n: int, ranks: int, workgroups: int) -> int:
    """How many WGs begin as movers."""
    return crew(movers_per_peer("ag_tn_col_fprop", 0, n, 0), ranks, workgroups)


def plan_ag_gemm(
    rows: Sequence[int],
    n: int,
    k: int,
    tile: Tile,
    workgroups: int,
    *,
    policy: str = "one_way",
    movers: int | None = None,
) -> AgGemmPlan:
    """The plan for shards of `rows[q]` x `k` times a weight of `n` x `k`.

    Raises:
        ValueError: no such launch can run; says why.
    """
    if movers is None:
        movers = movers_for(n, len(rows), workgroups)
    every = tuple(int(r) for r in rows)
    return AgGemmPlan("ag_gemm", every, n, k, tile, workgroups, movers if len(rows) > 1 else 0, policy)


def plan_ag_gemm_dgrad(
    rows: Sequence[int],
    n: int,
    k: int,
    tile: Tile,
    workgroups: int,
    *,
    policy: str = "one_way",
    movers: int | None = None,
    split: int | None = None,
) -> AgGemmDgradPlan:
    """The plan for shards of `rows[q]` x `k` times a weight of `k` x `n`.

    Raises:
        ValueError: no such launch can run; says why.
    """
    every = tuple(int(r) for r in rows)
    if movers is None:
        movers = crew(movers_per_peer("ag_nn_row_dgrad", 0, n, 0), len(rows), workgroups)
    if split is None:
        split = parts_that_fit("ag_nn_row_dgrad", sum(rows), n, tile, workgroups)
    cut = Cut.of(k, split)
    movers = movers if len(rows) > 1 else 0
    return AgGemmDgradPlan("ag_gemm_dgrad", every, n, k, tile, workgroups, movers, policy, cut)


__all__ = ["AgGemmDgradPlan", "AgGemmPlan", "movers_for", "plan_ag_gemm", "plan_ag_gemm_dgrad", "round_up"]
