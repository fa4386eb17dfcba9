"""What a forward of an MoE layer leaves for its backward: where it lies, in which shape and type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KosmosError
from ..plan.moe.forward import OP

if TYPE_CHECKING:
    from .moe_forward import MoELayer


@dataclass(frozen=True)
class MoESaved:
    """Arrays of the device, in the layer's own memory: nothing was copied for them. So they live until the layer's
    next forward, and asking for one after that raises KosmosError. Whoever runs several forwards before their
    backwards takes a layer for each.

    T: this rank's tokens, k: top_k, E: experts, R: ranks, H: hidden, I and S: widths of routed and shared experts,
    rounded up to 16. BF16 is uint16 bits. Tile row v of this rank is rows [s * tile_m, (s + 1) * tile_m) of a ring,
    where s is v modulo the ring's length: so an array of a ring holds what the last rows have left in it, and all of
    them if it is long enough. Which rows a tile row has follows from `counts` alone: numerics/moe/layout.py.
    """

    layer: MoELayer
    x: Any  # [T, H], as it was given
    given: str  # one of MOE_GIVEN: who made the choices
    params: np.ndarray = field(repr=False)  # MOE_FORWARD: the launch. Addresses of all that is here, and the rest of it
    launch: int = field(repr=False)

    # -- routing

    @property
    def choices(self) -> Any:
        """[T, k] uint64: expert, its weight's bits << 32."""
        return self._array("choices", (self._tokens, self._config.top_k), np.uint64)

    @property
    def experts(self) -> Any:
        """[T, k] int32, in the order in which they are folded. A copy."""
        return (self.choices & 0xFFFFFFFF).astype(np.int32)

    @property
    def weights(self) -> Any:
        """[T, k] float32. A copy."""
        return (self.choices >> 32).astype(np.uint32).view(np.float32)

    @property
    def logits(self) -> Any | None:
        """[T, E] float32; None where choices and weights were given."""
        return None if self.given == "experts_and_weights" else self._logits()[:, : self._config.experts]

    @property
    def shared_gate(self) -> Any | None:
        """[T] float32: logits of the shared expert's gate; None if it has none."""
        return self._logits()[:, int(self._p["gate_column"])] if self._config.gated_shared else None

    def _logits(self) -> Any:
        return self._array("logits", (self._tokens, int(self._p["logit_ld"])), np.float32)

    @property
    def scores(self) -> Any | None:
        """[T, E] float32, without the bias; None where choices and weights were given."""
        if self.given == "experts_and_weights":
            return None
        E = self._config.experts
        return self._array("scores", (self._tokens, -(-E // 4) * 4), np.float32)[:, :E]

    @property
    def aux_loss(self) -> Any:
        """[] float32; 0 where there is none."""
        return self._array("aux_loss", (2,), np.float32)[1]

    @property
    def aux_sums(self) -> Any:
        """[E] uint64: how many tokens the auxiliary loss counts, and << 32 the bits of the sum of their scores' shares.
        Of a config with such a loss."""
        return self._array("aux_sums", (self._config.experts,), np.uint64)

    # -- the plan: where rows lie

    def _table(self, name: str) -> Any:
        plan = self.layer.plan
        first, shape = plan.table_arrays[name]
        every = self._array("tables", (plan.table_words,), np.uint64, int(self._p["layout"]["tables"]))
        return every[first : first + int(np.prod(shape))].reshape(shape).astype(np.int32)

    @property
    def counts(self) -> Any:
        """[R, E] int32: rows that each rank has for each expert. A copy, as all of the plan."""
        return self._table("counts")

    @property
    def group_start(self) -> Any:
        """[R + 1, E] int32: where each rank's rows begin in their expert; last, the expert's rows. Padding included."""
        return self._table("starts")

    @property
    def send_base(self) -> Any:
        """[R, E] int32: where the rows for an expert begin in each rank's send list and combine buffer."""
        return self._table("bases")

    @property
    def tile_base(self) -> Any:
        """[E] int32: an expert's first tile row, at its owner."""
        return self._table("tile_bases")

    @property
    def strides(self) -> Any:
        """[E] int32: by which an expert's tiles are visited, see MoeLayout::tile_of."""
        return self._table("strides")

    @property
    def tile_rows(self) -> Any:
        """[] int32: of this rank."""
        return self._table("head")[2]

    @property
    def expert_of_row(self) -> Any:
        """[row_cap] int32: the expert of each tile row of this rank; the first `tile_rows` mean something."""
        return self._table("experts")

    @property
    def sources_of_row(self) -> Any:
        """[row_cap] int32: bit q is set if rank q has rows in the tile row."""
        return self._table("sources_of")

    @property
    def send_list(self) -> Any:
        """[T * k] uint64: token * k + slot, by expert, then by token."""
        return self._array("list", (self._tokens * self._config.top_k,), np.uint64)

    @property
    def row_of_slot(self) -> Any:
        """[T, k] uint64: where in the send list and in `combine` a token's slot is."""
        return self._array("row_of_slot", (self._tokens, self._config.top_k), np.uint64)

    # -- rows

    @property
    def received(self) -> Any | None:
        """[x_slots * tile_m, H] BF16: rows of x that this rank's experts were given (weighted, if inputs are). Rows of
        padding are zero, rows behind an expert's last hold anything. None of a layer that has them pushed again, as
        one in MXFP8 has."""
        return None if self.layer.is_without_rows else self._ring("x_slots", self._config.hidden, self._arena("x_at"))

    @property
    def pre(self) -> Any | None:
        """[h_slots * tile_m, 2 I] BF16 pre-activations: 16 of gate and 16 of up in turn (moe_weights.separated takes
        them apart). None of a layer that does not keep them."""
        address = int(self._p["pre"])
        return self._ring("h_slots", 2 * self.layer.plan.width, address) if address else None

    @property
    def combine(self) -> Any:
        """[T * k, H] BF16: experts' outputs for this rank's tokens, not weighted, in the order of `send_list`."""
        return self._array(
            "combine", (self._tokens * self._config.top_k, self._config.hidden), np.uint16, self._arena("combine_at")
        )

    @property
    def shared_pre(self) -> Any | None:
        """[T, 2 S] BF16, as `pre`; None without a shared expert, or if they are not kept."""
        wanted = self._config.shared_width and self.layer.plan.keep
        return (
            self._array("shared_pre", (self._tokens, 2 * self.layer.plan.shared_width), np.uint16) if wanted else None
        )

    @property
    def shared_y(self) -> Any | None:
        """[T, H] BF16: the shared expert's output, before its gate; None without one."""
        shape = (self._tokens, self._config.hidden)
        return self._array("shared_y", shape, np.uint16) if self._config.shared_width else None

    # --

    @property
    def _p(self) -> Any:
        return self.params[0]

    @property
    def _config(self) -> Any:
        return self.layer.config

    @property
    def _tokens(self) -> int:
        return int(self.x.shape[0])

    def _arena(self, name: str) -> int:
        comm = self.layer.comm
        return comm.arena.address(comm.rank, int(self._p[name]) * 16)

    def _ring(self, slots: str, width: int, address: int) -> Any:
        plan = self.layer.plan
        return self._array(slots, (getattr(plan.rings, slots) * plan.tile.m, width), np.uint16, address)

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any, address: int | None = None) -> Any:
        self.check()
        comm = self.layer.comm
        return comm.device.array(int(self._p[name]) if address is None else address, shape, dtype, comm)

    def check(self) -> None:
        """Raises KosmosError once the layer's next forward has taken the memory again."""
        if self.launch != self.layer.forwards:
            raise KosmosError(
                f"{OP}: what forward {self.launch} of the layer had saved was overwritten by forward "
                f"{self.layer.forwards}; want its backward before, or a layer for each"
            )
