"""What one launch of bulk_ag or bulk_rs will use. The rows that move and the product beside them are independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .crew import KERNELS, Crew, Grid, whole_if_beside
from .gemm_rs import LEAST_SLICE
from .heuristics import parts_that_fit
from .link import (
    LEAST_PULL,
    Moved,
    Pulls,
    adding_beside_us,
    choose,
    joining,
    reducing,
    table_pulls,
    whole_pulls,
)
from .shapes import BF16_FORMAT, K_STEP, VECTOR, Cut, Format, Plan, round_up


@dataclass(frozen=True)
class BulkPlan(Plan):
    """`rows` x `width` are moved; the product is `gemm_m` x n, contracted over k."""

    width: int
    gemm_m: int
    halved: int  # tiles, the last of the queue, that are taken in halves

    @property
    def gemm_tiles(self) -> int:
        return -(-self.gemm_m // self.tile.m) * self.columns

    @property
    def queue_entries(self) -> int:
        return self.gemm_tiles + 1

    @property
    def padded_width(self) -> int:
        return round_up(self.width, VECTOR)


@dataclass(frozen=True)
class BulkAgPlan(BulkPlan):
    """In MXFP8 columns are gathered: `rows` are then the lines that each rank has, all of `width` or none."""

    pulls: Pulls
    tokens: tuple[int, ...]  # rows of X of every rank

    @property
    def depths(self) -> tuple[int, ...]:
        """Of MXFP8: of each rank's columns."""
        return tuple(round_up(rows, self.form.step) for rows in self.tokens)

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/gather.h lists them)."""
        return self.gather_words(self.pulls)

    @property
    def shard_bytes(self) -> int:
        """Symmetric workspace for the shard when the caller's array does not lie in the arena; equal on all ranks."""
        if self.form is BF16_FORMAT:
            return max(self.tokens) * self.padded_width * 2
        return self.form.nbytes(self.width, max(self.depths))

    @property
    def moved_bytes(self) -> int:
        """What all ranks together read of their peers."""
        if self.form is BF16_FORMAT:
            return (self.ranks - 1) * sum(self.tokens) * self.padded_width * 2
        return (self.ranks - 1) * sum(self.form.nbytes(self.width, depth) for depth in self.depths)


@dataclass(frozen=True)
class BulkRsPlan(BulkPlan):
    slices: int
    cut: Cut

    @property
    def queue_entries(self) -> int:
        return self.gemm_tiles * (self.cut.parts + 1) + 1

    @property
    def counter_words(self) -> int:
        """Words of one counter set (hip_kernels/schedule/bulk_rs.h lists them)."""
        return 4 + (self.gemm_tiles if self.cut.parts > 1 else 0)

    @property
    def x_bytes(self) -> int:
        """Symmetric workspace for X when the caller's array does not lie in the arena."""
        return self.m * self.padded_width * 2

    @property
    def moved_bytes(self) -> int:
        """What all ranks together read of their peers."""
        return (self.ranks - 1) * self.x_bytes

    @property
    def padded_m(self) -> int:
        return round_up(self.gemm_m, VECTOR)

    @property
    def sums_bytes(self) -> int:
        return self.cut.sums_bytes(self.gemm_m, self.padded_n)


def plan_bulk_ag(
    rows: Sequence[int],
    width: int,
    shape: tuple[int, int, int],
    grid: Grid,
    *,
    policy: str | None = None,
    movers: int | None = None,
    form: Format = BF16_FORMAT,
) -> BulkAgPlan:
    """The plan for gathering rows[q] x `width` of each rank beside a product of `shape` (M, N, K).

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every, (m, n, k) = "bulk_ag", tuple(int(r) for r in rows), shape
    ranks, words = len(every), form.nbytes(1, round_up(width, form.step)) // 16
    lines = every if form is BF16_FORMAT else tuple(width if r else 0 for r in every)
    policy = grid.policy(policy, ranks)
    beside = policy == "beside"
    crew = Crew.choose(op, shape, ranks, grid, policy, movers, dtype=form.dtype)
    if grid.link is None or ranks == 1 or not words:
        tile, pulls = grid.tile((m,), n, k, crew.movers), table_pulls(crew.movers, ranks, words)
        return BulkAgPlan(op, lines, n, k, tile, grid.workgroups, crew, width, m, 0, pulls, every, form=form)
    moved = Moved(sum(every) * (ranks - 1) // ranks, words, awaited=False)
    chosen = choose(grid.link, grid.tiles, (m,), n, k, grid.workgroups, moved, movers, beside=beside)
    crew, tile = Crew.choose(op, shape, ranks, grid, policy, chosen.movers), chosen.tile
    pulls = whole_pulls(chosen, words if form is BF16_FORMAT else max(every) // form.word)
    return BulkAgPlan(op, lines, n, k, tile, grid.workgroups, crew, width, m, chosen.halved, pulls, every, form=form)


def plan_bulk_rs(
    rows: Sequence[int],
    width: int,
    shape: tuple[int, int, int],
    grid: Grid,
    *,
    policy: str | None = None,
    movers: int | None = None,
    max_movers: int | None = None,
    split: int | None = None,
    form: Format = BF16_FORMAT,
) -> BulkRsPlan:
    """The plan for reducing sum(rows) x `width`, rows[q] for rank q, beside a product of `shape` (M, N, K).

    Raises:
        ValueError: no such launch can run; says why.
    """
    op, every, (m, n, k) = "bulk_rs", tuple(int(r) for r in rows), shape
    ranks, words = len(every), round_up(width, VECTOR) // VECTOR
    parts = parts_that_fit(KERNELS[op], m, n, grid.tiles[0], grid.workgroups, form.dtype) if split is None else split
    moved = Moved(max(every) * (ranks - 1), words, awaited=False)
    if policy is None and movers is None and grid.link and ranks > 1:
        given = (grid.tiles, (m,), n, k, grid.workgroups, moved)
        others = choose(reducing(grid.link, ranks), *given, halves=parts == 1)
        if adding_beside_us(grid.link, *given) > others.us:
            policy = "one_way"
    policy = grid.policy(policy, ranks, whole=parts == 1)
    crew, halved = Crew.choose(op, shape, ranks, grid, policy, movers, max_movers, form.dtype), 0
    split, beside = whole_if_beside(op, policy, ranks, split), crew.policy == "beside"
    least, nbytes = LEAST_SLICE, max(every) * width * 2
    tile = grid.tile((m,), n, k, 0 if beside else crew.movers)
    if split is None:
        split = parts_that_fit(KERNELS[op], m, n, tile, grid.workgroups, form.dtype)
    if grid.link and ranks > 1 and words:
        link, least = reducing(grid.link, ranks), LEAST_PULL
        if beside:
            movers = max_movers = crew.movers  # nobody joins agents
        chosen = choose(link, grid.tiles, (m,), n, k, grid.workgroups, moved, movers, halves=split == 1, beside=beside)
        most = max(chosen.movers, joining(grid.workgroups)) if max_movers is None else max_movers
        crew, tile = Crew.choose(op, shape, ranks, grid, policy, chosen.movers, most), chosen.tile
        halved = chosen.halved if split == 1 else 0
    slices = max(1, min(4 * crew.max_movers, nbytes // least))
    if beside:  # as many for each agent
        each = max(1, -(-nbytes * (ranks - 1) // (crew.movers * LEAST_PULL)))
        slices = max(1, min(each * crew.movers, nbytes // LEAST_SLICE))
    cut = Cut.of(k, split, max(K_STEP, form.step))
    return BulkRsPlan(op, every, n, k, tile, grid.workgroups, crew, width, m, halved, slices, cut, form=form)
