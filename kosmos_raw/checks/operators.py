"""What judging an operator takes: its inputs, its call, and what must come out. One `Checked` an operator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from ..build.params import MAX_RANKS
from ..numerics import oracles, spread
from ..numerics.tolerance import BF16_TINY, gemm_bound, reduced_bound, sum_bound
from ..ops.ag_gemm import ag_gemm
from ..ops.ag_gemm_dgrad import ag_gemm_dgrad
from ..ops.bulk_ag import bulk_ag
from ..ops.bulk_rs import bulk_rs
from ..ops.gemm_rs import gemm_rs
from ..plan.shapes import ORDERS_OF, round_up
from ..ranks.communicator import Communicator


@dataclass(frozen=True)
class Case:
    """One shape of one operator, and how to run it. `rows` are every rank's; N and K are the GEMM's own."""

    rows: tuple[int, ...]
    n: int
    k: int
    op: str = "ag_gemm"
    policy: str | None = None  # the default of the device
    order: str = "as_consumed"
    movers: int | None = None
    arena: bool = False  # inputs that peers read lie in the arena, where no copy is needed
    transport: str | None = None  # of gemm_rs
    split: int | None = None  # parts of a contraction; only for operators that cut it
    iters: int = 2  # each with new data
    repeats: int = 2  # calls on the same data, whose bits must be equal
    dtype: str = "bf16"  # of the factors
    delay_us: int = 0  # how late ranks come to a call, by chance, and (on the CPU) WGs to their work
    seed: int = 0

    @property
    def m(self) -> int:
        return sum(self.rows)

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def first(self, rank: int) -> int:
        """The first of the rows of `rank`."""
        return sum(self.rows[:rank])

    def own(self, rank: int) -> slice:
        """The rows of `rank`."""
        return slice(self.first(rank), self.first(rank + 1))

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operator's call."""
        given: dict[str, Any] = {"rows": self.rows, "policy": self.policy, "movers": self.movers}
        if len(ORDERS_OF[self.op]) > 1:
            given["order"] = self.order
        if self.split is not None:
            given["split"] = self.split
        if self.transport is not None:
            given["transport"] = self.transport
        return given

    def is_spread(self, iteration: int) -> bool:
        return spread.is_spread(self.dtype, iteration)

    def random(self, iteration: int, what: int, rows: str, columns: str) -> np.ndarray:
        """Standard normal bf16, new for each iteration. `what` numbers the matrices of all ranks.

        Args: rows, columns: "m", "n" or "k", a size. Where the iteration is spread, each row and each column is
            multiplied by that size's power of two; or, of "1/k", divided, for the factor that meets one with "k".
        """
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        shape = sizes[rows[-1]], sizes[columns[-1]]
        key = (self.seed, iteration), what, shape, (rows, columns) if self.is_spread(iteration) else None
        return _kept(*key) if shape[0] * shape[1] <= 1 << 22 else _random(*key)


def _random(seed: tuple[int, int], what: int, shape: tuple[int, int], spread_by: tuple[str, str] | None) -> np.ndarray:
    values = np.random.default_rng((*seed, what)).standard_normal(shape, np.float32)
    for axis, name in enumerate(spread_by or ()):
        powers = spread.powers(np.random.default_rng((*seed, 0, ord(name[-1]))), shape[axis])
        values *= np.expand_dims(1 / powers if name.startswith("1/") else powers, 1 - axis).astype(np.float32)
    bf16 = values.astype(ml_dtypes.bfloat16)
    bf16.flags.writeable = False
    return bf16


_kept = lru_cache(maxsize=3 * MAX_RANKS)(_random)  # of one iteration: the inputs, for which the oracle asks again


Arrays = dict[str, Any]
# By output: exact value and bound of the error, in float64; or the bits, as uint16.
Wanted = dict[str, tuple[np.ndarray, np.ndarray] | np.ndarray]


class Checked(ABC):
    """One operator. Arrays go by the names of its arguments."""

    in_arena: str | None  # the input that may lie in the arena

    @abstractmethod
    def inputs(self, case: Case, rank: int, iteration: int) -> Arrays:
        """This rank's inputs, bf16."""

    @abstractmethod
    def outputs(self, case: Case, rank: int) -> dict[str, tuple[int, int]]:
        """Shapes of this rank's outputs."""

    @abstractmethod
    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        """Makes the call; without `outputs` it allocates them itself."""

    @abstractmethod
    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        """What must come out on this rank."""

    @abstractmethod
    def arena_bytes(self, case: Case) -> int:
        """Room in the arena for a call with `case.arena` or without."""

    def kept_bytes(self, case: Case) -> dict[str, int]:
        """What the communicator keeps in the arena for the operator, by name, and lets grow with its calls."""
        return {}


class AgGemm(Checked):
    in_arena: str | None = "a"

    def inputs(self, case: Case, rank: int, iteration: int) -> Arrays:
        a = case.random(iteration, 0, "m", "k")
        return {"a": a[case.own(rank)], "b": case.random(iteration, 1 + rank, "n", "1/k")}

    def outputs(self, case: Case, rank: int) -> dict[str, tuple[int, int]]:
        return {"out": (case.m, case.n)}

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        ag_gemm(comm, **inputs, **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        a = case.random(iteration, 0, "m", "k")
        exact, magnitude = oracles.gemm(a, self.inputs(case, rank, iteration)["b"])
        return {"out": (exact, gemm_bound(exact, magnitude, case.k))}

    def arena_bytes(self, case: Case) -> int:
        return 2 * max(case.rows) * (case.k + 8) * 2  # a caller's array, and a copy


class GemmRs(Checked):
    in_arena = None

    def inputs(self, case: Case, rank: int, iteration: int) -> Arrays:
        a = case.random(iteration, 2 * rank, "m", "k")
        return {"a": a, "b": case.random(iteration, 2 * rank + 1, "n", "1/k")}

    def outputs(self, case: Case, rank: int) -> dict[str, tuple[int, int]]:
        return {"out": (case.rows[rank], case.n)}

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        gemm_rs(comm, **inputs, **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        own = case.own(rank)
        every = [self.inputs(case, q, iteration) for q in range(case.ranks)]
        products = [oracles.gemm(x["a"][own], x["b"]) for x in every]
        exact, bound = reduced_bound(products, case.k)
        return {"out": (exact, bound)}

    def arena_bytes(self, case: Case) -> int:
        return 0  # but for what is kept

    def kept_bytes(self, case: Case) -> dict[str, int]:
        inbox = (case.ranks - 1) * round_up(max(case.rows), 256) * round_up(case.n, 256) * 2  # of the largest tile
        return {"staging": 2 * case.m * round_up(case.n, 8) * 2, "inbox": inbox}


class AgGemmDgrad(Checked):
    """Of a case: A is [rows, K], B [K, N]."""

    in_arena = "a"

    def inputs(self, case: Case, rank: int, iteration: int) -> Arrays:
        a = case.random(iteration, 0, "m", "k")
        return {"a": a[case.own(rank)], "b": case.random(iteration, 1 + rank, "1/k", "n")}

    def outputs(self, case: Case, rank: int) -> dict[str, tuple[int, int]]:
        return {"out": (case.m, case.n), "gathered": (case.m, case.k)}

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        ag_gemm_dgrad(comm, **inputs, **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        a = case.random(iteration, 0, "m", "k")
        exact, magnitude = oracles.product(a, self.inputs(case, rank, iteration)["b"])
        return {"out": (exact, gemm_bound(exact, magnitude, case.k)), "gathered": exactly(a)}

    def arena_bytes(self, case: Case) -> int:
        return 2 * max(case.rows) * (case.k + 8) * 2


class BulkAg(Checked):
    """Of a case: X is [rows, K], and the product [M, N] x [N, K]: as the data gradient of a column-parallel layer."""

    in_arena: str | None = "x"

    def inputs(self, case: Case, rank: int, iteration: int) -> Arrays:
        x = case.random(iteration, 0, "m", "k")
        a = case.random(iteration, 1 + 2 * rank, "m", "n")
        return {"x": x[case.own(rank)], "a": a, "b": case.random(iteration, 2 + 2 * rank, "1/n", "k")}

    def outputs(self, case: Case, rank: int) -> dict[str, tuple[int, int]]:
        return {"out": (case.m, case.k), "gathered": (case.m, case.k)}

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        bulk_ag(comm, **inputs, **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        own = self.inputs(case, rank, iteration)
        exact, magnitude = oracles.product(own["a"], own["b"])
        x = case.random(iteration, 0, "m", "k")
        return {"out": (exact, gemm_bound(exact, magnitude, case.n)), "gathered": exactly(x)}

    def arena_bytes(self, case: Case) -> int:
        return 2 * max(case.rows) * (case.k + 8) * 2


class BulkRs(Checked):
    """Of a case: X is [M, K], and the product [N, M] x [M, K]: as the weight gradient of a column-parallel layer."""

    in_arena = "x"

    def inputs(self, case: Case, rank: int, iteration: int) -> Arrays:
        sizes = {"x": ("m", "k"), "a": ("m", "n"), "b": ("1/m", "k")}
        return {name: case.random(iteration, 3 * rank + i, *of) for i, (name, of) in enumerate(sizes.items())}

    def outputs(self, case: Case, rank: int) -> dict[str, tuple[int, int]]:
        return {"out": (case.rows[rank], case.k), "c": (case.n, case.k)}

    def call(self, comm: Communicator, case: Case, inputs: Arrays, outputs: Arrays | None) -> None:
        bulk_rs(comm, **inputs, **case.options(), **(outputs or {}))

    def want(self, case: Case, rank: int, iteration: int) -> Wanted:
        own = self.inputs(case, rank, iteration)
        exact, magnitude = oracles.product(own["a"].T, own["b"])
        parts = [self.inputs(case, q, iteration)["x"][case.own(rank)] for q in range(case.ranks)]
        return {"out": sum_bound(parts), "c": (exact, gemm_bound(exact, magnitude, case.m))}

    def arena_bytes(self, case: Case) -> int:
        return 2 * case.m * (case.k + 8) * 2


def exactly(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What must come out bit by bit."""
    return x.astype(np.float64), np.full(x.shape, BF16_TINY)


CHECKED: dict[str, Checked] = {
    "ag_gemm": AgGemm(),
    "gemm_rs": GemmRs(),
    "ag_gemm_dgrad": AgGemmDgrad(),
    "bulk_ag": BulkAg(),
    "bulk_rs": BulkRs(),
}
