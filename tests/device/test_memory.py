"""Memory of a rank's own GPU, and of the host."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kosmos_raw.device.cupy_common import GRANULE
from kosmos_raw.device.cupy_errors import GpuError
from kosmos_raw.errors import NotAvailable

from .fakes import BF16, Refusal, both


@both
def test_allocations_are_raw_rounded_and_zeroed(make, name):
    device, fake = make(name, 1, 2)
    memory = device.allocate(GRANULE + 1, shared=True)
    assert memory.nbytes == 2 * GRANULE
    assert fake.of("malloc") == [(1, 2 * GRANULE)]
    assert fake.of("memsetAsync") == [(memory.address, 0, 2 * GRANULE - len(memory.tag), device.stream.ptr)]
    assert fake.memory == {memory.address + memory.nbytes - 16: memory.tag}
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
