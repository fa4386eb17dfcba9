"""What a GPU says of itself."""

from __future__ import annotations

import re
from pathlib import Path

import cupy
import pytest
from hip import hip

import kosmos_raw.emulator.node as node_package

rt = cupy.cuda.runtime


def fields():
    source = (Path(node_package.__file__).parent / "properties.cpp").read_text()
    return re.findall(r'^    \{\d+, \d, .*, "(\w+)(?:\[(\d)\])?"\}', source, re.M)


def test_every_field_lies_where_hip_python_looks_for_it():
    properties = hip.hipGetDeviceProperties(3)[1]
    expected = {
        "multiProcessorCount": 256,
        "warpSize": 64,
        "major": 9,
        "minor": 5,
        "totalGlobalMem": 288 << 30,
        "isLargeBar": 1,
    }
    named = fields()
    assert len(named) > 30
    for name, index in named:
        value = getattr(properties, name)
        if name == "arch":
            continue
        value = list(value)[int(index)] if index else int(value)
        assert value, name
        assert value == expected.get(name, value), name
    assert properties.name == "AMD Instinct MI355X"
    assert properties.gcnArchName.startswith("gfx950:")
    assert properties.pciBusID == 5 + 16 * 3


def test_cupy_reads_the_same():
    properties = rt.getDeviceProperties(0)
    assert properties["multiProcessorCount"] == 256
    assert properties["sharedMemPerBlock"] == 160 << 10
    assert cupy.cuda.Device(0).compute_capability == "95"


def test_attributes_by_hip_s_numbers():
    attribute = hip.hipDeviceAttribute_t
    assert hip.hipDeviceGetAttribute(attribute.hipDeviceAttributeMultiprocessorCount, 0)[1] == 256
    assert hip.hipDeviceGetAttribute(attribute.hipDeviceAttributeWarpSize, 7)[1] == 64
    assert int(hip.hipDeviceGetAttribute(attribute.hipDeviceAttributeWarpSize, 8)[0]) != 0


def test_cupy_s_attributes_are_not_to_be_trusted():
    """On ROCm it passes an old HIP's numbers on; code that reads Device.attributes must fail here as it would there."""
    assert cupy.cuda.Device(0).attributes["MultiProcessorCount"] != 256


def test_addresses_go_both_ways():
    addresses = [rt.deviceGetPCIBusId(i) for i in range(8)]
    assert len(set(addresses)) == 8
    assert [rt.deviceGetByPCIBusId(a) for a in addresses] == list(range(8))


def test_errors_have_names():
    error = hip.hipError_t.hipErrorPeerAccessAlreadyEnabled
    assert str(hip.hipGetErrorName(error)[-1]) == error.name
    with pytest.raises(rt.CUDARuntimeError, match="hipErrorInvalidDevice"):
        rt.setDevice(8)
    assert int(hip.hipPeekAtLastError()[0]) == 0  # CuPy takes it away
    hip.hipSetDevice(8)
    assert hip.hipPeekAtLastError()[0] == hip.hipError_t.hipErrorInvalidDevice
    assert hip.hipGetLastError()[0] == hip.hipError_t.hipErrorInvalidDevice
    assert int(hip.hipGetLastError()[0]) == 0


def test_a_function_that_is_not_there(stubs_called):
    stubs_called.add("libamdhip64:hipMemPoolTrimTo")
    assert hip.hipMemPoolTrimTo(None, 0)[0] == hip.hipError_t.hipErrorNotSupported
    assert hip.hipGetLastError()[0] == hip.hipError_t.hipErrorNotSupported
