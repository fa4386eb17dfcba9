"""The CPU as a device: a WG is a thread with one lane, ranks share memory by anonymous files.

Proves schedules, protocols and numerics, on any Linux machine. The kernels are hip_kernels/ built for the host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..build import sources, zig
from ..errors import KosmosError, NotAvailable
from .base import Device, Handle, Kernel, Matrix, Memory, Tile

MAX_WORKGROUPS = 256  # hip_kernels/target/host_run.h


class CpuKernel(Kernel):
    def __init__(self, op: str, device: CpuDevice):
        self.op, self._device = op, device
        library = ctypes.CDLL(str(_library(op, device.flags)))
        self._main = getattr(library, f"{op}_main")  # ctypes lets go of the GIL during the call
        self._main.argtypes = [ctypes.c_void_p]
        self._main.restype = ctypes.c_int

        self._come_late = getattr(library, f"{op}_come_late")

        self._moved_bytes = getattr(library, f"{op}_moved_bytes")
        self._moved_bytes.restype = ctypes.c_uint64

        def constant(name: str) -> int:
            return int(getattr(library, f"{op}_{name}")())

        self.params_bytes = constant("params_bytes")
        self.tile = Tile(constant("tile_m"), constant("tile_n"))

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        return int(self._moved_bytes())

    def prepare(self, params: np.ndarray, operands: Sequence[Matrix] = ()) -> Callable[[int], None]:
        address = params.ctypes.data

        def begin(workgroups: int) -> None:
            self._come_late(self._device.most_delay_us)
            error = self._main(address)
            if error:
                raise KosmosError(
                    f"{self.op}: could not start {workgroups} threads on rank: {os.strerror(error)}; "
                    "lower workgroups= or raise the process limit (ulimit -u)"
                )

        return begin


class CpuDevice(Device):
    name = "cpu"
    xp = np
    dlpack_types = (1, 3, 11)  # the CPU's, and what CUDA and ROCm pin
    tick_hz = 1_000_000_000
    default_arena_bytes = 64 << 20
    queues_launches = False
    flags: tuple[str, ...] = ()  # more, for the compiler

    def __init__(self, index: int = 0, ranks: int = 1):
        if not hasattr(os, "memfd_create"):
            raise NotAvailable("device cpu: needs Linux (memfd_create), for memory that ranks share")
        self.index = index
        self._ranks = ranks

    @property
    def max_workgroups(self) -> int:
        return MAX_WORKGROUPS

    @property
    def default_workgroups(self) -> int:
        return min(MAX_WORKGROUPS, max(4, len(os.sched_getaffinity(0)) // self._ranks))

    # Anonymous files: peers open them through /proc while the owner lives, and nothing is left when it dies, however.
    def allocate(self, nbytes: int, *, signals: bool = False, shared: bool = False) -> Memory:
        nbytes = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        if not shared:
            pages = mmap.mmap(-1, nbytes)
            return Memory(_address(pages), nbytes, keep=(pages, None))
        available = _available_bytes()
        refusal = (
            f"device cpu: cannot reserve {nbytes:,} bytes of shared memory; {available:,} bytes are available; "
            "lower arena_bytes= or free memory"
        )
        if nbytes > available:  # reserving more would have the system kill processes, this one or another
            raise NotAvailable(refusal)
        fd = os.memfd_create("kosmos_raw", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # now, not as a bus error inside a kernel
            pages = mmap.mmap(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise NotAvailable(f"{refusal} ({error.strerror})") from error
        return Memory(_address(pages), nbytes, keep=(pages, fd))

    def free(self, memory: Memory) -> None:
        _, fd = memory.keep
        memory.keep = None  # arrays that still view the pages keep them mapped
        if fd is not None:
            os.close(fd)

    def _export_token(self, memory: Memory) -> Any:
        return memory.keep[1]

    def _open_token(self, handle: Handle) -> Memory:
        path = f"/proc/{handle.pid}/fd/{handle.token}"
        try:
            with open(path, "r+b", buffering=0) as file:
                pages = mmap.mmap(file.fileno(), handle.nbytes)
        except OSError as error:
            raise NotAvailable(
                f"device cpu: cannot open the memory of process {handle.pid} ({path}: {error.strerror}); "
                "ranks must run as one user in one PID namespace (one container)"
            ) from error
        return Memory(_address(pages), handle.nbytes, keep=(pages, None), opened=True)

    def close(self, memory: Memory) -> None:
        memory.keep = None

    def host_words(self, count: int) -> tuple[np.ndarray, int]:
        words = np.zeros(count, np.uint32)
        return words, words.ctypes.data

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        view = (ctypes.c_char * max(1, count * dtype.itemsize)).from_address(address)
        view._owner = owner  # NumPy keeps `view`, and so the pages
        return np.frombuffer(view, dtype, count).reshape(shape)

    def address_of(self, array: Any) -> int:
        return int(array.ctypes.data)

    def to_host(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def fill(self, address: int, nbytes: int, word: int) -> None:
        self.array(address, (nbytes // 2,), np.uint16, None)[...] = word

    @classmethod
    def build(cls, op: str) -> None:
        _library(op, cls.flags)

    def kernel(self, op: str) -> Kernel:
        return CpuKernel(op, self)

    def synchronize(self) -> None:
        """Every launch has ended when it returns."""

    def close_device(self) -> None:
        """Nothing is held."""

    def describe(self) -> str:
        return f"cpu, {len(os.sched_getaffinity(0))} cores"


def _library(op: str, flags: Sequence[str] = ()) -> Path:
    return zig.shared_library(sources.kernel(op), flags)


def _address(pages: mmap.mmap) -> int:
    return int(np.frombuffer(pages, np.uint8).ctypes.data)


def _available_bytes() -> int:
    """What can be had without swapping: MemAvailable of the machine, or what is left of the memory limit of the group
    of processes (container) that this one is in."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        available = min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # no such limit
        pass
    return available
