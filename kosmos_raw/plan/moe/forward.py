"""What the launches of one MoE layer will use: crews, rings, tables, counters. Pure functions of shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ...build.params import MAX_RANKS, MOE_SIGNALS, MOE_SIGNALS_ROW
from ...device.base import Link, Tile
from ..heuristics import FITTED_WORKGROUPS, moe_combine_crew, moe_dispatch_crew
from ..shapes import MXFP8_FORMAT, VECTOR, round_up
from ..tiles import rows_together
from .config import MoEConfig
from .sizes import GATED, Rings, Tables, combine_bytes, default_rings, padded_hidden, padded_width, tables

OP = "moe_forward"
POLICIES = ("two_way", "dedicated", "fixed", "planned")
BLOCK = 32  # tokens of a unit of routing, sorting and folding, at most
LANES = 512  # words that PLAN has for sums of lanes: no target has more of them
MAX_GROUPS = 32  # of experts, and words of TOPK for each token: hip_kernels/schedule/moe_params.h
TOKEN_WORDS = 2 + MAX_GROUPS
HEAD_WORDS = 4 + 3 * MAX_RANKS + MAX_RANKS + 1  # hip_kernels/schedule/moe_layout.h
HEAD_COUNTERS = 8 + MAX_RANKS  # hip_kernels/schedule/moe_params.h
MAX_SCANS = 8
MX_BLOCK = 32  # of MXFP8 along a contraction, rows of a group among them
DTYPES = ("bf16", "mxfp8")


def kernel_of(op: str, dtype: str) -> str:
    """The name of the operator's kernel."""
    if dtype not in DTYPES:
        raise ValueError(f"{op}: dtype is {dtype!r}, want one of {', '.join(DTYPES)}")
    return op if dtype == "bf16" else f"{op}_{dtype}"


def tile_of(tile: Tile, dtype: str) -> Tile:
    """What a device's tile becomes: in MXFP8 no block of h, nor of gate and up in turn, may cross its columns."""
    return tile if dtype == "bf16" else Tile(tile.m, tile.n // (2 * MX_BLOCK) * (2 * MX_BLOCK))


@dataclass(frozen=True)
class Crews:
    """Who moves. The first `movers` WGs push (or pull) before they build, the first `senders` send back what is ready;
    of both, the first `crew` build no more than `crew_tiles` tiles of experts."""

    movers: int
    senders: int
    crew: int = 0
    crew_tiles: int = 0


def crews_for(
    config: MoEConfig,
    workgroups: int,
    policy: str,
    tiles_per_workgroup: int,
    ranks: int = 1,
    link: Link | None = None,
) -> Crews:
    """Table B.3 gives crews of 256 WGs; of others, in proportion. Where the link was measured, as many push as keep it
    busy, with a share of their rows for their own rank.

    two_way: who moves decides before each claim what to do (the paper's choice). dedicated: who sends back does nothing
    else. fixed: movers and senders are one crew, which never builds. planned: it builds so many tiles, and sends after.
    """
    if policy not in POLICIES:
        raise ValueError(f"{OP}: policy is {policy!r}, want one of {', '.join(POLICIES)}")
    if policy != "two_way" and workgroups < 2:
        raise ValueError(f"{OP}: policy {policy!r} with one WG a rank: a crew that does not build needs a builder")
    share = workgroups / FITTED_WORKGROUPS
    most = workgroups if policy == "two_way" else workgroups - 1
    movers = max(1, min(most, round(moe_dispatch_crew(config.expert_width) * share)))
    if link and ranks > 1:
        movers = max(1, min(most, workgroups // 2, -int(-link.push * ranks // ((ranks - 1) * link.mover))))
    senders = max(1, min(most, round(moe_combine_crew(FITTED_WORKGROUPS) * share)))
    if policy == "two_way":
        return Crews(movers, senders)
    if policy == "dedicated":
        return Crews(movers, senders, senders)
    return Crews(movers, movers, movers, tiles_per_workgroup if policy == "planned" else 0)


@dataclass(frozen=True)
class MoeForwardPlan:
    """Of all launches of a layer with at most `tokens` tokens on each rank. Equal on all ranks but for the crews."""

    config: MoEConfig
    ranks: int
    tokens: int
    tile: Tile
    workgroups: int
    rings: Rings
    crews: Crews
    pad: int = 1
    pull: bool = False
    keep: bool = True  # pre-activations stay for the backward
    router_parts: int = 1  # 3: of an FP32 router
    dtype: str = "bf16"  # of experts' products
    bf16_tiles: bool = False  # the device makes BF16 of MXFP8 to multiply it
    tables: Tables = field(init=False)

    def __post_init__(self) -> None:
        c, crews = self.config, self.crews
        kernel_of(OP, self.dtype)  # refuses what there is none of
        if self.is_mxfp8 and self.pad % MX_BLOCK:
            raise ValueError(
                f"{OP}: groups are padded to {self.pad} rows, want a multiple of {MX_BLOCK} in MXFP8: rows that share "
                "a scale are of one group"
            )
        if c.hidden % VECTOR:
            raise ValueError(f"{OP}: hidden is {c.hidden}, want a multiple of {VECTOR}")
        if c.groups > MAX_GROUPS:
            raise ValueError(f"{OP}: {c.groups} groups of experts, want at most {MAX_GROUPS}")
        if self.tokens < 0:
            raise ValueError(f"{OP}: tokens is {self.tokens}, want 0 or more for each rank")
        if self.pull and c.weight_on == "input":
            raise ValueError(f"{OP}: pull with weights on the input: an owner does not know them; want pull=False")
        if not 0 <= crews.crew < self.workgroups:
            raise ValueError(
                f"{OP}: a crew of {crews.crew} WGs does not build, of {self.workgroups}; want one at least that does"
            )
        object.__setattr__(
            self, "tables", tables(c, self.ranks, self.tokens, self.tile.m, pad=self.pad, pull=self.pull)
        )
        if self.tokens * c.top_k >= 1 << 31 or self.queue_entries >= 1 << 31:
            raise ValueError(f"{OP}: {self.tokens} tokens a rank make more queue entries than fit in 31 bits")

    @property
    def is_mxfp8(self) -> bool:
        return self.dtype == "mxfp8"

    @property
    def kernel(self) -> str:
        return kernel_of(OP, self.dtype)

    # -- widths, as kernels have them

    @property
    def width(self) -> int:
        return padded_width(self.config, self.dtype)

    @property
    def depth(self) -> int:
        """Of rows that experts multiply."""
        return padded_hidden(self.config, self.dtype)

    @property
    def shared_width(self) -> int:
        return round_up(self.config.shared_width, GATED)

    def router_rows(self, given_weights: bool) -> int:
        """Columns of logits, of one part: experts, if the router is asked, and the shared expert's gate."""
        return round_up((0 if given_weights else self.config.experts) + self.config.gated_shared, 4)

    @property
    def scans(self) -> int:
        return max(1, min(MAX_SCANS, self.config.experts // 64))

    @property
    def block(self) -> int:
        """Tokens of a block: the largest divisor of a tile's rows that is not above BLOCK."""
        return max(b for b in range(1, BLOCK + 1) if self.tile.m % b == 0)

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.block)

    @property
    def side_by_side(self) -> int:
        """Tile rows worked on together: as in AgGemmPlan, but within a step."""
        return min(self.rings.step_rows, rows_together(self.workgroups, self.tile))

    @property
    def columns(self) -> int:
        """Tiles of both products of a tile row."""
        return -(-2 * self.width // self.tile.n) + -(-self.config.hidden // self.tile.n)

    @property
    def queue_entries(self) -> int:
        return self.tables.row_cap * self.columns + self.blocks

    # -- memory

    @property
    def table_arrays(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """First word and shape of each of the plan's tables (hip_kernels/schedule/moe_layout.h lists them)."""
        t, e, arrays, first = self.tables, self.config.experts, {}, 0
        shapes: dict[str, tuple[int, ...]] = {"head": (HEAD_WORDS,), "counts": (self.ranks, e)}
        shapes |= {"starts": (self.ranks + 1, e), "bases": (self.ranks, e), "tile_bases": (e,), "strides": (e,)}
        shapes |= dict.fromkeys(("experts", "sources_of", "moves_end", "sends_end"), (t.row_cap,))
        for name, shape in (shapes | {"moves": (t.move_cap,), "sends": (t.send_cap,)}).items():
            arrays[name] = first, shape
            first += prod(shape)
        return arrays

    @property
    def table_words(self) -> int:
        """Of all of them."""
        first, shape = self.table_arrays["sends"]
        return first + prod(shape)

    def counter_words(self, tokens: int) -> int:
        """Of one counter set, with so many tokens on this rank (hip_kernels/schedule/moe_params.h)."""
        return HEAD_COUNTERS + 3 * -(-tokens // self.tile.m) + 4 * self.tables.row_cap

    @property
    def signal_bytes(self) -> int:
        return MOE_SIGNALS.itemsize + (self.tables.row_cap - 1) * MOE_SIGNALS_ROW.itemsize

    @property
    def counts_bytes(self) -> int:
        """Of one of the two copies of all counts."""
        return round_up(self.ranks * self.config.experts * 8, 16)

    @property
    def arena_bytes(self) -> int:
        """Of every rank's arena, that the layer takes; rounded up generously."""
        rows = self.tokens * self.config.top_k * 8 + self.tokens * self.config.hidden * 2 * self.pull
        return self.x_bytes + self.combine_bytes + rows + 2 * self.counts_bytes + (1 << 20)

    def elements_bytes(self, lines: int, depth: int) -> int:
        """Of a matrix that experts' tiles read, without scales."""
        return lines * depth * (1 if self.is_mxfp8 and not self.bf16_tiles else 2)

    def operand_bytes(self, lines: int, depth: int) -> int:
        """With scales, which lie behind."""
        scales = MXFP8_FORMAT.scales_nbytes(lines, depth) if self.is_mxfp8 else 0
        return self.elements_bytes(lines, depth) + scales

    @property
    def x_bytes(self) -> int:
        return self.operand_bytes(self.rings.x_slots * self.tile.m, self.depth)

    @property
    def combine_bytes(self) -> int:
        return combine_bytes(self.config, self.tokens)


def plan_moe_forward(
    config: MoEConfig,
    ranks: int,
    tokens: int,
    tile: Tile,
    workgroups: int,
    *,
    rings: Rings | None = None,
    policy: str = "two_way",
    crews: Crews | None = None,
    pad: int | None = None,
    pull: bool = False,
    keep: bool = True,
    router_parts: int = 1,
    link: Link | None = None,
    dtype: str = "bf16",
    bf16_tiles: bool = False,
) -> MoeForwardPlan:
    """The plan for at most `tokens` tokens on each rank.

    Args:
        tile: of the device's kernel, see tile_of.
        pad: of groups; None: none in BF16, a block in MXFP8.
        rings: of tile rows; None holds 1.5 times balanced rows, see plan.moe.sizes.
        policy: one of POLICIES; see crews_for. crews: instead of what follows from the policy. link: to peers, where
            it was measured.
    Raises: ValueError: no such launch can run; says why.
    """
    tile = tile_of(tile, dtype)
    pad = pad or (MX_BLOCK if dtype == "mxfp8" else 1)
    sizes = tables(config, ranks, tokens, tile.m, pad=pad, pull=pull)
    rings = rings or default_rings(sizes)
    if crews is None:
        columns = -(-3 * config.expert_width // tile.n)
        tiles = sizes.balanced_row_cap * columns // workgroups // 2
        crews = crews_for(config, workgroups, policy, tiles, ranks, link)
    return MoeForwardPlan(
        config, ranks, tokens, tile, workgroups, rings, crews, pad, pull, keep, router_parts, dtype, bf16_tiles
    )
