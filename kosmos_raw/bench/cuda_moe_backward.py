"""moe_backward, and whole steps, on CUDA GPUs beside the unfused layer's: see cuda_moe.py.

On both sides it is the whole layer: rows of routed experts, weights of choices, router with its auxiliary loss, shared
expert with its gate; gradients of weights in BF16, into memory that is there (ours) or that PyTorch's allocator holds.
Each backward has a forward of its own before it, which in Backward is not timed, and from which it knows all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from ..numerics.bf16 import widen
from ..ops.moe_forward import MoELayer
from ..ops.moe_gradients import MoEGradients
from ..ops.moe_weights import MoEWeights
from ..plan.moe.backward import OP
from ..ranks.communicator import POISON
from .checking import normal
from .cuda_moe import Problem, Timed, off
from .moe_peer import MoePeer, Sizes
from .moe_peer_backward import PeerGradients, alone, backward
from .moe_rows import KNOWN, PRODUCTS, STEP, UNFUSED

# Compared by the scale of all of it: a row's own may be that of a difference of equal numbers, as where a token has one
# expert, or an expert no token.
OF_ROUTER = ("router", "shared_gate", "slot_weights", "logits")


class Backward(Problem):
    """The backward is what is timed."""

    op = OP
    launches = 2

    def __init__(self, *given: Any):
        super().__init__(*given)
        xp = self.xp
        self.dy, self.dx = normal(xp, len(self.x), self.config.hidden), xp.empty_like(self.x)
        w = {f.name: getattr(self.weights(), f.name) for f in fields(MoEWeights)}
        self.into = MoEWeights(
            **{name: None if a is None or name == "bias" else xp.empty_like(a) for name, a in w.items()}
        )

    def ours(self, layer: MoELayer) -> Timed:
        return Timed(lambda: self.back(layer), lambda: layer.forward(self.x, out=self.out))

    def back(self, layer: MoELayer) -> MoEGradients:
        return layer.backward(self.dy, dx=self.dx, into=self.into)

    def peers(self, peer: MoePeer, sizes: Sizes) -> dict[str, Timed]:
        x, dy, kept = self.tensor(self.x), self.tensor(self.dy), []
        return {
            UNFUSED: Timed(
                lambda: backward(peer, kept.pop(), dy),
                lambda: kept.append(peer.forward(x, sizes, keep=True)[1]),
            ),
            PRODUCTS: Timed(alone(peer, peer.forward(x, sizes)[1], dy)),
        }

    def check(self, repeats: int) -> float:
        """Every variant on poisoned memory: its gradients against the peer's with ours' choices, and the bits of
        `repeats` calls of the first and two of the others. Returns how much of what is allowed is used.

        Raises: ValueError when something is wrong.
        """
        largest, wanted, chosen = 0.0, None, None
        for name, layer in self.layers.items():
            what, first = f"bench {self.op} {self.model}, {name}", None
            for _ in range(2 if chosen is not None else max(1, repeats)):
                got, ids = self._poisoned_step(layer)
                if first is None:
                    first = {part: array.copy() for part, array in got.items()}
                for part, array in got.items():
                    if different := int((array.view(first[part].dtype) != first[part]).sum()):
                        raise ValueError(f"{what}: {different} elements of {part} differ from those of the first call")
            if chosen is None or wanted is None:
                chosen = ids
                peer = self.make_peer(exact=True)
                _, kept = peer.forward(self.tensor(self.x), ids=self.chosen(what, peer, ids), keep=True)
                wanted = self._by_name(backward(peer, kept, self.tensor(self.dy)))
            elif (ids != chosen).any():
                raise ValueError(f"{what}: chooses other experts than the first variant")
            assert first is not None
            largest = max(largest, *(self._off(what, part, first[part], wanted[part]) for part in first))
        return largest

    def _poisoned_step(self, layer: MoELayer) -> tuple[dict[str, Any], Any]:
        """(gradients by name, bits or float32; choices) of a forward and a backward."""
        layer.forward(self.dy, out=self.out)  # rings that keep what they had then have rows of another call
        layer.backward(self.x, dx=self.dx, into=self.into)
        self.comm.poison()
        layer.poison()
        outputs = {f.name: getattr(self.into, f.name) for f in fields(MoEWeights) if f.name != "bias"}
        outputs = {"x": self.dx} | {name: array for name, array in outputs.items() if array is not None}
        for array in (self.out, *outputs.values()):
            array[...] = POISON
        _, saved = layer.forward(self.x, out=self.out)
        ids = saved.experts
        layer.poison(forwarded=False)
        g = self.back(layer)
        self.comm.synchronize()
        return outputs | {"slot_weights": g.slot_weights, "logits": g.logits}, ids

    def _by_name(self, g: PeerGradients) -> dict[str, Any]:
        E = self.config.experts
        found = vars(g) | {"router": g.router[:E], "logits": g.logits[:, :E]}
        return found | ({"shared_gate": g.router[E]} if self.config.gated_shared else {})

    def _off(self, what: str, part: str, ours: Any, theirs: Any) -> float:
        def pairs() -> Iterator[tuple[str, Any, Any]]:
            if ours.ndim == 3:  # one expert at a time: all of them in float32 are more than there is room for
                for e, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                    yield f"{part} of expert {e}", one, other
            elif part in OF_ROUTER:
                yield part, ours.reshape(1, -1), theirs.reshape(1, -1)
            else:
                yield part, ours, theirs

        used = 0.0
        for name, one, other in pairs():
            values = widen(one) if one.dtype == np.uint16 else one
            used = max(used, off(f"{what}, gradient of {name}", values, self.xp.asarray(other.float()), self.xp))
        return used


class Step(Backward):
    """A forward and its backward are what is timed."""

    op = STEP
    launches = 3

    def ours(self, layer: MoELayer) -> Timed:
        def step() -> None:
            layer.forward(self.x, out=self.out)
            self.back(layer)

        return Timed(step)

    def peers(self, peer: MoePeer, sizes: Sizes) -> dict[str, Timed]:
        x, dy = self.tensor(self.x), self.tensor(self.dy)
        kept = peer.forward(x, sizes)[1]
        forward_alone, backward_alone = peer.alone(kept), alone(peer, kept, dy)

        def step(known: Sizes | None) -> None:
            backward(peer, peer.forward(x, known, keep=True)[1], dy)

        def products() -> None:
            forward_alone()
            backward_alone()

        return {UNFUSED: Timed(lambda: step(None)), KNOWN: Timed(lambda: step(sizes)), PRODUCTS: Timed(products)}


PROBLEMS: dict[str, type[Problem]] = {kind.op: kind for kind in (Problem, Backward, Step)}
