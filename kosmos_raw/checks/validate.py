"""What `validate OP` does on every rank."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from ..numerics.tolerance import BF16_HALF_ULP, compare
from ..ranks.communicator import POISON, Communicator
from .mxfp8 import CHECKED_MXFP8
from .operators import CHECKED, Arrays, Case, Checked

GUARD_ROWS = 3  # of poison before and after every output


@dataclass
class Outcome:
    """What one rank found over all iterations."""

    passed: bool = True
    bitwise_repeat: bool = True
    max_abs_error: float = 0.0
    rel_error: float = 0.0
    over_bound: float = 0.0  # largest |error| over what rounding allows; at most 1
    format_error: float = 0.0  # relative, of a layer in MXFP8 beside one that rounds nowhere, on noise
    seconds: float = 0.0  # median of one call
    problems: list[str] = field(default_factory=list)

    def fail(self, problem: str) -> None:
        self.passed = False
        if len(self.problems) < 5:
            self.problems.append(problem)


def judge_of(case: Case) -> Checked:
    """What judges a case."""
    return {"bf16": CHECKED, "mxfp8": CHECKED_MXFP8}[case.dtype][case.op]


def run(comm: Communicator, case: Case, progress: bool = False) -> Outcome:
    """Runs `case` on this rank; every rank calls it. Each iteration has new data, and repeats with equal bits."""
    outcome = Outcome()
    operator = judge_of(case)
    xp = comm.device.xp
    guarded = {
        name: xp.empty((rows + 2 * GUARD_ROWS, columns), np.uint16)
        for name, (rows, columns) in operator.outputs(case, comm.rank).items()
    }
    outputs = {name: array[GUARD_ROWS : len(array) - GUARD_ROWS] for name, array in guarded.items()}
    own: Any = None
    place: Any = None
    shared = operator.in_arena if case.arena else None
    if shared:
        shapes = [operator.inputs(case, q, 0)[shared].shape for q in range(case.ranks)]
        own = comm.empty((max(rows for rows, _ in shapes), shapes[comm.rank][1]))
        place = own[: shapes[comm.rank][0]].view(np.uint16)
    times = []
    dice = random.Random(case.seed * 8 + comm.rank)
    comm.device.most_delay_us = case.delay_us
    bars = tqdm(
        range(case.iters),
        desc=f"{case.op} {case.m}x{case.n}x{case.k}",
        disable=None if progress and comm.rank == 0 else True,
        leave=False,
    )
    for iteration in bars:
        given = operator.inputs(case, comm.rank, iteration)
        inputs = {name: xp.array(array.view(np.uint16)) for name, array in given.items()}  # a copy, also on the CPU
        results = []
        for _ in range(case.repeats):
            comm.poison()
            for array in guarded.values():
                comm.device.fill(comm.device.address_of(array), array.nbytes, POISON)
            if shared:
                place[...] = xp.asarray(given[shared].view(np.uint16))
                inputs[shared] = place
            time.sleep(dice.random() * case.delay_us * 1e-6)
            start = time.perf_counter()
            operator.call(comm, case, inputs, outputs)
            comm.synchronize()
            times.append(time.perf_counter() - start)
            results.append({name: _to_numpy(array) for name, array in guarded.items()})
        _judge(outcome, case, comm.rank, iteration, results)
        for name, was in given.items():
            if not np.array_equal(_to_numpy(inputs[name]), was.view(np.uint16)):
                outcome.fail(f"iteration {iteration}: input {name} was changed")
    comm.device.most_delay_us = 0
    outcome.seconds = sorted(times)[(len(times) - 1) // 2] if times else 0.0
    if own is not None:
        comm.free(own)
    return outcome


def on_device(comm: Communicator, case: Case) -> Arrays:
    """Inputs of the first iteration."""
    given = judge_of(case).inputs(case, comm.rank, 0)
    return {name: comm.device.xp.array(x.view(np.uint16)) for name, x in given.items()}


def call_once(comm: Communicator, case: Case) -> None:
    """One call on random data, not checked: to warm up, to trace."""
    judge_of(case).call(comm, case, on_device(comm, case), None)
    comm.synchronize()


def bits_of(comm: Communicator, case: Case, inputs: Arrays | None = None) -> dict[str, np.ndarray]:
    """The bits of every output of one call, not checked: to compare one way of doing it with another. `inputs`: those
    of on_device, where there are many ways."""
    operator, xp = judge_of(case), comm.device.xp
    outputs = {name: xp.full(shape, POISON, np.uint16) for name, shape in operator.outputs(case, comm.rank).items()}
    operator.call(comm, case, on_device(comm, case) if inputs is None else inputs, outputs)
    comm.synchronize()
    return {name: _to_numpy(array) for name, array in outputs.items()}


def _judge(outcome: Outcome, case: Case, rank: int, iteration: int, results: list[dict[str, np.ndarray]]) -> None:
    wanted = judge_of(case).want(case, rank, iteration)
    for name, want in wanted.items():
        first, *others = (result[name] for result in results)
        for repeat, again in enumerate(others, 2):
            if not np.array_equal(first, again):
                row, col = np.argwhere(first != again)[0]
                outcome.bitwise_repeat = False
                outcome.fail(f"iteration {iteration}: {name}: run {repeat} differs at {row - GUARD_ROWS}, {col}")
        again = results[-1][name]
        guards = np.concatenate([again[:GUARD_ROWS], again[len(again) - GUARD_ROWS :]])
        if not (guards == POISON).all():
            outcome.fail(f"iteration {iteration}: {name}: rows outside the output were written")
        got = again[GUARD_ROWS : len(again) - GUARD_ROWS]
        if isinstance(want, np.ndarray):
            if got.shape != want.shape or (got != want).any():
                outcome.fail(
                    f"iteration {iteration}: {name}: {int((got != want).sum())} words of {want.size} are wrong"
                )
            continue
        result = compare(got.view(ml_dtypes.bfloat16), *want)
        outcome.max_abs_error = max(outcome.max_abs_error, result.max_abs_error)
        outcome.rel_error = max(outcome.rel_error, result.rel_error)
        outcome.over_bound = max(outcome.over_bound, result.over_bound)
        if not result.passed:
            outcome.fail(f"iteration {iteration}: {name} at {result.worst}: got {result.got}, want {result.wanted}")


def run_all(comm: Communicator, cases: Sequence[Case], progress: bool = False) -> list[Outcome]:
    """Several cases on one communicator, one after the other."""
    bars = tqdm(cases, disable=None if progress and comm.rank == 0 else True, leave=False)
    return [run(comm, case) for case in bars]


def arena_bytes(cases: Sequence[Case]) -> int:
    """An arena with room for the cases one after another, and for what `comm.empty` and alignment add."""
    kept: dict[str, int] = {}
    for case in cases:
        for name, nbytes in judge_of(case).kept_bytes(case).items():
            kept[name] = max(nbytes, kept.get(name, 0))
    # Twice: what grows leaves a hole behind, into which what comes next may not fit.
    return max(judge_of(case).arena_bytes(case) for case in cases) + 2 * sum(kept.values()) + (1 << 20)


def _to_numpy(array: Any) -> np.ndarray:
    return np.array(array.get() if hasattr(array, "get") else array)


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst of all ranks."""
    merged = Outcome(
        passed=all(o.passed for o in outcomes),
        bitwise_repeat=all(o.bitwise_repeat for o in outcomes),
        max_abs_error=max(o.max_abs_error for o in outcomes),
        rel_error=max(o.rel_error for o in outcomes),
        over_bound=max(o.over_bound for o in outcomes),
        format_error=max(o.format_error for o in outcomes),
        seconds=max(o.seconds for o in outcomes),
    )
    for rank, o in enumerate(outcomes):
        merged.problems += [f"rank {rank}, {problem}" for problem in o.problems]
    return merged


def report(case: Case, device: str, outcome: Outcome) -> dict[str, Any]:
    """The fields of `validate --json`."""
    return {
        "op": case.op,
        "dtype": case.dtype,
        "device": device,
        "ranks": len(case.rows),
        "shape": {"m": case.m, "n": case.n, "k": case.k, "rows": list(case.rows)},
        "policy": case.policy or "default",
        "order": case.order,
        "iters": case.iters,
        "repeats": case.repeats,
        "rel_error": outcome.rel_error,
        "max_abs_error": outcome.max_abs_error,
        "over_bound": outcome.over_bound,
        "tolerance": f"|error| <= {BF16_HALF_ULP} |exact| for each rounding + 2^-24 for each addition of magnitudes, "
        "element by element (over_bound <= 1)",
        "bitwise_repeat": outcome.bitwise_repeat,
        "passed": outcome.passed,
        "seconds": outcome.seconds,
        "problems": outcome.problems,
    }
