"""What `validate moe_forward` does on every rank: random layers against the float64 oracle."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from ..device.base import Tile
from ..numerics import near, spread
from ..numerics.moe import generators
from ..numerics.moe.judge import judge_forward
from ..numerics.moe.layer import Weights, forward, lift
from ..numerics.tolerance import Comparison, compare
from ..ops.moe_forward import MoELayer
from ..ops.moe_saved import MoESaved
from ..ops.moe_weights import MoEWeights
from ..plan.moe.backward import plan_moe_backward
from ..plan.moe.config import MoEConfig
from ..plan.moe.forward import OP, MoeForwardPlan, kernel_of, plan_moe_forward
from ..plan.moe.sizes import Rings
from ..ranks.communicator import POISON, Communicator
from .validate import GUARD_ROWS, Outcome

RINGS = ("default", "smallest", "all")


@dataclass(frozen=True)
class MoeCase:
    """One layer, its tokens on each rank, and how it is run."""

    config: MoEConfig
    tokens: tuple[int, ...]
    routing: str = "balanced"
    rings: str = "default"  # "smallest": one tile row each; "all": every row of any routing
    policy: str = "two_way"
    pull: bool = False
    dtype: str = "bf16"  # of experts' products
    pad: int | None = None  # what the layer takes by itself
    float_router: bool = False  # FP32, in three BF16 parts
    given_weights: bool = False  # the caller gives choices and their weights
    iters: int = 2
    repeats: int = 2
    delay_us: int = 0
    seed: int = 0
    # of moe_backward
    into: str = "set_bf16"  # an Into (hip_kernels/work/sum.h): where gradients of weights go
    recompute: bool = False
    aux_grad: float = 1.0
    zero_dy: bool = False  # so that all gradients are those of the auxiliary loss

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def rings_for(self, tile: Tile) -> Rings | None:
        if self.rings == "default":
            return None
        return Rings.holding(1 if self.rings == "smallest" else self.plan(tile).tables.row_cap)

    def plan(self, tile: Tile, rings: Rings | None = None) -> MoeForwardPlan:
        """Of the device that wants most memory."""
        given: dict[str, Any] = {"pad": self.pad, "pull": self.pull, "dtype": self.dtype, "bf16_tiles": True}
        return plan_moe_forward(self.config, self.ranks, max(self.tokens), tile, 4, rings=rings, **given)

    def is_spread(self, iteration: int) -> bool:
        return spread.is_spread(self.dtype, iteration)

    def inputs(self, iteration: int) -> generators.Inputs:
        seed = self.seed * 1000 + iteration
        given = generators.inputs(self.config, self.tokens, self.routing, seed=seed)
        if self.is_spread(iteration):
            given = generators.spread(given, seed)
        if not self.float_router:
            return given
        rng = np.random.default_rng((self.seed, iteration))
        router = np.asarray(given.weights.router)
        router = router * (1 + rng.uniform(-(2.0**-9), 2.0**-9, router.shape))
        return replace(given, weights=replace(given.weights, router=router.astype(np.float32).astype(np.float64)))


def arena_bytes(case: MoeCase, tile: Tile) -> int:
    """Room for the layer of `case`, one like it with rings that hold all, and a backward of either."""
    plans = [case.plan(tile, replace(case, rings=rings).rings_for(tile)) for rings in (case.rings, "all")]
    # What backwards keep may grow, and then lies twice.
    return sum(p.arena_bytes for p in plans) + 2 * max(_backward_bytes(p) for p in plans)


def _backward_bytes(plan: MoeForwardPlan) -> int:
    """Of a layer's backward; 0 where it can have none."""
    try:
        return plan_moe_backward(plan).arena_bytes
    except ValueError:
        return 0


def own_weights(case: MoeCase, w: Weights, rank: int, xp: Any) -> MoEWeights:
    """Of this rank, on its device."""
    own = case.config.experts_of(rank, case.ranks)

    def bf16(array: Any) -> Any:
        return None if array is None else xp.asarray(array.astype(ml_dtypes.bfloat16).view(np.uint16))

    def router(array: Any) -> Any:
        return xp.asarray(array.astype(np.float32)) if case.float_router and array is not None else bf16(array)

    bias = None if w.bias is None else xp.asarray(w.bias.astype(np.float32))
    experts = slice(own.start, own.stop)
    return MoEWeights(
        router(w.router),
        bf16(w.gate_up[experts]),
        bf16(w.down[experts]),
        bf16(w.shared_gate_up),
        bf16(w.shared_down),
        router(w.shared_gate),
        bias,
    )


def make_layer(comm: Communicator, case: MoeCase, w: Weights, **options: Any) -> MoELayer:
    tile = comm.kernel(kernel_of(OP, case.dtype)).tile
    given: dict[str, Any] = {"rings": case.rings_for(tile), "policy": case.policy, "dtype": case.dtype}
    given |= {"pad": case.pad, "pull": case.pull, "recompute": case.recompute, **options}
    weights = own_weights(case, w, comm.rank, comm.device.xp)
    return MoELayer(comm, case.config, weights, tokens=max(case.tokens), **given)


def run(comm: Communicator, case: MoeCase, progress: bool = False) -> Outcome:
    """Runs `case` on this rank; every rank calls it. Each iteration has new weights and tokens."""
    outcome, xp = Outcome(), comm.device.xp
    layers = [make_layer(comm, case, case.inputs(0).weights)]
    if case.rings != "all":  # whose bits must be the same
        layers.append(make_layer(comm, replace(case, rings="all"), case.inputs(0).weights))
    dice, times = random.Random(case.seed * 8 + comm.rank), []
    comm.device.most_delay_us = case.delay_us
    bars = tqdm(range(case.iters), desc=OP, disable=None if progress and comm.rank == 0 else True, leave=False)
    for iteration in bars:
        given = case.inputs(iteration)
        x = given.x[comm.rank].astype(ml_dtypes.bfloat16).view(np.uint16)
        guarded = xp.empty((len(x) + 2 * GUARD_ROWS, case.config.hidden), np.uint16)
        out = guarded[GUARD_ROWS : len(guarded) - GUARD_ROWS]
        results = []
        for layer in layers:
            layer.set_weights(own_weights(case, given.weights, comm.rank, xp))
        for layer in [layers[0]] * case.repeats + layers[1:]:
            comm.poison()
            comm.device.fill(comm.device.address_of(guarded), guarded.nbytes, POISON)
            inputs = xp.array(x)
            time.sleep(dice.random() * case.delay_us * 1e-6)
            start = time.perf_counter()
            _, saved = layer.forward(inputs, out=out, **from_outside(case, given, comm.rank, xp))
            comm.synchronize()
            times.append(time.perf_counter() - start)
            results.append(_results(case, saved, guarded))
            if not np.array_equal(to_numpy(inputs), x):
                outcome.fail(f"iteration {iteration}: x was changed")
        _judge(outcome, case, given, comm.rank, iteration, results)
    comm.device.most_delay_us = 0
    outcome.seconds = sorted(times)[(len(times) - 1) // 2] if times else 0.0
    for layer in layers:
        layer.close()
    return outcome


def from_outside(case: MoeCase, given: generators.Inputs, rank: int, xp: Any) -> dict[str, Any]:
    """What the caller gives: the same in every call."""
    ids = None if given.ids is None else given.ids[rank]
    if not case.given_weights:
        return {} if ids is None else {"experts": xp.asarray(ids.astype(np.int32))}
    rng = np.random.default_rng((case.seed, rank))
    if ids is None:
        order = np.argsort(rng.random((case.tokens[rank], case.config.experts)), axis=-1)
        ids = order[:, : case.config.top_k]
    return {"experts": xp.asarray(ids.astype(np.int32)), "weights": xp.asarray(rng.random(ids.shape, np.float32))}


def _results(case: MoeCase, saved: MoESaved, guarded: Any) -> dict[str, np.ndarray]:
    found = {"out": guarded, "ids": saved.experts, "weights": saved.weights}
    if saved.logits is not None:
        found["logits"] = saved.logits
        if case.config.aux_loss != "none":
            found["aux"] = saved.aux_loss
    return {name: to_numpy(array) for name, array in found.items()}


def _judge(
    outcome: Outcome,
    case: MoeCase,
    given: generators.Inputs,
    rank: int,
    iteration: int,
    results: Sequence[dict[str, np.ndarray]],
) -> None:
    first = results[0]
    for other, again in enumerate(results[1:], 1):
        for name, value in first.items():
            if value.tobytes() != again[name].tobytes():
                outcome.bitwise_repeat = False
                which = "with rings that hold all" if other >= case.repeats else f"in run {other + 1}"
                outcome.fail(f"iteration {iteration}: {name}: other bits {which}")
    guards = np.concatenate([first["out"][:GUARD_ROWS], first["out"][len(first["out"]) - GUARD_ROWS :]])
    if not (guards == POISON).all():
        outcome.fail(f"iteration {iteration}: rows outside the output were written")
    got = dict(first)
    got["out"] = first["out"][GUARD_ROWS : len(first["out"]) - GUARD_ROWS].view(ml_dtypes.bfloat16).astype(np.float64)
    tokens = [case.tokens[rank]] if case.tokens[rank] else []
    if case.given_weights:
        compared = _judge_given(case, given, rank, got)
    else:
        compared = judge_forward(case.config, given.x[rank], given.weights, got, sequences=tokens, dtype=case.dtype)
        if case.dtype != "bf16" and not case.is_spread(iteration) and tokens:
            exact = forward(case.config, given.x[rank], given.weights, ids=got["ids"], sequences=tokens).out
            error = compare(got["out"], near.value_of(exact), np.ones(exact.shape)).rel_error
            outcome.format_error = max(outcome.format_error, error)
    for name, c in compared.items():
        if name == "out":
            outcome.max_abs_error = max(outcome.max_abs_error, c.max_abs_error)
            outcome.rel_error = max(outcome.rel_error, c.rel_error)
        outcome.over_bound = max(outcome.over_bound, c.over_bound)
        if not c.passed:
            outcome.fail(f"iteration {iteration}: {name} at {c.worst}: got {c.got}, want {c.wanted}")


def _judge_given(
    case: MoeCase, given: generators.Inputs, rank: int, got: dict[str, np.ndarray]
) -> dict[str, Comparison]:
    """Choices and weights must come back as they were; the output is the fold with them."""
    outside = from_outside(case, given, rank, np)
    x, w = lift(given.x[rank], given.weights)
    weights, sequences = near.Near.of(outside["weights"].astype(np.float64)), [len(got["ids"])]
    f = forward(case.config, x, w, ids=got["ids"], weights=weights, sequences=sequences, dtype=case.dtype)
    same = {
        "ids": compare(got["ids"], outside["experts"].astype(np.float64), np.full(got["ids"].shape, 0.5)),
        "weights": compare(got["weights"], outside["weights"].astype(np.float64), np.full(got["ids"].shape, 1e-30)),
    }
    assert isinstance(f.out, near.Near)
    return same | {"out": compare(got["out"], f.out.value, f.out.error)}


def to_numpy(array: Any) -> np.ndarray:
    return np.array(array.get() if hasattr(array, "get") else array)
