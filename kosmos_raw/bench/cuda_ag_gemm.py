"""ag_gemm on CUDA GPUs beside what it replaces: NCCL's all-gather and then cuBLAS, and PyTorch's asynchronous TP.

One process and one GPU a rank. Everything is checked on poisoned output before it is timed. All variants run in each
round, in shuffled order, on the same random data. The peers come through PyTorch, which is needed nowhere else.
"""

from __future__ import annotations

import csv
import importlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..numerics.tolerance import compare, gemm_bound
from ..ops.ag_gemm import ag_gemm
from ..ranks.communicator import POISON, Communicator
from .cuda_gemm import CHECKED_ROWS, Shape, normal, to_float

SERIAL, ASYNC_TP, GATHER, GEMM = "nccl + cublas", "async tp", "nccl alone", "cublas alone"
SLEEP_CYCLES = 2_000_000  # about a millisecond
MODES = {"single": 1, "steady": 10}  # calls between two events: alone from a common start, and back to back


@dataclass
class AgGemmRow:
    """One shape: milliseconds of the slowest rank, median over rounds, by (variant, mode)."""

    shape: Shape
    over_bound: float
    ms: dict[tuple[str, str], float]
    samples: dict[tuple[str, str], list[float]] = field(repr=False)

    def best(self, mode: str) -> tuple[str, float]:
        """The fastest crew of movers."""
        ours = {name: ms for (name, m), ms in self.ms.items() if m == mode and name.startswith("movers=")}
        name = min(ours, key=ours.__getitem__)
        return name, ours[name]


def run(
    comm: Communicator,
    shapes: Sequence[Shape],
    crews: Sequence[int | None],
    port: int,
    rounds: int = 9,
    seed: int = 0,
) -> list[AgGemmRow]:
    """Measures every shape with every crew of movers. Every rank calls it; results are alike on all."""
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(comm.rank), WORLD_SIZE=str(comm.ranks))
    torch.cuda.set_device(comm.device.index)
    dist.init_process_group("nccl", device_id=torch.device("cuda", comm.device.index))
    group = dist.group.WORLD.group_name
    symmetric.enable_symm_mem_for_group(group)
    try:
        with comm.device.stream:  # type: ignore[attr-defined]  # everybody on one stream
            torch.cuda.set_stream(torch.cuda.ExternalStream(comm.device.stream.ptr))  # type: ignore[attr-defined]
            return [_measure(comm, torch, dist, group, shape, crews, rounds, seed) for shape in shapes]
    finally:
        dist.destroy_process_group()


def _measure(
    comm: Communicator,
    torch: Any,
    dist: Any,
    group: str,
    shape: Shape,
    crews: Sequence[int | None],
    rounds: int,
    seed: int,
) -> AgGemmRow:
    xp, rows = comm.device.xp, shape.m // comm.ranks
    shard = comm.empty((rows, shape.k)).view(np.uint16)
    xp.random.seed(seed * 8 + comm.rank)
    shard[...] = normal(xp, rows, shape.k)
    b = normal(xp, shape.n, shape.k)
    out = xp.empty((shape.m, shape.n), np.uint16)
    full = xp.empty((shape.m, shape.k), np.uint16)
    x, w, c, gathered = (
        torch.as_tensor(t.view(np.int16), device="cuda").view(torch.bfloat16) for t in (shard, b, out, full)
    )

    def gather() -> None:
        dist.all_gather_into_tensor(gathered, x)

    def gemm() -> None:
        torch.mm(gathered, w.t(), out=c)

    def serial() -> None:
        gather()
        gemm()

    def async_tp() -> None:
        torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], gather_dim=0, group_name=group)

    worst = 0.0
    variants: dict[str, Callable[[], None]] = {SERIAL: serial, ASYNC_TP: async_tp, GATHER: gather, GEMM: gemm}
    serial()
    wanted = out.copy()
    for movers in crews:
        comm.poison()
        out[...] = POISON
        ag_gemm(comm, shard, b, out=out, movers=movers)
        comm.synchronize()
        worst = max(worst, _check(shape, full, b, out, wanted))
        variants[f"movers={movers or 'planned'}"] = _prepared(
            comm, partial(ag_gemm, comm, shard, b, out=out, movers=movers)
        )
    little = torch.zeros(1, device="cuda")

    def start_together() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)  # meanwhile the host queues all that follows: its time is not in the samples
        dist.all_reduce(little)

    samples = _alternate(comm, variants, rounds, start_together)
    comm.synchronize()
    comm.free(shard)
    xp.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()
    return AgGemmRow(shape, worst, {key: median(times) for key, times in samples.items()}, samples)


def _prepared(comm: Communicator, call: Callable[[], Any]) -> Callable[[], None]:
    """The launch that `call` makes, without preparing its arguments again: what is timed is the kernel."""
    caught: list[tuple[Any, ...]] = []
    comm.launch = lambda *arguments: caught.append(arguments)  # type: ignore[method-assign]
    try:
        call()
    finally:
        del comm.launch
    (arguments,) = caught
    return lambda: comm.launch(*arguments)


def _check(shape: Shape, full: Any, b: Any, out: Any, wanted: Any) -> float:
    """Rows spread over C against float64, all of C against NCCL and cuBLAS. Returns how much of the bound is used."""
    xp = importlib.import_module("cupy")
    rows = xp.unique(xp.linspace(0, shape.m - 1, CHECKED_ROWS).astype(int))
    a, w = to_float(full[rows], np.float64), to_float(b, np.float64)
    exact, magnitude = (a @ w.T).get(), (abs(a) @ abs(w).T).get()
    result = compare(to_float(out[rows], np.float64).get(), exact, gemm_bound(exact, magnitude, shape.k))
    off = max(
        float(abs(to_float(out[m : m + 1024], np.float32) - to_float(wanted[m : m + 1024], np.float32)).max())
        for m in range(0, shape.m, 1024)
    )
    if not result.passed or not off <= 0.06 * shape.k**0.5:
        raise ValueError(f"bench ag_gemm: {shape}: wrong at {result.worst}, or {off} off NCCL + cuBLAS")
    return result.over_bound


def _alternate(
    comm: Communicator, variants: dict[str, Callable[[], None]], rounds: int, start_together: Callable[[], None]
) -> dict[tuple[str, str], list[float]]:
    """Milliseconds a call of the slowest rank, for each variant and mode one value a round."""
    device, order = comm.device, random.Random(0)  # the same order on all ranks
    todo = [(name, mode) for name in variants for mode in MODES]
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in todo}
    for round_ in range(rounds + 2):  # the first two warm up
        order.shuffle(todo)
        mine = []
        for name, mode in todo:
            comm.synchronize()
            comm.barrier()
            start_together()
            start = device.record()  # type: ignore[attr-defined]
            for _ in range(MODES[mode]):
                variants[name]()
            mine.append(device.elapsed_ms(start, device.record()) / MODES[mode])  # type: ignore[attr-defined]
        for key, times in zip(todo, zip(*comm.allgather(mine), strict=True), strict=True):
            if round_ >= 2:
                samples[key].append(max(times))
    return samples


def geometric_means(rows: Sequence[AgGemmRow], mode: str) -> dict[str, float]:
    """Over all shapes: speedup over each peer, and max(collective, GEMM) over ours."""
    ours = [row.best(mode)[1] for row in rows]

    def mean(times: list[float]) -> float:
        return float(np.exp(np.mean(np.log(np.array(times) / np.array(ours)))))

    bound = [max(row.ms[GATHER, mode], row.ms[GEMM, mode]) for row in rows]
    return {
        "over " + SERIAL: mean([row.ms[SERIAL, mode] for row in rows]),
        "over " + ASYNC_TP: mean([row.ms[ASYNC_TP, mode] for row in rows]),
        "bound over ours": mean(bound),
    }


def write_csv(rows: Sequence[AgGemmRow], path: Path) -> None:
    """Every sample, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["name", "m", "n", "k", "over_bound", "variant", "mode", "round", "ms"])
        for row in rows:
            s = row.shape
            for (variant, mode), times in row.samples.items():
                for i, ms in enumerate(times):
                    out.writerow([s.name, s.m, s.n, s.k, f"{row.over_bound:.4f}", variant, mode, i, f"{ms:.5f}"])


def free_port() -> int:
    """A port of this machine that nobody uses now, for the peers' processes to meet."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
