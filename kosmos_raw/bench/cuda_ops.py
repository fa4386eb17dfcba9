"""The operators on CUDA GPUs beside what they replace: NCCL's collective and cuBLAS, one after the other or on two
streams, and PyTorch's asynchronous TP.

One process and one GPU a rank. Everything is checked on poisoned output before it is timed. All variants run in each
round, in shuffled order, on the same random data. The peers come through PyTorch, which is needed nowhere else.
"""

from __future__ import annotations

import csv
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ..ranks.communicator import Communicator
from .cuda_mxfp8 import MX_PROBLEMS
from .cuda_problems import PROBLEMS, Problem
from .llama3 import Shape, rows_moved

SERIAL, TWO_STREAMS, ASYNC_TP = "nccl + cublas", "nccl beside cublas", "async tp"
COMM, GEMM = "nccl alone", "cublas alone"
PLANNED = "planned"
SLEEP_CYCLES = {"single": 2_000_000, "steady": 8_000_000}  # about a millisecond, and four
MODES = {"single": 1, "steady": 10}  # calls between two events: alone from a common start, and back to back

Options = Mapping[str, Any]  # keyword arguments of the operator


@dataclass
class OpRow:
    """One operator and shape: milliseconds of the slowest rank, median over rounds, by (variant, mode)."""

    op: str
    shape: Shape
    ranks: int
    over_bound: float
    link_ms: float  # what must cross a link, at the rate that was measured for it
    ms: dict[tuple[str, str], float]
    samples: dict[tuple[str, str], list[float]] = field(repr=False)
    variants: tuple[str, ...] = (PLANNED,)  # ours
    dtype: str = "bf16"  # of our factors; peers' are BF16
    link_bytes: int = 0  # that a rank pulls or sends; 0: not noted

    @property
    def of_bf16(self) -> float:
        """Those bytes over what the same takes in BF16."""
        rows, width = rows_moved(self.op, self.shape)
        return self.link_bytes / max(1, rows // self.ranks * (self.ranks - 1) * width * 2)

    def bound(self, mode: str) -> float:
        """No call can be faster: link and cuBLAS, whichever takes longer."""
        return max(self.link_ms, self.ms[GEMM, mode])

    def over(self, peer: str, mode: str, variant: str = PLANNED) -> float | None:
        """How many times as fast as a peer; None if it was not there."""
        if (peer, mode) not in self.ms:
            return None
        return self.ms[peer, mode] / self.ms[variant, mode]

    def summary(self) -> str:
        return f"{self.op} {self.shape.name}: at {self.over_bound:.2f} of its bound; ms: {listed(self.ms)}"

    def of_bound(self, mode: str, variant: str = PLANNED) -> float:
        return self.bound(mode) / self.ms[variant, mode]


def run(
    comm: Communicator,
    todo: Sequence[tuple[str, Shape]],
    variants: Mapping[str, Mapping[str, Options]],
    port: int,
    rounds: int = 9,
    repeats: int = 100,
    seed: int = 0,
    dtype: str = "bf16",
    path: Path | None = None,
) -> list[OpRow]:
    """Measures every operator and shape of `todo` with its variants, by name. Every rank calls it; results are alike on
    all. `repeats`: calls whose bits must be equal. dtype: of our factors. `path`: gets the samples of all shapes so
    far, after each; a line of each goes to stderr."""
    problems = {"bf16": PROBLEMS, "mxfp8": MX_PROBLEMS}[dtype]
    with torch_group(comm, port) as (torch, dist):
        importlib.import_module("torch.distributed._symmetric_memory")
        rows = []
        for op, shape in todo:
            problem = problems[op](comm, torch, dist, shape, seed)
            rows.append(_measure(problem, {PLANNED: {}} | dict(variants.get(op, {})), rounds, repeats))
            problem.free()
            tell(comm, rows, path, write_csv)
        return rows


def tell(
    comm: Communicator, rows: Sequence[Any], path: Path | None, write: Callable[[Sequence[Any], Path], None]
) -> None:
    """After each measurement, by rank 0: a line of it, and the samples of all so far."""
    if comm.rank == 0:
        print(rows[-1].summary(), file=sys.stderr, flush=True)
        if path:
            write(rows, path)


def listed(ms: Mapping[tuple[str, str], float]) -> str:
    """Times by (variant, mode), in a line."""
    return ", ".join(f"{variant} ({mode}) {time:.3f}" for (variant, mode), time in sorted(ms.items()))


@contextmanager
def torch_group(comm: Communicator, port: int) -> Iterator[tuple[Any, Any]]:
    """PyTorch and its process group of the same ranks, on the communicator's stream."""
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(comm.rank), WORLD_SIZE=str(comm.ranks))
    torch.cuda.set_device(comm.device.index)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dist.init_process_group("nccl", device_id=torch.device("cuda", comm.device.index))
    try:
        with comm.device.stream:  # type: ignore[attr-defined]  # everybody on one stream
            torch.cuda.set_stream(torch.cuda.ExternalStream(comm.device.stream.ptr))  # type: ignore[attr-defined]
            yield torch, dist
    finally:
        dist.destroy_process_group()


def _measure(problem: Problem, ours: Mapping[str, Options], rounds: int, repeats: int) -> OpRow:
    comm, torch = problem.comm, problem.torch
    variants: dict[str, Callable[[], Any]] = {
        SERIAL: problem.serial,
        TWO_STREAMS: partial(_beside, torch, torch.cuda.Stream(), problem.collective, problem.multiply),
        ASYNC_TP: problem.async_tp,
        COMM: problem.collective,
        GEMM: problem.multiply,
    }
    if not problem.independent:
        del variants[TWO_STREAMS]
    if not problem.has_async_tp:
        del variants[ASYNC_TP]
    worst = problem.check(ours, repeats)
    variants |= {name: partial(problem.ours, **options) for name, options in ours.items()}
    little = torch.zeros(1, device="cuda")

    def start_together(mode: str) -> None:
        torch.cuda._sleep(SLEEP_CYCLES[mode])  # meanwhile the host queues what follows: its time is not in the samples
        problem.dist.all_reduce(little)

    samples = alternate(comm, variants, rounds, start_together)
    link = comm.device.link
    assert link is not None
    link_ms = problem.link_bytes / (link.push if problem.pushes else link.pull) / 1e6
    medians = {key: median(times) for key, times in samples.items()}
    return OpRow(
        problem.op, problem.shape, comm.ranks, worst, link_ms, medians, samples, tuple(ours),
        dtype=problem.dtype, link_bytes=problem.link_bytes,
    )  # fmt: skip


def _beside(torch: Any, stream: Any, collective: Callable[[], None], multiply: Callable[[], None]) -> None:
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        collective()
    multiply()
    here.wait_stream(stream)


def alternate(
    comm: Communicator,
    variants: Mapping[str, Callable[[], Any]],
    rounds: int,
    start_together: Callable[[str], None],
    modes: Mapping[str, int] = MODES,
    before: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[tuple[str, str], list[float]]:
    """Milliseconds a call of the slowest rank, for each variant and mode one value a round. `before`: what a variant
    wants done before each of its calls, outside of its time."""
    device, order = comm.device, random.Random(0)  # the same order on all ranks
    todo = [(name, mode) for name in variants for mode in modes]
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in todo}
    for round_ in range(rounds + 2):  # the first two warm up
        order.shuffle(todo)
        mine = []
        for name, mode in todo:
            comm.synchronize()
            comm.barrier()
            first = (before or {}).get(name)
            if first:
                first()
            start_together(mode)
            mine.append(_timed(device, variants[name], modes[mode], first) / modes[mode])
        for key, times in zip(todo, zip(*comm.allgather(mine), strict=True), strict=True):
            if round_ >= 2:
                samples[key].append(max(times))
    comm.synchronize()
    return samples


def _timed(device: Any, call: Callable[[], Any], calls: int, before: Callable[[], Any] | None) -> float:
    """Milliseconds of so many calls; what the first one wants before it is done."""
    events = [device.record()]  # starts and ends in turn; nothing is waited for before all is queued
    for i in range(calls):
        if before and i:
            events.append(device.record())
            before()
            events.append(device.record())
        call()
    events.append(device.record())
    return sum(device.elapsed_ms(a, b) for a, b in zip(events[::2], events[1::2], strict=True))


def write_csv(rows: Sequence[OpRow], path: Path) -> None:
    """Every sample, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow("op dtype ranks name m n k over_bound link_ms link_bytes variant mode round ms".split())
        for row in rows:
            s = row.shape
            for (variant, mode), times in row.samples.items():
                for i, ms in enumerate(times):
                    fixed = [row.op, row.dtype, row.ranks, s.name, s.m, s.n, s.k]
                    of_link = [f"{row.over_bound:.4f}", f"{row.link_ms:.5f}", row.link_bytes]
                    out.writerow([*fixed, *of_link, variant, mode, i, f"{ms:.5f}"])


def read_csv(path: Path) -> list[OpRow]:
    """What write_csv wrote."""
    rows: dict[tuple[str, ...], OpRow] = {}
    peers = {SERIAL, TWO_STREAMS, ASYNC_TP, COMM, GEMM}
    with path.open() as file:
        for line in csv.DictReader(file):
            shape = Shape(line["name"], int(line["m"]), int(line["n"]), int(line["k"]))
            key = (line["op"], line["dtype"], line["ranks"], shape.name)
            if key not in rows:
                over, link_ms, nbytes = float(line["over_bound"]), float(line["link_ms"]), int(line["link_bytes"])
                rows[key] = OpRow(line["op"], shape, int(line["ranks"]), over, link_ms, {}, {}, (), key[1], nbytes)
            row = rows[key]
            row.samples.setdefault((line["variant"], line["mode"]), []).append(float(line["ms"]))
            if line["variant"] not in peers and line["variant"] not in row.variants:
                row.variants += (line["variant"],)
    for row in rows.values():
        row.ms = {key: median(times) for key, times in row.samples.items()}
    return list(rows.values())


def free_port() -> int:
    """A port of this machine that nobody uses now, for the peers' processes to meet."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
