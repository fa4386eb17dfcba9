"""On GPUs: AMD's, real or emulated (tests/hip/tier.py), and NVIDIA's where there are any."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from kosmos_raw.build import params
from kosmos_raw.device import device_class, open_device
from kosmos_raw.errors import NotAvailable
from kosmos_raw.ops.ag_gemm import ag_gemm
from kosmos_raw.ranks.launch import launch
from tests.hip.tier import DEVICE

from .fakes import BF16, OP

real = pytest.mark.parametrize(
    "name", [pytest.param("hip", marks=pytest.mark.hip), pytest.param("cuda", marks=pytest.mark.cuda)]
)


def open_or_skip(name, index=0, ranks=1, **options):
    try:
        return device_class(DEVICE if name == "hip" else name)(index, ranks, **options)
    except NotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture
def gpu(name):
    device = open_or_skip(name)
    yield device
    device.close_device()


@real
@pytest.mark.parametrize("signals", [False, True])
def test_gpu_memory(gpu, signals):
    memory = gpu.allocate(1000, signals=signals, shared=True)
    assert memory.address % 256 == 0
    assert gpu.to_host(memory.address, memory.nbytes) == bytes(memory.nbytes - 16) + memory.tag
    array = gpu.array(memory.address, (5, 7), BF16, memory)
    assert gpu.address_of(array) == memory.address
    array.view(np.uint16)[...] = 0x4040
    assert gpu.to_host(memory.address, 70) == b"\x40" * 70
    assert array.get().tolist() == [[3.0] * 7] * 5
    gpu.zero(memory.address, 4)
    assert gpu.to_host(memory.address, 6) == bytes(4) + b"\x40\x40"
    gpu.free(memory)


@real
def test_gpu_host_words(gpu):
    words, address = gpu.host_words(4)
    words[2] = 5
    memory = gpu.allocate(16)
    gpu.array(memory.address, (4,), np.uint32, memory)[...] = gpu.array(address, (4,), np.uint32, words)
    assert np.frombuffer(gpu.to_host(memory.address, 16), np.uint32).tolist() == [0, 0, 5, 0]
    gpu.free(memory)


@real
def test_gpu_streams_and_events(gpu):
    start = gpu.record()
    with gpu.cupy.cuda.Stream(non_blocking=True):
        for value in range(5):
            array = gpu.cupy.full(1 << 16, value, np.uint16)
            assert gpu.to_host(gpu.address_of(array) + array.nbytes - 2, 2) == value.to_bytes(2, "little")
    assert gpu.elapsed_ms(start, gpu.record()) > 0
    assert gpu.name in gpu.describe()


@real
def test_gpu_kernel(gpu):
    kernel = gpu.kernel(OP)
    assert kernel.params_bytes == params.AG_GEMM.itemsize
    assert kernel.scratch_bytes == 0
    with pytest.raises(NotAvailable, match="workgroups"):
        kernel.launch(np.zeros(1, params.AG_GEMM), gpu.max_workgroups + 1)


@real
def test_gpu_dlpack(gpu):
    from kosmos_raw.memory import dlpack

    source = gpu.cupy.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    view = dlpack.as_array(source, gpu)
    assert gpu.address_of(view) == source.data.ptr
    assert view.get().tolist() == source.get().tolist()


def _write_into(name, handle, index, ranks, connection):
    try:
        device = open_device(DEVICE if name == "hip" else name, index, ranks)
        memory = device.open(handle)
        again = device.open(handle)
        seen = device.to_host(memory.address, 4)
        device.array(again.address, (1,), np.uint32, again)[...] = 7
        device.synchronize()
        device.close(memory)
        device.close(again)
        connection.send((seen, memory.address == again.address))
    except BaseException as error:
        connection.send(error)


@real
def test_gpu_ipc_between_processes(name, monkeypatch):
    monkeypatch.setenv("KOSMOS_SHARE_GPU", "1")  # one GPU is enough
    owner = open_or_skip(name, 0, 2)
    memory = owner.allocate(4, signals=True, shared=True)
    owner.array(memory.address, (1,), np.uint32, memory)[...] = 5
    owner.synchronize()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_write_into, args=(name, owner.export(memory), 1, 2, there))
    child.start()
    try:
        assert here.poll(120), "the other process says nothing"
        answer = here.recv()
        if isinstance(answer, BaseException):
            raise answer
        assert answer == ((5).to_bytes(4, "little"), True)
        assert owner.to_host(memory.address, 4) == (7).to_bytes(4, "little")
    finally:
        child.join(30)
        owner.free(memory)
        owner.close_device()


@real
def test_gpu_peers_of_one_process(name):
    first = open_or_skip(name, 0, 2)
    second = open_or_skip(name, 1, 2)
    memory = first.allocate(4, shared=True)
    opened = second.open(first.export(memory))
    second.array(opened.address, (1,), np.uint32, opened)[...] = 9
    second.synchronize()
    assert first.to_host(memory.address, 4) == (9).to_bytes(4, "little")
    second.close(opened)
    first.free(memory)
    second.close_device()
    first.close_device()


@real
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_of_one_gpu_may_use_the_null_stream(name, late, monkeypatch):
    """As threads they have one null stream, which CuPy makes current again after any `with stream:`."""
    monkeypatch.setenv("KOSMOS_SHARE_GPU", "1")
    open_or_skip(name).close_device()
    device = DEVICE if name == "hip" else name
    monkeypatch.setattr(device_class(device), "_count_devices", lambda self: 1)
    launch(gather_on_the_null_stream, late, ranks=2, device=device, mode="threads", timeout_s=30, workgroups=3)


def gather_on_the_null_stream(comm, late):
    device, xp = comm.device, comm.device.xp
    with device.stream:
        pass
    assert device.sharers == 2 and xp.cuda.get_current_stream().ptr == 0
    if comm.rank == late:  # what the other one queues until then must not hold this one's launch
        at_once = device._after
        device._after = lambda caller: (time.sleep(0.05), at_once(caller))
    rng = np.random.default_rng()
    for rows in (40, 3):
        mine, weight = (rng.integers(-9, 9, shape).astype(BF16) for shape in ((rows, 24), (17, 24)))
        got = ag_gemm(comm, *(xp.asarray(array.view(np.uint16)) for array in (mine, weight)))
        wanted = np.concatenate(comm.allgather(mine)).astype(float) @ weight.astype(float).T
        assert (got.get().view(BF16).astype(float) == wanted.astype(BF16).astype(float)).all()
