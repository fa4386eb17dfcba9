"""device/hip.py and device/cuda.py: against a CuPy and a hip-python that only record what is asked of them, and on real
GPUs where there are any (marks cuda and hip)."""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from kosmos_raw.build import params, report
from kosmos_raw.device import open_device
from kosmos_raw.device.base import Handle
from kosmos_raw.device.cupy_common import GRANULE, Code, GpuError, _opened
from kosmos_raw.errors import KosmosError, NotAvailable

DEVICES = ("hip", "cuda")
BF16 = np.dtype(ml_dtypes.bfloat16)
OP = "ag_gemm"
MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


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
            assert function == 0xF00 and y == z == ty == tz == 1 and extra is None
            params = ctypes.string_at(arguments[0], 8)
            self.note("launch", self.current_device, (x,), (threads,), params, shared, stream)
            return 0

        return SimpleNamespace(cuLaunchKernel=launch)

    # -- cupy

    def cupy(self):
        fake = self

        class Runtime:
            is_hip = self.is_hip

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

            def memcpyAsync(self, to, source, nbytes, kind, stream):
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
                return fake.address(1)

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


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (*MASKS, "HSA_ENABLE_IPC_MODE_LEGACY", "HSA_CU_MASK", "ROC_GLOBAL_CU_MASK", "KOSMOS_SHARE_GPU"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make(monkeypatch):
    """make(name, index=0, ranks=1, setup=function of Fake, **options) -> (device, fake)."""
    monkeypatch.delenv("GPU_MAX_HW_QUEUES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    fakes: dict[str, Fake] = {}
    opened = []

    def make(name, index=0, ranks=1, *, setup=None, **options):
        module = importlib.import_module(f"kosmos_raw.device.{name}")
        if name not in fakes:
            fake = fakes[name] = Fake(name == "hip")
            monkeypatch.setitem(sys.modules, "cupy", fake.cupy())
            monkeypatch.setitem(sys.modules, "hip", fake.hip())
        fake = fakes[name]
        if setup:
            setup(fake)
        if name == "hip":
            monkeypatch.setattr(module, "hip_libraries", lambda: [])
            device = module.HipDevice(index, ranks, **options)
        else:
            monkeypatch.setattr(module, "_driver", fake.driver)
            device = module.CudaDevice(index, ranks, **options)
        monkeypatch.setattr(device, "_code", lambda op: Code(Path(f"/built/{op}.bin"), "", (), 8))
        opened.append(device)
        return device, fake

    yield make
    for device in opened:
        device.close_device()
    _opened.clear()


both = pytest.mark.parametrize("name", DEVICES)


# -- packages and environment


def test_importing_the_package_imports_no_gpu_library():
    modules = "kosmos_raw, kosmos_raw.device.hip, kosmos_raw.device.cuda"
    code = f"import sys, {modules}; print({{'cupy', 'hip'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize(("name", "extra"), [("hip", "rocm"), ("cuda", "cuda")])
def test_missing_cupy_names_the_extra(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotAvailable, match=rf"kosmos-raw\[{extra}\]"):
        open_device(name, 0, 1)


def test_missing_hip_python_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Fake(True).cupy())
    monkeypatch.setitem(sys.modules, "hip", None)
    with pytest.raises(NotAvailable, match=r"hip-python.*kosmos-raw\[rocm\]"):
        open_device("hip", 0, 1)


@pytest.mark.parametrize(
    ("name", "is_hip", "words"),
    [("hip", False, "built for CUDA.*device='cuda'"), ("cuda", True, "built for ROCm.*device='hip'")],
)
def test_cupy_of_the_other_vendor_is_named(name, is_hip, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Fake(is_hip).cupy())
    with pytest.raises(NotAvailable, match=words):
        open_device(name, 0, 1)


def test_cupy_that_does_not_load_says_why(monkeypatch):
    def refuse(name):
        raise ImportError(
            "\n====\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libamdhip64.so.7: no such file\n===="
        )

    monkeypatch.setattr("kosmos_raw.device.cupy_common.importlib.import_module", refuse)
    with pytest.raises(NotAvailable, match=r"does not load: ImportError: libamdhip64\.so\.7"):
        open_device("hip", 0, 1)


@both
def test_no_visible_gpu_lists_the_masks(make, name, monkeypatch):
    variables = MASKS[:3] if name == "hip" else MASKS[2:3]
    for i, variable in enumerate(variables):
        monkeypatch.setenv(variable, str(i + 1))
    wanted = ".*".join(f"{variable}={i + 1}" for i, variable in enumerate(variables))
    with pytest.raises(NotAvailable, match=wanted):
        make(name, setup=lambda fake: fake.fail.update(getDeviceCount=Refusal("ErrorNoDevice", 100)))


@both
def test_a_runtime_dead_after_fork_is_explained(make, name):
    with pytest.raises(NotAvailable, match=r"forked process.*spawn"):
        make(name, setup=lambda fake: fake.fail.update(getDeviceCount=Refusal("NotInitialized", 3)))


def test_other_architectures_are_refused(make):
    with pytest.raises(NotAvailable, match=r"is gfx942.*want gfx950"):
        make("hip", setup=lambda fake: setattr(fake, "arch", b"gfx942:sramecc+"))
    with pytest.raises(NotAvailable, match=r"compute capability 10\.0, want 9\.0"):
        make("cuda", setup=lambda fake: setattr(fake, "capability", (10, 0)))


def test_slices_and_compute_modes_are_refused(make):
    with pytest.raises(NotAvailable, match="MIG slice"):
        make("cuda", 0, 2, setup=lambda fake: setattr(fake, "name", b"NVIDIA H200 MIG 1g.18gb"))
    with pytest.raises(NotAvailable, match="compute mode 2, which allows no process"):
        make("cuda", setup=lambda fake: (setattr(fake, "name", b"NVIDIA H200"), setattr(fake, "compute_mode", 2)))
    make("cuda", 0, 2, setup=lambda fake: setattr(fake, "compute_mode", 3))
    with pytest.raises(NotAvailable, match="allows one process, and 2 ranks share it"):
        make("cuda", 0, 4, share=True)


def test_known_bad_rocm_is_warned_about(make, monkeypatch, tmp_path):
    hip = importlib.import_module("kosmos_raw.device.hip")
    monkeypatch.setenv("HSA_ENABLE_IPC_MODE_LEGACY", "1")
    with pytest.warns(RuntimeWarning, match="HSA_ENABLE_IPC_MODE_LEGACY=1 breaks hipIpcGetMemHandle"):
        make("hip", 0, 2)
    monkeypatch.delenv("HSA_ENABLE_IPC_MODE_LEGACY")
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version").write_text("7.0.1-42\n")
    assert hip.rocm_version([str(tmp_path / "lib" / "libamdhip64.so.7")]) == (7, 0, 1)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"ROCm 7\.0\.1.*install ROCm 7\.0\.2"):
        make("hip")


def test_two_hip_runtimes_are_refused(make, monkeypatch):
    device, _ = make("hip")
    hip = importlib.import_module("kosmos_raw.device.hip")
    monkeypatch.setattr(hip, "hip_libraries", lambda: ["/a/libamdhip64.so.7", "/b/libamdhip64.so.6"])
    with pytest.raises(NotAvailable, match=r"/a/libamdhip64\.so\.7 and /b/libamdhip64\.so\.6"):
        device._check_device()


def test_hidden_compute_units_are_refused(make, monkeypatch):
    monkeypatch.setenv("HSA_CU_MASK", "0:0-63")
    with pytest.raises(NotAvailable, match=r"HSA_CU_MASK=0:0-63.*workgroups_cap="):
        make("hip")
    assert make("hip", workgroups_cap=64)[0].max_workgroups == 64


# -- which GPU, how many workgroups


@both
def test_more_ranks_than_gpus(make, name, monkeypatch):
    for index in (0, 2):  # the rank that would have a GPU refuses too: all ranks fail alike
        with pytest.raises(NotAvailable, match=r"3 ranks, but this process sees 2 GPU\(s\).*KOSMOS_SHARE_GPU=1"):
            make(name, index, 3)
    units = 256 if name == "hip" else 132
    monkeypatch.setenv("KOSMOS_SHARE_GPU", "1")
    devices = [make(name, index, 3)[0] for index in range(3)]
    assert [device.index for device in devices] == [0, 1, 0]
    assert [device.max_workgroups for device in devices] == [units // 2, units, units // 2]
    assert "shared by 2 ranks" in devices[2].describe()


@both
def test_workgroups_follow_the_gpu_and_the_cap(make, name):
    def units(n):
        return lambda fake: setattr(fake, "units", n)

    assert make(name, setup=units(32))[0].max_workgroups == 32  # a partition, or a smaller GPU
    assert make(name, workgroups_cap=8)[0].default_workgroups == 8
    with pytest.raises(NotAvailable, match="1 compute units, too few for 4 ranks"):
        make(name, 0, 8, share=True, setup=units(1))
    with pytest.raises(ValueError, match="workgroups_cap is 0"):
        make(name, workgroups_cap=0)
    with pytest.raises(ValueError, match="index is 2 of 2 ranks"):
        make(name, 2, 2)


@both
def test_hardware_queues_bound_the_ranks_of_one_process(make, name, monkeypatch):
    variable = {"hip": "GPU_MAX_HW_QUEUES", "cuda": "CUDA_DEVICE_MAX_CONNECTIONS"}[name]
    make(name, 0, 6, share=True)
    monkeypatch.setenv(variable, "2")
    second, _ = make(name, 2, 6, share=True)
    make(name, 1, 6, share=True)  # another GPU
    with pytest.raises(NotAvailable, match=f"{variable}=3 or use processes"):
        make(name, 4, 6, share=True)
    second.close_device()
    make(name, 4, 6, share=True)


def test_a_cu_mask_makes_the_stream(make):
    device, fake = make("hip", compute_units=range(8, 72))
    assert fake.of("hipExtStreamCreateWithCUMask") == [(8, [0xFFFFFF00, 0xFFFFFFFF, 0xFF, 0, 0, 0, 0, 0])]
    assert device.max_workgroups == 64
    assert device.stream.ptr == 0x5000
    device.close_device()
    device.close_device()
    assert fake.of("hipStreamDestroy") == [(0x5000,)]
    with pytest.raises(ValueError, match="want numbers from 0 to 255"):
        make("hip", compute_units=range(250, 260))


@both
def test_ordinary_streams_are_non_blocking_and_on_the_right_gpu(make, name):
    _, fake = make(name, 1, 2)
    assert fake.of("Stream") == [(1, True)]


# -- memory


@both
def test_allocations_are_raw_rounded_and_zeroed(make, name):
    device, fake = make(name, 1, 2)
    memory = device.allocate(GRANULE + 1, shared=True)
    assert memory.nbytes == 2 * GRANULE
    assert fake.of("malloc") == [(1, 2 * GRANULE)]
    assert fake.of("memsetAsync") == [(memory.address, 0, 2 * GRANULE, device.stream.ptr)]
    assert fake.names()[-1] == "streamSynchronize"
    signals = device.allocate(96, signals=True, shared=True)
    if name == "hip":
        assert fake.of("hipExtMallocWithFlags") == [(1, GRANULE, 3)]  # uncached
    else:
        assert fake.of("malloc")[1:] == [(1, GRANULE)]
    device.free(memory)
    device.free(memory)
    device.free(signals)
    assert fake.of("free") == [(memory.address,), (signals.address,)]


@both
def test_no_room_gives_the_numbers(make, name):
    device, fake = make(name)
    fake.fail["malloc"] = Refusal("out of memory", 2)
    with pytest.raises(NotAvailable, match=r"no room for 4,194,304 bytes: 1,048,576 of 1,073,741,824 bytes are free"):
        device.allocate(4 << 20)
    fake.fail["malloc"] = Refusal("illegal address", 700)
    with pytest.raises(GpuError, match=rf"{name}:0: allocating .*illegal address") as caught:
        device.allocate(1)
    assert caught.value.status == 700


def other(device, memory, pid=1):
    """The handle as a process `pid` would have sent it."""
    handle = pickle.loads(pickle.dumps(device.export(memory)))
    return Handle(pid, handle.address, handle.nbytes, handle.token)


@both
def test_a_handle_is_opened_once_and_closed_by_its_last_user(make, name):
    owner, fake = make(name, 0, 2)
    importer, _ = make(name, 1, 2)
    handle = other(owner, owner.allocate(100, shared=True))
    first, second = importer.open(handle), importer.open(handle)
    assert first.address == second.address
    assert fake.of("ipcOpenMemHandle") == [(1, handle.token.handle, 1)]  # on the importer's GPU, lazy peer access
    assert fake.of("deviceEnablePeerAccess")[0] == (1, 0)
    order = fake.names("deviceEnablePeerAccess", "ipcOpenMemHandle", "memcpy")
    assert order[:3] == ["deviceEnablePeerAccess", "ipcOpenMemHandle", "memcpy"]  # probed before the first use
    importer.close(first)
    importer.close(first)
    assert fake.of("ipcCloseMemHandle") == []
    importer.close(second)
    assert fake.of("ipcCloseMemHandle") == [(second.address,)]
    importer.open(handle)
    assert len(fake.of("ipcOpenMemHandle")) == 2


@both
def test_two_processes_on_one_gpu_need_no_peer_access(make, name):
    device, fake = make(name, 0, 2)
    device.open(other(device, device.allocate(1)))
    assert fake.of("deviceEnablePeerAccess") == []
    assert len(fake.of("ipcOpenMemHandle")) == 1


@both
def test_the_own_process_is_never_opened(make, name):
    owner, fake = make(name, 0, 2)
    thread, _ = make(name, 1, 2)
    memory = owner.allocate(100, shared=True)
    handle = owner.export(memory)
    fake.fail["deviceEnablePeerAccess"] = Refusal("already enabled", 704)
    opened = thread.open(handle)
    assert opened.address == memory.address
    assert fake.of("deviceEnablePeerAccess") == [(1, 0)]
    owner.close(owner.open(handle))  # ranks on one GPU: nothing to enable
    thread.close(opened)
    assert fake.names("ipcOpenMemHandle", "ipcCloseMemHandle") == []
    assert len(fake.of("deviceEnablePeerAccess")) == 1


@both
def test_memory_of_others_is_closed_and_own_memory_freed(make, name):
    device, _ = make(name)
    memory = device.allocate(1)
    opened = device.open(other(device, memory))
    with pytest.raises(ValueError, match="another rank's; close it"):
        device.free(opened)
    with pytest.raises(ValueError, match="this rank's own; free it"):
        device.close(memory)
    with pytest.raises(ValueError, match="want a whole allocation"):
        device.export(opened)
    device.free(memory)
    with pytest.raises(ValueError, match="not freed"):
        device.export(memory)


@both
def test_failures_of_ipc_say_which_pair_and_what_to_look_at(make, name):
    owner, fake = make(name, 0, 2)
    importer, _ = make(name, 1, 2)
    memory = owner.allocate(1)
    handle = other(owner, memory)
    look = "HSA_ENABLE_IPC_MODE_LEGACY" if name == "hip" else "shared IPC and PID namespaces"
    fake.fail["ipcOpenMemHandle"] = Refusal("invalid device", 101)
    with pytest.raises(NotAvailable, match=rf"0000:01:00\.0 .*0000:00:00\.0 .process 1.*invalid device.*{look}"):
        importer.open(handle)
    fake.fail = {"deviceGetByPCIBusId": Refusal("no device", 100)}
    with pytest.raises(NotAvailable, match=r"0000:00:00\.0 of process 1 is not visible.*CUDA_VISIBLE_DEVICES=not set"):
        importer.open(handle)
    fake.fail = {}
    fake.peers = False
    with pytest.raises(NotAvailable, match=r"cannot use memory of GPU 0"):
        importer.open(handle)
    fake.fail = {"ipcGetMemHandle": Refusal("invalid argument", 1)}
    refused = other(owner, memory)  # ranks that are threads never need it
    with pytest.raises(NotAvailable, match=rf"process 1 could not export its memory: invalid argument.*{look}"):
        importer.open(refused)


@both
def test_host_words_are_mapped_zeroed_and_freed_with_their_last_view(make, name):
    device, fake = make(name)
    words, address = device.host_words(4)
    assert words.dtype == np.uint32 and words.tolist() == [0, 0, 0, 0]
    if name == "hip":
        assert fake.of("hipHostMalloc") == [(16, 0x40000003)]  # coherent, mapped, portable
        assert address == words.ctypes.data + 1  # the kernel's address is what the runtime says
    else:
        assert fake.of("hostAlloc") == [(16, 3)]
        assert address == words.ctypes.data
    free = "hipHostFree" if name == "hip" else "freeHost"
    where, view = words.ctypes.data, words[1:]
    del words
    gc.collect()
    assert fake.of(free) == []
    del view
    gc.collect()
    assert fake.of(free) == [(where,)]


@both
def test_arrays_view_memory_as_this_gpu_s(make, name):
    device, _ = make(name, 1, 2)
    memory = device.allocate(1)
    array = device.array(memory.address + 256, (3, 4), BF16, memory)
    assert device.address_of(array) == memory.address + 256
    unowned = array.data.memory
    assert (unowned.nbytes, unowned.owner, unowned.device) == (24, memory, 1)


@both
def test_copies_and_zeroing_use_the_stream(make, name):
    device, fake = make(name)
    assert device.to_host(0x1000, 5) == b"\x07" * 5
    assert fake.of("memcpyAsync") == [(0x1000, 5, 2, device.stream.ptr)]
    assert fake.names()[-3:] == ["wait_event", "memcpyAsync", "streamSynchronize"]
    device.zero(0x1000, 64)
    assert fake.of("memsetAsync") == [(0x1000, 0, 64, device.stream.ptr)]


def test_hip_python_errors_carry_the_name_of_the_call(make):
    device, fake = make("hip")
    fake.fail["hipExtMallocWithFlags"] = 1
    with pytest.raises(GpuError, match=r"hipExtMallocWithFlags: hipErrorInvalidValue \(1\)"):
        device.allocate(1, signals=True)
    fake.fail["hipExtMallocWithFlags"] = RuntimeError("failed to dlopen 'libamdhip64.so'")
    with pytest.raises(NotAvailable, match=r"hipExtMallocWithFlags: failed to dlopen.*without a version number"):
        device.allocate(1, signals=True)
    fake.fail["hipExtMallocWithFlags"] = 2
    with pytest.raises(NotAvailable, match="no room for"):
        device.allocate(1, signals=True)


# -- kernels and streams

ONE = np.zeros(1, np.dtype([("x", "u8")]))


@both
def test_a_kernel_is_loaded_at_once_on_the_right_gpu(make, name):
    device, fake = make(name, 1, 2)
    fake.current_device = 0
    kernel = device.kernel(OP)
    assert fake.of("RawModule") == [({"path": f"/built/{OP}.bin"},)]
    assert fake.of("get_function") == [(1, f"{OP}_main")]
    assert fake.current_device == 0
    threads = 512 if name == "hip" else 384
    shared = report.target_constants(device.target).get("DYNAMIC_SHARED_BYTES", 0)
    assert fake.of("occupancy") == [(0xF00, threads, shared)]
    assert (kernel.tile.m, kernel.tile.n) == tuple(
        report.target_constants(device.target)[constant] for constant in ("TILE_M", "TILE_N")
    )
    kernel.launch(ONE, 7)
    assert fake.of("launch") == [(1, (7,), (threads,), bytes(8), shared, device.stream.ptr)]


def test_constants_of_the_devices(make):
    hip, _ = make("hip")
    assert (hip.tick_hz, hip.trace_rows) == (100_000_000, 1)
    cuda, _ = make("cuda")
    assert (cuda.tick_hz, cuda.trace_rows) == (1_000_000_000, 2)


@both
def test_source_goes_to_the_run_time_compiler_when_nothing_is_built(make, name, monkeypatch):
    device, fake = make(name)
    module = importlib.import_module(f"kosmos_raw.device.{name}")
    monkeypatch.setattr(module.gfx950 if name == "hip" else module.sm90, "missing", lambda: "no compiler")
    code = type(device)._code(device, OP)
    assert code.path is None
    assert f"KOSMOS_KERNEL({OP}," in code.text
    assert '#include "' not in code.text  # CuPy's cache does not look into headers
    assert code.params_bytes == params.AG_GEMM.itemsize
    monkeypatch.setattr(device, "_code", lambda op: code)
    device.kernel(OP)
    (how,) = fake.of("RawModule")[0]
    assert how["backend"] == "nvrtc" and "-std=c++20" in how["options"]


@pytest.mark.parametrize(("chosen", "source"), [("object", False), ("source", True), ("", False)])
def test_code_is_chosen_by_the_environment(make, chosen, source, monkeypatch):
    device, _ = make("hip")
    monkeypatch.setenv("KOSMOS_HIP_CODE", chosen)
    assert (type(device)._code(device, OP).path is None) == source
    monkeypatch.setenv("KOSMOS_HIP_CODE", "objects")
    with pytest.raises(ValueError, match="KOSMOS_HIP_CODE is 'objects', want object or source"):
        type(device)._code(device, OP)


def test_params_are_measured_by_the_code_object(make, monkeypatch):
    device, _ = make("hip")
    hip = importlib.import_module("kosmos_raw.device.hip")
    monkeypatch.setattr(hip.gfx950, "missing", lambda: None)
    monkeypatch.setattr(hip.gfx950, "code_object", lambda op: SimpleNamespace(code_object=Path("/x.hsaco")))
    monkeypatch.setattr(hip.report, "gfx950_arguments", lambda build, kernel: {f"{OP}_main": (416,)}[kernel])
    code = type(device)._code(device, OP)
    assert (code.path, code.params_bytes) == (Path("/x.hsaco"), 416)


def test_params_are_measured_by_the_cuda_driver(make, monkeypatch):
    class Driver:
        @staticmethod
        def cuFuncGetParamInfo(function, index, offset, size):
            assert (function.value, index.value) == (0xF00, 0)
            size._obj.value = 24
            return 0

        @staticmethod
        def cuDeviceGetP2PAttribute(value, attribute, device, peer):
            assert (attribute, device, peer) == (3, 0, 1)
            value._obj.value = 0
            return 0

    device, _ = make("cuda", 0, 2)
    monkeypatch.setattr("kosmos_raw.device.cuda._driver", Driver)
    assert device.kernel(OP).params_bytes == 24
    with pytest.warns(RuntimeWarning, match="GPUs 0 and 1 have no native atomics"):
        device._reach(1, "0000:01:00.0")


@both
def test_dynamic_shared_memory_of_the_target(make, name, monkeypatch):
    device, fake = make(name)
    constants = {"TILE_M": 1, "TILE_N": 2, "WG_THREADS": 64, "DYNAMIC_SHARED_BYTES": 100_000}
    monkeypatch.setattr("kosmos_raw.device.cupy_common.report.target_constants", lambda target: constants)
    kernel = device.kernel(OP)
    kernel.launch(ONE, 1)
    assert fake.of("occupancy") == [(0xF00, 64, 100_000)]
    assert fake.of("launch")[0][4] == 100_000
    if name == "cuda":  # HIP takes it without being told
        assert fake.raw.max_dynamic_shared_size_bytes == 100_000


@both
def test_a_struct_of_another_size_is_refused(make, name):
    device, fake = make(name)
    kernel = device.kernel(OP)
    for wrong in (np.zeros(1, np.dtype([("x", "u4")])), np.zeros(2, ONE.dtype), np.zeros(2, np.dtype("u4"))):
        with pytest.raises(KosmosError, match=rf"{OP}: params has .* the compiled kernel wants one of 8"):
            kernel.launch(wrong, 1)
    assert fake.of("launch") == []


@both
def test_a_grid_that_cannot_be_resident_is_refused(make, name):
    device, fake = make(name)
    kernel = device.kernel(OP)
    for workgroups in (0, device.max_workgroups + 1):
        with pytest.raises(NotAvailable, match=rf"{workgroups} workgroups, want 1 to {device.max_workgroups}"):
            kernel.launch(ONE, workgroups)
    assert fake.of("launch") == []
    fake.occupancy = 0
    with pytest.raises(NotAvailable, match=f"{OP}: no WG of .* threads .* fits"):
        device.kernel(OP)


@both
def test_captured_streams_are_refused(make, name):
    device, fake = make(name)
    kernel = device.kernel(OP)
    fake.capturing = {device.stream.ptr}
    with pytest.raises(KosmosError, match="the device's stream is being captured into a graph"):
        kernel.launch(ONE, 1)
    fake.capturing = {0}
    with pytest.raises(KosmosError, match="the current stream is being captured into a graph"):
        device.wait_for_caller()
    fake.fail["is_capturing"] = Refusal("StreamCaptureImplicit", 906)
    with pytest.raises(KosmosError, match=r"captured into a graph .StreamCaptureImplicit"):
        kernel.launch(ONE, 1)
    assert fake.of("launch") == []
    fake.fail["is_capturing"] = Refusal("NotSupported", 801)  # a runtime that does not know
    kernel.launch(ONE, 1)


@both
def test_events_order_the_two_streams(make, name):
    device, fake = make(name)
    own = device.stream.ptr
    fake.calls.clear()
    device.wait_for_caller()
    device.caller_waits()
    (_, theirs, one), (_, two, waits), (_, mine, three), (_, four, waits_too) = fake.calls
    assert fake.names() == ["record", "wait_event", "record", "wait_event"]
    assert (one, two, waits) == (0, own, theirs)
    assert (three, four, waits_too) == (own, 0, mine)
    fake.calls.clear()
    fake.caller = device.stream
    device.wait_for_caller()
    device.caller_waits()
    assert fake.calls == []


@both
def test_timing(make, name):
    device, fake = make(name)
    a, b = device.record(), device.record()
    assert a.timing and b.timing
    assert device.elapsed_ms(a, b) == 1.5
    assert fake.of("eventSynchronize") == [(b.number,)]


@both
def test_errors_say_what_was_being_done(make, name):
    device, fake = make(name)
    kernel = device.kernel(OP)
    fake.fail["launch"] = Refusal("invalid configuration", 9)
    with pytest.raises(GpuError, match=rf"{name}:0: launching {OP} with 3 workgroups of .*: invalid configuration"):
        kernel.launch(ONE, 3)
    fake.fail = {"streamSynchronize": Refusal("unspecified launch failure", 719)}
    with pytest.raises(GpuError, match="waiting for the GPU: unspecified launch failure; after a fault"):
        device.synchronize()
    fake.fail = {"get_function": Refusal("no binary for GPU", 209)}
    with pytest.raises(GpuError, match=f"loading {OP}: no binary for GPU; the code is built for {device.target}"):
        device.kernel(OP)


@both
def test_closed_and_forked_devices_refuse(make, name, monkeypatch):
    device, _ = make(name)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(KosmosError, match=r"this is its fork -1.*spawn"):
        device.allocate(1)
    monkeypatch.undo()
    device.close_device()
    with pytest.raises(KosmosError, match="GPU 0 is closed"):
        device.allocate(1)


@both
def test_streams_by_dlpack_s_numbers(make, name):
    device, fake = make(name)
    assert device.dlpack_stream() == (0 if name == "hip" else 1)  # the null stream
    fake.caller = device.stream
    assert device.dlpack_stream() == device.stream.ptr


# -- on a GPU

real = pytest.mark.parametrize(
    "name", [pytest.param("hip", marks=pytest.mark.hip), pytest.param("cuda", marks=pytest.mark.cuda)]
)


def open_or_skip(name, index=0, ranks=1, **options):
    module = importlib.import_module(f"kosmos_raw.device.{name}")
    try:
        return (module.HipDevice if name == "hip" else module.CudaDevice)(index, ranks, **options)
    except NotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture
def gpu(name):
    device = open_or_skip(name)
    yield device
    device.close_device()


@real
@pytest.mark.parametrize("signals", [False, True])
def test_gpu_memory(gpu, signals):
    memory = gpu.allocate(1000, signals=signals, shared=True)
    assert memory.address % 256 == 0
    assert gpu.to_host(memory.address, memory.nbytes) == bytes(memory.nbytes)
    array = gpu.array(memory.address, (5, 7), BF16, memory)
    assert gpu.address_of(array) == memory.address
    array.view(np.uint16)[...] = 0x4040
    assert gpu.to_host(memory.address, 70) == b"\x40" * 70
    assert array.get().tolist() == [[3.0] * 7] * 5
    gpu.zero(memory.address, 4)
    assert gpu.to_host(memory.address, 6) == bytes(4) + b"\x40\x40"
    gpu.free(memory)


@real
def test_gpu_host_words(gpu):
    words, address = gpu.host_words(4)
    words[2] = 5
    memory = gpu.allocate(16)
    gpu.array(memory.address, (4,), np.uint32, memory)[...] = gpu.array(address, (4,), np.uint32, words)
    assert np.frombuffer(gpu.to_host(memory.address, 16), np.uint32).tolist() == [0, 0, 5, 0]
    gpu.free(memory)


@real
def test_gpu_streams_and_events(gpu):
    start = gpu.record()
    with gpu.cupy.cuda.Stream(non_blocking=True):
        for value in range(5):
            array = gpu.cupy.full(1 << 16, value, np.uint16)
            assert gpu.to_host(gpu.address_of(array) + array.nbytes - 2, 2) == value.to_bytes(2, "little")
    assert gpu.elapsed_ms(start, gpu.record()) > 0
    assert gpu.name in gpu.describe()


@real
def test_gpu_kernel(gpu):
    kernel = gpu.kernel(OP)
    assert kernel.params_bytes == params.AG_GEMM.itemsize
    assert kernel.scratch_bytes == 0
    with pytest.raises(NotAvailable, match="workgroups"):
        kernel.launch(np.zeros(1, params.AG_GEMM), gpu.max_workgroups + 1)


@real
def test_gpu_dlpack(gpu):
    from kosmos_raw.memory import dlpack

    source = gpu.cupy.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    view = dlpack.as_array(source, gpu)
    assert gpu.address_of(view) == source.data.ptr
    assert view.get().tolist() == source.get().tolist()


def _write_into(name, handle, index, ranks, connection):
    try:
        device = open_device(name, index, ranks)
        memory = device.open(handle)
        again = device.open(handle)
        seen = device.to_host(memory.address, 4)
        device.array(again.address, (1,), np.uint32, again)[...] = 7
        device.synchronize()
        device.close(memory)
        device.close(again)
        connection.send((seen, memory.address == again.address))
    except BaseException as error:
        connection.send(error)


@real
def test_gpu_ipc_between_processes(name, monkeypatch):
    monkeypatch.setenv("KOSMOS_SHARE_GPU", "1")  # one GPU is enough
    owner = open_or_skip(name, 0, 2)
    memory = owner.allocate(4, signals=True, shared=True)
    owner.array(memory.address, (1,), np.uint32, memory)[...] = 5
    owner.synchronize()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_write_into, args=(name, owner.export(memory), 1, 2, there))
    child.start()
    try:
        assert here.poll(120), "the other process says nothing"
        answer = here.recv()
        if isinstance(answer, BaseException):
            raise answer
        assert answer == ((5).to_bytes(4, "little"), True)
        assert owner.to_host(memory.address, 4) == (7).to_bytes(4, "little")
    finally:
        child.join(30)
        owner.free(memory)
        owner.close_device()


@real
def test_gpu_peers_of_one_process(name):
    first = open_or_skip(name, 0, 2)
    second = open_or_skip(name, 1, 2)
    memory = first.allocate(4, shared=True)
    opened = second.open(first.export(memory))
    second.array(opened.address, (1,), np.uint32, opened)[...] = 9
    second.synchronize()
    assert first.to_host(memory.address, 4) == (9).to_bytes(4, "little")
    second.close(opened)
    first.free(memory)
    second.close_device()
    first.close_device()
