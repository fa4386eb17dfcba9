"""How much memory one launch of an MoE layer needs, whatever the routing. Pure functions of shape.

Tables are sized for the worst routing there can be: they are small. Rows are not: they lie in rings of tile rows, which
may be shorter than what arrives, down to one tile row each (hip_kernels/schedule/moe_forward.h says how that works).
What a ring holds changes time, never bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..shapes import MXFP8_FORMAT, round_up
from .config import MoEConfig

CAPACITY = 1.5  # of balanced rows, that rings hold unless told otherwise: the paper sees 1.3 in DeepSeek-V3
STEPS = 8  # in which the main queue goes through the rows that rings hold
GATED = 16  # rows of gate, then as many of up: hip_kernels/target/target.h
PACKED = 1 << 24  # tile rows and experts share a word with a rank in lists of units


@dataclass(frozen=True)
class Tables:
    """The most of what indices count, over all routings; equal on all ranks."""

    rows: int  # tokens' rows that a rank can receive
    row_cap: int  # tile rows of an owner
    move_cap: int  # units to push (or pull): rows of one source in one tile row
    send_cap: int  # units to send back: rows of one destination in one tile row
    balanced_row_cap: int  # tile rows of an owner, if every expert of all gets its share


def tables(config: MoEConfig, ranks: int, tokens: int, tile_m: int, *, pad: int = 1, pull: bool = False) -> Tables:
    """For at most `tokens` tokens on each rank, groups padded to `pad` rows.

    Raises: ValueError: pad does not divide the tile, or indices do not fit their words.
    """
    if pad < 1 or tile_m % pad:
        raise ValueError(f"moe: groups are padded to {pad} rows, want a divisor of the {tile_m} rows of a tile")
    own = config.per_rank(ranks)
    here = min(config.top_k, own)  # a token's rows for one rank
    received = _Groups.of(tokens, here, own, pad)  # from one source
    rows = ranks * tokens * here
    filled = min(own, rows)  # experts that have rows
    row_cap = (ranks * received.padded + filled * (tile_m - pad)) // tile_m
    share = -(-ranks * tokens * config.top_k // config.experts)
    balanced = min(row_cap, own * -(-round_up(share, pad) // tile_m))
    sends = received.units(tile_m, pad, ranks)
    moves = sends if pull else _Groups.of(tokens, config.top_k, config.experts, pad).units(tile_m, pad)
    if max(row_cap, config.experts) >= PACKED:
        raise ValueError(
            f"moe: {row_cap} tile rows and {config.experts} experts, want each below {PACKED}; give each rank fewer "
            f"than {tokens} tokens a call"
        )
    return Tables(rows, max(1, row_cap), max(1, moves), max(1, sends), max(1, balanced))


@dataclass(frozen=True)
class _Groups:
    """The most that one source's tokens, `each` rows of a token, can make of rows for `experts` experts."""

    groups: int
    padded: int  # rows, if as many groups as can be are padded

    @classmethod
    def of(cls, tokens: int, each: int, experts: int, pad: int) -> _Groups:
        groups = min(experts, tokens * each)
        padded = (tokens * each + groups * (pad - 1)) // pad * pad
        return cls(groups, min(padded, groups * round_up(tokens, pad)))  # a token is in a group once

    def units(self, tile_m: int, pad: int, sources: int = 1) -> int:
        """(group, tile row) pairs: n rows that begin anywhere in a tile touch up to 1 + ceil((n - pad) / tile_m)."""
        return sources * (self.padded + self.groups * (2 * tile_m - 2 * pad)) // tile_m


@dataclass(frozen=True)
class Rings:
    """How many tile rows are in memory at a time, and in which order they are worked on.

    Steps of `step_rows` tile rows; GEMM2 of a step is queued `lag` steps behind its GEMM1. Where h holds all rows that
    arrive and lag + 1 steps are all of them, all of GEMM1 comes before all of GEMM2: the paper's order.
    """

    step_rows: int
    lag: int
    x_slots: int  # received rows
    h_slots: int  # between GEMM1 and GEMM2; pre-activations too
    y_slots: int  # of GEMM2

    def __post_init__(self) -> None:
        least = {"x_slots": self.step_rows, "y_slots": self.step_rows, "h_slots": (self.lag + 1) * self.step_rows}
        if self.step_rows < 1 or self.lag < 0:
            raise ValueError(f"moe: step_rows is {self.step_rows} and lag {self.lag}, want 1 or more, and 0 or more")
        for name, want in least.items():
            if getattr(self, name) < want:
                raise ValueError(
                    f"moe: {name} is {getattr(self, name)}, want {want} or more with step_rows {self.step_rows} and "
                    f"lag {self.lag}: a shorter ring deadlocks"
                )

    @classmethod
    def holding(cls, tile_rows: int) -> Rings:
        """That hold so many received rows at a time, all of GEMM1 before GEMM2 as long as they do."""
        step_rows = -(-tile_rows // STEPS)
        steps = -(-tile_rows // step_rows)
        return cls(step_rows, steps - 1, steps * step_rows, steps * step_rows, min(2, steps) * step_rows)

    def bytes(self, config: MoEConfig, tile_m: int, *, dtype: str = "bf16", keep: bool = True) -> int:
        """Of all rings of a rank. `keep`: pre-activations stay for the backward. In MXFP8 h is there in BF16 too, of
        which it is quantised; where a device multiplies BF16 alone, rows take as much as in BF16."""
        depth, width = padded_hidden(config, dtype), padded_width(config, dtype)
        h = 2 * width + (row_bytes(width, dtype) if dtype == "mxfp8" else 0) + (4 * width if keep else 0)
        return tile_m * (self.x_slots * row_bytes(depth, dtype) + self.h_slots * h + self.y_slots * 2 * config.hidden)


def padded_width(config: MoEConfig, dtype: str) -> int:
    """Of an expert, as kernels have it."""
    return round_up(config.expert_width, MXFP8_FORMAT.step if dtype == "mxfp8" else GATED)


def padded_hidden(config: MoEConfig, dtype: str) -> int:
    """Elements of a row that experts multiply."""
    return round_up(config.hidden, MXFP8_FORMAT.step) if dtype == "mxfp8" else config.hidden


def row_bytes(depth: int, dtype: str) -> int:
    """Of one row that experts multiply: BF16, or MXFP8 with a scale for each 32 elements."""
    return 2 * depth if dtype == "bf16" else depth + depth // 32


def combine_bytes(config: MoEConfig, tokens: int) -> int:
    """Of a rank's combine buffer: experts' rows of its own tokens. Does not depend on the routing."""
    return tokens * config.top_k * config.hidden * 2


def default_rings(t: Tables, capacity: float = CAPACITY) -> Rings:
    """Hold `capacity` times the tile rows of balanced routing, and never more than any routing can need.

    Raises: ValueError: a capacity that is not above 0.
    """
    if not capacity > 0:
        raise ValueError(f"moe: capacity is {capacity}, want a number above 0, of times the rows of balanced routing")
    return Rings.holding(max(1, min(t.row_cap, round(capacity * t.balanced_row_cap))))


def rings_that_fit(t: Tables, room: int, size: Callable[[Rings], int]) -> Rings:
    """The longest rings whose `size` in bytes (Rings.bytes, bound to a layer) is at most `room`.

    Raises: ValueError: even one tile row each does not fit; says how much it takes.
    """
    least = size(Rings.holding(1))
    if least > room:
        raise ValueError(
            f"moe: rings of one tile row each take {least} bytes, but there are {room}; give it more memory"
        )
    low, high = 1, t.row_cap
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(Rings.holding(middle)) <= room else (low, middle - 1)
    return Rings.holding(low)
