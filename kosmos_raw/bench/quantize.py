"""The quantising kernel beside a plain copy that moves as many bytes: what memory allows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import ml_dtypes
import numpy as np

from ..numerics import mxfp8
from ..ops.quantize import MxArray, quantize_mxfp8
from ..ranks.communicator import Communicator
from .cuda_gemm import alternate_calls
from .timing import alternate

COPIES = {"rows": (1,), "columns": (0,), "both": (1, 0)}
CHECKED = 256  # rows, or columns, are compared with the oracle


@dataclass(frozen=True)
class QuantizeResult:
    rows: int
    columns: int
    copies: str
    ms: float
    gbytes_per_s: float  # that had to be read or written
    ratio: float  # time of a copy that reads and writes as many bytes, over ours


def run(comm: Communicator, shapes: Sequence[tuple[int, int]]) -> list[QuantizeResult]:
    """One rank; on the CPU one core. Checked before it is timed."""
    if comm.device.name == "cpu":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with getattr(comm.device, "stream", nullcontext()):
        return [_measure(comm, shape, name) for shape in shapes for name in COPIES]


def _measure(comm: Communicator, shape: tuple[int, int], name: str) -> QuantizeResult:
    xp = comm.device.xp
    host = np.random.default_rng(shape).standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    x = xp.asarray(host.view(np.uint16))
    out = tuple(MxArray.empty(comm, shape, axis) for axis in COPIES[name])
    ours: Callable[[], object] = partial(quantize_mxfp8, comm, x, COPIES[name], out=out)
    ours()
    comm.synchronize()
    for copy in out:
        _check(host, copy)
    nbytes = x.nbytes + sum(copy.nbytes for copy in out)
    source, target = (xp.ones(nbytes // 2, np.uint8) for _ in range(2))
    variants: dict[str, Callable[[], object]] = {"ours": ours, "copy": partial(xp.copyto, target, source)}
    if comm.device.queues_launches:
        seconds = {key: median(ms) * 1e-3 for key, ms in alternate_calls(comm, variants).items()}  # type: ignore[arg-type]
    else:
        seconds = alternate(variants, warm_up=3, timed=9, clock=time.process_time)  # of one core
    taken = seconds["ours"]
    return QuantizeResult(*shape, name, taken * 1e3, nbytes / taken / 1e9, seconds["copy"] / taken)


def _check(x: np.ndarray, copy: MxArray) -> None:
    """Lines spread over the copy, every byte of them.

    Raises: ValueError when one is wrong.
    """
    lines = np.unique(np.linspace(0, copy.lines - 1, min(CHECKED, copy.lines)).astype(int))
    elements, scales = mxfp8.quantize(x[lines] if copy.axis == 1 else x[:, lines].T)
    got = copy.elements.get() if hasattr(copy.elements, "get") else copy.elements
    depth = elements.shape[1]
    same = np.array_equal(got[lines, :depth], elements)
    if not same or not np.array_equal(copy.scales_by_line()[lines, : depth // 32], scales):
        raise ValueError(f"bench quantize: wrong bytes along axis {copy.axis} of {copy.shape}")
