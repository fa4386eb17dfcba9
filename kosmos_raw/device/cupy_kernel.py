"""An operator's compiled code, loaded by CuPy, and its launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..build import report
from ..errors import KosmosError, NotAvailable
from .base import Kernel, Matrix, Tile

if TYPE_CHECKING:
    from .cupy_common import CupyDevice


@dataclass(frozen=True)
class Code:
    """One operator's compiled code, as `Device._code` finds it."""

    path: Path | None  # a code object or cubin to load, or else:
    text: str  # source for the run-time compiler
    options: tuple[str, ...]  # of that compiler
    params_bytes: int  # size of the params struct, by the code's own metadata where there is some
    plain_scratch: int | None = None  # bytes a WG, of a kernel without a schedule (KOSMOS_PLAIN_KERNEL)


class CupyKernel(Kernel):
    """An operator's entry point, loaded on one device."""

    def __init__(self, device: CupyDevice, op: str, code: Code):
        self.op = op
        self._device = device
        constants = report.target_constants(device.target)
        self.tile = Tile(constants["TILE_M"], constants["TILE_N"])
        self.threads = constants["WG_THREADS"]
        self.params_bytes = code.params_bytes
        self._plain = code.plain_scratch
        self._shared_bytes = constants.get("DYNAMIC_SHARED_BYTES", 0)  # a target without it uses static memory only
        if self._shared_bytes and self._plain is not None:
            self._shared_bytes = self._plain
        cupy = device.cupy
        with device.current(), device.explained(f"loading {op}", f"the code is built for {device.target}"):
            # get_function loads the module on the current device, now.
            if code.path is not None:
                module = cupy.RawModule(path=str(code.path))
            else:
                module = cupy.RawModule(code=code.text, options=code.options, backend="nvrtc")
            raw = module.get_function(f"{op}_main")
            if self._shared_bytes:
                device._allow_shared(raw, self._shared_bytes)
            self.scratch_bytes = int(raw.local_size_bytes)  # a lane's; not 0: a spill or a copied struct
            self._most_threads = int(raw.max_threads_per_block)
            self._function = raw.kernel  # RawKernel looks this up at every call
        self._check()

    def _check(self) -> None:
        device = self._device
        if self.threads > self._most_threads:
            raise NotAvailable(
                f"{self.op}: a WG has {self.threads} threads, the code on {device.describe()} takes "
                f"{self._most_threads}"
            )
        with device.current(), device.explained(f"asking for the occupancy of {self.op}"):
            loaded = device._loaded_params_bytes(self._function.ptr)
            if loaded is not None:
                self.params_bytes = loaded
            resident = device._occupancy(self._function.ptr, self.threads, self._shared_bytes)
        if resident < 1:
            raise NotAvailable(
                f"{self.op}: no WG of {self.threads} threads and {self._shared_bytes:,} bytes of dynamic shared memory "
                f"fits on a compute unit of {device.describe()}"
            )
        if self._plain is not None:
            self.wgs_per_unit = resident

    def _bind(self, params: np.ndarray, operands: Sequence[Matrix]) -> Callable[[int], None]:
        # As plain bytes: CuPy asks NumPy for a description of every field otherwise, which takes 40 us.
        as_bytes = params.view(np.dtype((np.void, params.nbytes)))
        shared, stream = self._shared_bytes, self._device.stream

        def begin(workgroups: int) -> None:
            self._function((workgroups,), (self.threads,), (as_bytes,), shared_mem=shared, stream=stream)

        return begin

    def prepare(self, params: np.ndarray, operands: Sequence[Matrix] = ()) -> Callable[[int], None]:
        device = self._device
        if params.shape != (1,) or params.nbytes != self.params_bytes:
            # Neither CuPy nor the driver compares sizes: a short struct is read past its end.
            raise KosmosError(
                f"{self.op}: params has {params.shape} elements of {params.itemsize} bytes, the compiled kernel wants "
                f"one of {self.params_bytes}; kernel and package are not of the same version"
            )
        most, begin = device.max_workgroups * self.wgs_per_unit, self._bind(params, operands)
        refuse_capture, stream = device.refuse_capture, device.stream
        explained = device.explained(f"launching {self.op} in workgroups of {self.threads} threads")

        def launch(workgroups: int) -> None:
            if not 1 <= workgroups <= most:
                raise NotAvailable(
                    f"{self.op}: {workgroups} workgroups, want 1 to {most}: all must be resident at once on "
                    f"{device.describe()}"
                )
            refuse_capture(stream, "the device's stream")
            with explained:
                begin(workgroups)

        return launch

    def launch(self, params: np.ndarray, workgroups: int, operands: Sequence[Matrix] = ()) -> None:
        begin = self.prepare(params, operands)
        with self._device.current():
            begin(workgroups)
