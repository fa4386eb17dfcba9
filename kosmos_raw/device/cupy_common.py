"""What AMD and NVIDIA GPUs share when CuPy drives them: which GPU, its memory, streams and events. Peers are in
cupy_peers.py, kernels and launches in cupy_kernel.py.

CuPy has one interface for both. What differs is in hip.py and cuda.py: the kind of memory for signals, the code that is
loaded, and what is known to go wrong. Nothing imports CuPy before a GPU device is opened.

Streams. Kernels run on `Device.stream`, which is the rank's own and does not wait for the null stream. Arrays that a
caller makes with CuPy are filled on the caller's current stream instead. `wait_for_caller` and `caller_waits` order the
two, without the host waiting; a launch between them behaves as if it were queued on the caller's stream.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from ..build import report
from ..build.params import MAX_RANKS
from ..errors import KosmosError, NotAvailable
from .base import Memory
from .cupy_errors import (
    CAPTURE_ERRORS,
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    NOT_INITIALIZED,
    OUT_OF_MEMORY,
    Explained,
    GpuError,
    status_of,
)
from .cupy_kernel import Code, CupyKernel
from .cupy_peers import PeerMemory

GRANULE = 2 << 20  # bytes. IPC maps whole pages of this size, and some runtimes get other sizes wrong
TAG_BYTES = 16
SHARE = "KOSMOS_SHARE_GPU"

_lock = threading.Lock()
_users: dict[tuple[str, int], weakref.WeakSet[CupyDevice]] = {}  # devices of this process, by kind and ordinal


def _address(data: bytes) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


@cache
def _block(word: int) -> np.ndarray:
    """64 KiB of one word. Kept, for copies that are queued may still read it."""
    return np.full(1 << 15, word, np.uint16)


class CupyDevice(PeerMemory):
    """One rank's GPU. Makes it the current device of the calling thread, which must be the thread that uses it.

    Args:
        index: the rank's number on this node: ordinal of its GPU, unless GPUs are shared.
        ranks: ranks on this node.
        share: whether ranks may share a GPU when there are fewer GPUs than ranks; each then gets its part of the
            compute units. None asks KOSMOS_SHARE_GPU=1. Ranks that are processes take turns: right, but slow.
        workgroups_cap: upper limit of `max_workgroups`.
    Raises:
        NotAvailable: no such GPU, a package is missing, or something here is known not to work; with the remedy.
    """

    target: str  # of the compiled code: "gfx950", "sm_90a"
    extra: str  # of this package, with what the device needs
    masks: tuple[str, ...]  # environment variables that hide GPUs
    queues_variable: str  # environment variable: hardware queues a process and GPU
    queues_default: int

    def __init__(self, index: int = 0, ranks: int = 1, *, share: bool | None = None, workgroups_cap: int | None = None):
        if not 0 <= index < ranks or ranks > MAX_RANKS:
            raise ValueError(
                f"device {self.name}: index is {index} of {ranks} ranks, want 0 <= index < ranks <= {MAX_RANKS}"
            )
        self.cupy = self._import()
        self.xp = self.cupy
        self._runtime = self.cupy.cuda.runtime
        self._pid = os.getpid()
        self._ranks = ranks
        self._closed = False
        constants = report.target_constants(self.target)
        self.trace_rows, self.dies = constants["TRACE_ROWS"], constants["DIES"]
        share = os.environ.get(SHARE) == "1" if share is None else share
        self.index, self.sharers = self._place(index, ranks, self._count_devices(), share)
        self._gpu = self.cupy.cuda.Device(self.index)
        self._gpu.use()
        self._properties = self._runtime.getDeviceProperties(self.index)
        self._check_device()
        self._max_workgroups = self._count_workgroups(workgroups_cap)
        self._check_queues()
        self.stream = self._make_stream()
        self._mine = self.cupy.cuda.Event(disable_timing=True)
        self._callers = self.cupy.cuda.Event(disable_timing=True)
        self._kept: list[int] = []  # addresses to free at the end
        if self.sharers > 1:
            self._share()

    # -- what hip.py and cuda.py say

    @abstractmethod
    def _import(self) -> ModuleType:
        """CuPy, and whatever else the device needs."""

    @abstractmethod
    def _check_device(self) -> None:
        """Refuses a GPU or an environment that cannot work, warns about one that may not."""

    @abstractmethod
    def _code(self, op: str) -> Code: ...

    @abstractmethod
    def _occupancy(self, function: int, threads: int, shared_bytes: int) -> int:
        """WGs of the loaded function that fit on one compute unit."""

    def _loaded_params_bytes(self, function: int) -> int | None:
        """Size of the params struct by the driver's word, where it can be asked."""
        return None

    def _allow_shared(self, raw: Any, nbytes: int) -> None:
        """Lets a kernel use more dynamic shared memory than the default."""

    def _allocate_signals(self, nbytes: int) -> int:
        return int(self._runtime.malloc(nbytes))

    @abstractmethod
    def _allocate_host(self, nbytes: int) -> tuple[int, int, Callable[[], None]]:
        """Pinned mapped host memory: its address for the host, its address for kernels, and how to free it."""

    def _make_stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    # -- which GPU

    def _masks_in_words(self) -> str:
        return ", ".join(f"{name}={os.environ.get(name, 'not set')!s}" for name in self.masks)

    def _count_devices(self) -> int:
        try:
            count = int(self._runtime.getDeviceCount())
        except RuntimeError as error:
            if status_of(error) == NOT_INITIALIZED:
                raise NotAvailable(
                    f"device {self.name}: the GPU runtime does not work in a forked process ({error}); start ranks "
                    "with kosmos_raw.launch, mpirun or multiprocessing's spawn, and touch no GPU before"
                ) from error
            raise NotAvailable(
                f"device {self.name}: no GPU is visible ({error}); {self._masks_in_words()}; "
                "a mask that names a GPU that is not there hides all behind it"
            ) from error
        if count < 1:
            raise NotAvailable(f"device {self.name}: no GPU is visible; {self._masks_in_words()}")
        return count

    def _place(self, index: int, ranks: int, count: int, share: bool) -> tuple[int, int]:
        """Ordinal of the rank's GPU, and how many ranks use it."""
        if ranks > count and not share:
            raise NotAvailable(
                f"device {self.name}: {ranks} ranks, but this process sees {count} GPU(s); {self._masks_in_words()}. "
                f"Every rank must see the GPUs of all ranks. To let ranks share GPUs set {SHARE}=1 (right, but slow)"
            )
        ordinal = index % count
        return ordinal, len(range(ordinal, ranks, count))

    def _count_workgroups(self, cap: int | None) -> int:
        # Device.attributes has wrong numbers on ROCm: CuPy passes an old HIP's attribute numbers to HIP 7.
        units = int(self._properties["multiProcessorCount"])
        most = units // self.sharers
        if cap is not None:
            if cap < 1:
                raise ValueError(f"device {self.name}: workgroups_cap is {cap}, want 1 or more")
            most = min(most, cap)
        if most < 1:
            raise NotAvailable(f"device {self.name}: {units} compute units, too few for {self.sharers} ranks")
        return most

    def _check_queues(self) -> None:
        # Ranks as threads of one process: a kernel that waits blocks every stream of its hardware queue, also the one
        # whose kernel it waits for.
        with _lock:
            here = _users.setdefault((self.name, self.index), weakref.WeakSet())
            queues = os.environ.get(self.queues_variable, "")
            most = int(queues) if queues.isdigit() else self.queues_default
            if len(here) >= most:
                raise NotAvailable(
                    f"device {self.name}: {len(here)} ranks of this process use GPU {self.index} already, and it has "
                    f"{most} hardware queues here; set {self.queues_variable}={len(here) + 1} or use processes"
                )
            here.add(self)

    @property
    def max_workgroups(self) -> int:
        return self._max_workgroups

    @property
    def default_workgroups(self) -> int:
        return self._max_workgroups

    @property
    def compute_units(self) -> int:
        """Compute units (AMD) or SMs (NVIDIA) of the whole GPU."""
        return int(self._properties["multiProcessorCount"])

    @property
    def pci(self) -> str:
        """PCI address: what system tools and other processes call this GPU, whatever its ordinal is here."""
        return str(self._runtime.deviceGetPCIBusId(self.index))

    @property
    def gpu_name(self) -> str:
        name = self._properties["name"]
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def _share(self) -> None:
        """What keeps ranks of one GPU and process (threads) from waiting for each other on the host.

        The null stream would order the work of all threads, so each rank's thread gets the rank's own stream instead.
        After any `with stream:`, and CuPy has some, the null stream is current again: slower, but no hang, for a launch
        waits for it before ranks meet. Freeing waits for the GPU, so memory is kept until the end (see `free`).
        """
        self.launches_together = True
        self.stream.use()

    # -- current device, errors, streams

    def current(self) -> AbstractContextManager[Any]:
        """Makes the GPU the calling thread's current one inside a `with` block."""
        if os.getpid() != self._pid:
            raise KosmosError(
                f"device {self.name}: was opened by process {self._pid} and this is its fork {os.getpid()}; GPU "
                "runtimes do not survive fork: open the device in the process that uses it, and start that with spawn"
            )
        if self._closed:
            raise KosmosError(f"device {self.name}: GPU {self.index} is closed")
        return self._gpu

    def explained(self, doing: str, advice: str = "") -> AbstractContextManager[None]:
        """Errors of the runtime or driver inside the block become GpuError: what was done, what was said."""
        return Explained(self, doing, advice)

    def refuse_capture(self, stream: Any, which: str) -> None:
        """Raises KosmosError when `stream` is being captured into a graph."""
        try:
            capturing = stream.is_capturing()
        except RuntimeError as error:
            if status_of(error) in CAPTURE_ERRORS:
                raise self._capture_error(which, error) from error
            return  # a runtime without the question captures nothing
        if capturing:
            raise self._capture_error(which)

    def _capture_error(self, which: str, error: BaseException | None = None) -> KosmosError:
        said = f" ({error})" if error else ""
        return KosmosError(
            f"device {self.name}: {which} is being captured into a graph{said}; a replay would repeat the launch with "
            "an old epoch and hang. Call operators outside of the capture"
        )

    def wait_for_caller(self) -> None:
        """Work queued on `stream` from now on starts after what the caller's current CuPy stream holds now."""
        with self.current():
            caller = self._other_stream()
            if caller is not None:
                self._after(caller)

    def _other_stream(self) -> Any | None:
        """The caller's current stream; None when it is the device's own."""
        caller = self.cupy.cuda.get_current_stream()
        return None if caller.ptr == self.stream.ptr else caller

    def _after(self, caller: Any) -> None:
        self.refuse_capture(caller, "the current stream")
        with self.explained("waiting for the current stream"):
            self._callers.record(caller)
            self.stream.wait_event(self._callers)

    def _before(self, caller: Any) -> None:
        with self.explained("making the current stream wait"):
            self._mine.record(self.stream)
            caller.wait_event(self._mine)

    def caller_waits(self) -> None:
        """Work queued on the caller's current CuPy stream from now on starts after what `stream` holds now. Without it
        CuPy may also give an operand's memory away while a kernel still uses it."""
        with self.current():
            caller = self._other_stream()
            if caller is not None:
                self._before(caller)

    def in_order(self, begin: Callable[[int], None], workgroups: int) -> None:
        current = self.current()
        if self._runtime.getDevice() == self.index:  # to ask takes a tenth of what changing it takes
            self._in_order(begin, workgroups)
            return
        with current:
            self._in_order(begin, workgroups)

    def _in_order(self, begin: Callable[[int], None], workgroups: int) -> None:
        caller = self._other_stream()
        if caller is not None:  # the kernel, for inputs that the caller's stream is still making
            self._after(caller)
        begin(workgroups)
        if caller is not None:  # the caller's stream, for the result
            self._before(caller)

    def synchronize(self) -> None:
        """Waits for everything queued on `stream` and on the caller's current stream."""
        self.wait_for_caller()
        with self.current(), self.explained("waiting for the GPU", "after a fault in a kernel the process must end"):
            self.stream.synchronize()

    def record(self) -> Any:
        """An event with a time, at this point of `stream`."""
        with self.current():
            event = self.cupy.cuda.Event()
            event.record(self.stream)
            return event

    def elapsed_ms(self, a: Any, b: Any) -> float:
        """Milliseconds from event `a` to event `b` of `record`; waits for `b`."""
        with self.current(), self.explained("waiting for an event"):
            b.synchronize()
            return float(self.cupy.cuda.get_elapsed_time(a, b))

    def dlpack_stream(self) -> int:
        """The caller's current stream, as __dlpack__(stream=) wants it."""
        with self.current():
            pointer = int(self.cupy.cuda.get_current_stream().ptr)
        legacy = 0 if self._runtime.is_hip else 1  # DLPack's number of the null stream
        return pointer or legacy

    # -- memory

    def allocate(self, nbytes: int, *, signals: bool = False, shared: bool = False) -> Memory:
        """A raw allocation, zeroed, of whole 2 MiB. Never from CuPy's pool: a handle names a whole allocation. What is
        shared ends with a tag, behind the bytes that were asked for."""
        tag = os.urandom(TAG_BYTES) if shared else b""
        nbytes = max(1, -(-(nbytes + len(tag)) // GRANULE)) * GRANULE
        with self.current():
            try:
                with self.explained(f"allocating {nbytes:,} bytes"):
                    address = self._allocate_signals(nbytes) if signals else int(self._runtime.malloc(nbytes))
            except GpuError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                free, total = self._runtime.memGetInfo()
                raise NotAvailable(
                    f"device {self.name}:{self.index}: no room for {nbytes:,} bytes: {free:,} of {total:,} bytes are "
                    "free; lower arena_bytes=, or free CuPy's pool (cupy.get_default_memory_pool().free_all_blocks())"
                ) from error
            with self.explained("zeroing new memory"):
                self._runtime.memsetAsync(address, 0, nbytes - len(tag), self.stream.ptr)
                if tag:
                    at = address + nbytes - len(tag)
                    self._runtime.memcpyAsync(at, _address(tag), len(tag), HOST_TO_DEVICE, self.stream.ptr)
                self.stream.synchronize()  # peers may write into it as soon as they have it
        return Memory(address, nbytes, keep=self, tag=tag)

    def free(self, memory: Memory) -> None:
        """Frees what `allocate` gave, on a shared GPU when the device is closed. Waits for kernels that still run. A
        second call does nothing."""
        if memory.opened:
            raise ValueError(f"free: the memory at {memory.address:#x} is another rank's; close it")
        if memory.keep is None:
            return
        memory.keep = None
        if self.sharers > 1:
            self._kept.append(memory.address)
            return
        with self.current(), self.explained("freeing memory"):
            self._runtime.free(memory.address)

    def host_words(self, count: int) -> tuple[np.ndarray, int]:
        """Pinned and mapped; freed when the array and all its views are gone."""
        with self.current(), self.explained("allocating pinned host memory"):
            host, address, free = self._allocate_host(4 * count)
        ctypes.memset(host, 0, 4 * count)
        words = (ctypes.c_uint32 * count).from_address(host)

        def release() -> None:
            if os.getpid() == pid:  # a fork has no driver
                with suppress(RuntimeError):  # nor is there one to tell after a fault
                    free()

        pid = self._pid
        weakref.finalize(words, release).atexit = False  # NumPy keeps `words`; at exit the driver frees by itself
        return np.frombuffer(words, np.uint32), address  # type: ignore[call-overload]

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        dtype = np.dtype(dtype)
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        with self.current():
            # This GPU's number also for a peer's memory: by the owner's number CuPy would copy through the other GPU.
            memory = self.cupy.cuda.UnownedMemory(address, nbytes, owner, self.index)
            return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0))

    def address_of(self, array: Any) -> int:
        return int(array.data.ptr)

    def to_host(self, address: int, nbytes: int) -> bytes:
        """After everything queued before, on `stream` and on the caller's current stream."""
        out = np.empty(nbytes, np.uint8)
        self.wait_for_caller()
        with self.current(), self.explained("copying to the host"):
            self._runtime.memcpyAsync(out.ctypes.data, address, nbytes, DEVICE_TO_HOST, self.stream.ptr)
            self.stream.synchronize()
        return out.tobytes()

    def zero(self, address: int, nbytes: int) -> None:
        with self.current(), self.explained("zeroing memory"):
            self._runtime.memsetAsync(address, 0, nbytes, self.stream.ptr)

    def fill(self, address: int, nbytes: int, word: int) -> None:
        """By copies that double in size: no kernel of CuPy's, to be compiled and, on an emulated GPU, to be run lane by
        lane."""
        with self.current(), self.explained("filling memory"):
            source, kind, done = _block(word).ctypes.data, HOST_TO_DEVICE, 0
            while done < nbytes:
                size = min(nbytes - done, done or _block(word).nbytes)
                self._runtime.memcpyAsync(address + done, source, size, kind, self.stream.ptr)
                source, kind, done = address, DEVICE_TO_DEVICE, done + size

    # -- work

    def kernel(self, op: str) -> CupyKernel:
        return CupyKernel(self, op, self._code(op))

    def close_device(self) -> None:
        """Lets the stream go. Peer access stays, for other communicators of this process may use it."""
        if self._closed:
            return
        self._closed = True
        with _lock:
            users = _users.get((self.name, self.index))
            if users is not None:
                users.discard(self)
        if os.getpid() == self._pid:
            with self._gpu:
                if self.cupy.cuda.get_current_stream().ptr == self.stream.ptr:
                    self.cupy.cuda.Stream.null.use()
                for address in self._kept:
                    with suppress(RuntimeError):  # after a fault there is nothing to free
                        self._runtime.free(address)
                self._kept.clear()
                self._drop_stream()

    def _drop_stream(self) -> None:
        self.stream = None

    def describe(self) -> str:
        shared = f", shared by {self.sharers} ranks" if self.sharers > 1 else ""
        return (
            f"{self.name}:{self.index} {self.gpu_name} at {self.pci}, {self.compute_units} compute units, at most "
            f"{self.max_workgroups} workgroups{shared}"
        )
