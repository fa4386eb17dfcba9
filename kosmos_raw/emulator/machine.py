"""Runs launches: a thin front on the C functions of runtime/emulator.h."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .module import Module, runtime_library

CACHES = {"none": 0, "xcd": 1, "workgroup": 2}
LATE = {"direct": 1, "lds": 2, "loads": 4, "stores": 8}
FENCES = {"device write-back": 1, "device invalidate": 2, "system write-back": 4, "system invalidate": 8}
OUTSIDE = {"zero": 0, "nothing": 1, "garbage": 2}
_BY_CHANCE = 16
_STATUS = {1: "time limit", 2: "fault", 3: "no such kernel", 4: "bad shape", 5: "no threads"}


@dataclass(frozen=True)
class Options:
    """How a run goes.

    seed: of preemption, chance, and the permutation of XCC ids (0: in order).
    preempt: a wave gives way at one in so many memory waits, and after each backward branch; 0: never.
    caches: "none", "xcd" (a private cache for each XCD) or "workgroup" (one for each: more cruel, still legal).
    late_memory: which of "direct" (direct loads to LDS), "lds", "loads" (into registers) and "stores" take effect only
        when a wait demands it; with late_by_chance each of them late or at once.
    outside: what direct loads write to LDS for lanes outside the buffer: "zero", "nothing" or "garbage".
    without_fences: those that do nothing, to see whether a test notices: names of FENCES.
    resident_wgs: of each launch at a time; 0: all.
    limit_seconds: after which a run that has not ended is stopped and reported.
    """

    seed: int = 0
    preempt: int = 0
    caches: str = "none"
    late_memory: tuple[str, ...] = ()
    late_by_chance: bool = False
    outside: str = "zero"
    threads: int = 1
    resident_wgs: int = 0
    without_fences: tuple[str, ...] = ()
    limit_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, known in (("caches", CACHES), ("outside", OUTSIDE)):
            if getattr(self, name) not in known:
                raise ValueError(f"emulator options: {name} is {getattr(self, name)!r}, want one of {', '.join(known)}")
        if set(self.late_memory) - set(LATE):
            raise ValueError(f"emulator options: late_memory is {self.late_memory}, want any of {', '.join(LATE)}")
        if set(self.without_fences) - set(FENCES):
            raise ValueError(
                f"emulator options: without_fences is {self.without_fences}, want any of {', '.join(FENCES)}"
            )

    @property
    def late(self) -> int:
        return sum(LATE[name] for name in self.late_memory) + (_BY_CHANCE if self.late_by_chance else 0)


@dataclass(frozen=True)
class Launch:
    """One kernel of one rank. `params` are the bytes of its arguments, as a struct or laid out by hand."""

    module: Module
    kernel: str
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    params: bytes
    rank: int = 0
    dynamic_lds_bytes: int = 0


@dataclass(frozen=True)
class RunReport:
    """What a run did, all launches together."""

    instructions: int  # of waves
    matrix_flops: int
    masked_barriers: int  # should be 0: else lanes of a wave went different ways round a barrier
    seconds: float

    def __str__(self) -> str:
        rate = self.instructions / max(self.seconds, 1e-9) / 1e6
        flops = self.matrix_flops / max(self.seconds, 1e-9) / 1e9
        return (
            f"{self.seconds:.3f} s, {self.instructions} wave instructions, {rate:.1f} M/s, {flops:.1f} matrix GFLOP/s"
        )


class RunError(RuntimeError):
    """A launch failed or did not end. The message names waves, workgroups, ranks and assembly lines."""

    def __init__(self, message: str, report: RunReport) -> None:
        super().__init__(message)
        self.report = report


class _Options(ctypes.Structure):
    _fields_ = [
        ("limit_seconds", ctypes.c_double),
        *(
            (name, ctypes.c_uint32)
            for name in "seed preempt_one_in caches late outside threads resident_wgs without_fences".split()
        ),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("module", ctypes.c_void_p),
        ("kernel", ctypes.c_char_p),
        ("params", ctypes.c_char_p),
        ("params_bytes", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("rank", ctypes.c_uint32),
        ("dynamic_lds_bytes", ctypes.c_uint32),
        ("barred_count", ctypes.c_uint32),
        ("barred", ctypes.c_void_p),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("instructions", ctypes.c_uint64), ("matrix_flops", ctypes.c_uint64), ("masked_barriers", ctypes.c_uint64),
        ("seconds", ctypes.c_double), ("status", ctypes.c_int32), ("message", ctypes.c_char * 8192),
    ]  # fmt: skip


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(runtime_library()))
    library.emulator_create.restype = ctypes.c_void_p
    library.emulator_create.argtypes = [ctypes.POINTER(_Options)]
    library.emulator_remember.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.emulator_launch.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(_Launch),
        ctypes.c_uint32,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    library.emulator_wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Report)]
    library.emulator_destroy.argtypes = [ctypes.c_void_p]
    return library


def _three(size: int | Sequence[int]) -> tuple[int, ...]:
    given = (size,) if isinstance(size, int) else tuple(size)
    return (*given, 1, 1)[:3]


def _params(launch: Launch) -> bytes:
    """The arguments, and behind them those that the compiler reads by itself (sizes of grid and block)."""
    kernel = launch.module.kernels.get(launch.kernel)
    if kernel is None or not kernel.hidden_arguments:
        return launch.params
    grid, block = _three(launch.grid), _three(launch.block)
    values = {"hidden_grid_dims": (sum(n > 1 for n in grid) or 1, 2)}
    for n, axis in enumerate("xyz"):
        values |= {
            f"hidden_block_count_{axis}": (grid[n], 4),
            f"hidden_group_size_{axis}": (block[n], 2),
            f"hidden_remainder_{axis}": (0, 2),
        }
    out = bytearray(launch.params.ljust(kernel.flag("kernarg_size"), b"\0"))
    for name, offset in kernel.hidden_arguments.items():
        value, size = values.get(name, (0, 0))
        out[offset : offset + size] = value.to_bytes(size, "little")
    return bytes(out)


def _with_text(message: str, launches: Sequence[Launch]) -> str:
    """Adds the instruction to each FILE:LINE of a message."""
    modules = {launch.module.path.name: launch.module for launch in launches}

    def add(m: re.Match[str]) -> str:
        module = modules.get(m[1])
        return f"{m[0]} {module.line(int(m[2]))!r}" if module and int(m[2]) else m[0]

    return re.sub(r"(\S+):(\d+)$", add, message, flags=re.M)


@dataclass
class Running:
    """Launches that have been started; `wait` once."""

    launches: Sequence[Launch]
    tickets: Any

    def wait(self) -> RunReport:
        total, messages, status = RunReport(0, 0, 0, 0.0), [], 0
        for ticket in self.tickets:
            r = _Report()
            _runtime().emulator_wait(ticket, ctypes.byref(r))
            total = RunReport(
                total.instructions + r.instructions,
                total.matrix_flops + r.matrix_flops,
                total.masked_barriers + r.masked_barriers,
                max(total.seconds, r.seconds),
            )
            status = status or r.status
            messages += [line for line in r.message.decode().split("\n") if line and line not in messages]
        if status:
            raise RunError(f"emulator: {_STATUS[status]}: " + _with_text("\n".join(messages), self.launches), total)
        return total


class Machine:
    """Host threads that run launches; several may run at once. Close it, or use it in a with statement."""

    def __init__(self, options: Options | None = None) -> None:
        o = self.options = options or Options()
        without = sum(FENCES[name] for name in o.without_fences)
        numbers = o.seed, o.preempt, CACHES[o.caches], o.late, OUTSIDE[o.outside], o.threads, o.resident_wgs, without
        given = _Options(o.limit_seconds, *numbers)
        self._handle = _runtime().emulator_create(ctypes.byref(given))

    def remember(self, arrays: Iterable[np.ndarray]) -> None:
        """Memory that caches may hold old contents of: what it held when a launch started."""
        for array in arrays:
            _runtime().emulator_remember(self._handle, array.ctypes.data, array.nbytes)

    def start(self, launches: Sequence[Launch]) -> Running:
        """Starts all of them as one step; returns at once."""
        given = (_Launch * len(launches))()
        params = [_params(launch) for launch in launches]
        for to, launch, bytes_ in zip(given, launches, params, strict=True):
            to.module, to.kernel, to.rank = launch.module.handle, launch.kernel.encode(), launch.rank
            to.params, to.params_bytes, to.dynamic_lds_bytes = bytes_, len(bytes_), launch.dynamic_lds_bytes
            to.grid[:], to.block[:] = _three(launch.grid), _three(launch.block)
        tickets = (ctypes.c_void_p * len(launches))()
        error = _runtime().emulator_launch(self._handle, given, len(launches), tickets)
        if error:
            what = ", ".join(f"{x.kernel} grid {x.grid} block {x.block}" for x in launches)
            raise ValueError(f"emulator: {_STATUS[error]}: {what}")
        return Running(launches, tickets)

    def close(self) -> None:
        if self._handle:
            _runtime().emulator_destroy(self._handle)
            self._handle = None

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(launches: Sequence[Launch], options: Options | None = None, memory: Iterable[np.ndarray] = ()) -> RunReport:
    """Runs launches together to their end.

    Args:
        memory: arrays that caches start full of, as they are now (used with options.caches).
    Raises: RunError when a launch faults or does not end in time; ValueError for an unknown kernel or a wrong shape.
    """
    with Machine(options) as machine:
        machine.remember(memory)
        return machine.start(launches).wait()
