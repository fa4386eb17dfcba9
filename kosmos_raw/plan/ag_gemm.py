"""What one launch of ag_gemm will use: crew, geometry, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..build.params import MAX_RANKS, POLICIES
from ..device.base import Tile

VECTOR = 8  # bf16 in the 16 bytes that a lane moves at a time; K and the rows of C are padded to it


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def split_rows(rows: int, ranks: int) -> list[int]:
    """`rows` dealt to `ranks` as evenly as can be, the first ranks taking one more: 10 over 4 is 3, 3, 2, 2."""
    return [rows // ranks + (q < rows % ranks) for q in range(ranks)]


def movers_for(n: int, ranks: int, workgroups: int) -> int:
    """How many WGs begin as movers.

    Table B.3 of the paper: 6 for each peer when N >= 3584, else 8, fitted on 256 CUs with 7 peers. Other counts of WGs
    scale; every mover keeps a builder beside it.
    """
    if ranks == 1:
        return 0
    crew = (6 if n >= 3584 else 8) * (ranks - 1)
    return max(1, min(round(crew * workgroups / 256), workgroups // 2))


@dataclass(frozen=True)
class AgGemmPlan:
    """All of it follows from (rows, N, K, tile, WGs, policy); equal on all ranks but for N."""

    rows: tuple[int, ...]  # of every rank's shard
    n: int
    k: int
    tile: Tile
    workgroups: int
    movers: int
    policy: str

    def __post_init__(self) -> None:
        ranks = len(self.rows)
        if self.policy not in POLICIES:
            raise ValueError(f"ag_gemm: policy is {self.policy!r}, want one of {', '.join(POLICIES)}")
        if ranks > 1 and not 1 <= self.movers < self.workgroups:
            raise ValueError(
                f"ag_gemm: movers is {self.movers}, want 1 to {self.workgroups - 1}: with {self.workgroups} WGs "
                "somebody must move and somebody must build"
            )
        if self.m >= 1 << 31 or self.n >= 1 << 31 or self.k >= 1 << 31:
            raise ValueError(f"ag_gemm: M, N, K are {self.m}, {self.n}, {self.k}, want each below 2**31")
        entries = (self.tile_rows_max * ranks * -(-self.n // self.tile.n)) + 1
        if entries + self.workgroups >= 1 << 32:
            raise ValueError(f"ag_gemm: {entries} queue entries do not fit in 32 bits; split N or the rows")

    @property
    def m(self) -> int:
        return sum(self.rows)

    @property
    def first(self) -> list[int]:
        """first[q] is the row at which rank q's chunk begins; one more entry than ranks may need, all equal to M."""
        starts = [sum(self.rows[:q]) for q in range(len(self.rows))]
        return starts + [self.m] * (MAX_RANKS + 1 - len(starts))

    @property
    def tile_rows_max(self) -> int:
        return -(-max(self.rows) // self.tile.m)

    @property
    def tiles(self) -> int:
        return sum(-(-r // self.tile.m) for r in self.rows) * -(-self.n // self.tile.n)

    @property
    def padded_k(self) -> int:
        return round_up(self.k, VECTOR)

    @property
    def ldc(self) -> int:
        """Elements from row to row of the C that the kernel writes."""
        return round_up(self.n, VECTOR)

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/ag_gemm.h lists them)."""
        return 1 + MAX_RANKS + len(self.rows) * self.tile_rows_max

    @property
    def shard_bytes(self) -> int:
        """Symmetric workspace for the shard when the caller's array does not lie in the arena; equal on all ranks."""
        return max(self.rows) * self.padded_k * 2

    @property
    def gathered_bytes(self) -> int:
        """Local memory for the peers' rows."""
        return self.m * self.padded_k * 2 if len(self.rows) > 1 else 0


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
    chosen = movers_for(n, len(rows), workgroups) if movers is None else movers
    return AgGemmPlan(tuple(int(r) for r in rows), n, k, tile, workgroups, chosen if len(rows) > 1 else 0, policy)
