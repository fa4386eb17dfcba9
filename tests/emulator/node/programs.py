"""What ranks do in the tests: each function runs in a process of its own, some with one thing made wrong."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import kosmos_raw as kr
from kosmos_raw.build import gfx950
from kosmos_raw.checks.drills import DRILLS
from kosmos_raw.checks.operators import Case
from kosmos_raw.checks.validate import merge, run
from kosmos_raw.device import open_device
from kosmos_raw.device.base import Handle, Memory
from kosmos_raw.device.cupy_kernel import Code
from kosmos_raw.ranks.communicator import Communicator

CASE = Case((130, 0, 200), 264, 72, iters=1)
IN_ARENA = replace(CASE, arena=True)
ARENA = 2 << 20


def validate(
    spoil: Callable[[Communicator], None] | None = None, case: Case = CASE, mode: str = "processes", **options: Any
) -> None:
    """ag_gemm on emulated ranks, spoiled by `spoil` before the first call; raises unless it is right."""
    options = {"arena_bytes": ARENA, "workgroups": 4, "timeout_s": 60, **options}
    outcome = merge(kr.launch(_rank, case, spoil, ranks=len(case.rows), device="emulated", mode=mode, **options))
    assert outcome.passed and outcome.bitwise_repeat, outcome.problems
    print("right")


def _rank(comm: Communicator, case: Case, spoil: Callable[[Communicator], None] | None) -> Any:
    if spoil:
        spoil(comm)
    return run(comm, case)


def read_at_once() -> None:
    """Makes the input and reads the result on the caller's stream, without any synchronisation of its own; raises when
    the result is not there."""
    there = kr.launch(_reads_at_once, ranks=2, device="emulated", arena_bytes=ARENA, workgroups=4)
    assert all(there), "result was not there"
    print("right")


def _reads_at_once(comm: Communicator) -> bool:
    xp = comm.device.xp
    one = xp.empty((256, 64), np.uint16)  # 1 in bf16, in time
    out = xp.zeros((512, 256), np.uint16)
    for _ in range(2):  # the first call loads and compiles
        one[...] = 0
        out[...] = 0
        comm.synchronize()
        one[...] = 0x3F80
        kr.ag_gemm(comm, one, one, out=out)
        seen = out.get()
    comm.synchronize()
    return bool((seen == 0x4280).all())


def fence_deleted(comm: Communicator) -> None:
    """The code object without its write-backs: what a producer stored stays in its cache."""
    built = gfx950.code_object("ag_gemm")
    text = built.text.read_text()
    changed = text.replace("\tbuffer_wbl2 ", "\ts_nop 0 ; ")
    assert changed != text
    folder = Path(tempfile.mkdtemp())
    (folder / "ag_gemm.s").write_text(changed)
    gfx950.assemble(folder / "ag_gemm.s", folder / "ag_gemm.hsaco")
    known = comm.device._code("ag_gemm")  # type: ignore[attr-defined]
    comm.device._code = lambda op: Code(folder / "ag_gemm.hsaco", "", (), known.params_bytes)  # type: ignore[attr-defined]


def drill(name: str, timeout_s: float) -> None:
    """A fault on purpose that the product must report in time; raises when it does not."""
    passed, seen = DRILLS[name](3, timeout_s, "emulated")
    assert passed, f"{name}: {seen}"
    print("right")


def after_a_device() -> None:
    """Ranks as processes, started by a program that has used a GPU itself."""
    device = open_device("emulated", 0, 1)
    device.free(device.allocate(4096))
    validate()


# -- two processes and one allocation
def owner(device: Any, memory: Memory) -> Handle:
    return device.export(memory)


def inner_pointer(device: Any, memory: Memory) -> Handle:
    """Not the base: the offset is lost on the way."""
    handle = device.export(memory)
    inner = bytes(device._runtime.ipcGetMemHandle(memory.address + 4096))
    return Handle(handle.pid, handle.address + 4096, handle.nbytes - 4096, handle.token._replace(handle=inner))


def freed(device: Any, memory: Memory) -> Handle:
    handle = device.export(memory)
    device.free(memory)
    return handle


def _open_and_read(
    handle: Handle, module: str, flags: int | None, offset: int, mask: str | None, connection: Any
) -> None:
    try:
        if mask is not None:
            os.environ["HIP_VISIBLE_DEVICES"] = mask
        if flags is not None:
            importlib.import_module(module).LAZY_PEER_ACCESS = flags
        device = open_device("emulated", 1, 2)
        opened = device.open(handle)
        word = int.from_bytes(device.to_host(opened.address + offset, 4), "little")
        device.close(opened)
        connection.send(word)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")


def share(
    export: Callable[[Any, Memory], Handle] = owner,
    flags: int | None = None,
    offset: int = 4096,
    mask: str | None = None,
) -> None:
    """Prints the word that another process, which sees the GPUs of `mask`, reads at `offset`: 1 at the base of the
    allocation, 2 at byte 4096."""
    device = open_device("emulated", 0, 2)
    memory = device.allocate(8192, shared=True)
    device.array(memory.address, (1,), np.uint32, memory)[...] = 1
    device.array(memory.address + 4096, (1,), np.uint32, memory)[...] = 2
    device.synchronize()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arguments = (export(device, memory), "kosmos_raw.device.cupy_peers", flags, offset, mask, there)
    child = context.Process(target=_open_and_read, args=arguments)
    child.start()
    print("read", here.recv() if here.poll(60) else "nothing")
    child.join(30)


def many_handles(count: int) -> None:
    """Prints how many of `count` allocations another process reads right."""
    device = open_device("emulated", 0, 2)
    memories = [device.allocate(4096, shared=True) for _ in range(count)]
    for i, memory in enumerate(memories):
        device.array(memory.address, (1,), np.uint32, memory)[...] = i + 1
    device.synchronize()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_read_all, args=([device.export(memory) for memory in memories], there))
    child.start()
    print("right", here.recv() if here.poll(60) else "nothing")
    child.join(30)


def _read_all(handles: list[Handle], connection: Any) -> None:
    try:
        device = open_device("emulated", 1, 2)
        opened = [device.open(handle) for handle in handles]
        words = [int.from_bytes(device.to_host(memory.address, 4), "little") for memory in opened]
        connection.send(sum(word == i + 1 for i, word in enumerate(words)))
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")


def fork() -> None:
    """A child that was forked uses the runtime of its parent."""
    device = open_device("emulated", 0, 1)
    runtime = device._runtime  # type: ignore[attr-defined]
    child = os.fork()
    if child == 0:
        try:
            runtime.malloc(4096)
        except RuntimeError as error:
            print(error, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


# -- kernels that go wrong
def _raw(code: str) -> Any:
    open_device("emulated", 0, 1)
    import cupy

    return cupy, cupy.RawKernel(f'extern "C" __global__ void f{code}', "f")


def out_of_bounds() -> None:
    cupy, kernel = _raw("(int* p, long i) { p[i] = 1; }")
    address = cupy.cuda.runtime.malloc(4096)
    kernel((1,), (64,), (np.uint64(address), np.int64(1024)))
    cupy.cuda.Device().synchronize()


def use_after_free() -> None:
    cupy, kernel = _raw("(int* p) { *p = 1; }")
    address = cupy.cuda.runtime.malloc(4096)
    cupy.cuda.runtime.free(address)
    kernel((1,), (64,), (np.uint64(address),))
    cupy.cuda.Device().synchronize()


def peer_access(enabled: bool) -> None:
    """Prints what a kernel of GPU 0 reads from GPU 1, a 7."""
    cupy, kernel = _raw("(int* to, const int* from) { *to = *from; }")
    with cupy.cuda.Device(1):
        there = cupy.full(1, 7, np.int32)
        cupy.cuda.Device(1).synchronize()
    to = cupy.zeros(1, np.int32)
    if enabled:
        cupy.cuda.runtime.deviceEnablePeerAccess(1)
    kernel((1,), (1,), (to, np.uint64(there.data.ptr)))
    print("read", int(to.get()[0]))


def never_ends() -> None:
    cupy, kernel = _raw("(volatile int* p) { while (*p == 0) __builtin_amdgcn_s_sleep(1); }")
    kernel((2,), (64,), (cupy.zeros(1, np.int32),))
    cupy.cuda.Device().synchronize()


def missing_stream_wait(wait: bool) -> None:
    """Prints how often of 100 a copy on another stream was overtaken by the zeros that it should follow."""
    open_device("emulated", 0, 1)
    import cupy

    host = np.frombuffer(cupy.cuda.alloc_pinned_memory(4000), np.float32, 1000)
    host[:] = 2
    wrong = 0
    for _ in range(100):
        array = cupy.zeros(1000, np.float32)
        if wait:
            cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        array.set(host, stream)
        cupy.cuda.Device().synchronize()
        wrong += bool((array.get() != 2).any())
    print("wrong", wrong)


def visible() -> None:
    """Prints the PCI addresses of the GPUs that the masks leave."""
    open_device("emulated", 0, 1)
    import cupy

    runtime = cupy.cuda.runtime
    print("sees", [runtime.deviceGetPCIBusId(i)[5:7] for i in range(runtime.getDeviceCount())])


if __name__ in ("__main__", "__mp_main__") and "KOSMOS_TEST_MUTANT" in os.environ:
    importlib.import_module("tests.hip.mutants").apply_named()  # to ranks of a program as to itself

if __name__ == "__main__":
    eval(sys.argv[1])  # a call of one of the functions above, written by a test
