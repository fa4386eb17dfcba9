"""Crews, tiles and pulls on a device whose links were measured (Device.link): from times, not from the paper's table.

Table B.3 was fitted to eight GPUs with a link each to every peer. Where one link serves all peers, what saturates it is
a number of movers, however many peers there are: the link's rate over what one mover carries. Fewer bring the rows
late; more only take builders away, and their time in all is the same. A crew changes how many tiles a wave has, so it
is chosen together with the width of the tile. What a last wave leaves over is built in halves of tiles. And where
moving takes about as long as multiplying, what follows the last row's arrival counts: tiles begin with the first part
of their contraction (slabs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..device.base import Link, Tile
from .tiles import STEP, end_of_tiles, slices_of, tile_count, tile_time

MOST_MOVERS = 24  # of an all-gather; more gained nothing
LEAST_PULL = (
    128 << 10
)  # bytes: publishing a pull then costs little beside it (67 MB beside nothing: 0.235 ms, in 32 KiB 0.314)
BESIDE_PULL = 32 << 10  # of a mover beside builders that wait for it, for it carries a hundredth of the link
# Columns of a slab: an eighth of the contraction, so that little is left to do after the last arrival; but lines of
# 1 KiB or more, for shorter ones take longer to move, and 2 KiB are enough.
SLABS, LEAST_SLAB_K, SLAB_K = 8, 512, 1024
BEGIN_US, END_US = 6.0, 4.0  # until the first row has come; from the last slab's arrival to its tiles' last step
NEARLY = 1.01  # times this close count as equal


@dataclass(frozen=True)
class Pulls:
    """How the rows of each peer are cut into pulls (hip_kernels/schedule/gather.h)."""

    slices: int = 1
    slabs: int = 1
    slab_words: int = 0  # of 16 bytes
    band: int = 1


@dataclass(frozen=True)
class Moved:
    """What a rank pulls from all peers together."""

    rows: int
    words: int  # of 16 bytes, of a row
    awaited: bool  # tiles wait for it

    @property
    def nbytes(self) -> int:
        return self.rows * self.words * 16


@dataclass(frozen=True)
class Chosen:
    movers: int
    tile: Tile
    halved: int  # tiles, the last of the queue, that are taken in halves
    us: float  # what the whole is expected to take
    moved_us: float  # and moving alone


def slab_k(k: int) -> int:
    """Columns of a slab of a contraction over k, a multiple of 64."""
    return min(SLAB_K, max(LEAST_SLAB_K, k // SLABS // STEP * STEP))


def unit_us(tile: Tile, link: Link) -> float:
    """Microseconds of the unit in which plan.tiles counts."""
    return 2 * tile.m * STEP / (link.tflops * 1e6)


@lru_cache(maxsize=1024)
def choose(
    link: Link,
    tiles: tuple[Tile, ...],
    rows: tuple[int, ...],
    n: int,
    k: int,
    workgroups: int,
    moved: Moved,
    movers: int | None = None,
    halves: bool = True,
    beside: bool = False,
) -> Chosen:
    """The crew and tile with which a call ends first.

    Args: rows: of the product, chunk by chunk. movers: those to take, if somebody has chosen. halves: whether the
        kernel can take tiles in halves. beside: whether all WGs build, and movers are agents of their own.
    """
    saturates = -(-link.pull // link.mover)
    crews = range(1, max(1, min(MOST_MOVERS, workgroups // 2)) + 1) if movers is None else (movers,)
    if beside:
        crews, saturates = (movers or workgroups,), workgroups
    found: list[tuple[Chosen, float, int]] = []
    for i, tile in enumerate(tiles):
        unit, count = unit_us(tile, link), tile_count(tile, rows, n)
        whole, half = tile_time(tile.n, k) * unit, tile_time(tile.n // 2, k) * unit
        for crew in crews:
            rate, away = (link.pull, 0) if beside else (min(link.pull, crew * link.mover), crew)
            moved_us = BEGIN_US + moved.nbytes / (rate * 1e3)
            end, taken = end_of_tiles(count, whole, half if halves else whole, workgroups - away, away, moved_us)
            # Only a tile's first slice can begin before all of its rows have come.
            late = slices_of(tile.n) - 1 + min(k, slab_k(k)) / max(1, k)
            tail = END_US + whole * late / slices_of(tile.n) if moved.awaited else 0.0
            found.append(
                (Chosen(crew, tile, count - taken, max(end, moved_us + tail), moved_us), abs(crew - saturates), i)
            )
    least = min(chosen.us for chosen, *_ in found)
    return min((one for one in found if one[0].us <= NEARLY * least), key=lambda one: (one[1], one[0].us, one[2]))[0]


def pulls_of(chosen: Chosen, ranks: int, words: int, columns: int, workgroups: int, *, beside: bool = False) -> Pulls:
    """The cut that goes with a crew. `words`: 16 bytes each, of a row. `columns`: tiles in a row of the product."""
    slab_words = min(words, slab_k(8 * words) // 8)
    count = -(-words // slab_words)
    least = BESIDE_PULL if beside else LEAST_PULL
    slices = max(1, min(chosen.movers, chosen.tile.m * slab_words * 16 // least))
    # As many tile rows side by side as can have all their tiles under way at a time, at the end. With one row more (140
    # tiles, 132 WGs) a few begin when the others are done: 8192 x 1280 x 8192 0.350 instead of 0.309 ms, on a GPU that
    # is its own peer.
    at_once = columns * (2 if chosen.halved else 1)
    band = max(1, workgroups // (max(1, at_once) * (ranks - 1))) if count > 1 else 1
    return Pulls(slices, count, slab_words, band)


def whole_pulls(chosen: Chosen, words: int) -> Pulls:
    """The same of lines that are not cut in slabs. `words`: 16 bytes each, of a line."""
    return Pulls(max(1, min(chosen.movers, chosen.tile.m * words * 16 // LEAST_PULL)), 1, words)


def together(chosen: Chosen, rows: tuple[int, ...], side_by_side: int) -> int:
    """Tile rows of a peer whose tiles are taken together: as many as have come when the own tiles are done."""
    own_us = chosen.us / len(rows)
    arrived = max(rows) / chosen.tile.m * min(1.0, own_us / chosen.moved_us)
    return max(1, min(side_by_side, int(arrived))) if chosen.moved_us < 0.5 * chosen.us else 1


def table_pulls(movers: int, ranks: int, words: int) -> Pulls:
    """Where nothing was measured: all movers of a peer work on one tile row."""
    return Pulls(max(1, -(-movers // max(1, ranks - 1))), 1, words)


def reducing(link: Link, ranks: int) -> Link:
    """The link as movers see it that add what all ranks have, and so read this one's too."""
    return replace(link, mover=link.mover * (ranks - 1) / ranks)


def adding_beside_us(
    link: Link, tiles: tuple[Tile, ...], rows: tuple[int, ...], n: int, k: int, workgroups: int, moved: Moved
) -> float:
    """What a call is expected to take whose WGs each have a warp that adds: slowly until all is built, then as fast as
    the link."""
    built = choose(link, tiles, rows, n, k, workgroups, Moved(0, 0, awaited=False), beside=True).us
    left = moved.nbytes - workgroups * link.adder * 1e3 * built
    return built + BEGIN_US + max(0.0, left) / (link.pull * 1e3)


def joining(workgroups: int) -> int:
    """Movers of a bulk_rs when no tile is left, builders that join them included. To be measured anew: 66 and 96 of 132
    were alike on two H200s where parts began with lines of memory, and all others were measured with parts that did
    not."""
    return 3 * workgroups // 4


def saturating(link: Link, workgroups: int) -> int:
    """Movers with which the link carries what it can."""
    return min(workgroups, int(-(-link.pull // link.mover)))
