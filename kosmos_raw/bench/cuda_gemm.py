"""The GEMM of a CUDA device alone, driven by the schedule on one rank, beside cuBLAS.

Everything is checked before it is timed. Candidates alternate in shuffled order on the same random data, several calls
back to back between two events: the power limit moves the clock, so one after the other would compare temperatures.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from ..build.params import AG_GEMM
from ..device.base import Matrix, Tile
from ..numerics.tolerance import gemm_bound
from ..ops.ag_gemm import OP, ag_gemm
from ..plan.ag_gemm import AgGemmPlan, plan_ag_gemm
from ..plan.crew import Grid
from ..plan.shapes import round_up
from ..plan.tiles import best_tile
from ..ranks.communicator import POISON, Communicator
from .checking import close_to_exact, close_to_peer, normal, rows_to_check, to_float
from .llama3 import Shape

PEERS = ("cublas", "torch")  # cuBLAS through CuPy, and through PyTorch where that is installed
SAMPLE_MS = 15.0  # at least that long is each timed run of calls
WARM_UP_S = 0.4  # of calls in turn, until clocks and power are those of steady work


@dataclass
class GemmRow:
    """One shape in one layout."""

    shape: Shape
    layout: str
    tile_n: int  # the planned width
    over_bound: float  # of the planned one, see numerics/tolerance.py
    ms: dict[str, float]  # median of each candidate: "planned", "cublas", "torch", and widths like "n128"
    samples: dict[str, list[float]] = field(repr=False)

    @property
    def peer_ms(self) -> float:
        """The faster peer's."""
        return min(self.ms[name] for name in PEERS if name in self.ms)

    @property
    def ratio(self) -> float:
        """Our rate over the faster peer's."""
        return self.peer_ms / self.ms["planned"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tflops = {name: self.tflops(ms) for name, ms in self.ms.items()}
        return asdict(self) | {"ratio": self.ratio, "tflops": tflops}

    def tflops(self, ms: float) -> float:
        return 2e-9 * self.shape.m * self.shape.n * self.shape.k / ms


class Problem:
    """One product on one rank, with its buffers: `run(tile)` launches, `peer()` is the same by cuBLAS.

    Args: op: a kernel with the params of ag_gemm. layout: what its tiles want, in BLAS's column-major words: TN has
        A[M, K] and B[N, K], NN A[M, K] and B[K, N], NT A[K, M] and B[K, N].
    """

    def __init__(self, comm: Communicator, shape: Shape, op: str = OP, layout: str = "TN", seed: int = 0):
        self.comm, self.shape, self.op, self.layout = comm, shape, op, layout
        xp, m, n, k = comm.device.xp, shape.m, shape.n, shape.k
        xp.random.seed(seed)
        self.a = normal(xp, *((k, m) if layout == "NT" else (m, k)))
        self.b = normal(xp, *((n, k) if layout == "TN" else (k, n)))
        self.ldc = round_up(n, 8)
        self.c = xp.empty((m, self.ldc), np.uint16)
        self.peer_c = xp.empty((m, n), np.uint16)
        self.halved = 0  # tiles, the last of the queue, that are taken in halves
        self._key = object()  # of its launches, for Communicator.launch_again
        self._launches: dict[Tile, tuple[np.ndarray, AgGemmPlan, list[Matrix]]] = {}

    def tiles(self) -> list[Tile]:
        kernel = self.comm.kernel(self.op)
        return [kernel.tile, *kernel.other_tiles]

    def planned(self) -> Tile:
        return best_tile(self.tiles(), (self.shape.m,), self.shape.n, self.shape.k, self.comm.workgroups)

    def _prepare(self, tile: Tile) -> tuple[np.ndarray, AgGemmPlan, list[Matrix]]:
        s = self.shape
        plan = plan_ag_gemm((s.m,), s.n, s.k, Grid((tile,), self.comm.workgroups))
        params = np.zeros(1, AG_GEMM)
        params["shard_of"][0, 0] = self.a.data.ptr
        params["b"], params["c"] = self.b.data.ptr, self.c.data.ptr
        params["m"]["first"][0] = plan.first
        params["m"]["tile_m"], params["m"]["tile_rows_max"] = tile.m, plan.tile_rows_max
        params["m"]["side_by_side"], params["queues"] = plan.side_by_side, plan.queues
        params["N"], params["K"], params["ldc"], params["tile_n"] = s.n, s.k, self.ldc, tile.n
        operands = [
            Matrix(x.data.ptr, lines, elements, x.shape[1], by_rows)
            for x, lines, elements, by_rows in (
                (self.a, *((s.k, s.m, False) if self.layout == "NT" else (s.m, s.k, True))),
                (self.b, *((s.n, s.k, True) if self.layout == "TN" else (s.k, s.n, False))),
            )
        ]
        return params, plan, operands

    def run(self, tile: Tile) -> None:
        if tile not in self._launches:
            self._launches[tile] = self._prepare(tile)
        params, plan, operands = self._launches[tile]
        params["halved"] = self.halved
        key = (self._key, tile)
        if not self.comm.launch_again(key):
            self.comm.launch(self.op, params, (plan.rows, plan.k), plan.counter_words, operands, key=key)

    def peer(self) -> Callable[[], None]:
        """cuBLAS through CuPy, by cublasGemmEx with FP32 accumulation."""
        cublas = importlib.import_module("cupy_backends.cuda.libs.cublas")
        xp, s = self.comm.device.xp, self.shape
        handle = xp.cuda.device.get_cublas_handle()
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        bf16, fp32, no, yes = 14, 68, 0, 1  # CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_OP_N and _T
        first, second = (yes if self.layout == "TN" else no), (yes if self.layout == "NT" else no)
        sizes = (s.n, s.m, s.k)  # cuBLAS is column-major: it makes the transpose of C

        def run() -> None:
            cublas.gemmEx(
                handle,
                *(first, second, *sizes),
                *(one.ctypes.data, self.b.data.ptr, bf16, self.b.shape[1]),
                *(self.a.data.ptr, bf16, self.a.shape[1]),
                *(zero.ctypes.data, self.peer_c.data.ptr, bf16, s.n, fp32, -1),
            )

        return run

    def torch_peer(self, torch: Any) -> Callable[[], None]:
        """The same through PyTorch, which may choose another kernel."""
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        a, b, c = (
            torch.as_tensor(x.view(np.int16), device="cuda").view(torch.bfloat16) for x in (self.a, self.b, self.peer_c)
        )
        left, right = a.t() if self.layout == "NT" else a, b.t() if self.layout == "TN" else b

        def run() -> None:
            torch.mm(left, right, out=c)

        return run

    def check(self, tile: Tile) -> float:
        """Runs on poisoned output; compares rows spread over C with float64 and all of C with cuBLAS. Returns how much
        of the error bound is used.

        Raises: ValueError when something is wrong.
        """
        xp, s, what = self.comm.device.xp, self.shape, f"bench gemm: {self.shape} {self.layout} tile {tile}"
        self.c[...] = POISON
        self.run(tile)
        self.comm.synchronize()
        self.peer()()
        rows = rows_to_check(xp, s.m)
        a = to_float(self.a[:, rows].T if self.layout == "NT" else self.a[rows], np.float64)
        worst, step = 0.0, max(1, (1 << 26) // max(1, s.k))
        for n in range(0, s.n, step):
            b = to_float(self.b[n : n + step].T if self.layout == "TN" else self.b[:, n : n + step], np.float64)
            exact, magnitude = (a @ b).get(), (abs(a) @ abs(b)).get()
            got = self.c[rows, n : min(n + step, s.n)]
            worst = max(worst, close_to_exact(what, got, exact, gemm_bound(exact, magnitude, s.k)))
        close_to_peer(what, self.c[:, : s.n], self.peer_c, s.k)
        return worst


def alternate_calls(
    comm: Communicator, variants: Mapping[str, Callable[[], None]], *, rounds: int = 9, seed: int = 0
) -> dict[str, list[float]]:
    """Milliseconds a call: for each variant one value a round."""
    order = random.Random(seed)
    device = comm.device
    calls = dict.fromkeys(variants, 1)
    taken: dict[str, list[float]] = {name: [] for name in variants}
    begin = time.perf_counter()
    warming, left = True, rounds
    while left:
        names = list(variants)
        order.shuffle(names)
        for name in names:
            run = variants[name]
            run()
            start = device.record()  # type: ignore[attr-defined]
            for _ in range(calls[name]):
                run()
            ms = device.elapsed_ms(start, device.record()) / calls[name]  # type: ignore[attr-defined]
            if warming:
                calls[name] = max(1, min(200, math.ceil(SAMPLE_MS / max(ms, 0.01))))
            else:
                taken[name].append(ms)
        left -= not warming
        warming = warming and time.perf_counter() - begin < WARM_UP_S
    return taken


def measure(problem: Problem, *, rounds: int = 9, all_widths: bool = False) -> GemmRow:
    """Checks every candidate, then times all of them."""
    comm, planned = problem.comm, problem.planned()
    tiles = problem.tiles() if all_widths else [planned]
    worst = {tile: problem.check(tile) for tile in tiles}
    variants: dict[str, Callable[[], None]] = {"cublas": problem.peer()}
    if importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
        torch.cuda.set_stream(torch.cuda.ExternalStream(comm.device.stream.ptr))  # type: ignore[attr-defined]
        variants["torch"] = problem.torch_peer(torch)
    for tile in tiles:
        variants["planned" if tile == planned else f"n{tile.n}"] = lambda tile=tile: problem.run(tile)  # type: ignore[misc]
    samples = alternate_calls(comm, variants, rounds=rounds)
    comm.synchronize()
    ms = {name: median(times) for name, times in samples.items()}
    return GemmRow(problem.shape, problem.layout, planned.n, worst[planned], ms, samples)


def run(
    comm: Communicator,
    shapes: Sequence[Shape],
    ops: Mapping[str, str] | None = None,
    *,
    rounds: int = 9,
    all_widths: bool = False,
    progress: bool = False,
) -> list[GemmRow]:
    """Measures every shape in every layout of `ops`, a mapping from layout to the operator that has it."""
    xp, rows = comm.device.xp, []
    ops = ops or {"TN": OP}
    with comm.device.stream:  # type: ignore[attr-defined]  # everybody on one stream
        todo = [(layout, op, shape) for layout, op in ops.items() for shape in shapes]
        for layout, op, shape in tqdm(todo, disable=None if progress else True, leave=False):
            rows.append(measure(Problem(comm, shape, op, layout), rounds=rounds, all_widths=all_widths))
            xp.get_default_memory_pool().free_all_blocks()
    return rows


def host_us(comm: Communicator, launches: int = 300) -> dict[str, float]:
    """Host microseconds, nothing waited for, medians of ten: of a launch that is made again, and of a call of ag_gemm
    with the arrays of the call before."""
    problem = Problem(comm, Shape("host", 128, 128, 64))
    tile = problem.planned()
    a = comm.empty((128, 64))
    calls: dict[str, Callable[[], Any]] = {
        "launch": partial(problem.run, tile),
        "call": partial(ag_gemm, comm, a, problem.b, out=problem.c),
    }
    found = {}
    with comm.device.stream:  # type: ignore[attr-defined]
        for name, call in calls.items():
            samples = []
            for _ in range(11):
                start = time.perf_counter()
                for _ in range(launches):
                    call()
                samples.append((time.perf_counter() - start) / launches * 1e6)
                comm.synchronize()
            found[name] = median(samples[1:])
    comm.free(a)
    return found


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def write_csv(rows: Sequence[GemmRow], path: Path) -> None:
    """Every sample, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["name", "m", "n", "k", "layout", "planned_tile_n", "over_bound", "variant", "round", "ms"])
        for row in rows:
            s = row.shape
            for variant, times in row.samples.items():
                for i, ms in enumerate(times):
                    fixed = [s.name, s.m, s.n, s.k, row.layout, row.tile_n, f"{row.over_bound:.4f}"]
                    out.writerow([*fixed, variant, i, f"{ms:.5f}"])
