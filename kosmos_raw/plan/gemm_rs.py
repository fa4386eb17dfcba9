"""What one launch of gemm_rs will use: crews, bands, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .crew import Crew, Grid
from .shapes import VECTOR, Plan

LEAST_SLICE = 4096  # bytes that one REDUCE should have of each rank, or claiming costs more than moving


@dataclass(frozen=True)
class GemmRsPlan(Plan):
    """All of it follows from (rows, N, K, grid, policy); equal on all ranks but for K."""

    band_tile_rows: int
    slices: int  # of a band, one REDUCE each

    @property
    def bands(self) -> int:
        """Bands of the longest chunk."""
        return -(-self.tile_rows_max // self.band_tile_rows)

    @property
    def queue_entries(self) -> int:
        tiles = self.bands * self.band_tile_rows * self.ranks * self.columns
        return max(tiles, self.bands * self.slices + max(1, self.crew.movers))

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/gemm_rs.h lists them)."""
        return 3

    @property
    def partial_bytes(self) -> int:
        """Of a rank's partial results: one of the two buffers of its staging."""
        return self.m * self.padded_n * 2


def plan_gemm_rs(
    rows: Sequence[int],
    n: int,
    k: int,
    grid: Grid,
    *,
    policy: str = "one_way",
    movers: int | None = None,
    max_movers: int | None = None,
) -> GemmRsPlan:
    """The plan for a product of sum(rows) x `n`, contracted over `k` on each rank, of which rank q gets rows[q].

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every = "gemm_rs", tuple(int(r) for r in rows)
    crew = Crew.choose(op, (sum(every), n, k), len(every), grid, policy, movers, max_movers)
    tile = grid.tile(every, n, k, crew.movers)
    # A band of all chunks is about one step of all builders, so that reducing can begin after it.
    columns = max(1, -(-n // tile.n))
    band_tile_rows = max(1, (grid.workgroups - crew.movers) // (len(every) * columns))
    band_bytes = min(band_tile_rows * tile.m, max(1, max(every, default=1))) * max(n, VECTOR) * 2
    slices = max(1, min(crew.max_movers, band_bytes // LEAST_SLICE))
    return GemmRsPlan(op, every, n, k, tile, grid.workgroups, crew, band_tile_rows, slices)
