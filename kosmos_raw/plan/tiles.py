"""Which output tile suits a shape, where a target offers several, and how tiles come out over WGs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..device.base import Tile

# What a tile costs beside its multiplications, in units of one K step of 64 for one column: little, for the next one is
# multiplied meanwhile. From measurements on H200, 8192 x 8192 over 512 to 3584.
FIXED = 200
STEP, SLICE = 64, 128  # k, and columns, that are multiplied at a time
# Of tiles that are several slices wide: who is at the second needs rows again that may have left the cache. 3 % where
# the contraction is 4096, and of 65536 x 13312 x 16384 a fifth (567 instead of 700 TFLOP/s).
AGAIN = 1.03


def slices_of(columns: int) -> int:
    """Of a tile so many columns wide: they are multiplied one after the other."""
    return -(-columns // SLICE)


def tile_time(columns: int, k: int) -> float:
    """Of a tile so many columns wide, in those units."""
    count = slices_of(columns)
    return -(-k // STEP) * count * SLICE * (AGAIN if count > 1 else 1) + FIXED


def tile_count(tile: Tile, rows: Sequence[int], n: int) -> int:
    """Tiles of chunks of `rows` by n; a tile row never crosses a chunk."""
    return sum(-(-r // tile.m) for r in rows) * -(-n // tile.n)


def rows_together(workgroups: int, tile: Tile) -> int:
    """Tile rows whose tiles are taken together, column by column: what makes one wave of tiles about square, so that it
    reads as few rows of both operands as can be. A power of two, as which rows of models come out even: on an H200,
    where tiles are 128 x 128, 8 rows instead of 11 take up to 6 % off eleven products of Llama 3, 2 % as a mean,
    and add to none."""
    return 1 << int(math.log2(max(1.0, (workgroups * tile.n / tile.m) ** 0.5)))


def best_tile(tiles: Sequence[Tile], rows: Sequence[int], n: int, k: int, builders: int) -> Tile:
    """The tile with which `builders` WGs end first. What matters is how full the last wave is; ties go to the first.

    Args: rows: of every rank's chunk. k: the contraction.
    """
    return min(tiles, key=lambda tile: -(-tile_count(tile, rows, n) // max(1, builders)) * tile_time(tile.n, k))


def end_of_tiles(count: int, whole: float, half: float, builders: int, movers: int, back: float) -> tuple[float, int]:
    """When `count` tiles are done by builders, whom movers join at the time `back`, and how many tiles are taken whole:
    the last ones are taken in halves where that ends sooner. `whole`, `half`: what either takes."""

    def done(waves: int) -> int:
        """Whole tiles by the end of so many waves of the builders."""
        return builders * waves + movers * max(0, int((waves * whole - back) / whole))

    waves = max(1, -(-count // (builders + movers)))
    while done(waves) < count:
        waves += 1
    ends = [(waves * whole, count)]
    for fewer in (waves - 1, waves - 2):
        left = count - done(fewer)
        if fewer >= 0 and left > 0 and half < whole:
            start = fewer * whole
            hands = builders + movers if back <= start else builders
            ends.append((start + -(-2 * left // hands) * half, count - left))
    return min(ends)
