"""Every operator's gfx950 text, through the package's own Python path: ranks are threads, memory is the CPU device's,
and launches run in the emulator, all ranks' together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw import emulator
from kosmos_raw.build import gfx950, report
from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.checks.validate import merge, run_all
from kosmos_raw.device.base import Kernel, Matrix, Tile
from kosmos_raw.device.cpu import CpuDevice
from kosmos_raw.ranks import communicator
from tests import programs

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
        self.here, self.done = threading.Barrier(ranks, self._run), threading.Barrier(ranks)

    def _run(self) -> None:
        emulator.run([launch for launch in self.launches if launch], self.options)

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

    def launch(self, params: np.ndarray, workgroups: int, operands: Sequence[Matrix] = ()) -> None:
        name = f"{self.op}_main"
        self.node.launch(emulator.Launch(self.module, name, workgroups, 512, params.tobytes(), self.rank), self.rank)


@pytest.fixture
def emulated(monkeypatch):
    """Makes the CPU device launch in the emulator."""

    def use(ranks: int, options: emulator.Options) -> None:
        node = Node(ranks, options)

        class Device(CpuDevice):
            tick_hz = 100_000_000

            def kernel(self, op: str) -> Kernel:
                return EmulatedKernel(op, self.index, node)

        monkeypatch.setattr(communicator, "open_device", lambda name, rank, ranks: Device(rank, ranks))

    return use


ROWS = ((100, 0, 290), (1, 2, 0), (257, 256, 3))


@pytest.mark.parametrize("op", CHECKED)
def test_every_operator(op, emulated):
    emulated(3, emulator.Options(late_memory=("direct", "lds", "loads", "stores"), preempt=4, seed=1, threads=2))
    cases = [Case(rows, 130, 72, op, arena=i == 0, iters=1, seed=i) for i, rows in enumerate(ROWS)]
    for outcomes in zip(*kr.launch(run_all, cases, ranks=3, mode="threads", workgroups=4), strict=True):
        assert merge(outcomes).passed, merge(outcomes).problems


def test_operators_in_turn(emulated):
    """With changing shapes, split contractions and gradients that are added, each exact."""
    emulated(3, emulator.Options(threads=2))
    assert kr.launch(programs.back_to_back, 40, 5, ranks=3, mode="threads", workgroups=4) == [40] * 3
