"""One problem an operator: data on this rank, our call, and the same by NCCL and cuBLAS through PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from ..numerics.tolerance import gemm_bound, reduced_bound, sum_bound
from ..ops.ag_gemm import ag_gemm
from ..ops.ag_gemm_dgrad import ag_gemm_dgrad
from ..ops.bulk_ag import bulk_ag
from ..ops.bulk_rs import bulk_rs
from ..ops.gemm_rs import gemm_rs
from ..ranks.communicator import POISON, Communicator
from .checking import close_to_exact, close_to_peer, normal, rows_to_check, to_float
from .llama3 import Shape, rows_moved


class Problem(ABC):
    """Rows are dealt evenly. `outputs` are ours, `peer_outputs` those of the peers, in the same order."""

    op: ClassVar[str]
    dtype: ClassVar[str] = "bf16"  # of our factors
    pushes: ClassVar[bool] = False  # what crosses the link by default: pushed or pulled
    independent: ClassVar[bool] = False  # the product needs nothing of the collective
    has_async_tp: ClassVar[bool] = True

    def __init__(self, comm: Communicator, torch: Any, dist: Any, shape: Shape, seed: int):
        self.comm, self.torch, self.dist, self.shape = comm, torch, dist, shape
        self.xp = comm.device.xp
        self.moved_rows, self.width = rows_moved(self.op, shape)
        self.rows = self.moved_rows // comm.ranks
        if self.rows * comm.ranks != self.moved_rows:
            raise ValueError(f"bench {self.op}: {self.moved_rows} rows do not divide by {comm.ranks} ranks")
        self.xp.random.seed(seed * 64 + comm.rank)
        self.in_arena: list[Any] = []
        self.outputs: list[Any] = []
        self.peer_outputs: list[Any] = []
        self.make()

    @property
    def link_bytes(self) -> int:
        """What one rank gets from its peers, or sends to them."""
        return self.rows * (self.comm.ranks - 1) * self.width * 2

    @property
    def group(self) -> str:
        return str(self.dist.group.WORLD.group_name)

    def shared(self, lines: int, elements: int) -> Any:
        """Random, in the arena."""
        array = self.comm.empty((lines, elements)).view(np.uint16)
        array[...] = normal(self.xp, lines, elements)
        self.in_arena.append(array)
        return array

    def result(self, lines: int, elements: int) -> tuple[Any, Any]:
        """Ours, and the peers'."""
        pair = (self.xp.empty((lines, elements), np.uint16), self.xp.empty((lines, elements), np.uint16))
        self.outputs.append(pair[0])
        self.peer_outputs.append(pair[1])
        return pair

    def tensor(self, array: Any) -> Any:
        return self.torch.as_tensor(array.view(np.int16), device="cuda").view(self.torch.bfloat16)

    def free(self) -> None:
        self.comm.synchronize()
        for array in self.in_arena:
            self.comm.free(array)
        for name in list(vars(self)):
            if name not in ("comm", "xp", "torch"):
                delattr(self, name)
        self.xp.get_default_memory_pool().free_all_blocks()
        self.torch.cuda.empty_cache()

    @abstractmethod
    def make(self) -> None:
        """Data."""

    @abstractmethod
    def ours(self, **options: Any) -> None: ...

    @abstractmethod
    def collective(self) -> None: ...

    @abstractmethod
    def multiply(self) -> None: ...

    def serial(self) -> None:
        self.collective()
        self.multiply()

    def async_tp(self) -> None:
        raise NotImplementedError

    @abstractmethod
    def exact(self) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        """Of some rows of each output: which rows, float64 values, and the largest error allowed."""

    def check(self, variants: Mapping[str, Mapping[str, Any]], repeats: int) -> float:
        """Every variant on poisoned outputs: the first against float64 and the peers, all others, and `repeats` calls
        of the first, against its bits. Returns the largest part of a bound that is used.

        Raises: ValueError when something is wrong.
        """
        what = f"bench {self.op} {self.shape.name}"
        self.serial()
        wanted, worst = self.exact(), 0.0
        first: list[Any] = []
        for name, options in variants.items():
            different = self.xp.zeros((), np.int64)
            for _ in range(repeats if not first else 2):
                self.comm.poison()
                for out in self.outputs:
                    out[...] = POISON
                self.ours(**options)
                if not first:
                    first = [out.copy() for out in self.outputs]
                different += sum((out != was).sum() for out, was in zip(self.outputs, first, strict=True))
            self.comm.synchronize()
            if int(different):
                raise ValueError(f"{what}, {name}: {int(different)} elements differ from those of the first call")
        for out, theirs, (rows, exact, bound) in zip(first, self.peer_outputs, wanted, strict=True):
            worst = max(worst, close_to_exact(what, out[rows], exact, bound))
            self.beside_peer(what, out, theirs)
        return worst

    def beside_peer(self, what: str, ours: Any, theirs: Any) -> None:
        """Compares one output with the peer's. Raises: ValueError."""
        close_to_peer(what, ours, theirs, self.shape.k * (self.comm.ranks if self.pushes else 1))

    def products(self, a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
        """a @ b and |a| @ |b| of bf16 bits, in float64."""
        x, y = to_float(a, np.float64), to_float(b, np.float64)
        return (x @ y).get(), (abs(x) @ abs(y)).get()


class Gather(Problem):
    """A's rows from all ranks, then a product with them. `turned`: B is [N, K]."""

    turned: ClassVar[bool]
    call: ClassVar[Callable[..., Any]]

    def make(self) -> None:
        s = self.shape
        self.a = self.shared(self.rows, s.k)
        self.b = normal(self.xp, *((s.n, s.k) if self.turned else (s.k, s.n)))
        self.c, peer_c = self.result(s.m, s.n)
        self.full = self.xp.empty((s.m, s.k), np.uint16)
        self.x, w, self.peer_c, self.gathered = map(self.tensor, (self.a, self.b, peer_c, self.full))
        self.w = w.t() if self.turned else w

    def ours(self, **options: Any) -> None:
        type(self).call(self.comm, self.a, self.b, out=self.c, **options)

    def collective(self) -> None:
        self.dist.all_gather_into_tensor(self.gathered, self.x)

    def multiply(self) -> None:
        self.torch.mm(self.gathered, self.w, out=self.peer_c)

    def async_tp(self) -> None:
        self.torch.ops.symm_mem.fused_all_gather_matmul(self.x, [self.w], gather_dim=0, group_name=self.group)

    def exact(self) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        rows = rows_to_check(self.xp, self.shape.m)
        exact, magnitude = self.products(self.full[rows], self.b.T if self.turned else self.b)
        return [(rows, exact, gemm_bound(exact, magnitude, self.shape.k))]


class AgGemm(Gather):
    op, turned, call = "ag_gemm", True, staticmethod(ag_gemm)


class AgGemmDgrad(Gather):
    op, turned, call = "ag_gemm_dgrad", False, staticmethod(ag_gemm_dgrad)


class GemmRs(Problem):
    op, pushes = "gemm_rs", True

    def make(self) -> None:
        s = self.shape
        self.a, self.b = normal(self.xp, s.m, s.k), normal(self.xp, s.n, s.k)
        self.c, peer_c = self.result(self.rows, s.n)
        self.partial = self.torch.empty((s.m, s.n), dtype=self.torch.bfloat16, device="cuda")
        self.x, self.w, self.peer_c = map(self.tensor, (self.a, self.b, peer_c))

    def ours(self, **options: Any) -> None:
        gemm_rs(self.comm, self.a, self.b, out=self.c, **options)

    def collective(self) -> None:
        self.dist.reduce_scatter_tensor(self.peer_c, self.partial)

    def multiply(self) -> None:
        self.torch.mm(self.x, self.w.t(), out=self.partial)

    def serial(self) -> None:
        self.multiply()
        self.collective()

    def async_tp(self) -> None:
        self.torch.ops.symm_mem.fused_matmul_reduce_scatter(
            self.x, self.w.t(), "sum", scatter_dim=0, group_name=self.group
        )

    def exact(self) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        rows = rows_to_check(self.xp, self.rows)
        mine = [self.products(self.a[q * self.rows + rows], self.b.T) for q in range(self.comm.ranks)]
        every = self.comm.allgather(mine)
        return [(rows, *reduced_bound([theirs[self.comm.rank] for theirs in every], self.shape.k))]


class BulkAg(Problem):
    op, independent, has_async_tp = "bulk_ag", True, False

    def make(self) -> None:
        s = self.shape
        self.x = self.shared(self.rows, self.width)
        self.a, self.b = normal(self.xp, s.m, s.k), normal(self.xp, s.k, s.n)
        self.c, peer_c = self.result(s.m, s.n)
        self.gathered, peer_gathered = self.result(self.moved_rows, self.width)
        self.tx, self.ta, self.tb = map(self.tensor, (self.x, self.a, self.b))
        self.peer_gathered_bits = peer_gathered
        self.peer_c, self.peer_gathered = map(self.tensor, (peer_c, peer_gathered))

    def ours(self, **options: Any) -> None:
        bulk_ag(self.comm, self.x, self.a, self.b, out=self.c, gathered=self.gathered, **options)

    def collective(self) -> None:
        self.dist.all_gather_into_tensor(self.peer_gathered, self.tx)

    def multiply(self) -> None:
        self.torch.mm(self.ta, self.tb, out=self.peer_c)

    def exact(self) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        rows = rows_to_check(self.xp, self.shape.m)
        exact, magnitude = self.products(self.a[rows], self.b)
        moved = rows_to_check(self.xp, self.moved_rows)
        whole = to_float(self.peer_outputs[1][moved], np.float64).get()
        same = (moved, whole, np.full(whole.shape, 1e-30))
        return [(rows, exact, gemm_bound(exact, magnitude, self.shape.k)), same]


class BulkRs(Problem):
    op, independent, has_async_tp = "bulk_rs", True, False

    def make(self) -> None:
        s = self.shape
        self.x = self.shared(self.moved_rows, self.width)
        self.a, self.b = normal(self.xp, s.k, s.m), normal(self.xp, s.k, s.n)
        self.sum, peer_sum = self.result(self.rows, self.width)
        self.c, peer_c = self.result(s.m, s.n)
        self.tx, self.ta, self.tb = map(self.tensor, (self.x, self.a, self.b))
        self.peer_c, self.peer_sum = map(self.tensor, (peer_c, peer_sum))

    def ours(self, **options: Any) -> None:
        bulk_rs(self.comm, self.x, self.a, self.b, out=self.sum, c=self.c, **options)

    def collective(self) -> None:
        self.dist.reduce_scatter_tensor(self.peer_sum, self.tx)

    def multiply(self) -> None:
        self.torch.mm(self.ta.t(), self.tb, out=self.peer_c)

    def exact(self) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        moved = rows_to_check(self.xp, self.rows)
        mine = [to_float(self.x[q * self.rows + moved], np.float64).get() for q in range(self.comm.ranks)]
        parts = [theirs[self.comm.rank] for theirs in self.comm.allgather(mine)]
        rows = rows_to_check(self.xp, self.shape.m)
        exact, magnitude = self.products(self.a[:, rows].T, self.b)
        return [(moved, *sum_bound(parts)), (rows, exact, gemm_bound(exact, magnitude, self.shape.k))]


PROBLEMS: dict[str, type[Problem]] = {p.op: p for p in (AgGemm, GemmRs, AgGemmDgrad, BulkAg, BulkRs)}
