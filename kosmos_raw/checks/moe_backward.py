"""What `validate moe_backward` does on every rank: gradients of random layers against the float64 oracle."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from ..numerics import near
from ..numerics.moe import generators, judge
from ..numerics.moe.layer import Saved
from ..numerics.moe.routing import largest
from ..numerics.near import Near
from ..numerics.tolerance import FP32_EPS
from ..ops.moe_forward import MoELayer
from ..ops.moe_gradients import MoEGradients, shapes
from ..ops.moe_weights import MoEWeights, separated
from ..plan.moe.backward import OP, MoeBackwardPlan, plan_moe_backward
from ..plan.moe.sizes import Rings
from ..ranks.communicator import POISON, Communicator
from .moe import MoeCase, from_outside, make_layer, own_weights, to_numpy
from .validate import Outcome

GUARD = 64  # elements of poison before and behind every array that is written
EXPERTS = ("gate_up", "down")


def run(comm: Communicator, case: MoeCase, progress: bool = False) -> Outcome:
    """Runs `case` on this rank; every rank calls it. Each iteration has new weights and tokens."""
    outcome = Outcome()
    layers, plan = _layers(comm, case)
    dice, times = random.Random(case.seed * 8 + comm.rank), []
    comm.device.most_delay_us = case.delay_us
    bars = tqdm(range(case.iters), desc=OP, disable=None if progress and comm.rank == 0 else True, leave=False)
    for iteration in bars:
        made = case.inputs(iteration)
        if case.zero_dy:
            made = replace(made, dout=[np.zeros_like(d) for d in made.dout])
        for layer in layers.values():
            layer.set_weights(own_weights(case, made.weights, comm.rank, comm.device.xp))
        calls = {f"in run {i + 1}": "first" for i in range(case.repeats)}
        calls |= {f"with {name}": name for name in layers if name != "first"}
        results, saved = {}, None
        for what, name in calls.items():
            comm.poison()
            for layer in layers.values():
                layer.poison()
            time.sleep(dice.random() * case.delay_us * 1e-6)
            call = _Call(comm, case, plan, layers[name], made, iteration)
            call.forward()
            saved = saved or call.saved()
            start = time.perf_counter()
            results[what] = call.backward(outcome)
            times.append(time.perf_counter() - start)
        results["by a second backward"] = call.backward(outcome)
        _same_bits(outcome, iteration, results)
        _judge(outcome, comm, case, made, saved, plan, iteration, next(iter(results.values())))
    comm.device.most_delay_us = 0
    outcome.seconds = sorted(times)[(len(times) - 1) // 2] if times else 0.0
    for layer in layers.values():
        layer.close()
    return outcome


def _layers(comm: Communicator, case: MoeCase) -> tuple[dict[str, MoELayer], MoeBackwardPlan]:
    """The layer of `case`, and others whose bits must be the same."""
    weights = case.inputs(0).weights
    layers = {"first": make_layer(comm, case, weights)}
    plan = plan_moe_backward(layers["first"].plan)
    rows, rounds = plan.round_rows, plan.rounds
    if case.rings != "all":
        all_rows = Rings(rows, rounds - 1, rounds * rows, rounds * rows, rows)
        layers["rings that hold all"] = make_layer(comm, case, weights, rings=all_rows, round_rows=rows)
    layers["recompute" if not case.recompute else "no recompute"] = make_layer(
        comm, case, weights, recompute=not case.recompute
    )
    return layers, plan


@dataclass
class _Results:
    bits: dict[str, np.ndarray]  # of all that came out, guards included where an array has some
    values: dict[str, np.ndarray]  # float64


class _Call:
    """A forward and backwards of it on one rank."""

    def __init__(
        self,
        comm: Communicator,
        case: MoeCase,
        plan: MoeBackwardPlan,
        layer: MoELayer,
        made: generators.Inputs,
        iteration: int,
    ):
        self.comm, self.case, self.plan, self.layer, self.made = comm, case, plan, layer, made
        self.iteration, self.xp = iteration, comm.device.xp
        self.x = self._bits(made.x[comm.rank])
        self.inputs = self.xp.array(self.x)

    def _bits(self, values: np.ndarray) -> np.ndarray:
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)

    def forward(self) -> None:
        given = from_outside(self.case, self.made, self.comm.rank, self.xp)
        _, self.kept = self.layer.forward(self.inputs, **given)
        self.comm.synchronize()

    def saved(self) -> Saved:
        """What the forward has left of this rank's tokens, but for pre-activations, which are elsewhere."""
        kept, c = self.kept, self.case.config
        rows = to_numpy(kept.row_of_slot).astype(np.int64)
        combine, ids = _values(to_numpy(kept.combine)), to_numpy(kept.experts)
        logits = np.zeros((len(ids), c.experts)) if kept.logits is None else to_numpy(kept.logits)
        shared: tuple[np.ndarray, ...] = ()
        if c.shared_width:
            g, u = separated(np, _values(to_numpy(kept.shared_pre)), c.shared_width)
            shared = g, u, _values(to_numpy(kept.shared_y))
        weights = to_numpy(kept.weights).astype(np.float64)
        return Saved(ids, logits.astype(np.float64), weights, None, None, combine[rows], *shared, dtype=self.case.dtype)

    def backward(self, outcome: Outcome) -> _Results:
        """Into arrays between guards, which hold poison, or random numbers where they are added to."""
        comm, case, device = self.comm, self.case, self.comm.device
        self.layer.poison(forwarded=False)
        dtype = np.dtype(np.float32 if case.into.endswith("f32") else np.uint16)
        guarded, views = {}, {}
        wanted: dict[str, tuple[tuple[int, ...], np.dtype]] = {"x": (self.x.shape, np.dtype(np.uint16))}
        wanted |= {n: (shape, dtype) for n, shape in shapes(self.plan, comm.rank).items()}
        for name, (shape, kind) in wanted.items():
            guarded[name] = self.xp.empty(int(np.prod(shape)) + 2 * GUARD, kind)
            device.fill(device.address_of(guarded[name]), guarded[name].nbytes, POISON)
        device.synchronize()  # before the array library writes, in a stream of its own
        for name, (shape, _) in wanted.items():
            size = int(np.prod(shape))
            views[name] = guarded[name][GUARD : GUARD + size].reshape(shape)
            if name != "x" and case.into.startswith("add"):
                before = self.before(name, shape)
                views[name][...] = self.xp.asarray(before if dtype == np.float32 else self._bits(before))
        dy = self.xp.array(self._bits(self.made.dout[comm.rank]))
        into = MoEWeights(**{f.name: views.get(f.name) for f in fields(MoEWeights)})
        g: MoEGradients = self.layer.backward(
            dy, aux_grad=case.aux_grad, dx=views["x"], into=into, accumulate=case.into.startswith("add")
        )
        comm.synchronize()
        for name, array, was in (("x", self.inputs, self.x), ("dy", dy, self._bits(self.made.dout[comm.rank]))):
            if not np.array_equal(to_numpy(array), was):
                outcome.fail(f"iteration {self.iteration}: {name} was changed")
        bits = {name: to_numpy(array) for name, array in guarded.items()}
        for name, array in bits.items():
            ends = np.concatenate([array[:GUARD], array[len(array) - GUARD :]])
            if not (ends.view(np.uint16) == POISON).all():
                outcome.fail(f"iteration {self.iteration}: elements outside the gradient of {name} were written")
        bits["slot_weights"] = to_numpy(g.slot_weights)
        if g.logits is not None:
            bits["logits"] = to_numpy(g.logits)
        values = {}
        for name, array in bits.items():
            inner = array[GUARD : len(array) - GUARD].reshape(wanted[name][0]) if name in wanted else array
            values[name] = _values(inner) if inner.dtype == np.uint16 else inner.astype(np.float64)
        return _Results(bits, values)

    def before(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return before(self.case, self.comm.rank, self.iteration, name, shape)


def before(case: MoeCase, rank: int, iteration: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What is in an array that is added to. BF16."""
    rng = np.random.default_rng((case.seed, rank, iteration, *name.encode()))
    return near.to_bf16(rng.standard_normal(shape))


def _values(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def _same_bits(outcome: Outcome, iteration: int, results: dict[str, _Results]) -> None:
    (_, first), *others = results.items()
    for which, again in others:
        for name, array in first.bits.items():
            if array.tobytes() != again.bits[name].tobytes():
                outcome.bitwise_repeat = False
                outcome.fail(f"iteration {iteration}: {name}: other bits {which}")


def _judge(
    outcome: Outcome,
    comm: Communicator,
    case: MoeCase,
    made: generators.Inputs,
    saved: Saved | None,
    plan: MoeBackwardPlan,
    iteration: int,
    got: _Results,
) -> None:
    assert saved is not None
    config, weights, rank = case.config, made.weights, comm.rank
    if case.given_weights:  # the router is not asked, so nothing depends on it
        weights = replace(weights, router=np.zeros_like(weights.router))
    everywhere = comm.allgather(saved)
    given = [
        judge.Given(made.x[q], s, made.dout[q], [len(s.ids)] if len(s.ids) else [], largest(s.logits, config.top_k))
        for q, s in enumerate(everywhere)
    ]
    of_own = judge.backward_of(config, given[rank], weights, aux_scale=case.aux_grad)
    wanted: dict[str, Any] = judge.gradients_by_name(of_own)
    own = config.experts_of(rank, case.ranks)
    pairs = [judge.expert_gradients(config, given, weights, e) for e in own]
    rows = sum(len(s.ids) for s in everywhere)
    for i, name in enumerate(EXPERTS):
        wanted[name] = near.stack([pair[i] for pair in pairs]) if pairs else Near(np.zeros(got.values[name].shape))
    if case.given_weights:
        wanted["router"] = Near(np.zeros(weights.router.shape))
    for name, shape in shapes(plan, rank).items():
        was = before(case, rank, iteration, name, shape) if case.into.startswith("add") else np.zeros(shape)
        wanted[name] = stored(wanted[name], case.into, was, rows)
    for name, c in judge.compared(got.values, wanted).items():
        outcome.max_abs_error = max(outcome.max_abs_error, c.max_abs_error)
        outcome.rel_error = max(outcome.rel_error, c.rel_error)
        outcome.over_bound = max(outcome.over_bound, c.over_bound)
        if not c.passed:
            outcome.fail(f"iteration {iteration}: gradient of {name} at {c.worst}: got {c.got}, want {c.wanted}")


def stored(sums: Near, into: str, was: np.ndarray, rows: int) -> Near:
    """What is in an array after sums over `rows` rows went there. In FP32, what was there is one more of the terms."""
    if into == "add_f32":
        return Near(sums.value + was, sums.error + (2 * rows + 2) * FP32_EPS * np.abs(was))
    if into == "add_bf16":
        sums = sums + was
    return near.bf16(sums) if into.endswith("bf16") else sums
