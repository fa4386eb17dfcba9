"""Every operator's gfx950 text, through the package's own Python path: ranks are threads, memory is the CPU device's,
and launches run in the emulator, all ranks' together."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw import emulator
from kosmos_raw.build import gfx950, report
from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.checks.validate import merge, run_all
from kosmos_raw.device.base import Kernel, Matrix, Memory, Tile
from kosmos_raw.device.cpu import CpuDevice
from kosmos_raw.ranks import communicator
from tests import programs
from tests.test_gemm_rs import check_patterns, pass_patterns

pytestmark = [pytest.mark.emulated, pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))]

_lock = threading.Lock()


@cache
def module(op: str) -> emulator.Module:
    return emulator.Module(gfx950.code_object(op).text)


class Node:
    """Where the launches of all ranks meet, to run together."""

    def __init__(self, ranks: int, options: emulator.Options):
        self.options = options
        self.launches: list[emulator.Launch | None] = [None] * ranks
        self.memory: dict[int, np.ndarray] = {}  # of all ranks, by address: what caches may hold from before a launch
        self.here, self.done = threading.Barrier(ranks, self._run), threading.Barrier(ranks)

    def _run(self) -> None:
        launches = [launch for launch in self.launches if launch]
        emulator.run(launches, self.options, tuple(self.memory.values()) if self.options.caches != "none" else ())

    def launch(self, launch: emulator.Launch, rank: int) -> None:
        self.launches[rank] = launch
        self.here.wait(120)
        self.done.wait(120)


class EmulatedKernel(Kernel):
    tile = Tile(256, 256)

    def __init__(self, op: str, rank: int, node: Node):
        self.op, self.rank, self.node = op, rank, node
        self.params_bytes = report.python_param_bytes(op)
        with _lock:
            self.module = module(op)

    def prepare(self, params: np.ndarray, operands: Sequence[Matrix] = ()) -> Callable[[int], None]:
        def launch(workgroups: int) -> None:
            name, given = f"{self.op}_main", params.tobytes()
            self.node.launch(emulator.Launch(self.module, name, workgroups, 512, given, self.rank), self.rank)

        return launch


@pytest.fixture
def emulated(monkeypatch):
    """Makes the CPU device launch in the emulator."""

    def use(ranks: int, options: emulator.Options) -> None:
        node = Node(ranks, options)

        class Device(CpuDevice):
            tick_hz = 100_000_000

            def kernel(self, op: str) -> Kernel:
                return EmulatedKernel(op, self.index, node)

            def allocate(self, nbytes: int, **more: bool) -> Memory:
                made = super().allocate(nbytes, **more)
                if nbytes:
                    here = (ctypes.c_uint8 * nbytes).from_address(made.address)
                    node.memory[made.address] = np.ctypeslib.as_array(here)
                return made

            def free(self, memory: Memory) -> None:
                node.memory.pop(memory.address, None)
                super().free(memory)

        monkeypatch.setattr(communicator, "open_device", lambda name, rank, ranks: Device(rank, ranks))

    return use


ROWS = ((100, 0, 290), (1, 2, 0), (257, 256, 3))


@pytest.mark.parametrize("op", CHECKED)
def test_every_operator(op, emulated):
    emulated(3, emulator.Options(late_memory=("direct", "lds", "loads", "stores"), preempt=4, seed=1, threads=2))
    cases = [Case(rows, 130, 72, op, arena=i == 0, iters=1, seed=i) for i, rows in enumerate(ROWS)]
    for outcomes in zip(*kr.launch(run_all, cases, ranks=3, mode="threads", workgroups=4), strict=True):
        assert merge(outcomes).passed, merge(outcomes).problems


def test_mxfp8(emulated):
    """Rows and columns gathered, and both products of them. (tests/hip has another operator, by way of CuPy.)"""
    emulated(3, emulator.Options(late_memory=("direct", "lds", "loads", "stores"), preempt=4, seed=1, threads=2))
    cases = [
        Case(rows, 130, 200, "ag_gemm_dgrad", arena=i == 0, iters=1, dtype="mxfp8") for i, rows in enumerate(ROWS[:2])
    ]
    for outcomes in zip(*kr.launch(run_all, cases, ranks=3, mode="threads", workgroups=4), strict=True):
        assert merge(outcomes).passed, merge(outcomes).problems


def test_operators_in_turn(emulated):
    """With changing shapes, split contractions and gradients that are added, each exact."""
    emulated(3, emulator.Options(threads=2))
    assert kr.launch(programs.back_to_back, 40, 5, ranks=3, mode="threads", workgroups=4) == [40] * 3


def right_without(op: str, fences: tuple[str, ...], emulated: Callable[..., None], seed: int) -> bool:
    """One shape, its contraction cut in parts, where caches keep what they have read and what they were given."""
    emulated(3, emulator.Options(caches="workgroup", preempt=3, seed=seed, without_fences=fences))
    case = Case((100, 40, 0), 300, 136, op, arena=True, iters=1, repeats=1, seed=seed, split=2)
    outcomes = kr.launch(run_all, [case], ranks=3, mode="threads", workgroups=4, arena_bytes=1 << 20)
    return merge([outcome for (outcome,) in outcomes]).passed


@pytest.mark.parametrize("op", ["ag_gemm_dgrad", "bulk_rs"])
def test_the_fences_round_sums_of_parts_are_needed(op, emulated):
    """Sums of parts go from WG to WG of a rank. (What goes from rank to rank: test_ag_gemm.py, test_protocol.py.)"""
    assert right_without(op, (), emulated, 1)
    for fence in ("device write-back", "device invalidate"):
        assert not all(right_without(op, (fence,), emulated, seed) for seed in (1, 2)), fence


def test_every_bf16_pattern_passes_gemm_rs(emulated):
    """As tests/test_gemm_rs.py on the CPU: times one, plus zeros of the other rank."""
    emulated(2, emulator.Options(caches="xcd", threads=2))
    for owner in range(2):
        check_patterns(np.concatenate(kr.launch(pass_patterns, owner, ranks=2, mode="threads", workgroups=8)))
