"""What a device is to the rest of the package: a few methods, the same for every kind.

A `Device` object belongs to one rank. Addresses are plain integers, valid in this process; arrays are of the device's
array library (`xp`). Nothing here knows of operators.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np


@dataclass
class Memory:
    """One raw allocation, or a peer's that was opened here."""

    address: int
    nbytes: int
    keep: Any = field(default=None, repr=False)  # what must live as long as the address is used
    opened: bool = False  # another process's: close it, never free it
    tag: bytes = b""  # what its last bytes hold, by which importers see that they have opened the right memory


@dataclass(frozen=True)
class Handle:
    """Names an allocation to other processes. Picklable. Always of a whole allocation: offsets travel apart."""

    pid: int
    address: int  # in the owner's process
    nbytes: int
    token: Any  # what the device needs to open it elsewhere


@dataclass(frozen=True)
class Tile:
    m: int
    n: int


@dataclass(frozen=True)
class Link:
    """What one GPU's links to all its peers carry together, in GB/s, and what plans set against it. Measured."""

    pull: float  # all GPUs reading at a time
    push: float  # all GPUs writing
    mover: float  # one WG that copies from a peer while the others build
    tflops: float  # of one WG that builds, while all do
    adder: float = 0.0  # what one WG's warp adds of its peers' rows while the others multiply; 0: none does


@dataclass(frozen=True)
class Matrix:
    """A bf16 matrix that output tiles read. Targets that load by descriptor must know where it ends: past its end they
    read zeros, 64 k at a time. So the K of a tile ends where its matrix does, or is a multiple of 64. Addresses and
    `ld` are whole 16 bytes."""

    address: int
    lines: int
    elements: int  # of a line
    ld: int  # elements from line to line
    by_rows: bool = False  # lines are rows or columns of tiles; else lines are k


class Kernel(ABC):
    """One operator's entry point on one device."""

    tile: Tile  # rows and columns of one output tile
    other_tiles: tuple[Tile, ...] = ()  # that it can do as well: a launch says which in its params, `tile_n`
    params_bytes: int  # size of the params struct that the compiled code expects
    moved_bytes: int | None = None  # read of peers so far, by all ranks of this process; None: nobody counts
    wgs_per_unit: int = 1  # that run at once on a compute unit; more than one of kernels without a schedule alone

    @abstractmethod
    def prepare(self, params: np.ndarray, operands: Sequence[Matrix] = ()) -> Callable[[int], None]:
        """What queues a launch of so many WGs on the device's stream, with what `params` holds then: a 1-element
        structured array, passed by value. `operands` are all matrices that its tiles read. For Device.in_order. The CPU
        device returns when the launch has ended."""

    def launch(self, params: np.ndarray, workgroups: int, operands: Sequence[Matrix] = ()) -> None:
        """Prepares a launch and makes it."""
        self.prepare(params, operands)(workgroups)


class Device(ABC):
    """One rank's device."""

    name: str  # "cpu", "hip", "emulated", "cuda"
    index: int  # ordinal of the device in this process
    xp: ModuleType  # the array library: numpy or cupy
    dlpack_types: tuple[int, ...]  # DLDeviceType of the memory that it can use as it is
    tick_hz: int  # rate of target::ticks()
    trace_rows: int = 1  # rows of trace events a WG writes
    dies: int = 1  # parts with an L2 of their own
    link: Link | None = None  # None: not measured; crews then follow the paper's table
    beside: bool = False  # its WGs have threads to spare that move while the others build (policy "beside")
    default_arena_bytes: int = 4 << 30  # symmetric memory of a rank when the caller does not say
    multiplies_mxfp8: bool = True  # False: its tile takes BF16, and operators in MXFP8 make that first
    queues_launches: bool = True  # False: a launch has ended when `Kernel.launch` returns
    most_delay_us: int = 0  # for tests: how late a WG may come, by chance, to a claim or a publication. CPU only
    # Whether ranks meet before and after each launch: on a GPU that ranks of one process share, allocating memory or
    # loading a kernel may wait for the GPU, and so for the very rank that does it.
    launches_together: bool = False

    @abstractmethod
    def __init__(self, index: int = 0, ranks: int = 1): ...

    @property
    @abstractmethod
    def max_workgroups(self) -> int:
        """WGs that are resident at once, one a compute unit; a larger grid would deadlock and is refused."""

    @property
    @abstractmethod
    def default_workgroups(self) -> int:
        """The grid when the caller does not choose one."""

    # -- memory

    @abstractmethod
    def allocate(self, nbytes: int, *, signals: bool = False, shared: bool = False) -> Memory:
        """A raw allocation, zeroed. `shared`: other processes will open it. `signals`: its words are written by
        peers and polled here while a kernel runs, so no cache may hold them back."""

    @abstractmethod
    def free(self, memory: Memory) -> None: ...

    def export(self, memory: Memory) -> Handle:
        """A handle of a shared allocation."""
        return Handle(os.getpid(), memory.address, memory.nbytes, self._export_token(memory))

    def open(self, handle: Handle) -> Memory:
        """A peer's allocation at an address of this process. To be opened once; in the owner's own process (ranks
        as threads) it is simply the owner's address."""
        if handle.pid == os.getpid():
            self._reach_own(handle)
            return Memory(handle.address, handle.nbytes, opened=True)
        return self._open_token(handle)

    @abstractmethod
    def _export_token(self, memory: Memory) -> Any: ...

    @abstractmethod
    def _open_token(self, handle: Handle) -> Memory: ...

    def _reach_own(self, handle: Handle) -> None:
        """Makes memory of another device of this process reachable (peer access); nothing to do on the CPU."""

    @abstractmethod
    def close(self, memory: Memory) -> None:
        """Undoes `open`. Every importer closes before the owner frees."""

    @abstractmethod
    def host_words(self, count: int) -> tuple[np.ndarray, int]:
        """`count` zeroed uint32 words of host memory that kernels can read while they run: NumPy view and address
        for the kernel."""

    @abstractmethod
    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """An `xp` array over memory that `owner` keeps alive."""

    @abstractmethod
    def address_of(self, array: Any) -> int:
        """Where an `xp` array's first element lies."""

    @abstractmethod
    def to_host(self, address: int, nbytes: int) -> bytes:
        """Copies device memory to the host, after everything queued before."""

    @abstractmethod
    def zero(self, address: int, nbytes: int) -> None:
        """Zeroes device memory, in stream order."""

    @abstractmethod
    def fill(self, address: int, nbytes: int, word: int) -> None:
        """Fills device memory with a 16-bit word, in stream order. `nbytes` is even."""

    # -- order between the device's stream and the caller's; one and the same on the CPU

    def wait_for_caller(self) -> None:
        """What is queued on the device from now on starts after what the caller has queued by now."""

    def caller_waits(self) -> None:
        """What the caller queues from now on starts after what is queued on the device by now."""

    def in_order(self, begin: Callable[[int], None], workgroups: int) -> None:
        """Makes a launch that `Kernel.prepare` has made ready, between `wait_for_caller` and `caller_waits`."""
        begin(workgroups)

    def dlpack_stream(self) -> int | None:
        """The caller's stream, as __dlpack__(stream=) wants it; None where there are no streams."""
        return None

    # -- work

    @classmethod
    @abstractmethod
    def build(cls, op: str) -> None:
        """Compiles the operator into the cache, where `kernel` finds it. Opens no device."""

    @abstractmethod
    def kernel(self, op: str) -> Kernel:
        """The compiled operator, loaded now: loading must not happen while a peer's kernel already waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for everything queued on the device's stream."""

    @abstractmethod
    def close_device(self) -> None:
        """Releases what the device object itself holds (streams, modules)."""

    @abstractmethod
    def describe(self) -> str:
        """The device in words, for reports."""
