"""Gradients of an MoE layer's weights: where the kernel writes them, and how they come into the caller's arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..build.params import INTO
from ..plan.moe.backward import OP, MoeBackwardPlan
from ..ranks.communicator import Communicator
from .arguments import as_matrix, overlaps
from .bulk_rs import bits, into_number
from .moe_weights import MoEWeights


@dataclass(frozen=True)
class MoEGradients:
    """Of all that a call of a layer was given. Arrays of the device."""

    x: Any  # [T, hidden], as x
    # Of this rank's experts over all ranks' tokens; of the rest over this rank's. A bias has none: it only chooses.
    weights: MoEWeights
    slot_weights: Any  # [T, top_k] float32: of the weights of a token's choices, in their order
    logits: Any | None  # [T, experts] float32; None where choices and weights were given


def shapes(plan: MoeBackwardPlan, rank: int) -> dict[str, tuple[int, ...]]:
    """Of every weight that has a gradient, by its name in MoEWeights."""
    c = plan.forward.config
    own = len(c.experts_of(rank, plan.forward.ranks))
    found: dict[str, tuple[int, ...]] = {
        "router": (c.experts, c.hidden),
        "gate_up": (own, 2 * c.expert_width, c.hidden),
        "down": (own, c.hidden, c.expert_width),
    }
    if c.shared_width:
        found |= {"shared_gate_up": (2 * c.shared_width, c.hidden), "shared_down": (c.hidden, c.shared_width)}
    if c.gated_shared:
        found["shared_gate"] = (c.hidden,)
    return found


def destination(
    comm: Communicator,
    plan: MoeBackwardPlan,
    into: MoEWeights | None,
    accumulate: bool,
    dtype: Any,
    used: dict[str, Any],
) -> MoEWeights:
    """`into`, checked, or new arrays of `dtype`. `used`, by name, must overlap none of them."""
    wanted = shapes(plan, comm.rank)
    if into is None:
        if accumulate:
            raise ValueError(f"{OP}: accumulate=True adds to arrays; give them as into=MoEWeights(...)")
        made = {
            f.name: comm.device.xp.empty(wanted[f.name], dtype) if f.name in wanted else None
            for f in fields(MoEWeights)
        }
        return MoEWeights(**made)
    before = dict(used)
    for name, array in ((f.name, getattr(into, f.name)) for f in fields(MoEWeights)):
        if (array is None) != (name not in wanted):
            raise ValueError(
                f"{OP}: into.{name} is {'None' if array is None else 'given'}, but the layer has "
                f"{'one' if name in wanted else 'no gradient of it'}"
            )
        if array is None:
            continue
        as_matrix(comm, OP, f"into.{name}", array.reshape(-1, array.shape[-1]), float32=True)
        if tuple(array.shape) != wanted[name]:
            raise ValueError(
                f"{OP}: into.{name} has shape {tuple(array.shape)}, want {wanted[name]} on rank {comm.rank}"
            )
        for other, there in before.items():
            if overlaps(comm, array, there):
                raise ValueError(f"{OP}: into.{name} overlaps {other}, which is still used while it is written")
        before[f"into.{name}"] = array
    if into.shared_gate is not None and into.shared_gate.dtype != into.router.dtype:
        raise TypeError(
            f"{OP}: into.shared_gate has dtype {into.shared_gate.dtype} and into.router {into.router.dtype}, want the "
            "same: they are one matrix in the kernel"
        )
    return into


Pairs = Callable[[Any], list[tuple[Any, Any]]]  # of a copy: (the caller's array, what it is in the copy)


@dataclass(frozen=True)
class Gradient:
    """One matrix that the kernel makes: of the caller's arrays, or of a copy."""

    name: str  # in the params
    address: int
    into: int  # an Into
    elements: int
    copies: tuple[tuple[Any, Any], ...] = ()  # (the caller's, the same in the copy)

    def bring(self) -> None:
        """To the copy what is added to."""
        if INTO[self.into].startswith("add"):
            for own, copy in self.copies:
                copy[...] = bits(own)

    def take(self) -> None:
        for own, copy in self.copies:
            bits(own)[...] = copy

    @property
    def rounded(self) -> bool:
        return INTO[self.into].endswith("bf16")


def gradients(
    comm: Communicator, plan: MoeBackwardPlan, to: MoEWeights, accumulate: bool, router_rows: int, asked: bool
) -> Iterator[Gradient]:
    """What the kernel makes of a call.

    Args:
        router_rows: of the matrix that holds router and shared gate; 0: there is none.
        asked: whether the router is in it.
    """
    c, f = plan.forward.config, plan.forward
    if not asked and not accumulate:
        bits(to.router)[...] = 0

    def made(name: str, shape: tuple[int, ...], like: Any, pairs: Pairs) -> Gradient:
        """Straight into `like` if that has this shape, else into a copy."""
        elements, into = int(np.prod(shape)), into_number(like, accumulate)
        fits = tuple(like.shape) == shape and (asked or like is not to.router)
        if fits and like.flags.c_contiguous and comm.device.address_of(like) % 16 == 0:
            return Gradient(name, comm.device.address_of(like), into, elements)
        dtype = bits(like).dtype
        address = comm.local(f"{OP}.{name}", max(16, elements * dtype.itemsize))
        return Gradient(name, address, into, elements, tuple(pairs(comm.device.array(address, shape, dtype, comm))))

    if router_rows:
        gate = [] if to.shared_gate is None else [(to.shared_gate, c.experts if asked else 0)]
        yield made(
            "d_router",
            (router_rows, c.hidden),
            to.router,
            lambda copy: [(to.router, copy[: c.experts])] * asked + [(own, copy[row]) for own, row in gate],
        )
    yield from _of_expert(made, "", to.gate_up, to.down, c.expert_width, f.width)
    if c.shared_width:
        yield from _of_expert(made, "shared_", to.shared_gate_up, to.shared_down, c.shared_width, f.shared_width)


def _of_expert(
    made: Callable[..., Gradient], prefix: str, gate_up: Any, down: Any, width: int, padded: int
) -> Iterator[Gradient]:
    """Of one or many experts, whose width the kernel has padded."""
    *lead, _, hidden = gate_up.shape

    def halves(copy: Any) -> list[tuple[Any, Any]]:
        return [
            (gate_up[..., i * width : (i + 1) * width, :], copy[..., i * padded : i * padded + width, :])
            for i in range(2)
        ]

    yield made(f"d_{prefix}gate_up", (*lead, 2 * padded, hidden), gate_up, halves)
    yield made(f"d_{prefix}down", (*lead, hidden, padded), down, lambda copy: [(down, copy[..., :width])])
