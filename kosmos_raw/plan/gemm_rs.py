"""What one launch of gemm_rs will use: crews, bands, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..device.base import Tile
from .heuristics import crew, movers_per_peer
from .shapes import VECTOR, Plan

LEAST_SLICE = 4096  # bytes that one REDUCE should have of each rank, or claiming costs more than moving


@dataclass(frozen=True)
class GemmRsPlan(Plan):
    """All of it follows from (rows, N, K, tile, WGs, policy); equal on all ranks but for K."""

    policies: ClassVar[tuple[str, ...]] = ("one_way", "fixed")

    max_movers: int  # at which the links are saturated: builders that find no tile join up to here
    band_tile_rows: int
    slices: int  # of a band, one REDUCE each

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_movers <= self.workgroups or self.max_movers < self.movers:
            raise ValueError(
                f"{self.op}: max_movers is {self.max_movers}, want {max(1, self.movers)} to {self.workgroups}: "
                "the movers, and the builders that join them"
            )

    @property
    def bands(self) -> int:
        """Bands of the longest chunk."""
        return -(-self.tile_rows_max // self.band_tile_rows)

    @property
    def queue_entries(self) -> int:
        tiles = self.bands * self.band_tile_rows * self.ranks * self.columns
        return max(tiles, self.bands * self.slices + max(1, self.movers))

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/gemm_rs.h lists them)."""
        return 3

    @property
    def partial_bytes(self) -> int:
        """Of a rank's partial results: one of the two buffers of its staging."""
        return self.m * self.padded_n * 2


def movers_for(m: int, n: int, k: int, ranks: int, workgroups: int) -> int:
    """How many WGs begin as movers."""
    return crew(movers_per_peer("gemm_rs_row_fprop", m, n, k, workgroups=workgroups), ranks, workgroups)


def plan_gemm_rs(
    rows: Sequence[int],
    n: int,
    k: int,
    tile: Tile,
    workgroups: int,
    *,
    policy: str = "one_way",
    movers: int | None = None,
    max_movers: int | None = None,
) -> GemmRsPlan:
    """The plan for a product of sum(rows) x `n`, contracted over `k` on each rank, of which rank q gets rows[q].

    Raises:
        ValueError: no such launch can run; says why.
    """
    every = tuple(int(r) for r in rows)
    ranks = len(every)
    if movers is None:
        movers = movers_for(sum(every), n, k, ranks, workgroups)
    if ranks == 1:
        movers = 0
    if max_movers is None:
        # One rank: nothing is moved, all may add. Else half again as many as begin: more ask links that are busy.
        max_movers = workgroups if ranks == 1 else max(1, min(workgroups, movers + -(-movers // 2)))
    if ranks == 1 and policy == "fixed":
        movers, policy = 0, "one_way"  # there is nobody to move from: all build, then all add
    # A band of all chunks is about one step of all builders, so that reducing can begin after it.
    columns = max(1, -(-n // tile.n))
    band_tile_rows = max(1, (workgroups - movers) // (ranks * columns))
    band_bytes = min(band_tile_rows * tile.m, max(1, max(every, default=1))) * max(n, VECTOR) * 2
    slices = max(1, min(max_movers, band_bytes // LEAST_SLICE))
    return GemmRsPlan("gemm_rs", every, n, k, tile, workgroups, movers, policy, max_movers, band_tile_rows, slices)
