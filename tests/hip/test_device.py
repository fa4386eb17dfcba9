"""device/hip.py beyond what tests/device/test_on_gpu.py asks of any GPU."""

from __future__ import annotations

import ctypes
import importlib
import os

import numpy as np
import pytest

from kosmos_raw.build import params
from kosmos_raw.device import device_class, hip, rocm
from kosmos_raw.errors import KosmosError, NotAvailable

from .tier import DEVICE, REAL

pytestmark = pytest.mark.hip
OP = "ag_gemm"
COHERENT_AND_MAPPED = 0x40000002
NON_BLOCKING = 1


@pytest.fixture
def device(request):
    device = device_class(DEVICE)(0, 1, **getattr(request, "param", {}))
    yield device
    device.close_device()


def test_one_runtime_of_a_version_without_known_faults(device):
    libraries = rocm.hip_libraries()
    assert len(libraries) == 1  # CuPy's and hip-python's
    assert rocm.rocm_version(libraries) >= hip.FIXED_ROCM


def test_compute_units_are_counted_by_hip_s_own_numbers(device):
    """CuPy's Device.attributes has an old HIP's numbers."""
    which = importlib.import_module("hip").hip.hipDeviceAttribute_t.hipDeviceAttributeMultiprocessorCount
    units = device.hip.hipDeviceGetAttribute(which, device.index)
    assert device.max_workgroups == device.compute_units == units >= 32
    assert f"{units} compute units" in device.describe()
    assert device.default_workgroups == (units if REAL else 8)


def test_the_gpu_is_the_one_that_the_address_says(device):
    assert device.hip.hipDeviceGetByPCIBusId(device.pci.encode()) == device.index
    assert device.describe().startswith(f"{DEVICE}:0 ") and device.pci in device.describe()


def test_the_stream_is_the_device_s_own_and_waits_for_no_null_stream(device):
    assert device.stream.ptr != 0
    assert device.hip.hipStreamGetFlags(device.stream.ptr) == NON_BLOCKING
    assert device.hip.hipStreamGetDevice(device.stream.ptr) == device.index


def test_the_struct_s_size_comes_from_the_code_object(device):
    kernel = device.kernel(OP)
    assert kernel.params_bytes == params.AG_GEMM.itemsize
    short = params.AG_GEMM.itemsize - 8
    with pytest.raises(KosmosError, match=f"{short} bytes, the compiled kernel wants one of {kernel.params_bytes}"):
        kernel.launch(np.zeros(1, f"V{short}"), 1)


def test_a_kernel_is_there_when_it_was_asked_for(device):
    """Not at its first launch: loading may wait for kernels of peers, which wait for that launch."""
    assert isinstance(device.kernel(OP)._function.ptr, int)
    assert device.kernel(OP).scratch_bytes == 0


@pytest.mark.parametrize("device", [{"compute_units": range(4)}], indirect=True)
def test_a_mask_caps_the_grid(device):
    assert device.max_workgroups == device.default_workgroups == 4
    words = (ctypes.c_uint32 * 8)()
    device.hip.hipExtStreamGetCUMask(device.stream.ptr, 8, ctypes.addressof(words))
    assert list(words) == [0b1111] + [0] * 7
    with pytest.raises(NotAvailable, match="5 workgroups, want 1 to 4"):
        device.kernel(OP).launch(np.zeros(1, params.AG_GEMM), 5)


def test_signals_are_uncached_and_data_is_not(device):
    signals, data = device.allocate(64, signals=True), device.allocate(64)
    flags = [device.hip.hipPointerGetAttributes(memory.address).allocationFlags for memory in (signals, data)]
    assert flags == [hip.UNCACHED, 0]
    for memory in (signals, data):
        device.free(memory)


def test_allocations_are_whole_ones(device):
    """A handle names an allocation: of a part of one, a peer would open the beginning of the whole."""
    for nbytes in (1, (2 << 20) + 1):
        memory = device.allocate(nbytes, shared=True)
        base, size = device.hip.hipMemGetAddressRange(memory.address)
        assert (int(base), size) == (memory.address, memory.nbytes) and size % (2 << 20) == 0
        assert memory.nbytes >= nbytes + len(memory.tag)
        device.free(memory)


def test_host_words_are_seen_by_kernels_that_run(device):
    words, address = device.host_words(4)
    flags = device.hip.hipHostGetFlags(words.ctypes.data)
    assert flags & COHERENT_AND_MAPPED == COHERENT_AND_MAPPED
    assert int(device.hip.hipHostGetDevicePointer(words.ctypes.data, 0)) == address
    assert os.getpid() == device._pid and words.tolist() == [0] * 4


def test_own_memory_is_never_opened(device):
    """HIP refuses a handle in the process that made it."""
    memory = device.allocate(4096, shared=True)
    handle = device.export(memory)
    assert handle.token.handle is not None
    assert device.open(handle).address == memory.address
    device.free(memory)
