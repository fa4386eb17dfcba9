"""device/hip.py on the node, where the tests that a real GPU runs as well do not reach."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kosmos_raw.build import params
from kosmos_raw.device.emulated import EmulatedDevice
from kosmos_raw.device.rocm import hip_libraries, rocm_version
from kosmos_raw.errors import NotAvailable


@pytest.fixture
def device(request):
    device = EmulatedDevice(0, 1, **getattr(request, "param", {}))
    yield device
    device.close_device()


def test_one_runtime_of_a_known_version():
    assert len(hip_libraries()) == 1
    assert rocm_version(hip_libraries()) == (7, 0, 2)


def test_what_it_says(device):
    assert device.describe().startswith("emulated:0 AMD Instinct MI355X at 0000:05:00.0, 256 compute units")
    assert device.max_workgroups == 256 and device.default_workgroups == 8


def test_the_struct_s_size_comes_from_the_code_object(device):
    kernel = device.kernel("ag_gemm")
    assert kernel.params_bytes == params.AG_GEMM.itemsize


@pytest.mark.parametrize("device", [{"compute_units": range(4)}], indirect=True)
def test_a_mask_caps_the_grid(device):
    assert device.max_workgroups == device.default_workgroups == 4
    words = (ctypes.c_uint32 * 8)()
    device.hip.hipExtStreamGetCUMask(device.stream.ptr, 8, ctypes.addressof(words))
    assert list(words) == [0b1111] + [0] * 7
    with pytest.raises(NotAvailable, match="5 workgroups, want 1 to 4"):
        device.kernel("ag_gemm").launch(np.zeros(1, params.AG_GEMM), 5)


def test_signals_are_uncached(device):
    signals, data = device.allocate(64, signals=True), device.allocate(64)
    flags = [device.hip.hipPointerGetAttributes(memory.address).allocationFlags for memory in (signals, data)]
    assert flags == [3, 0]
    for memory in (signals, data):
        device.free(memory)
