"""AMD MI350X and MI355X: CuPy-ROCm for arrays, modules, streams and events, hip-python for what CuPy lacks (kinds of
memory, mapped host memory, CU masks, occupancy). Both must sit on one and the same HIP runtime.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..build import gfx950, inline, report, shipped
from ..errors import NotAvailable
from . import rocm
from .base import Handle, Memory
from .cupy_common import CupyDevice
from .cupy_errors import GpuError, import_cupy
from .cupy_kernel import Code

ARCH = "gfx950"
UNCACHED = 3  # hipDeviceMallocUncached, which hip-python does not name: no L2 keeps these words from a peer
HOST_FLAGS = 0x40000000 | 2 | 1  # hipHostMallocCoherent | Mapped | Portable
RUNTIME_COMPILER = ("-std=c++20", "-O3", "-fno-slp-vectorize")  # as build/gfx950.py
FIXED_ROCM = (7, 0, 2)  # before it host memory was not coherent for kernels on gfx950
CODE = "KOSMOS_HIP_CODE"  # "object" or "source"
BLOCKING = ("HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")
UNITS = "KOSMOS_COMPUTE_UNITS"  # how many compute units kernels may use: the rest stay free for others
CU_MASKS = ("HSA_CU_MASK", "ROC_GLOBAL_CU_MASK")  # take compute units away without changing their count
_FIRST_CALL = threading.Lock()  # hip-python loads its library then; of two at once one frees the name the other reads


class Hip:
    """hip-python with exceptions. Every call of it returns (error, results...); here `hip.hipMalloc(n)` returns the
    results alone, or raises GpuError with the call's name."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)

        def call(*arguments: Any) -> Any:
            try:
                error, *results = function(*arguments)
            except RuntimeError as missing:  # hip-python looks for the library and for each function at the first call
                raise NotAvailable(
                    f"device hip: {name}: {missing}; hip-python wants libamdhip64.so without a version number beside "
                    "libamdhip64.so.7: install ROCm's development package, or make that link and set ROCM_PATH"
                ) from missing
            if int(error):
                raise GpuError(f"device hip: {name}: {getattr(error, 'name', 'error')} ({int(error)})", int(error))
            return results[0] if len(results) == 1 else tuple(results) or None

        return call


class HipDevice(CupyDevice):
    """One rank's MI350X or MI355X. See CupyDevice for the other arguments.

    Args:
        compute_units: numbers of the compute units that kernels may use; None takes the first KOSMOS_COMPUTE_UNITS, or
            all without that variable. Number i lies on XCD i % 8: a block of 8 takes one of each. Such a stream is a
            blocking one: it and the null stream wait for each other.
    """

    name = "hip"
    target = "gfx950"
    extra = "rocm"
    dlpack_types = (10,)
    tick_hz = 100_000_000  # s_memrealtime
    masks = rocm.MASKS
    queues_variable = "GPU_MAX_HW_QUEUES"
    queues_default = 4

    def __init__(
        self,
        index: int = 0,
        ranks: int = 1,
        *,
        share: bool | None = None,
        workgroups_cap: int | None = None,
        compute_units: range | None = None,
    ):
        self._units = compute_units if compute_units is not None else _units_of_environment()
        super().__init__(index, ranks, share=share, workgroups_cap=workgroups_cap)

    def _import(self) -> ModuleType:
        cupy = import_cupy(self.name, self.extra, want_hip=True)
        try:
            self.hip = Hip(importlib.import_module("hip").hip)
        except (ImportError, AttributeError) as error:
            raise NotAvailable(
                f"device hip: needs hip-python, which does not load ({error}); pip install 'kosmos-raw[rocm]'"
            ) from error
        return cupy

    def _check_device(self) -> None:
        arch = self._properties["gcnArchName"]
        arch = arch.decode() if isinstance(arch, bytes) else str(arch)
        if arch.split(":")[0] != ARCH:
            raise NotAvailable(
                f"device hip: GPU {self.index} ({self.gpu_name}) is {arch}, want {ARCH} (MI350X, MI355X): the kernels "
                "are built for nothing else; use device='cpu'"
            )
        with _FIRST_CALL:
            self.hip.hipSetDevice(self.index)  # loads hip-python's library, if it is another than CuPy's
        libraries = rocm.hip_libraries()
        if len(libraries) > 1:
            raise NotAvailable(
                f"device hip: two HIP runtimes are loaded, {' and '.join(libraries)}: CuPy takes libamdhip64.so.7, "
                "hip-python libamdhip64.so; make the second a link to the first, or set ROCM_PATH and LD_LIBRARY_PATH "
                "to one ROCm"
            )
        version = rocm.rocm_version(libraries)
        if version is not None and version < FIXED_ROCM:
            _warn(
                f"ROCm {'.'.join(map(str, version))}: before 7.0.2 kernels on {ARCH} may see old values of host "
                "memory, so that a lost rank is noticed only when a wait ends by itself; install ROCm 7.0.2 or later"
            )
        for variable in BLOCKING:
            if self._ranks > 1 and os.environ.get(variable, "0") != "0":
                _warn(
                    f"{variable}={os.environ[variable]} has launches wait for their kernels: ranks that are threads of "
                    "one process then wait for each other until their limit ends it; unset it, or use processes"
                )
        if self._ranks > 1 and os.environ.get("HSA_ENABLE_IPC_MODE_LEGACY") == "1":
            _warn(
                "HSA_ENABLE_IPC_MODE_LEGACY=1 breaks hipIpcGetMemHandle on newer Linux kernels; unset it, or set it to "
                "0 (images for vLLM often set it)"
            )

    def _count_workgroups(self, cap: int | None) -> int:
        hidden = [f"{name}={os.environ[name]}" for name in CU_MASKS if os.environ.get(name)]
        if hidden and cap is None and self._units is None:
            raise NotAvailable(
                f"device hip: {', '.join(hidden)} takes compute units away, and HIP still counts "
                f"{self._properties['multiProcessorCount']}: a grid of that size would never be resident; unset it, or "
                "pass workgroups_cap="
            )
        most = super()._count_workgroups(cap)
        if self._units is None:
            return most
        last = int(self._properties["multiProcessorCount"]) - 1
        if not self._units or min(self._units) < 0 or max(self._units) > last:
            raise ValueError(f"device hip: compute_units is {self._units}, want numbers from 0 to {last}, one or more")
        return min(most, len(self._units))

    def _make_stream(self) -> Any:
        self._masked = None
        if self._units is None:
            return super()._make_stream()
        mask = sum(1 << unit for unit in self._units)
        words = [mask >> bit & 0xFFFFFFFF for bit in range(0, int(self._properties["multiProcessorCount"]), 32)]
        self._masked = _Masked(int(self.hip.hipExtStreamCreateWithCUMask(len(words), words)))
        return self.cupy.cuda.Stream.from_external(self._masked)

    def _drop_stream(self) -> None:
        super()._drop_stream()
        if self._masked is not None:
            self.hip.hipStreamDestroy(self._masked.address)
            self._masked = None

    def _allocate_signals(self, nbytes: int) -> int:
        return int(self.hip.hipExtMallocWithFlags(nbytes, UNCACHED))

    def _allocate_host(self, nbytes: int) -> tuple[int, int, Callable[[], None]]:
        host = int(self.hip.hipHostMalloc(nbytes, HOST_FLAGS))
        free = self.hip.hipHostFree
        return host, int(self.hip.hipHostGetDevicePointer(host, 0)), lambda: free(host)

    def _code(self, op: str) -> Code:
        plain = report.plain_scratch_bytes(op)
        if self._wants_source(op):
            return Code(None, inline.source_text(op), RUNTIME_COMPILER, report.python_param_bytes(op), plain)
        built = gfx950.code_object(op)
        arguments = report.gfx950_arguments(built, f"{op}_main")
        if len(arguments) != 1:
            raise NotAvailable(f"{op}: the code object takes {len(arguments)} arguments, want one, the params struct")
        return Code(built.code_object, "", (), arguments[0], plain)

    @classmethod
    def build(cls, op: str) -> None:
        if not cls._wants_source(op):
            gfx950.code_object(op)

    @classmethod
    def _wants_source(cls, op: str) -> bool:
        """Whether hiprtc compiles the sources here, instead of loading a code object.

        Code objects are the default: they are the very text that was checked and emulated, made by a compiler whose
        faults are known, and nothing is compiled while other ranks wait. Where there is neither a shipped one nor the
        compiler, hiprtc is what is left.
        """
        can_load = shipped.find(op) is not None or gfx950.missing() is None
        chosen = os.environ.get(CODE) or ("object" if can_load else "source")
        if chosen not in ("object", "source"):
            raise ValueError(f"device hip: {CODE} is {chosen!r}, want object or source")
        return chosen == "source"

    def _occupancy(self, function: int, threads: int, shared_bytes: int) -> int:
        return int(self.hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared_bytes))

    def _open_token(self, handle: Handle) -> Memory:
        opened = super()._open_token(handle)
        if int(self._runtime.deviceGetByPCIBusId(handle.token.pci)) != handle.token.ordinal:
            _warn(
                f"process {handle.pid} sees GPUs in another order than this one; some versions of ROCm then map wrong "
                f"memory; {self._masks_in_words()}; give every rank the same masks"
            )
        return opened

    def _ipc_advice(self) -> str:
        legacy = os.environ.get("HSA_ENABLE_IPC_MODE_LEGACY", "not set")
        return (
            f"look first at HSA_ENABLE_IPC_MODE_LEGACY={legacy} (0 works with newer Linux kernels); all ranks need one "
            "IPC and one PID namespace (containers: --ipc=host --pid=host), and bare metal iommu=pt; "
            f"{self._masks_in_words()}"
        )

    def describe(self) -> str:
        version = rocm.rocm_version(rocm.hip_libraries())
        said = f"ROCm {'.'.join(map(str, version))}" if version else f"HIP runtime {self._runtime.runtimeGetVersion()}"
        units = f", on compute units {self._units}" if self._units is not None else ""
        return f"{super().describe()}{units} (CuPy {self.cupy.__version__}, {said})"


class _Masked:
    """A stream of hip-python, as CuPy takes foreign streams."""

    def __init__(self, address: int):
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _units_of_environment() -> range | None:
    given = os.environ.get(UNITS)
    if not given:
        return None
    if not given.isdigit() or int(given) < 1:
        raise ValueError(f"device hip: {UNITS} is {given!r}, want how many compute units kernels may use")
    return range(int(given))


def _warn(message: str) -> None:
    warnings.warn(f"device hip: {message}", RuntimeWarning, stacklevel=3)
