"""Allocations, pointers, copies: what HIP allows, and what it refuses."""

from __future__ import annotations

import cupy
import numpy as np
import pytest
from cupy.cuda.runtime import CUDARuntimeError
from hip import hip

rt = cupy.cuda.runtime
H2D, D2H = 1, 2
GIB = 1 << 30


def check(result):
    error, *values = result
    assert int(error) == 0, error
    return values[0] if len(values) == 1 else tuple(values)


def read(address: int, count: int) -> np.ndarray:
    out = np.zeros(count, np.uint8)
    rt.memcpy(out.ctypes.data, address, count, D2H)
    return out


@pytest.fixture
def memory():
    address = rt.malloc(10_000)
    yield address
    rt.free(address)


def test_new_memory_is_not_zero(memory):
    assert (read(memory, 10_000) == 0xA5).all()


def test_bytes_come_back(memory):
    data = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    rt.memcpy(memory, data.ctypes.data, data.nbytes, H2D)
    assert (read(memory, 10_000) == data).all()


@pytest.mark.parametrize(("offset", "count"), [(0, 10_001), (9_999, 2), (12_000, 1)])
def test_a_copy_past_the_end_is_refused(memory, offset, count):
    with pytest.raises(CUDARuntimeError, match="hipErrorInvalidValue"):
        read(memory + offset, count)
    with pytest.raises(CUDARuntimeError, match="hipErrorInvalidValue"):
        rt.memsetAsync(memory + offset, 0, count, 0)


def test_memory_is_freed_once_and_by_its_base():
    address = rt.malloc(100)
    with pytest.raises(CUDARuntimeError):
        rt.free(address + 8)
    rt.free(address)
    with pytest.raises(CUDARuntimeError):
        rt.free(address)
    with pytest.raises(CUDARuntimeError):
        read(address, 1)


def test_a_gpu_has_288_gib():
    free, total = rt.memGetInfo()
    assert total == 288 * GIB and free <= total
    with pytest.raises(CUDARuntimeError, match="hipErrorOutOfMemory"):
        rt.malloc(289 * GIB)
    big = rt.malloc(200 * GIB)  # nothing of it is touched
    assert rt.memGetInfo()[0] <= free - 200 * GIB
    rt.free(big)
    assert rt.memGetInfo()[0] == free


def test_freed_memory_is_found_again():
    first = [rt.malloc(5000) for _ in range(5)]
    for address in first[1:4]:
        rt.free(address)
    again = rt.malloc(20_000)
    assert again == first[1]
    for address in (first[0], again, first[4]):
        rt.free(address)


def test_gpus_have_memory_of_their_own():
    addresses = []
    for gpu in range(8):
        with cupy.cuda.Device(gpu):
            addresses.append(rt.malloc(1 << 22))
    assert [rt.pointerGetAttributes(address).device for address in addresses] == list(range(8))
    for address in addresses:
        rt.free(address)


def test_kinds_of_memory():
    assert check(hip.hipExtMallocWithFlags(4096, 3))  # uncached
    assert check(hip.hipExtMallocWithFlags(8, 2))  # a signal: 8 bytes, no more
    assert hip.hipExtMallocWithFlags(16, 2)[0] == hip.hipError_t.hipErrorInvalidValue
    assert hip.hipExtMallocWithFlags(16, 9)[0] == hip.hipError_t.hipErrorInvalidValue
    assert rt.mallocManaged(100)


def test_cupy_and_hip_python_share_the_runtime():
    address = int(check(hip.hipMalloc(4096)))
    memory = cupy.cuda.UnownedMemory(address, 4096, None, 0)
    array = cupy.ndarray((1024,), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    array[:] = 3
    assert float(array.sum()) == 3072
    base, size = check(hip.hipMemGetAddressRange(address + 100))
    assert (int(base), size) == (address, 4096)
    check(hip.hipFree(address))


def test_pinned_memory():
    host = int(check(hip.hipHostMalloc(4096, 0x40000003)))
    device = int(check(hip.hipHostGetDevicePointer(host, 0)))
    words = (np.ctypeslib.ctypes.c_uint32 * 1024).from_address(host)
    words[5] = 77
    seen = cupy.ndarray((1024,), np.uint32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(device, 4096, None, 0), 0))
    assert int((seen + np.uint32(1))[5]) == 78
    seen[6] = 5
    cupy.cuda.get_current_stream().synchronize()
    assert words[6] == 5
    check(hip.hipHostFree(host))
    assert hip.hipHostFree(host)[0] == hip.hipError_t.hipErrorInvalidValue
    assert hip.hipHostGetDevicePointer(host, 0)[0] == hip.hipError_t.hipErrorInvalidValue


def test_dlpack():
    array = cupy.arange(12, dtype=np.float32)
    assert array.__dlpack_device__()[0] == 10  # kDLROCM
    assert cupy.from_dlpack(array).data.ptr == array.data.ptr


def test_what_cupy_s_pool_does():
    pool = cupy.get_default_memory_pool()
    free = rt.memGetInfo()[0]
    array = cupy.empty(1 << 24, np.uint8)
    assert pool.used_bytes() >= array.nbytes and rt.memGetInfo()[0] <= free - array.nbytes
    del array
    pool.free_all_blocks()
    assert rt.memGetInfo()[0] >= free


def test_peers():
    assert rt.deviceCanAccessPeer(0, 1) and not rt.deviceCanAccessPeer(2, 2)
    rt.deviceEnablePeerAccess(5)
    with pytest.raises(CUDARuntimeError, match="AlreadyEnabled"):
        rt.deviceEnablePeerAccess(5)
    with pytest.raises(CUDARuntimeError):
        rt.deviceEnablePeerAccess(0)
    rt.deviceDisablePeerAccess(5)


def test_a_handle_of_this_process_cannot_be_opened_here(memory):
    with pytest.raises(CUDARuntimeError, match="hipErrorInvalidContext"):
        rt.ipcOpenMemHandle(rt.ipcGetMemHandle(memory), 1)


def test_handles_name_memory_of_a_gpu_only():
    host = int(check(hip.hipHostMalloc(4096, 0)))
    for address in (host, np.zeros(4).ctypes.data):
        with pytest.raises(CUDARuntimeError, match="hipErrorInvalidValue"):
            rt.ipcGetMemHandle(address)
    check(hip.hipHostFree(host))
