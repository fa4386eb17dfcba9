"""Bugs on purpose in device/hip.py and what it stands on, each with a test of the suite that must fail of it.

Run as a program it tries those that need no process of their own, one after the other, on the emulated node; what came
out is the last line, as JSON. The others are in tests/emulator/node/test_node.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kosmos_raw.build import params, report
from kosmos_raw.device import cupy_common, cupy_peers, hip
from kosmos_raw.device.base import Device, Memory, Tile
from kosmos_raw.device.cupy_common import CupyDevice
from kosmos_raw.device.cupy_kernel import CupyKernel
from kosmos_raw.device.cupy_peers import PeerMemory
from kosmos_raw.device.hip import HipDevice
from kosmos_raw.memory.arena import Arena
from kosmos_raw.ranks import processes

Patch = pytest.MonkeyPatch
VARIABLE = "KOSMOS_TEST_MUTANT"  # applied by programs that tests start, and by the ranks of those

HERE, ON_GPU = "tests/hip/test_device.py::", "tests/device/test_on_gpu.py::"
KERNELS, MEMORY = "tests/device/test_kernels.py::", "tests/device/test_memory.py::"
PEERS, ENVIRONMENT = "tests/device/test_peers.py::", "tests/device/test_environment.py::"


# -- memory
def signals_cached(patch: Patch) -> None:
    patch.setattr(HipDevice, "_allocate_signals", CupyDevice._allocate_signals)


def data_uncached(patch: Patch) -> None:
    whole = CupyDevice.allocate
    patch.setattr(CupyDevice, "allocate", lambda self, nbytes, **_: whole(self, nbytes, signals=True))


def inner_pointer(patch: Patch) -> None:
    whole = CupyDevice.allocate

    def allocate(self: CupyDevice, nbytes: int, **options: Any) -> Memory:
        memory = whole(self, nbytes + 4096, **options)
        return replace(memory, address=memory.address + 4096, nbytes=memory.nbytes - 4096)

    patch.setattr(CupyDevice, "allocate", allocate)


def odd_sizes(patch: Patch) -> None:
    patch.setattr(cupy_common, "GRANULE", 1)


def zeros_not_awaited(patch: Patch) -> None:
    whole = CupyDevice.allocate

    def allocate(self: CupyDevice, nbytes: int, **options: Any) -> Memory:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self.stream, "synchronize", lambda: None)
            return whole(self, nbytes, **options)

    patch.setattr(CupyDevice, "allocate", allocate)


def host_words_not_coherent(patch: Patch) -> None:
    patch.setattr(hip, "HOST_FLAGS", 1)


def host_words_on_the_gpu(patch: Patch) -> None:
    """The host writes to one place, kernels look at another."""

    def allocate_host(self: HipDevice, nbytes: int) -> tuple[int, int, Callable[[], None]]:
        host = np.zeros(nbytes, np.uint8)
        there = int(self._runtime.malloc(nbytes))
        self._runtime.memset(there, 0, nbytes)
        return host.ctypes.data, there, lambda: host.fill(0)

    patch.setattr(HipDevice, "_allocate_host", allocate_host)


# -- streams and compute units
def blocking_stream(patch: Patch) -> None:
    def make(self: HipDevice) -> Any:
        self._masked = None
        return self.cupy.cuda.Stream()

    patch.setattr(HipDevice, "_make_stream", make)


def null_stream(patch: Patch) -> None:
    def make(self: HipDevice) -> Any:
        self._masked = None
        return self.cupy.cuda.Stream.null

    patch.setattr(HipDevice, "_make_stream", make)


def mask_not_set(patch: Patch) -> None:
    def make(self: HipDevice) -> Any:
        self._masked = None
        return CupyDevice._make_stream(self)

    patch.setattr(HipDevice, "_make_stream", make)


def mask_not_counted(patch: Patch) -> None:
    patch.setattr(HipDevice, "_count_workgroups", CupyDevice._count_workgroups)


def units_by_attributes(patch: Patch) -> None:
    def count(self: CupyDevice, cap: int | None) -> int:
        return int(self.cupy.cuda.Device(self.index).attributes["MultiProcessorCount"])

    patch.setattr(CupyDevice, "_count_workgroups", count)


def no_wait_for_the_caller(patch: Patch) -> None:
    patch.setattr(CupyDevice, "_after", lambda self, caller: None)


def no_wait_for_the_kernel(patch: Patch) -> None:
    patch.setattr(CupyDevice, "_before", lambda self, caller: None)


# -- kernels
def size_by_the_mirror(patch: Patch) -> None:
    """A mirror that lacks its last field is then compared with itself."""
    patch.setattr(report, "gfx950_arguments", lambda build, kernel: (params.AG_GEMM.itemsize - 8,))


def size_not_compared(patch: Patch) -> None:
    patch.setattr(CupyKernel, "prepare", lambda self, given, operands=(): self._bind(given, ()))


def stream_not_given(patch: Patch) -> None:
    def bind(self: CupyKernel, given: np.ndarray, operands: Any) -> Callable[[int], None]:
        as_bytes = given.view(np.dtype((np.void, given.nbytes)))
        return lambda wgs: self._function((wgs,), (self.threads,), (as_bytes,), shared_mem=self._shared_bytes)

    patch.setattr(CupyKernel, "_bind", bind)


class _Late:
    """A kernel that is loaded when it is first launched."""

    def __init__(self, device: CupyDevice, op: str):
        self._how = (device, op)
        self.params_bytes = device._code(op).params_bytes
        constants = report.target_constants(device.target)
        self.tile, self.other_tiles = Tile(constants["TILE_M"], constants["TILE_N"]), ()

    def prepare(self, *arguments: Any) -> Callable[[int], None]:
        device, op = self._how

        def begin(workgroups: int) -> None:
            time.sleep(0.3 * device.index)  # so long may compiling take
            CupyKernel(device, op, device._code(op)).prepare(*arguments)(workgroups)

        return begin


def functions_fetched_late(patch: Patch) -> None:
    patch.setattr(CupyDevice, "kernel", lambda self, op: _Late(self, op))


# -- peers
def own_handle_opened(patch: Patch) -> None:
    patch.setattr(Device, "open", lambda self, handle: self._open_token(handle))


def opened_again(patch: Patch) -> None:
    def open_token(self: PeerMemory, handle: Any) -> Memory:
        cupy_peers._opened.clear()
        return whole(self, handle)

    whole = PeerMemory._open_token
    patch.setattr(PeerMemory, "_open_token", open_token)


def opened_without_flag(patch: Patch) -> None:
    patch.setattr(cupy_peers, "LAZY_PEER_ACCESS", 0)


def no_peer_access(patch: Patch) -> None:
    patch.setattr(PeerMemory, "_reach", lambda self, ordinal, pci: None)


def offset_not_sent(patch: Patch) -> None:
    def address(self: Arena, rank: int, offset: int = 0) -> int:
        return self._regions[rank][1].address + (offset if rank == self.rank else 0)

    patch.setattr(Arena, "address", address)


def forked_ranks(patch: Patch) -> None:
    context = multiprocessing.get_context("fork")
    patch.setattr(processes.multiprocessing, "get_context", lambda method: context)


def fork_not_noticed(patch: Patch) -> None:
    patch.setattr(CupyDevice, "current", lambda self: self._gpu)


# -- what is known not to work
def nothing_checked(patch: Patch) -> None:
    patch.setattr(HipDevice, "_check_device", lambda self: None)


@dataclass(frozen=True)
class Mutant:
    patch: Callable[[Patch], None]
    detector: str


OPENED = f"{PEERS}test_a_handle_is_opened_once_and_closed_by_its_last_user[hip]"
LOADED = f"{KERNELS}test_a_kernel_is_loaded_at_once_on_the_right_gpu[hip]"
STREAM = f"{HERE}test_the_stream_is_the_device_s_own_and_waits_for_no_null_stream"
MUTANTS = {
    "signals in cached memory": Mutant(signals_cached, f"{HERE}test_signals_are_uncached_and_data_is_not"),
    "data in uncached memory": Mutant(data_uncached, f"{HERE}test_signals_are_uncached_and_data_is_not"),
    "handle not of the base": Mutant(inner_pointer, f"{HERE}test_allocations_are_whole_ones"),
    "sizes that are no whole pages": Mutant(odd_sizes, f"{HERE}test_allocations_are_whole_ones"),
    "zeros not awaited": Mutant(zeros_not_awaited, f"{MEMORY}test_allocations_are_raw_rounded_and_zeroed[hip]"),
    "abort word not coherent": Mutant(host_words_not_coherent, f"{HERE}test_host_words_are_seen_by_kernels_that_run"),
    "abort word not host-mapped": Mutant(host_words_on_the_gpu, f"{ON_GPU}test_gpu_host_words[hip]"),
    "stream waits for the null stream": Mutant(blocking_stream, STREAM),
    "null stream": Mutant(null_stream, STREAM),
    "mask not set": Mutant(mask_not_set, f"{HERE}test_a_mask_caps_the_grid"),
    "mask not counted": Mutant(mask_not_counted, f"{HERE}test_a_mask_caps_the_grid"),
    "compute units by CuPy's attributes": Mutant(
        units_by_attributes, f"{HERE}test_compute_units_are_counted_by_hip_s_own_numbers"
    ),
    "no wait for the caller": Mutant(no_wait_for_the_caller, f"{KERNELS}test_events_order_the_two_streams[hip]"),
    "no wait for the kernel": Mutant(no_wait_for_the_kernel, f"{KERNELS}test_events_order_the_two_streams[hip]"),
    "short struct": Mutant(size_by_the_mirror, f"{HERE}test_the_struct_s_size_comes_from_the_code_object"),
    "sizes not compared": Mutant(size_not_compared, f"{KERNELS}test_a_struct_of_another_size_is_refused[hip]"),
    "grid not bounded": Mutant(size_not_compared, f"{KERNELS}test_a_grid_that_cannot_be_resident_is_refused[hip]"),
    "stream not given": Mutant(stream_not_given, LOADED),
    "functions fetched late": Mutant(functions_fetched_late, LOADED),
    "own handle opened": Mutant(own_handle_opened, f"{HERE}test_own_memory_is_never_opened"),
    "handle opened again": Mutant(opened_again, OPENED),
    "handle opened without its flag": Mutant(opened_without_flag, OPENED),
    "no peer access": Mutant(no_peer_access, f"{PEERS}test_the_own_process_is_never_opened[hip]"),
    "fork not noticed": Mutant(fork_not_noticed, f"{KERNELS}test_closed_and_forked_devices_refuse[hip]"),
    **{
        f"nothing checked: {test}": Mutant(nothing_checked, f"{ENVIRONMENT}test_{test}")
        for test in (
            "other_architectures_are_refused",
            "known_bad_rocm_is_warned_about",
            "two_hip_runtimes_are_refused",
        )
    },
}


def apply_named() -> None:
    """For programs of tests: the mutant that the environment names, for the rest of the process's life."""
    name = os.environ.get(VARIABLE)
    if name:
        globals()[name](pytest.MonkeyPatch())


class _Outcomes:
    """A plugin: how tests ended, and what was said."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.ended.append(report.outcome)
            self.said.append(str(report.longrepr))


def outcomes(*tests: str) -> _Outcomes:
    """Runs tests in this process. Raises when one does not run."""
    seen = _Outcomes()
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line")
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*tests, *options], plugins=[seen])
    if len(seen.ended) < len(tests) or "skipped" in seen.ended:
        raise RuntimeError(f"{tests}: {seen.ended} {seen.said}")
    return seen


def try_all() -> dict[str, str]:
    """By name: what the test says that catches the mutant, "" if none does; and under "": what fails without one."""
    caught = {}
    for name, mutant in MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            mutant.patch(patch)
            seen = outcomes(mutant.detector)
        caught[name] = seen.said[0] if "failed" in seen.ended else ""
    control = outcomes(*sorted({mutant.detector for mutant in MUTANTS.values()}))
    caught[""] = "\n".join(said for said, ended in zip(control.said, control.ended, strict=True) if ended == "failed")
    return caught


if __name__ == "__main__":
    print(json.dumps(try_all()))
