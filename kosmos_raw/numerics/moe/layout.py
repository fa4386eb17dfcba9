"""Where rows lie when ranks share experts: it follows from the counts alone, so every rank knows it of every other.

Rank o owns the experts [o * per_rank, (o + 1) * per_rank). Its rows lie expert by expert, an expert's by source rank,
and a source's by token; each group (source, expert) is filled up with zeros to a multiple of `pad` rows, and each
expert begins a tile row of `tile_m` rows. What comes back to a source lies in the order of its own send list: by
expert, then by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...plan.moe.config import MoEConfig
from .. import near
from .experts import forward as expert_forward
from .layer import Weights


@dataclass(frozen=True)
class Layout:
    """Of the rows of all ranks."""

    config: MoEConfig
    counts: np.ndarray  # [ranks, E] rows that each source has for each expert
    tile_m: int
    pad: int = 1

    @classmethod
    def of(cls, config: MoEConfig, ids: Sequence[np.ndarray], tile_m: int, pad: int = 1) -> Layout:
        """From the experts [T, k] of every rank's tokens."""
        counts = [np.bincount(i.ravel(), minlength=config.experts) for i in ids]
        return cls(config, np.array(counts), tile_m, pad)

    @property
    def ranks(self) -> int:
        return self.counts.shape[0]

    @property
    def padded(self) -> np.ndarray:
        """[ranks, E]."""
        return -(-self.counts // self.pad) * self.pad

    @property
    def group_start(self) -> np.ndarray:
        """[ranks, E]: where a source's rows begin in their expert."""
        return np.cumsum(self.padded, axis=0) - self.padded

    @property
    def expert_tiles(self) -> np.ndarray:
        """[E]: tile rows of each expert."""
        return -(-self.padded.sum(0) // self.tile_m)

    @property
    def tile_base(self) -> np.ndarray:
        """[E]: an expert's first tile row at its owner."""
        base = np.zeros(self.config.experts, int)
        for rank in range(self.ranks):
            own = self.experts_of(rank)
            base[own] = np.cumsum(self.expert_tiles[own]) - self.expert_tiles[own]
        return base

    def experts_of(self, rank: int) -> slice:
        own = self.config.experts_of(rank, self.ranks)
        return slice(own.start, own.stop)

    def tile_rows(self, rank: int) -> int:
        """Of all its experts."""
        return int(self.expert_tiles[self.experts_of(rank)].sum())

    def expert_rows(self, e: int) -> slice:
        """Of an expert's groups at its owner, padding included."""
        first = int(self.tile_base[e]) * self.tile_m
        return slice(first, first + int(self.padded[:, e].sum()))

    @property
    def send_base(self) -> np.ndarray:
        """[ranks, E]: where the rows for an expert begin in a source's send list."""
        return np.cumsum(self.counts, axis=1) - self.counts

    def rows_at(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, place in its send list) of each row that a rank receives, [tile_rows * tile_m]; -1 where none is."""
        source, place = (np.full(self.tile_rows(rank) * self.tile_m, -1) for _ in range(2))
        for e in self.config.experts_of(rank, self.ranks):
            for q in range(self.ranks):
                n, first = self.counts[q, e], self.tile_base[e] * self.tile_m + self.group_start[q, e]
                source[first : first + n] = q
                place[first : first + n] = self.send_base[q, e] + np.arange(n)
        return source, place


def send_list(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(token, slot) of each entry of a rank's send list, [T * k]."""
    order = np.argsort(ids.ravel(), kind="stable")
    return order // ids.shape[1], order % ids.shape[1]


def row_of_slot(ids: np.ndarray) -> np.ndarray:
    """[T, k]: where in the send list a token's slot is."""
    row = np.empty(ids.size, int)
    row[np.argsort(ids.ravel(), kind="stable")] = np.arange(ids.size)
    return row.reshape(ids.shape)


@dataclass(frozen=True)
class Exchange:
    """What ranks hold in a forward whose rows really travel."""

    layout: Layout
    received: list[np.ndarray]  # of each rank [tile_rows * tile_m, H]; NaN where nothing is written
    combine: list[np.ndarray]  # of each rank [T * k, H], rows of experts in send order


def exchange(
    config: MoEConfig,
    x: Sequence[np.ndarray],
    w: Weights,
    ids: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    tile_m: int,
    pad: int = 1,
) -> Exchange:
    """Dispatch, experts and combine of all ranks in float64. x, ids and weights are of each rank's tokens."""
    layout = Layout.of(config, ids, tile_m, pad)
    lists = [send_list(i) for i in ids]
    sent = [q[tokens] for q, (tokens, _) in zip(x, lists, strict=True)]
    if config.weight_on == "input":
        sent = [rows * v[at][:, None] for rows, v, at in zip(sent, weights, lists, strict=True)]
    combine = [np.full((i.size, config.hidden), np.nan) for i in ids]
    received = []
    for rank in range(layout.ranks):
        source, place = layout.rows_at(rank)
        buffer = np.full((source.size, config.hidden), np.nan)
        experts = {e: layout.expert_rows(e) for e in config.experts_of(rank, layout.ranks)}
        for rows in experts.values():
            buffer[rows] = 0.0
        for q in range(layout.ranks):
            buffer[source == q] = sent[q][place[source == q]]
        for e, rows in experts.items():
            y, _ = expert_forward(buffer[rows], w.gate_up[e], w.down[e], config.swiglu_limit)
            for q in range(layout.ranks):
                own = source[rows] == q
                combine[q][place[rows][own]] = near.value_of(y)[own]
        received.append(buffer)
    return Exchange(layout, received, combine)
