"""What an MoE layer's backward uses besides what its forward has: rounds, memory. Pure functions of shape."""

from __future__ import annotations

from dataclasses import dataclass

from ...build.params import MAX_RANKS
from ..shapes import MXFP8_FORMAT, VECTOR, round_up
from ..tiles import rows_together
from .forward import MoeForwardPlan, kernel_of

OP = "moe_backward"
HEAD_COUNTERS = 10 + MAX_RANKS  # hip_kernels/schedule/moe_backward_params.h
TEAM = 16  # hip_kernels/schedule/moe_params.h
FARTHEST = 1 << 30  # bytes from the first row that a tile stores to its last one
QUANT_WIDTH = 1024  # columns of dY that a WG quantises at a time: many WGs share a tile row, and each reads whole lines
SPARE_SEGMENTS = 9  # hip_kernels/schedule/moe_backward_queue.h
# An FP32 router is three BF16 matrices and dlogits are two: of their products, those that FP32 does not round off.
ROUTER_PARTS = {1: (0, 0), 3: (0, 0, 1, 1, 2)}  # by parts of the router: which part each copy of dlogits multiplies


@dataclass(frozen=True)
class MoeBackwardPlan:
    """Of all backwards of a layer. Equal on all ranks but for the crews.

    round_rows: tile rows that rings give up together; an expert's weight gradient is added round by round, so its bits
    depend on this number, and on nothing else that a plan may choose.
    """

    forward: MoeForwardPlan
    round_rows: int

    def __post_init__(self) -> None:
        f, rings = self.forward, self.forward.rings
        if f.pull:
            raise ValueError(
                f"{OP}: the layer pulls rows (pull=True), and a backward only pushes; make the layer with pull=False"
            )
        if f.crews.crew:
            raise ValueError(
                f"{OP}: a crew of {f.crews.crew} WGs does not build, and a backward knows two_way alone; make the "
                "layer with policy='two_way'"
            )
        if (f.width + f.tile.m) * f.config.hidden * 2 >= FARTHEST:
            raise ValueError(
                f"{OP}: an expert's width is {f.width} and tokens have {f.config.hidden} columns, want less than "
                f"{FARTHEST >> 20} MiB of rows of gate: a tile stores as far apart"
            )
        if not f.keep:
            raise ValueError(f"{OP}: the layer keeps nothing for a backward; make it with keep=True")
        holds_all = min(rings.x_slots, rings.h_slots) >= f.tables.row_cap
        if rings.x_slots != rings.h_slots and not holds_all:
            raise ValueError(
                f"{OP}: rings hold {rings.x_slots} tile rows of x and {rings.h_slots} of h, want as many of both, or "
                f"all {f.tables.row_cap} that there can be: a backward goes through both by the same slots"
            )
        if self.round_rows < 1 or self.round_rows % rings.step_rows or rings.x_slots % self.round_rows:
            raise ValueError(
                f"{OP}: round_rows is {self.round_rows}, want a multiple of the {rings.step_rows} tile rows of a step "
                f"that divides the {rings.x_slots} slots of a ring"
            )

    @property
    def rounds(self) -> int:
        """The most that an owner's rows can make."""
        return -(-self.forward.tables.row_cap // self.round_rows)

    @property
    def piece_cap(self) -> int:
        """A round's end cuts one expert's rows; an expert without rows is a piece too."""
        return self.forward.config.per_rank(self.forward.ranks) + self.rounds

    @property
    def piece_words(self) -> int:
        return 2 + 3 * self.piece_cap + 2 * (6 * self.piece_cap + SPARE_SEGMENTS)

    def router_ld(self, given_weights: bool) -> int:
        """Columns of one copy of dlogits."""
        return round_up(self.forward.router_rows(given_weights), VECTOR)

    @property
    def router_copies(self) -> int:
        return len(ROUTER_PARTS[self.forward.router_parts])

    def own_ld(self, given_weights: bool) -> int:
        return self.router_copies * self.router_ld(given_weights) + 2 * self.forward.shared_width

    def counter_words(self, tokens: int) -> int:
        return HEAD_COUNTERS + 3 * -(-tokens // self.forward.tile.m) + 9 * self.forward.tables.row_cap

    @property
    def side_by_side(self) -> int:
        """Tile rows worked on together: as in MoeForwardPlan, but within a round."""
        return min(self.round_rows, rows_together(self.forward.workgroups, self.forward.tile))

    @property
    def kernel(self) -> str:
        return kernel_of(OP, self.forward.dtype)

    @property
    def dy_bytes(self) -> int:
        """Of the ring of received rows of dY, which are BF16."""
        return self.ring_rows * self.forward.config.hidden * 2

    # -- of MXFP8

    @property
    def quants(self) -> int:
        """Parts in which copies of a tile row of dY are made."""
        return -(-self.forward.depth // QUANT_WIDTH) if self.forward.is_mxfp8 else 0

    @property
    def tile_k(self) -> int:
        """Elements that a tile row has in a line of columns."""
        return round_up(self.forward.tile.m, MXFP8_FORMAT.step)

    @property
    def ring_rows(self) -> int:
        return self.forward.rings.x_slots * self.forward.tile.m

    @property
    def copies(self) -> dict[str, tuple[int, int]]:
        """Lines and depth of each copy that the kernel makes for itself."""
        f, across = self.forward, self.forward.rings.x_slots * self.tile_k
        if not f.is_mxfp8:
            return {}
        of_rows = {"dy": (self.ring_rows, f.depth), "dpre": (self.ring_rows, 2 * f.width)}
        columns = {"dy_columns": f.config.hidden, "h_columns": f.width, "dpre_columns": 2 * f.width}
        return of_rows | {name: (lines, across) for name, lines in columns.items()}

    @property
    def x_columns_shape(self) -> tuple[int, int]:
        """Of the ring of columns of x that peers push."""
        return self.forward.config.hidden, self.forward.rings.x_slots * self.tile_k

    @property
    def x_columns_bytes(self) -> int:
        return self.forward.operand_bytes(*self.x_columns_shape) if self.forward.is_mxfp8 else 0

    @property
    def arena_bytes(self) -> int:
        """Of every rank's arena, that backwards take."""
        return self.dy_bytes + self.landing_bytes + self.x_columns_bytes

    @property
    def landing_bytes(self) -> int:
        """Of rows of dX that come back."""
        return self.forward.combine_bytes

    def local_bytes(self) -> dict[str, int]:
        """Of a rank's own memory, by name, for as many tokens as the layer may have. No launch needs it of another one:
        all layers may share it."""
        f, c = self.forward, self.forward.config
        rows, T = f.rings.x_slots * f.tile.m, f.tokens
        bf16 = {"pre": rows * 2 * f.width, "dpre": rows * 2 * f.width, "dx_rows": rows * c.hidden}
        bf16 |= {"dx": T * c.hidden, "dout": T * c.hidden, "own_left": T * self.own_ld(False)}
        floats = {"dlogits": T * f.router_rows(False), "own_dx": T * c.hidden}
        words = {"dweights": T * c.top_k, "partials": T * (c.top_k + 1) * TEAM, "pieces": self.piece_words}
        sizes = {name: 2 * n for name, n in bf16.items()} | {name: 4 * n for name, n in floats.items()}
        sizes |= {f"{name}_copy": f.operand_bytes(*shape) for name, shape in self.copies.items()}
        return sizes | {name: 8 * n for name, n in words.items()}


def default_round_rows(forward: MoeForwardPlan) -> int:
    """Half of what rings hold, or the most below: while one half is worked on, the other is filled, and rows of dX go
    back before all are made."""
    steps = forward.rings.x_slots // forward.rings.step_rows
    most = max((d for d in range(1, steps // 2 + 1) if steps % d == 0), default=1)
    return most * forward.rings.step_rows


def plan_moe_backward(forward: MoeForwardPlan, round_rows: int | None = None) -> MoeBackwardPlan:
    """The plan of the backwards of what `forward` plans.

    Raises: ValueError: no such launch can run; says why.
    """
    return MoeBackwardPlan(forward, default_round_rows(forward) if round_rows is None else round_rows)
