"""What `validate ag_gemm` does on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from ..numerics import oracles
from ..numerics.tolerance import BF16_HALF_ULP, compare, gemm_bound
from ..ops.ag_gemm import ag_gemm
from ..ranks.communicator import POISON, Communicator

GUARD_ROWS = 3  # of poison before and after every output


@dataclass(frozen=True)
class Case:
    """One shape and how to run it. `rows` are every rank's; `arena` puts the shards where no copy is needed."""

    rows: tuple[int, ...]
    n: int
    k: int
    policy: str = "one_way"
    movers: int | None = None
    arena: bool = False
    iters: int = 2
    seed: int = 0

    @property
    def m(self) -> int:
        return sum(self.rows)


@dataclass
class Outcome:
    """What one rank found over all iterations."""

    passed: bool = True
    bitwise_repeat: bool = True
    max_abs_error: float = 0.0
    rel_error: float = 0.0
    over_bound: float = 0.0  # largest |error| over what rounding allows; at most 1
    seconds: float = 0.0  # median of one call
    problems: list[str] = field(default_factory=list)

    def fail(self, problem: str) -> None:
        self.passed = False
        if len(self.problems) < 5:
            self.problems.append(problem)


def inputs(case: Case, rank: int, iteration: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Every rank's shard and this rank's weight: bf16, standard normal, new for each iteration."""
    rng = np.random.default_rng((case.seed, iteration, 0))
    shards = [rng.standard_normal((r, case.k), np.float32).astype(ml_dtypes.bfloat16) for r in case.rows]
    own = np.random.default_rng((case.seed, iteration, 1 + rank))
    return shards, own.standard_normal((case.n, case.k), np.float32).astype(ml_dtypes.bfloat16)


def run(comm: Communicator, case: Case, progress: bool = False) -> Outcome:
    """Runs `case` on this rank; every rank calls it. Each iteration has new data, runs twice, and compares bits."""
    outcome = Outcome()
    xp = comm.device.xp
    shard = comm.empty((max(case.rows), case.k))[: case.rows[comm.rank]] if case.arena else None
    guarded = xp.empty((case.m + 2 * GUARD_ROWS, case.n), np.uint16)
    out = guarded[GUARD_ROWS : GUARD_ROWS + case.m]
    times = []
    bars = tqdm(
        range(case.iters),
        desc=f"ag_gemm {case.m}x{case.n}x{case.k}",
        disable=None if progress and comm.rank == 0 else True,
        leave=False,
    )
    for iteration in bars:
        shards, b = inputs(case, comm.rank, iteration)
        a = xp.asarray(shards[comm.rank].view(np.uint16))
        weight = xp.asarray(b.view(np.uint16))
        results = []
        for _ in range(2):
            comm.poison()
            guarded[...] = POISON
            if shard is not None:
                shard.view(np.uint16)[...] = a
            start = time.perf_counter()
            ag_gemm(
                comm,
                a if shard is None else shard.view(np.uint16),
                weight,
                rows=case.rows,
                out=out,
                policy=case.policy,
                movers=case.movers,
            )
            comm.synchronize()
            times.append(time.perf_counter() - start)
            results.append(_to_numpy(guarded))
        _judge(outcome, case, iteration, shards, b, results)
        for name, array, was in (("a", a, shards[comm.rank]), ("b", weight, b)):
            if not np.array_equal(_to_numpy(array), was.view(np.uint16)):
                outcome.fail(f"iteration {iteration}: input {name} was changed")
    outcome.seconds = float(np.median(times)) if times else 0.0
    if case.arena:
        comm.free(shard)
    return outcome


def call_once(comm: Communicator, case: Case) -> None:
    """One call on random data, not checked: to warm up, to trace."""
    shards, b = inputs(case, comm.rank, 0)
    a, weight = (comm.device.xp.asarray(x.view(np.uint16)) for x in (shards[comm.rank], b))
    ag_gemm(comm, a, weight, rows=case.rows, policy=case.policy, movers=case.movers)
    comm.synchronize()


def _judge(
    outcome: Outcome, case: Case, iteration: int, shards: Sequence[np.ndarray], b: np.ndarray, results: list[Any]
) -> None:
    first, again = results
    if not np.array_equal(first, again):
        row, col = np.argwhere(first != again)[0]
        outcome.bitwise_repeat = False
        outcome.fail(f"iteration {iteration}: the second run differs at row {row - GUARD_ROWS}, column {col}")
    guards = np.concatenate([again[:GUARD_ROWS], again[len(again) - GUARD_ROWS :]])
    if not (guards == POISON).all():
        outcome.fail(f"iteration {iteration}: rows outside the output were written")
    exact, magnitude = oracles.ag_gemm(shards, b)
    got = again[GUARD_ROWS : GUARD_ROWS + case.m].view(ml_dtypes.bfloat16)
    result = compare(got, exact, gemm_bound(exact, magnitude, case.k))
    outcome.max_abs_error = max(outcome.max_abs_error, result.max_abs_error)
    outcome.rel_error = max(outcome.rel_error, result.rel_error)
    outcome.over_bound = max(outcome.over_bound, result.over_bound)
    if not result.passed:
        outcome.fail(f"iteration {iteration}: at {result.worst} got {result.got}, want {result.wanted}")


def run_all(comm: Communicator, cases: Sequence[Case]) -> list[Outcome]:
    """Several cases on one communicator, one after the other."""
    return [run(comm, case) for case in cases]


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
        seconds=max(o.seconds for o in outcomes),
    )
    for rank, o in enumerate(outcomes):
        merged.problems += [f"rank {rank}, {problem}" for problem in o.problems]
    return merged


def report(case: Case, device: str, outcome: Outcome) -> dict[str, Any]:
    """The fields of `validate --json`."""
    return {
        "op": "ag_gemm",
        "dtype": "bf16",
        "device": device,
        "ranks": len(case.rows),
        "shape": {"m": case.m, "n": case.n, "k": case.k, "rows": list(case.rows)},
        "policy": case.policy,
        "iters": case.iters,
        "rel_error": outcome.rel_error,
        "max_abs_error": outcome.max_abs_error,
        "over_bound": outcome.over_bound,
        "tolerance": f"|error| <= {BF16_HALF_ULP} |exact| + K 2^-24 |A||B|, element by element (over_bound <= 1)",
        "bitwise_repeat": outcome.bitwise_repeat,
        "passed": outcome.passed,
        "seconds": outcome.seconds,
        "problems": outcome.problems,
    }
