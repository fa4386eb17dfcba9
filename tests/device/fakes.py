"""A CuPy and a hip-python that only record what is asked of them."""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from kosmos_raw.device.cupy_common import GRANULE

BF16 = np.dtype(ml_dtypes.bfloat16)
OP = "ag_gemm"
MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
both = pytest.mark.parametrize("name", ("hip", "cuda"))


class Refusal(RuntimeError):
    """An error of a runtime, as CuPy raises it."""

    def __init__(self, text, status):
        super().__init__(text)
        self.status = status


class Fake:
    """CuPy and hip-python in one, for `count` GPUs. `calls` holds (name, arguments...) in order; `fail[name]` is
    raised by calls of `name`."""

    def __init__(self, is_hip, count=2):
        self.is_hip, self.count = is_hip, count
        self.calls: list[tuple] = []
        self.fail: dict[str, Exception] = {}
        self.current_device = 0
        self.capturing: set[int] = set()
        self.peers = True
        self.units = 256 if is_hip else 132
        self.arch = b"gfx950:sramecc+:xnack-"
        self.capability = (9, 0)
        self.name = b"AMD Instinct MI355X" if is_hip else b"NVIDIA H200"
        self.compute_mode = 0
        self.occupancy = 1
        self.host: dict[int, object] = {}
        self.next = 0x7F0000000000
        self.memory: dict[int, bytes] = {}  # what was copied where

    def names(self, *wanted):
        return [call[0] for call in self.calls if not wanted or call[0] in wanted]

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]

    def note(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.fail:
            raise self.fail[name]

    def address(self, nbytes):
        self.next += -(-nbytes // GRANULE) * GRANULE
        return self.next

    def host_memory(self, nbytes):
        buffer = (ctypes.c_char * nbytes)(*b"\xa5" * nbytes)
        self.host[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def driver(self):
        """What device/cuda.py asks of the driver itself."""

        def launch(function, x, y, z, threads, ty, tz, shared, stream, arguments, extra):
            assert function.value == 0xF00 and extra is None
            assert all(one.value == 1 for one in (y, z, ty, tz))
            params = ctypes.string_at(arguments[0], 8)
            self.note("launch", self.current_device, (x,), (threads.value,), params, shared.value, stream.value)
            return 0

        return SimpleNamespace(cuLaunchKernel=launch)

    # -- cupy

    def cupy(self):
        fake = self

        class Runtime:
            is_hip = self.is_hip

            def getDevice(self):
                return fake.current_device

            def getDeviceCount(self):
                fake.note("getDeviceCount")
                return fake.count

            def getDeviceProperties(self, i):
                major, minor = fake.capability
                return {
                    "name": fake.name,
                    "multiProcessorCount": fake.units,
                    "gcnArchName": fake.arch,
                    "major": major,
                    "minor": minor,
                }

            def deviceGetAttribute(self, attribute, i):
                assert not fake.is_hip and attribute == 20
                return fake.compute_mode

            def deviceGetPCIBusId(self, i):
                return f"0000:{i:02x}:00.0"

            def deviceGetByPCIBusId(self, pci):
                fake.note("deviceGetByPCIBusId", pci)
                return int(pci.split(":")[1], 16)

            def runtimeGetVersion(self):
                return 70051831

            def driverGetVersion(self):
                return 13000

            def memGetInfo(self):
                return 1 << 20, 1 << 30

            def malloc(self, nbytes):
                fake.note("malloc", fake.current_device, nbytes)
                return fake.address(nbytes)

            def free(self, address):
                fake.note("free", address)

            def memsetAsync(self, address, value, nbytes, stream):
                fake.note("memsetAsync", address, value, nbytes, stream)

            def memcpy(self, to, source, nbytes, kind):
                fake.note("memcpy", source, nbytes, kind)
                ctypes.memmove(to, fake.memory.get(source, bytes(nbytes)), nbytes)

            def memcpyAsync(self, to, source, nbytes, kind, stream):
                if kind == 1:
                    fake.memory[to] = ctypes.string_at(source, nbytes)
                    return
                fake.note("memcpyAsync", source, nbytes, kind, stream)
                ctypes.memset(to, 7, nbytes)

            def hostAlloc(self, nbytes, flags):
                fake.note("hostAlloc", nbytes, flags)
                return fake.host_memory(nbytes)

            def freeHost(self, address):
                fake.note("freeHost", address)

            def ipcGetMemHandle(self, address):
                fake.note("ipcGetMemHandle", address)
                return address.to_bytes(8, "little") * 8

            def ipcOpenMemHandle(self, handle, flags=None):
                fake.note("ipcOpenMemHandle", fake.current_device, handle, flags)
                begin, address = int.from_bytes(handle[:8], "little"), fake.address(1 << 30)
                fake.memory |= {address + at - begin: data for at, data in fake.memory.items() if at >= begin}
                return address

            def ipcCloseMemHandle(self, address):
                fake.note("ipcCloseMemHandle", address)

            def deviceCanAccessPeer(self, device, peer):
                return int(fake.peers and device != peer)

            def deviceEnablePeerAccess(self, peer):
                fake.note("deviceEnablePeerAccess", fake.current_device, peer)

        class Device:
            def __init__(self, i):
                self.i, self.before = i, []

            def use(self):
                fake.current_device = self.i

            def __enter__(self):
                self.before.append(fake.current_device)
                fake.current_device = self.i

            def __exit__(self, *_):
                fake.current_device = self.before.pop()

        class Stream:
            made = 0x1000

            def __init__(self, ptr=None, non_blocking=False):
                if ptr is None:
                    Stream.made += 0x10
                    ptr = Stream.made
                    fake.note("Stream", fake.current_device, non_blocking)
                self.ptr = ptr

            @classmethod
            def from_external(cls, other):
                return cls(other.__cuda_stream__()[1])

            def use(self):
                fake.caller = self

            def is_capturing(self):
                if "is_capturing" in fake.fail:
                    raise fake.fail["is_capturing"]
                return self.ptr in fake.capturing

            def synchronize(self):
                fake.note("streamSynchronize", self.ptr)

            def wait_event(self, event):
                fake.note("wait_event", self.ptr, event.number)

        Stream.null = Stream(0)

        class Event:
            made = 0

            def __init__(self, disable_timing=False):
                Event.made += 1
                self.number, self.timing = Event.made, not disable_timing

            def record(self, stream):
                fake.note("record", self.number, stream.ptr)

            def synchronize(self):
                fake.note("eventSynchronize", self.number)

        class Function:
            ptr = 0xF00

            def __call__(self, grid, block, arguments, shared_mem=0, stream=None):
                fake.note("launch", fake.current_device, grid, block, arguments[0].tobytes(), shared_mem, stream.ptr)

        class RawModule:
            def __init__(self, **how):
                fake.note("RawModule", how)

            def get_function(self, name):
                fake.note("get_function", fake.current_device, name)
                fake.raw = SimpleNamespace(local_size_bytes=0, max_threads_per_block=1024, kernel=Function())
                return fake.raw

        class UnownedMemory:
            def __init__(self, address, nbytes, owner, device):
                self.address, self.nbytes, self.owner, self.device = address, nbytes, owner, device

        class MemoryPointer:
            def __init__(self, memory, offset):
                self.memory, self.ptr = memory, memory.address + offset

            def __add__(self, offset):
                return MemoryPointer(self.memory, self.ptr - self.memory.address + offset)

        class Array:
            def __init__(self, shape, dtype, data, strides=None):
                self.shape, self.dtype, self.data, self.strides = shape, dtype, data, strides

        def occupancy(function, threads, shared):
            fake.note("occupancy", function, threads, shared)
            return fake.occupancy

        cupy = ModuleType("cupy")
        cupy.__version__ = "14.2.0"
        cupy.ndarray = Array
        cupy.empty = lambda shape, dtype: Array(shape, dtype, None)
        self.caller = Stream(0)
        cupy.cuda = SimpleNamespace(
            runtime=Runtime(),
            driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=occupancy),
            Device=Device,
            Stream=Stream,
            Event=Event,
            UnownedMemory=UnownedMemory,
            MemoryPointer=MemoryPointer,
            get_current_stream=lambda: self.caller,
            get_elapsed_time=lambda a, b: 1.5,
        )
        cupy.RawModule = RawModule
        return cupy

    # -- hip-python: every call returns a tuple that begins with an error

    def hip(self):
        fake = self

        class Error(int):
            name = "hipErrorInvalidValue"

        def answer(name, *arguments, result=None):
            fake.calls.append((name, *arguments))
            if name in fake.fail:
                if isinstance(fake.fail[name], int):
                    return (Error(fake.fail[name]), None)
                raise fake.fail[name]
            return (Error(0),) if result is None else (Error(0), result)

        hip = ModuleType("hip")
        hip.hip = SimpleNamespace(
            hipSetDevice=lambda i: answer("hipSetDevice", i),
            hipExtMallocWithFlags=lambda n, flags: answer(
                "hipExtMallocWithFlags", fake.current_device, n, flags, result=fake.address(n)
            ),
            hipHostMalloc=lambda n, flags: answer("hipHostMalloc", n, flags, result=fake.host_memory(n)),
            hipHostGetDevicePointer=lambda p, flags: answer("hipHostGetDevicePointer", p, flags, result=p + 1),
            hipHostFree=lambda p: answer("hipHostFree", p),
            hipExtStreamCreateWithCUMask=lambda n, words: answer(
                "hipExtStreamCreateWithCUMask", n, list(words), result=0x5000
            ),
            hipStreamDestroy=lambda p: answer("hipStreamDestroy", p),
            hipModuleOccupancyMaxActiveBlocksPerMultiprocessor=lambda f, threads, shared: answer(
                "occupancy", f, threads, shared, result=fake.occupancy
            ),
        )
        return hip
