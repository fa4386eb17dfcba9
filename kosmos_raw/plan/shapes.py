"""What plans of all operators share: how rows are dealt, and sizes that kernels want."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..build.params import MAX_RANKS, ORDERS
from ..device.base import Tile
from .crew import Crew
from .link import Pulls
from .tiles import rows_together

VECTOR = 8  # bf16 in the 16 bytes that a lane moves at a time; rows of matrices are padded to it


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def split_rows(rows: int, ranks: int) -> list[int]:
    """`rows` dealt to `ranks` as evenly as can be, the first ranks taking one more: 10 over 4 is 3, 3, 2, 2."""
    return [rows // ranks + (q < rows % ranks) for q in range(ranks)]


K_STEP = 64  # to whose multiples a contraction is cut: what every target's tile multiplies at a time


@dataclass(frozen=True)
class Format:
    """How factors of a product lie. Contractions are padded with zeros to whole steps."""

    dtype: str
    step: int  # elements to whose multiples lines are padded
    word: int  # elements in 16 bytes
    scale_bytes: int = 0  # of a step of four lines

    def scales_nbytes(self, lines: int, depth: int) -> int:
        """Of the scales of a matrix; depth a multiple of the step."""
        return -(-lines // 4) * (depth // self.step) * self.scale_bytes

    def nbytes(self, lines: int, depth: int) -> int:
        """Of a matrix, its scales included."""
        return lines * depth * 16 // self.word + self.scales_nbytes(lines, depth)


BF16_FORMAT = Format("bf16", VECTOR, VECTOR)
MXFP8_FORMAT = Format("mxfp8", 128, 16, 16)  # hip_kernels/work/mxfp8.h

ORDERS_OF = {  # orders of tiles that an operator knows; where tiles wait for nothing there is one
    "ag_gemm": ORDERS,
    "ag_gemm_dgrad": ORDERS,
    "gemm_rs": ("as_consumed", "chunk_major", "rank_order"),
    "bulk_ag": ("as_consumed",),
    "bulk_rs": ("as_consumed",),
}


def order_number(op: str, order: str) -> int:
    """Number of an order of tiles in hip_kernels/schedule/group.h."""
    if order not in ORDERS_OF[op]:
        raise ValueError(f"{op}: order is {order!r}, want one of {', '.join(ORDERS_OF[op])}")
    return ORDERS.index(order)


@dataclass(frozen=True)
class Cut:
    """A contraction of k cut in parts; each leaves FP32 sums that are added in the order of the parts."""

    parts: int = 1
    step: int = 0  # k of a part; the last one may be short

    @classmethod
    def of(cls, k: int, parts: int, whole: int = K_STEP) -> Cut:
        """At most `parts` parts, none empty, each but the last a multiple of `whole`."""
        if parts < 1:
            raise ValueError(f"split is {parts}, want 1 or more parts of the contraction")
        step = round_up(max(1, -(-k // parts)), whole)
        return cls(max(1, -(-k // step)), step)

    def sums_bytes(self, rows: int, columns: int) -> int:
        """Local memory for the sums of all parts."""
        return self.parts * rows * columns * 4 if self.parts > 1 else 0


@dataclass(frozen=True)
class Plan:
    """What one launch of an operator will use. M = sum(rows) rows are dealt to ranks; N and K are the GEMM's own."""

    op: str
    rows: tuple[int, ...]  # of every rank
    n: int
    k: int
    tile: Tile
    workgroups: int
    crew: Crew
    form: Format = field(default=BF16_FORMAT, kw_only=True)  # of the factors

    def __post_init__(self) -> None:
        if self.m >= 1 << 31 or self.n >= 1 << 31 or self.k >= 1 << 31:
            raise ValueError(f"{self.op}: M, N, K are {self.m}, {self.n}, {self.k}, want each below 2**31")
        if self.queue_entries + self.workgroups >= 1 << 32:
            raise ValueError(
                f"{self.op}: {self.queue_entries} queue entries do not fit in 32 bits; split N or the rows"
            )

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def m(self) -> int:
        return sum(self.rows)

    @property
    def first(self) -> list[int]:
        """first[q] is the row at which rank q's chunk begins; one more entry than ranks may need, all equal to M."""
        starts = [sum(self.rows[:q]) for q in range(self.ranks)]
        return starts + [self.m] * (MAX_RANKS + 1 - len(starts))

    @property
    def tile_rows_max(self) -> int:
        return -(-max(self.rows) // self.tile.m)

    @property
    def columns(self) -> int:
        """Tiles in a row of the result."""
        return -(-self.n // self.tile.n)

    @property
    def side_by_side(self) -> int:
        """Tile rows of the own rows worked on together."""
        return rows_together(self.workgroups, self.tile)

    def gather_words(self, pulls: Pulls) -> int:
        """Counter words that pulling takes (hip_kernels/schedule/gather.h lists them)."""
        return 1 + MAX_RANKS + self.ranks * self.tile_rows_max * pulls.slabs

    @property
    def queue_entries(self) -> int:
        """Entries of the longest queue."""
        return self.tile_rows_max * self.ranks * self.columns + 1

    @property
    def padded_n(self) -> int:
        return round_up(self.n, VECTOR)

    @property
    def padded_k(self) -> int:
        return round_up(self.k, self.form.step)

    @property
    def kernel(self) -> str:
        """The kernel that is launched."""
        return self.op if self.form is BF16_FORMAT else f"{self.op}_{self.form.dtype}"
