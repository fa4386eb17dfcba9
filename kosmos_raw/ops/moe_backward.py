"""moe_backward: the gradients of an MoE layer, in one launch a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..build.params import MOE_BACKWARD, MOE_BACKWARD_MXFP8
from ..device.base import Matrix
from ..plan.moe.backward import OP, QUANT_WIDTH, ROUTER_PARTS, MoeBackwardPlan, plan_moe_backward
from ..plan.moe.forward import tile_of
from .arguments import as_matrix, hand_over, is_plain, local_operand, result
from .moe_gradients import Gradient, MoEGradients, destination, gradients
from .moe_saved import MoESaved
from .moe_weights import MoEWeights, Prepared, fill_copy

if TYPE_CHECKING:
    from .moe_forward import MoELayer


ARRIVES = tuple(f"{OP}.{name}" for name in ("dy_at", "dx_at", "x_columns_at"))  # regions that peers write into


@dataclass
class Forwarded:
    """The forward that a backward goes back through."""

    saved: MoESaved
    call: tuple[Any, ...]  # what was equal on all ranks
    weights: Prepared  # of which the params have addresses
    backwards: int = 0  # so far

    @property
    def asked(self) -> bool:
        """Whether the router was."""
        return self.saved.given != "experts_and_weights"


class MoEBackward:
    """Backwards of one layer. Making one and `run` are collective."""

    def __init__(self, layer: MoELayer, round_rows: int | None):
        self.layer, self.comm = layer, layer.comm
        self.plan: MoeBackwardPlan = plan_moe_backward(layer.plan, round_rows)
        tile = tile_of(self.comm.kernel(self.plan.kernel).tile, layer.plan.dtype)
        if tile != layer.plan.tile:
            raise ValueError(f"{OP}: its tile is {tile}, the forward's {layer.plan.tile}; they must be the same")
        self._bytes = self.plan.local_bytes()
        self._right: tuple[Prepared, bool, Any] | None = None  # own_right, and of what it is made

    def run(
        self,
        of: Forwarded,
        dy: Any,
        aux_grad: float,
        dx: Any | None,
        into: MoEWeights | None,
        accumulate: bool,
    ) -> MoEGradients:
        comm, plan = self.comm, self.plan
        dy = as_matrix(comm, OP, "dy", dy)
        x = of.saved.x
        shape = tuple(x.shape)
        if tuple(dy.shape) != shape:
            raise ValueError(
                f"{OP}: dy has shape {tuple(dy.shape)}, want {shape}, as the forward's x on rank {comm.rank}"
            )
        dx = result(comm, OP, dx, shape, x.dtype, {"x": x, "dy": dy}, "dx")
        to = destination(comm, plan, into, accumulate, x.dtype, {"x": x, "dy": dy, "dx": dx})
        params = self._params(of, dy, dx, aux_grad)
        made = list(
            gradients(
                comm,
                plan,
                to,
                accumulate,
                int(params["router_rows"][0]) if plan.router_ld(not of.asked) else 0,
                of.asked,
            )
        )
        for gradient in made:
            self._fill_gradient(params[gradient.name], gradient)
            gradient.bring()
        p = params[0]
        call = (*of.call, plan.round_rows, int(p["replays_all"]), int(p["dy_at"]), int(p["dx_at"]))
        tokens = int(p["tokens"])
        comm.launch(OP, params, call, plan.counter_words(tokens), self._operands(of, params), kernel=self.plan.kernel)
        of.backwards += 1
        for gradient in made:
            gradient.take()
        hand_over(comm, int(p["dx"]), dx, plan.forward.config.hidden)
        top_k = plan.forward.config.top_k
        slots = self._array("dweights", (tokens, top_k), np.uint64)
        slot_weights = (slots >> 32).astype(np.uint32).view(np.float32)
        logits = None
        if of.asked:
            columns = int(p["router_rows"])
            logits = self._array("dlogits", (tokens, columns), np.float32)[:, : plan.forward.config.experts].copy()
        return MoEGradients(dx, to, slot_weights, logits)

    # -- what a call is made of

    def _params(self, of: Forwarded, dy: Any, dx: Any, aux_grad: float) -> np.ndarray:
        comm, plan, f = self.comm, self.plan, self.plan.forward
        hidden = f.config.hidden
        params = np.zeros(1, MOE_BACKWARD_MXFP8 if f.is_mxfp8 else MOE_BACKWARD)
        p = params[0]
        for name in of.saved.params.dtype.names or ():
            params[name] = of.saved.params[name]
        self.layer.place_rings(p)
        if f.is_mxfp8:
            self._fill_copies(p, of.weights)
        for name, nbytes in (("dy_at", plan.dy_bytes), ("dx_at", plan.landing_bytes)):
            p[name] = comm.symmetric_region(f"{OP}.{name}", max(256, nbytes), OP)[0] // 16
        for name in self._bytes.keys() & set(MOE_BACKWARD.names or ()) - {"pre", "dx", "dout"}:
            p[name] = self._room(name)
        if not p["pre"]:
            p["pre"] = self._room("pre")
        p["dout"] = local_operand(comm, f"{OP}.dout", dy, hidden)
        p["dx"] = comm.device.address_of(dx) if is_plain(comm, dx, hidden) else self._room("dx")
        p["aux_grad"] = aux_grad
        p["round_rows"], p["piece_cap"], p["side_by_side"] = plan.round_rows, plan.piece_cap, plan.side_by_side
        p["replays_all"] = of.backwards > 0 or self.layer.recompute
        p["router_copies"], p["router_ld"] = plan.router_copies, plan.router_ld(not of.asked)
        p["own_ld"] = plan.own_ld(not of.asked)
        p["own_right"] = comm.device.address_of(self._own_right(of)) if p["own_ld"] else 0
        self._fill_tiles(p)
        return params

    def _fill_copies(self, p: Any, weights: Prepared) -> None:
        comm, plan, layer = self.comm, self.plan, self.layer
        for name, (lines, depth) in plan.copies.items():
            layer.place_copy(p[f"{name}_copy"], self._room(f"{name}_copy"), lines, depth)
        at = comm.symmetric_region(f"{OP}.x_columns_at", max(256, plan.x_columns_bytes), OP)[0]
        p["x_columns_at"] = at // 16
        p["x_column_scales_at"] = (at + plan.forward.elements_bytes(*plan.x_columns_shape)) // 16
        for name in ("gate_up_columns", "down_columns"):
            fill_copy(comm, p[name], getattr(weights, name))
        p["quants"], p["quant_width"], p["tile_k"] = plan.quants, QUANT_WIDTH, plan.tile_k

    def _fill_tiles(self, p: Any) -> None:
        tile, f = self.plan.forward.tile, self.plan.forward
        hidden, both, shared = f.config.hidden, 2 * f.width, f.shared_width
        p["tile_m"], p["tile_n"], p["lead"] = tile.m, tile.n, f.workgroups
        columns = {"cols_h": hidden, "cols_i": f.width, "cols_2i": both, "cols_s": shared}
        rows = {"rows_h": hidden, "rows_2i": both, "rows_2s": 2 * shared, "rows_r": int(p["router_rows"])}
        for widths, height in ((columns, tile.n), (rows, tile.m)):
            for name, width in widths.items():
                p[name] = -(-width // height)

    def _fill_gradient(self, to: Any, gradient: Gradient) -> None:
        to["to"], to["into"] = gradient.address, gradient.into
        if gradient.rounded:  # what is added in turns is rounded once
            to["sums"] = self.comm.local(f"{OP}.{gradient.name}.sums", max(16, 4 * gradient.elements))

    def _own_right(self, of: Forwarded) -> Any:
        """[own_ld, hidden]: what multiplies copies of dlogits, and the shared expert's weight behind."""
        if self._right is not None and self._right[0] is of.weights and self._right[1] == of.asked:
            return self._right[2]
        plan, f, w = self.plan, self.plan.forward, of.weights
        ld, rows = plan.router_ld(not of.asked), f.router_rows(not of.asked)
        right = self.comm.device.xp.zeros((plan.own_ld(not of.asked), f.config.hidden), np.uint16)
        router = (w.router if of.asked else w.gate_alone).view(np.uint16)
        for copy, part in enumerate(ROUTER_PARTS[f.router_parts] if rows else ()):
            right[copy * ld : copy * ld + rows] = router[part * rows : (part + 1) * rows]
        if w.shared_gate_up is not None:
            right[plan.router_copies * ld :] = w.shared_gate_up.view(np.uint16)
        self._right = of.weights, of.asked, right
        return right

    def _operands(self, of: Forwarded, params: np.ndarray) -> list[Matrix]:
        """All matrices that tiles read, first by their rows or columns, then by k."""
        p, f, arena = params[0], self.plan.forward, self.comm.arena
        hidden = f.config.hidden
        own = len(f.config.experts_of(self.comm.rank, f.ranks))
        w, tokens, ring, own_ld = p["weights"], int(p["tokens"]), self.plan.ring_rows, int(p["own_ld"])
        x_ring, dy = (arena.address(self.comm.rank, int(p[name]) * 16) for name in ("x_at", "dy_at"))
        of_experts, by_k = [], []
        if f.is_mxfp8:
            of_experts = self._copies_read(p, own, x_ring)
        else:
            of_experts = [
                (x_ring, ring, hidden),
                (w["gate_up"], own * 2 * f.width, hidden),
                (dy, ring, hidden),
                (p["dpre"], ring, 2 * f.width),
            ]
            by_k = [
                (w["down"], own * hidden, f.width),
                (w["gate_up"], own * 2 * f.width, hidden),
                (dy, ring, hidden),
                (p["h"], ring, f.width),
                (p["dpre"], ring, 2 * f.width),
                (x_ring, ring, hidden),
            ]
        by_rows = [*of_experts, (p["dout"], tokens, hidden), (p["own_left"], tokens, own_ld)]
        by_k += [
            (w["shared_down"], hidden, f.shared_width),
            (p["dout"], tokens, hidden),
            (p["shared_h"], tokens, f.shared_width),
            (p["own_left"], tokens, own_ld),
            (p["x"], tokens, hidden),
            (p["own_right"], own_ld, hidden),
        ]
        read = [(*matrix, True) for matrix in by_rows] + [(*matrix, False) for matrix in by_k]
        return [Matrix(int(at), lines, width, width, rows) for at, lines, width, rows in read if lines and width]

    def _copies_read(self, p: Any, own: int, x_ring: int) -> list[tuple[Any, int, int]]:
        """What experts' tiles read in MXFP8, all by rows."""
        f, hidden, both = self.plan.forward, self.plan.forward.config.hidden, 2 * self.plan.forward.width
        lines, across = self.plan.x_columns_shape
        weights = [
            (p["mx"]["gate_up"], own * both, f.depth),
            (p["down_columns"], f.width, own * f.depth),
            (p["gate_up_columns"], hidden, own * both),
            (p["h_columns_copy"], f.width, across),
        ]
        made = [(p[f"{name}_copy"], *self.plan.copies[name]) for name in ("dy", "dpre", "dy_columns", "dpre_columns")]
        x_columns = self.comm.arena.address(self.comm.rank, int(p["x_columns_at"]) * 16)
        return [
            (x_ring, self.plan.ring_rows, f.depth),
            (x_columns, lines, across),
            *((copy["elements"], count, depth) for copy, count, depth in [*weights, *made]),
        ]

    def _room(self, name: str) -> int:
        return self.comm.local(f"{OP}.{name}", max(16, self._bytes[name]))

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.comm.device.array(self._room(name), shape, dtype, self.comm)
