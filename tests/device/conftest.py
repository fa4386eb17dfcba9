"""device/hip.py and device/cuda.py over recorded libraries."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kosmos_raw.device.cupy_kernel import Code
from kosmos_raw.device.cupy_peers import _opened

from .fakes import MASKS, Fake


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
            monkeypatch.setattr("kosmos_raw.device.rocm.hip_libraries", lambda: [])
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
