"""Which output tile suits a shape, where a target offers several."""

from __future__ import annotations

from collections.abc import Sequence

from ..device.base import Tile

# Time of a tile, in units of one K step of 64 for one column: what it costs beside its multiplications, and how much
# slower a narrow tile's multiplications are (it loads A as often, for fewer columns). From measurements on H200.
FIXED = 400
SLOWNESS = {256: 1.0, 192: 1.02, 128: 1.05}


def best_tile(tiles: Sequence[Tile], rows: Sequence[int], n: int, k: int, builders: int) -> Tile:
    """The tile with which `builders` WGs end first. What matters is how full the last wave is; ties go to the first.

    Args: rows: of every rank's chunk; a tile row never crosses a chunk. k: the contraction.
    """

    def time(tile: Tile) -> float:
        count = sum(-(-r // tile.m) for r in rows) * -(-n // tile.n)
        waves = -(-count // max(1, builders))
        return waves * (-(-k // 64) * tile.n * SLOWNESS.get(tile.n, 1.0) + FIXED)

    return min(tiles, key=time)
