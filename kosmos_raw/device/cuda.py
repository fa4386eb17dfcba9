"""NVIDIA Hopper GPUs through CuPy. H100 and H200 only: sm_90a code runs on nothing else, newer GPUs included."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import numpy as np

from ..build import inline, report, sm90
from ..errors import KosmosError, NotAvailable
from .base import Link, Matrix, Tile
from .cupy_common import SHARE, CupyDevice
from .cupy_errors import GpuError, import_cupy
from .cupy_kernel import Code, CupyKernel

CAPABILITY = (9, 0)
RUNTIME_COMPILER = ("-std=c++20", "-arch=sm_90a")
COMPUTE_MODE = 20  # cudaDevAttrComputeMode; the properties have lost it in CUDA 13
EXCLUSIVE_PROCESS, PROHIBITED = 3, 2
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
MAPPED_PORTABLE = 3  # hostAllocPortable | hostAllocMapped


PANEL, BOX_LINES = 64, 128  # elements and lines that one TMA load brings: hip_kernels/target/sm90_tile.h
BFLOAT16, SWIZZLE_128B, PROMOTE_256B = 9, 3, 3  # CU_TENSOR_MAP_...


class CudaKernel(CupyKernel):
    """Adds what tiles are loaded by: a tensor map for each matrix."""

    def __init__(self, device: CudaDevice, op: str, code: Code):
        super().__init__(device, op, code)
        widths = report.target_constants(device.target)
        self.other_tiles = tuple(Tile(self.tile.m, n) for name, n in widths.items() if name.startswith("TILE_N_"))
        self._encoded: dict[tuple[Matrix, ...], np.ndarray] = {}
        self._launch = getattr(_driver(), "cuLaunchKernel", None)
        if self._launch is not None:
            sizes = (ctypes.c_uint,) * 7  # grid, block, shared memory
            self._launch.argtypes = (ctypes.c_void_p, *sizes, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

    def _bind(self, params: np.ndarray, operands: Sequence[Matrix]) -> Callable[[int], None]:
        # By the driver itself: CuPy's way takes 25 us, half the time of the smallest product worth its while.
        launch = self._launch
        assert launch is not None
        struct = self._encode(tuple(operands))
        arguments = (ctypes.c_void_p * 2)(params.ctypes.data, struct.ctypes.data)
        number, pointer = ctypes.c_uint, ctypes.c_void_p  # made once: ctypes takes its time for each
        one, function, stream = number(1), pointer(self._function.ptr), pointer(self._device.stream.ptr)
        rest = (one, one, number(self.threads), one, one, number(self._shared_bytes), stream, arguments, None)

        def begin(workgroups: int, _keep: object = (params, struct)) -> None:
            status = launch(function, workgroups, *rest)
            if status:
                raise GpuError(f"{self.op}: cuLaunchKernel gives error {status} for {workgroups} workgroups", status)

        return begin

    def _encode(self, operands: tuple[Matrix, ...]) -> np.ndarray:
        known = self._encoded.get(operands)
        if known is None:
            if len(self._encoded) >= 256:  # a caller with ever new arrays must not fill the memory
                self._encoded.clear()
            known = self._encoded[operands] = encode(operands)
        return known


def encode(operands: Sequence[Matrix]) -> np.ndarray:
    """The struct that sm_90a kernels take beside their params."""
    if len(operands) > sm90.MAX_OPERANDS:
        raise KosmosError(f"device cuda: {len(operands)} matrices for one launch, want at most {sm90.MAX_OPERANDS}")
    struct = np.zeros(1, sm90.OPERANDS)
    struct["count"], struct["by_rows"] = len(operands), sum(matrix.by_rows for matrix in operands)
    for i, matrix in enumerate(sorted(operands, key=lambda matrix: not matrix.by_rows)):
        struct["line_words"][0, i] = matrix.ld // 8
        if matrix.lines and matrix.elements:  # of an empty one no tile is loaded
            struct["maps"][0, i] = _tensor_map(matrix)
            struct["begin"][0, i] = matrix.address
            struct["end"][0, i] = matrix.address + matrix.lines * matrix.ld * 2
    return struct


def _tensor_map(matrix: Matrix) -> np.ndarray:
    raw = ctypes.create_string_buffer(192)
    at = -(-ctypes.addressof(raw) // 64) * 64  # the driver wants it aligned
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    driver = _driver()
    assert driver is not None
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        BFLOAT16,
        2,
        ctypes.c_void_p(matrix.address),
        (u64 * 2)(matrix.elements, matrix.lines),
        (u64 * 1)(matrix.ld * 2),
        (u32 * 2)(PANEL, BOX_LINES if matrix.by_rows else PANEL),
        (u32 * 2)(1, 1),
        0,
        SWIZZLE_128B,
        PROMOTE_256B,
        0,
    )
    if status:
        raise KosmosError(f"device cuda: cuTensorMapEncodeTiled refuses {matrix} ({status})")
    return np.frombuffer(ctypes.string_at(at, 128), "V128")[0]


class CudaDevice(CupyDevice):
    """One rank's Hopper GPU. See CupyDevice for the arguments."""

    name = "cuda"
    target = "sm_90a"
    extra = "cuda"
    dlpack_types = (2,)
    multiplies_mxfp8 = False
    tick_hz = 1_000_000_000  # %globaltimer
    beside = True
    link = Link(pull=332, push=358, mover=22, tflops=5.6, adder=1.4)  # H200, NVLink of 18 links
    masks = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    queues_variable = "CUDA_DEVICE_MAX_CONNECTIONS"
    queues_default = 8

    def _import(self) -> ModuleType:
        if os.environ.get(SHARE) == "1":
            # Lazily loaded kernels may be loaded at their first launch, which would wait for kernels of other ranks of
            # this process. Read by the driver once, before the first call.
            os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        return import_cupy(self.name, self.extra, want_hip=False)

    def _check_device(self) -> None:
        found = (int(self._properties["major"]), int(self._properties["minor"]))
        if found != CAPABILITY:
            raise NotAvailable(
                f"device cuda: GPU {self.index} ({self.gpu_name}) has compute capability {found[0]}.{found[1]}, want "
                "9.0: the kernels are built for sm_90a (H100, H200), which runs on no other GPU; use device='cpu'"
            )
        if self._ranks > 1 and " MIG " in f"{self.gpu_name} ":
            raise NotAvailable(
                f"device cuda: GPU {self.index} is a MIG slice ({self.gpu_name}): slices cannot use each other's "
                "memory; turn MIG off, or run one rank"
            )
        mode = int(self._runtime.deviceGetAttribute(COMPUTE_MODE, self.index))
        if mode == PROHIBITED or (mode == EXCLUSIVE_PROCESS and self.sharers > 1):
            allows = "no process" if mode == PROHIBITED else f"one process, and {self.sharers} ranks share it"
            raise NotAvailable(
                f"device cuda: GPU {self.index} is in compute mode {mode}, which allows {allows}; "
                "nvidia-smi -c DEFAULT changes it"
            )

    def kernel(self, op: str) -> CudaKernel:
        return CudaKernel(self, op, self._code(op))

    @classmethod
    def build(cls, op: str) -> None:
        if sm90.missing() is None:
            sm90.cubin(op)

    def _code(self, op: str) -> Code:
        plain = report.plain_scratch_bytes(op)
        if sm90.missing() is None:
            return Code(sm90.cubin(op).cubin, "", (), report.python_param_bytes(op), plain)
        return Code(None, inline.source_text(op), RUNTIME_COMPILER, report.python_param_bytes(op), plain)

    def _occupancy(self, function: int, threads: int, shared_bytes: int) -> int:
        return int(self.cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared_bytes))

    def _loaded_params_bytes(self, function: int) -> int | None:
        """By cuFuncGetParamInfo (CUDA 12.4 and later)."""
        ask = getattr(_driver(), "cuFuncGetParamInfo", None)
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        if ask is None or ask(ctypes.c_void_p(function), ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size)):
            return None
        return size.value

    def _allow_shared(self, raw: object, nbytes: int) -> None:
        raw.max_dynamic_shared_size_bytes = nbytes  # type: ignore[attr-defined]

    def _allocate_host(self, nbytes: int) -> tuple[int, int, Callable[[], None]]:
        address = int(self._runtime.hostAlloc(nbytes, MAPPED_PORTABLE))
        runtime = self._runtime
        return address, address, lambda: runtime.freeHost(address)  # one address space: kernels use the host's address

    def _reach(self, ordinal: int, pci: str) -> None:
        super()._reach(ordinal, pci)
        if ordinal == self.index:
            return
        native = ctypes.c_int(1)
        ask = getattr(_driver(), "cuDeviceGetP2PAttribute", None)
        if ask and not ask(ctypes.byref(native), NATIVE_ATOMICS, self.index, ordinal) and not native.value:
            warnings.warn(
                f"device cuda: GPUs {self.index} and {ordinal} have no native atomics between them (no NVLink): "
                "signals between them work by ordinary stores only, and slowly",
                RuntimeWarning,
                stacklevel=2,
            )

    def _ipc_advice(self) -> str:
        return (
            "CUDA IPC needs bare Linux or one container for all ranks (shared IPC and PID namespaces), the same user, "
            f"and GPUs that are no MIG slices; {self._masks_in_words()}"
        )

    def describe(self) -> str:
        versions = f"CuPy {self.cupy.__version__}, CUDA driver {self._runtime.driverGetVersion()}"
        mps = ", under MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else ""
        return f"{super().describe()} ({versions}{mps})"


@cache
def _driver() -> ctypes.CDLL | None:
    """The driver's library, for the questions that CuPy does not pass on."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
