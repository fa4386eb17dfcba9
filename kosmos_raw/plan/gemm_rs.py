"""What one launch of gemm_rs will use: crews, bands, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..device.base import Link, Tile
from .crew import Crew, Grid
from .link import LEAST_PULL, Moved, choose, reducing, saturating, unit_us
from .shapes import BF16_FORMAT, VECTOR, Format, Plan
from .tiles import end_of_tiles, tile_count, tile_time

TRANSPORTS = ("pull", "push")
LEAST_SLICE = 4096  # bytes that one REDUCE should have of each rank, or claiming costs more than moving


@dataclass(frozen=True)
class GemmRsPlan(Plan):
    """By pull. All of it follows from (rows, N, K, grid, policy); equal on all ranks but for K."""

    transport: ClassVar[str] = "pull"

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

    @property
    def moved_bytes(self) -> int:
        """What all ranks together read of their peers."""
        return (self.ranks - 1) * self.partial_bytes


@dataclass(frozen=True)
class GemmRsPushPlan(Plan):
    """By push: nobody moves. Equal on all ranks but for K and the height of bands; the tile too."""

    transport: ClassVar[str] = "push"

    band_tile_rows: int
    halved: int  # own tiles, the last of the queue, that are taken in halves
    lead: int = 1  # bands that tiles for peers are ahead of the own

    @property
    def padded_k(self) -> int:
        """At least one step of the contraction: its tiles always come from a product."""
        return max(self.form.step, super().padded_k)

    @property
    def kernel(self) -> str:
        return "gemm_rs_push" if self.form is BF16_FORMAT else f"gemm_rs_push_{self.form.dtype}"

    @property
    def moved_bytes(self) -> int:
        """What all ranks together write to their peers."""
        return (self.ranks - 1) * self.m * self.padded_n * 2

    @property
    def queue_entries(self) -> int:
        bands = -(-self.tile_rows_max // self.band_tile_rows)
        return bands * self.band_tile_rows * self.ranks * self.columns + self.halved + 1

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/gemm_rs_push.h lists them)."""
        return 1

    @property
    def chunk_tiles(self) -> int:
        """Of the longest chunk: signals that a rank gets from each peer."""
        return self.tile_rows_max * self.columns

    @property
    def inbox_bytes(self) -> int:
        """Symmetric memory for what peers send a rank."""
        return (self.ranks - 1) * self.chunk_tiles * self.tile.m * self.tile.n * 2


def plan_gemm_rs(
    rows: Sequence[int],
    n: int,
    k: int,
    grid: Grid,
    *,
    policy: str | None = None,
    movers: int | None = None,
    max_movers: int | None = None,
    form: Format = BF16_FORMAT,
) -> GemmRsPlan:
    """The plan for a product of sum(rows) x `n`, contracted over `k` on each rank, of which rank q gets rows[q].

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every = "gemm_rs", tuple(int(r) for r in rows)
    shape, ranks, least = (sum(every), n, k), len(every), LEAST_SLICE
    crew = Crew.choose(op, shape, ranks, grid, policy, movers, max_movers, form.dtype)
    tile = grid.tile(every, n, k, crew.movers)
    if grid.link and ranks > 1:
        link, least = reducing(grid.link, ranks), LEAST_PULL
        moved = Moved(max(every) * (ranks - 1), n // VECTOR, awaited=False)
        chosen = choose(link, grid.tiles, every, n, k, grid.workgroups, moved, movers, halves=False)
        most = max(chosen.movers, saturating(link, grid.workgroups)) if max_movers is None else max_movers
        crew, tile = Crew.choose(op, shape, ranks, grid, policy, chosen.movers, most), chosen.tile
    # A band of all chunks is about one step of all builders, so that reducing can begin after it.
    columns = max(1, -(-n // tile.n))
    band_tile_rows = max(1, (grid.workgroups - crew.movers) // (ranks * columns))
    band_bytes = min(band_tile_rows * tile.m, max(1, max(every, default=1))) * max(n, VECTOR) * 2
    slices = max(1, min(crew.max_movers, band_bytes // least))
    return GemmRsPlan(op, every, n, k, tile, grid.workgroups, crew, band_tile_rows, slices, form=form)


def plan_gemm_rs_push(
    rows: Sequence[int],
    n: int,
    k: int,
    grid: Grid,
    *,
    policy: str | None = None,
    order: str = "as_consumed",
    form: Format = BF16_FORMAT,
    most_k: int | None = None,
) -> GemmRsPushPlan:
    """The same by push. Tiles of peers' rows and of the own alternate by bands. Where links take long, bands are low:
    at any time some WGs then have tiles to send and others tiles to add. Else they are as high as makes a wave of tiles
    square."""
    op, every, wgs = "gemm_rs", tuple(int(r) for r in rows), grid.workgroups
    ranks = len(every)
    crew = Crew.choose(op, (sum(every), n, k), ranks, grid, policy, 1 if ranks > 1 else None)
    tile = _exchanged_tile(every, n, k if most_k is None else most_k, grid)
    columns = max(1, -(-n // tile.n))
    plan = GemmRsPushPlan(op, every, n, k, tile, wgs, crew, max(1, wgs // (ranks * columns)), 0, form=form)
    if grid.link is None or ranks == 1:
        return plan
    count, sent_us = tile_count(tile, every, n), _sent_us(every, n, grid.link)
    end_us, whole = _built_us(tile, every, n, k, grid.link, wgs)
    # Measured on two H200s: of a link that is busy most of the time, bands of one row, two ahead, make 2 % more; with
    # less to send, low bands only read B more often.
    band, lead = min(plan.side_by_side, max(2, plan.tile_rows_max // 4)), 1
    if sent_us > 0.5 * end_us:
        band = 2
    if sent_us > 0.75 * end_us:
        band, lead = 1, 2
    # Behind the last tile for a peer are so many bands of own tiles.
    tail = min(lead + 1, -(-plan.tile_rows_max // band)) * band * columns
    halved = min(count - whole, tail) if order == "as_consumed" and tile.n // 2 % 64 == 0 else 0
    return replace(plan, band_tile_rows=band, halved=halved, lead=lead)


def _sent_us(rows: tuple[int, ...], n: int, link: Link) -> float:
    """What tiles for peers take on the link."""
    return sum(rows) * (len(rows) - 1) / len(rows) * n * 2 / (link.push * 1e3)


def _built_us(tile: Tile, rows: tuple[int, ...], n: int, k: int, link: Link, workgroups: int) -> tuple[float, int]:
    """What all tiles take, and how many of them are taken whole."""
    unit = unit_us(tile, link)
    whole, half = tile_time(tile.n, k) * unit, tile_time(tile.n // 2, k) * unit
    return end_of_tiles(tile_count(tile, rows, n), whole, half, workgroups, 0, 0)


def _exchanged_tile(rows: tuple[int, ...], n: int, k: int, grid: Grid) -> Tile:
    """The tile that all ranks take. Where they wait for the link anyway, the narrowest: it is sent soonest (two H200s,
    8192 x 4096 x 512: 0.114 ms, with the widest 0.126)."""
    tile = grid.tile(rows, n, k, 0)
    if grid.link is None or len(rows) == 1:
        return tile
    if _sent_us(rows, n, grid.link) > _built_us(tile, rows, n, k, grid.link, grid.workgroups)[0]:
        return min(grid.tiles, key=lambda one: one.n)
    return tile
