"""Emulated MI355X: the same CuPy-ROCm, hip-python and device code as on a real one, over a HIP runtime of ours that
runs the gfx950 kernels instruction by instruction on the CPU. Right or wrong it shows; fast or slow it does not.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ..build import gfx950
from .hip import HipDevice

WORKGROUPS = 8  # of a launch when nobody chooses: all 256 compute units would be right, too, but 30 times slower


class EmulatedDevice(HipDevice):
    """One rank's emulated MI355X, of eight in each process. KOSMOS_EMULATOR says how the node behaves: see
    emulator/node/options.py. Other arguments as for HipDevice.

    Raises:
        NotAvailable: a wheel or the compiler is missing, or this machine has a real HIP runtime.
    """

    name = "emulated"
    extra = "emulated"
    default_arena_bytes = 64 << 20  # really zeroed, in the memory of this machine

    def _import(self) -> ModuleType:
        # Before CuPy: the loader then takes our libamdhip64 for the one that CuPy wants. Imported late, as the emulator
        # is nobody's business who has a GPU.
        importlib.import_module("kosmos_raw.emulator.node").preload()
        return super()._import()

    @classmethod
    def build(cls, op: str) -> None:
        super().build(op)
        if not cls._wants_source(op):
            importlib.import_module("kosmos_raw.emulator.node").build(gfx950.code_object(op).text)

    def _check_queues(self) -> None:
        """Streams are threads here: any number of them runs at once."""

    @property
    def default_workgroups(self) -> int:
        return min(WORKGROUPS, self.max_workgroups)
