"""moe_forward: a whole MoE layer, from the router to the fold, in one launch a rank."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from ..build.params import MOE_FORWARD, MOE_FORWARD_MXFP8, MOE_GIVEN, MOE_NOBODY, MOE_SCORES
from ..device.base import Matrix
from ..plan.moe.config import MoEConfig
from ..plan.moe.forward import LANES, OP, TOKEN_WORDS, Crews, MoeForwardPlan, kernel_of, plan_moe_forward
from ..plan.moe.sizes import Rings
from ..ranks.communicator import POISON, Communicator
from .arguments import as_matrix, local_operand, result, symmetric_operand
from .moe_backward import ARRIVES, Forwarded, MoEBackward
from .moe_gradients import MoEGradients
from .moe_saved import MoESaved
from .moe_weights import MoEWeights, Prepared, fill_copy, parts_of, refuse_extra

OF_ALL_LAYERS = ("h", "h_copy", "y")  # what no launch finds as another one has left it
X_RING = "moe.x_ring"  # nor does any find so this region, of layers whose backwards push again what they read of x


class MoELayer:
    """An MoE layer under expert parallelism: each rank has tokens of its own, and ceil(experts / ranks) experts.

    `forward` is one launch a rank, with no word from the host in between: logits, choices, plan, dispatch beside
    GEMM1, GEMM2 beside combine, the shared expert in every gap, fold (paper section 3.3.1). Rows that ranks receive lie
    in rings that need not hold all of them, so any routing runs in the same memory, and no token is dropped. Bits
    depend on neither rings, crews nor who was first.

    Args:
        config: equal on all ranks.
        weights: of this rank. They are copied into the kernel's layout; `set_weights` takes new ones.
        tokens: the most that a rank will have in a call, equal on all ranks.
        rings: how many received tile rows lie in memory at a time; None: 1.5 times balanced rows.
        policy: how WGs divide moving and building, see plan.moe.forward.crews_for; crews: instead of what follows.
        dtype: "bf16", or "mxfp8": experts multiply rows and weights that are quantised. Router, shared expert, and what
            comes back from experts are as in "bf16".
        pad: to whose multiples the rows of a source for an expert are filled up with zeros; a divisor of a tile's rows.
            None: 1; in MXFP8 32, of which it must be a multiple.
        pull: owners pull rows, instead of sources pushing them.
        keep: keeps what `backward` needs.
        recompute: `backward` pushes rows and makes pre-activations of experts again, to the same bits. Kept are tokens,
            routing and experts' rows of the output; rings then belong to all layers.
        round_rows: see plan.moe.backward; bits of experts' gradients depend on it. None: half of what rings hold.
        strided: takes a hot expert's rows from all sources at a time.
    Making one, `forward` and `close` are collective.
    Raises:
        ValueError, TypeError: an argument is wrong; says what came and what was wanted.
        ArenaFull: the rings and the combine buffer do not fit in the arena.
    """

    _numbers = count()
    forwards = 0  # so many so far

    def __init__(
        self,
        comm: Communicator,
        config: MoEConfig,
        weights: MoEWeights,
        *,
        tokens: int,
        rings: Rings | None = None,
        policy: str = "two_way",
        crews: Crews | None = None,
        dtype: str = "bf16",
        pad: int | None = None,
        pull: bool = False,
        keep: bool = True,
        recompute: bool = False,
        round_rows: int | None = None,
        strided: bool = True,
    ):
        self.comm, self.config, self.strided, self.recompute = comm, config, strided, recompute
        refuse_extra(config, weights)
        kernel = comm.kernel(kernel_of(OP, dtype))
        self.plan: MoeForwardPlan = plan_moe_forward(
            config,
            comm.ranks,
            tokens,
            kernel.tile,
            comm.workgroups,
            rings=rings,
            policy=policy,
            crews=crews,
            pad=pad,
            pull=pull,
            keep=keep,
            router_parts=parts_of(weights),
            link=comm.device.link,
            dtype=dtype,
            bf16_tiles=not comm.device.multiplies_mxfp8,
        )
        comm.arena.need_signals(self.plan.signal_bytes, OP)
        self._name = f"{OP}.{next(self._numbers)}"
        self._bytes = self._sizes()
        self.set_weights(weights)
        hidden = config.hidden
        self._round_rows = round_rows
        self._backward: MoEBackward | None = None
        self._last: Forwarded | None = None
        self._x_ring = None if self.is_without_rows else comm.empty((self.plan.x_bytes,), np.uint8)
        self._combine = comm.empty((max(1, tokens * config.top_k), hidden), np.uint16)
        self._list = comm.empty((max(2, tokens * config.top_k),), np.uint64)

    @property
    def is_without_rows(self) -> bool:
        """Whether it keeps no rows of experts: recomputed, or in MXFP8, where a backward has columns of all of them
        pushed anyway, and reads rows only where it has them pushed again."""
        return self.recompute or self.plan.is_mxfp8

    def set_weights(self, weights: MoEWeights) -> None:
        """Takes new weights, of the same shapes. Not collective."""
        if parts_of(weights) != self.plan.router_parts:
            raise TypeError(f"{OP}: weights.router has dtype {weights.router.dtype}, another one than before")
        self.weights = Prepared(self.comm, self.plan, weights)

    def forward(
        self, x: Any, *, experts: Any | None = None, weights: Any | None = None, out: Any | None = None
    ) -> tuple[Any, MoESaved]:
        """The layer on this rank's tokens.

        Args:
            x: bf16 [T, hidden], T at most the layer's tokens; ranks may differ, and have none.
            experts: integers [T, top_k], all different in a row: the choices, which the router then does not make.
                Their weights are its scores (hash routing), unless `weights` are given too.
            weights: float32 [T, top_k].
            out: bf16 [T, hidden] to fill; None allocates it. Must not overlap x.
        Returns: (Y of x's dtype, what the backward needs).
        """
        config, plan = self.config, self.plan
        x = as_matrix(self.comm, OP, "x", x)
        tokens = x.shape[0]
        if x.shape[1] != config.hidden or tokens > plan.tokens:
            raise ValueError(
                f"{OP}: x has shape {tuple(x.shape)}, want at most {plan.tokens} tokens of {config.hidden} on rank "
                f"{self.comm.rank}; make the layer with tokens={max(tokens, plan.tokens)}"
            )
        given = self._given(tokens, experts, weights)
        out = result(self.comm, OP, out, tuple(x.shape), x.dtype, {"x": x})
        direct = out.flags.c_contiguous and self.comm.device.address_of(out) % 16 == 0
        params = self._params(x, given)
        target = self.comm.device.address_of(out) if direct else self._room("out")
        params["out"] = target
        rings = plan.rings
        # What must be equal on all ranks. The rest of the rings, and the crews, need not.
        call: tuple[Any, ...] = (
            config,
            plan.tokens,
            plan.tile.m,
            plan.pad,
            plan.pull,
            rings.step_rows,
            rings.x_slots,
            self.strided,
            plan.dtype,
        )
        places = ("x_at", "combine_at", "counts_at", *(("source_at", "list_at") if plan.pull else ()))
        call += tuple(int(params[name][0]) for name in places)
        self._last = None
        operands = self._operands(params, tokens)
        self.comm.launch(OP, params, call, plan.counter_words(tokens), operands, kernel=plan.kernel)
        if not direct:
            out.view(np.uint16)[...] = self._array("out", tuple(x.shape), np.uint16)
        self.forwards += 1
        saved = MoESaved(self, x, given, params, self.forwards)
        self._last = Forwarded(saved, call, self.weights)
        return out, saved

    def backward(
        self,
        dy: Any,
        *,
        aux_grad: float = 1.0,
        dx: Any | None = None,
        into: MoEWeights | None = None,
        accumulate: bool = False,
    ) -> MoEGradients:
        """Gradients of the layer's last forward, in one launch a rank (paper section 3.3.2). Collective.

        Rows that rings no longer hold are pushed, and pre-activations made, once more: bits are the same in any memory.
        The forward's x must be as it was. May be called again, then without the help of what rings have held.

        Args:
            dy: bf16 [T, hidden]: dL/dY of this rank's tokens.
            aux_grad: dL/d(auxiliary loss).
            dx: bf16 [T, hidden] to fill; None allocates it. Must overlap neither x nor dy.
            into: arrays to fill, each bf16 or float32; None allocates bf16.
            accumulate: adds to them instead. Sums are FP32, and rounded once.
        Returns: dL/dx and gradients of all weights.
        """
        if self._last is None:
            raise ValueError(f"{OP}: backward wants a forward before it, whose gradients it makes; call forward")
        if self._backward is None:
            self._backward = MoEBackward(self, self._round_rows)
        return self._backward.run(self._last, dy, aux_grad, dx, into, accumulate)

    def close(self) -> None:
        """Gives the layer's memory back. Collective; no launch may be under way."""
        for array in (self._x_ring, self._combine, self._list):
            if array is not None:
                self.comm.free(array)
        self.comm.forget(f"{self._name}.")

    def poison(self, *, forwarded: bool = True) -> None:
        """Fills with NaNs what Communicator.poison leaves alone and peers write into, in forwards and backwards.

        Args: forwarded: also what the last forward has left there; it has no backward then.
        """
        device, arena = self.comm.device, self.comm.arena
        of_calls = [arena.regions()[name] for name in (X_RING, *ARRIVES) if name in arena.regions()]
        places = [(arena.address(self.comm.rank, offset), nbytes) for offset, nbytes in of_calls]
        if forwarded:
            self._last = None
            kept = [array for array in (self._x_ring, self._combine, self._list) if array is not None]
            places += [(device.address_of(array), array.nbytes) for array in kept]
        for address, nbytes in places:
            device.fill(address, nbytes, POISON)

    # -- what a call is made of

    def _given(self, tokens: int, experts: Any | None, weights: Any | None) -> str:
        """What the caller gives, put where the kernel looks for it."""
        shape = (tokens, self.config.top_k)
        for name, value in (("experts", experts), ("weights", weights)):
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(f"{OP}: {name} has shape {tuple(value.shape)}, want {shape} on rank {self.comm.rank}")
        if experts is None:
            if weights is not None or self.config.hash_routing:
                raise ValueError(f"{OP}: give experts [T, top_k]: the config routes by a hash, or weights are given")
            return "no_choices"
        choices = self._array("choices", shape, np.uint64)
        choices[...] = experts.astype(np.uint64)
        if not self.comm.device.queues_launches and tokens and int(choices.max()) >= self.config.experts:
            raise ValueError(f"{OP}: experts has {int(choices.max())}, want 0 to {self.config.experts - 1}")
        if weights is None:
            return "experts"
        if weights.dtype != np.float32:
            raise TypeError(f"{OP}: weights has dtype {weights.dtype}, want float32")
        bits = self.comm.device.xp.ascontiguousarray(weights).view(np.uint32)
        choices |= bits.astype(np.uint64) << np.uint64(32)
        return "experts_and_weights"

    def _params(self, x: Any, given: str) -> np.ndarray:
        comm, c, plan = self.comm, self.config, self.plan
        params = np.zeros(1, MOE_FORWARD_MXFP8 if plan.is_mxfp8 else MOE_FORWARD)
        p = params[0]
        tokens = x.shape[0]
        self._fill_arena(p, x)
        self._fill_layout(p["layout"])
        self._fill_weights(p, given)
        for name in self._bytes.keys() & set(MOE_FORWARD.names or ()) - {"out"}:
            p[name] = self._room(name)
        self._fill_routing(p, tokens, given)
        p["x"] = (
            local_operand(comm, f"{self._name}.x", x, c.hidden) if not plan.pull else self._symmetric(p, "source_at")
        )
        p["clamp"] = np.inf if c.swiglu_limit is None else c.swiglu_limit
        p["tokens"], p["block"] = tokens, plan.block
        p["H"], p["I"], p["S"] = c.hidden, plan.width, plan.shared_width
        p["tile_n"], p["scans"], p["side_by_side"] = plan.tile.n, plan.scans, plan.side_by_side
        widths = (int(p["router_rows"]) * plan.router_parts, 2 * plan.width, c.hidden, 2 * plan.shared_width)
        for name, width in zip(("columns0", "columns1", "columns2", "shared_columns"), widths, strict=True):
            p[name] = -(-width // plan.tile.n)
        for name in ("x_slots", "h_slots", "y_slots", "lag"):
            p[name] = getattr(plan.rings, name)
        for name in ("movers", "senders", "crew", "crew_tiles"):
            p[name] = getattr(plan.crews, name)
        return params

    def _fill_arena(self, p: Any, x: Any) -> None:
        comm, plan, arena = self.comm, self.plan, self.comm.arena
        p["arena_of"][: comm.ranks] = [arena.address(q) for q in range(comm.ranks)]
        offset, nbytes = comm.symmetric_region("moe.counts", 2 * plan.counts_bytes, OP)
        p["counts_at"], p["counts_words"] = offset // 16, nbytes // 2 // 16
        self.place_rings(p)
        for name, array in (("combine_at", self._combine), ("list_at", self._list)):
            p[name] = (comm.device.address_of(array) - arena.address(comm.rank)) // 16
        p["list"] = comm.device.address_of(self._list)
        if plan.pull:
            most = plan.tokens * self.config.hidden * 2
            p["source_at"] = symmetric_operand(comm, OP, x, self.config.hidden, most) // 16

    def place_rings(self, p: Any) -> None:
        """Fills in where rings are now: those of all layers together may have moved."""
        comm = self.comm
        if self._x_ring is None:
            p["x_at"] = comm.symmetric_region(X_RING, self.plan.x_bytes, OP)[0] // 16
        else:
            p["x_at"] = (comm.device.address_of(self._x_ring) - comm.arena.address(comm.rank)) // 16
        rings, plan = self.plan.rings, self.plan
        p["h"], p["y"] = self._room("h"), self._room("y")
        if plan.is_mxfp8:
            mx = p["mx"]
            mx["depth"] = plan.depth
            mx["x_scales_at"] = int(p["x_at"]) + plan.elements_bytes(rings.x_slots * plan.tile.m, plan.depth) // 16
            self.place_copy(mx["h"], self._room("h_copy"), rings.h_slots * plan.tile.m, plan.width)

    def place_copy(self, to: Any, address: int, lines: int, depth: int) -> None:
        """Fills in a copy that the kernel makes at `address`."""
        to["elements"], to["scales"] = address, address + self.plan.elements_bytes(lines, depth)
        to["depth"], to["ld_scales"] = depth, lines

    def _symmetric(self, p: Any, name: str) -> int:
        return self.comm.arena.address(self.comm.rank, int(p[name]) * 16)

    def _fill_layout(self, layout: Any) -> None:
        comm, plan, t = self.comm, self.plan, self.plan.tables
        layout["tables"] = self._room("tables")
        layout["rank"], layout["ranks"] = comm.rank, comm.ranks
        layout["experts"], layout["per_rank"] = self.config.experts, self.config.per_rank(comm.ranks)
        layout["tile_m"], layout["pad"], layout["step_rows"] = plan.tile.m, plan.pad, plan.rings.step_rows
        layout["strided"], layout["pull"] = self.strided, plan.pull
        layout["row_cap"], layout["move_cap"], layout["send_cap"] = t.row_cap, t.move_cap, t.send_cap

    def _fill_weights(self, p: Any, given: str) -> None:
        have = self.weights
        router = have.gate_alone if given == "experts_and_weights" else have.router
        named = {"router": router, "bias": have.bias}
        named |= {"shared_gate_up": have.shared_gate_up, "shared_down": have.shared_down}
        for name in ("gate_up", "down"):
            if self.plan.is_mxfp8:
                fill_copy(self.comm, p["mx"][name], getattr(have, name))
            else:
                named[name] = getattr(have, name)
        for name, array in named.items():
            p["weights"][name] = 0 if array is None else self.comm.device.address_of(array)

    def _sizes(self) -> dict[str, int]:
        """Bytes of this rank's own memory, by name, for as many tokens as the layer may have: nothing moves from call
        to call. Names are those of the params, but for tables, out and x."""
        c, plan, most = self.config, self.plan, self.plan.tokens
        tile_m, rings = plan.tile.m, plan.rings
        rows = {"h": rings.h_slots * tile_m * plan.width, "y": rings.y_slots * tile_m * c.hidden}
        rows |= {"shared_h": most * plan.shared_width, "shared_y": most * c.hidden * bool(c.shared_width)}
        if plan.keep:
            rows |= {"shared_pre": 2 * rows["shared_h"]} | ({} if self.recompute else {"pre": 2 * rows["h"]})
        words = {"choices": most * c.top_k, "token_scratch": TOKEN_WORDS * most, "places": plan.blocks * c.experts}
        words |= {"aux_parts": plan.blocks * c.experts, "aux_sums": c.experts, "aux_loss": 1}
        words |= {"row_of_slot": most * c.top_k, "scan_room": LANES}
        logits = most * plan.router_rows(False) * plan.router_parts
        floats = {"logits": logits, "scores": most * -(-c.experts // 4) * 4}
        sizes = {"tables": plan.table_words * 8, "out": most * c.hidden * 2}
        if plan.is_mxfp8:
            sizes["h_copy"] = plan.operand_bytes(rings.h_slots * tile_m, plan.width)
        sizes |= {name: 2 * n for name, n in rows.items()} | {name: 4 * n for name, n in floats.items()}
        return sizes | {name: 8 * n for name, n in words.items()}

    def _fill_routing(self, p: Any, tokens: int, given: str) -> None:
        c, plan, r = self.config, self.plan, p["routing"]
        weights_given = given == "experts_and_weights"
        r["top_k"], r["score"] = c.top_k, MOE_SCORES.index(c.score)
        r["normalise"] = c.normalises or c.softmax_after_topk
        r["groups"], r["top_groups"] = c.groups, c.top_groups
        r["group_top"] = min(c.group_score, c.experts_per_group)
        r["eps"], r["scale"] = 0 if c.softmax_after_topk else c.norm_eps, c.scaling
        if c.aux_loss != "none" and tokens and not weights_given:
            r["aux_scale"] = c.aux_loss_coeff * c.experts / (c.top_k * tokens * tokens)
        r["weigh_inputs"] = c.weight_on == "input"
        p["given"] = MOE_GIVEN.index(given)
        p["router_rows"] = rows = plan.router_rows(weights_given)
        p["router_parts"] = plan.router_parts
        p["logit_ld"] = rows * plan.router_parts
        p["gate_column"] = (0 if weights_given else c.experts) if c.gated_shared else MOE_NOBODY

    def _operands(self, params: np.ndarray, tokens: int) -> list[Matrix]:
        """All matrices that tiles read."""
        p, c, plan = params[0], self.config, self.plan
        own = len(c.experts_of(self.comm.rank, self.comm.ranks))
        w, ring = p["weights"], self.comm.arena.address(self.comm.rank, int(p["x_at"]) * 16)
        if plan.is_mxfp8:
            gate_up, h, down = (p["mx"][name]["elements"] for name in ("gate_up", "h", "down"))
        else:
            gate_up, h, down = w["gate_up"], p["h"], w["down"]
        read = [
            (p["x"], tokens, c.hidden),
            (w["router"], int(p["router_rows"]) * plan.router_parts, c.hidden),
            (ring, plan.rings.x_slots * plan.tile.m, plan.depth),
            (gate_up, own * 2 * plan.width, plan.depth),
            (h, plan.rings.h_slots * plan.tile.m, plan.width),
            (down, own * plan.depth, plan.width),
            (w["shared_gate_up"], 2 * plan.shared_width, c.hidden),
            (p["shared_h"], tokens, plan.shared_width),
            (w["shared_down"], c.hidden if plan.shared_width else 0, plan.shared_width),
        ]
        return [Matrix(int(at), lines, width, width, by_rows=True) for at, lines, width in read if lines and width]

    def _room(self, name: str) -> int:
        owner = "moe" if name in OF_ALL_LAYERS else self._name
        return self.comm.local(f"{owner}.{name}", max(16, self._bytes[name]))

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.comm.device.array(self._room(name), shape, dtype, self.comm)
