"""What every test may count on: nothing is left in shared memory, and no rank process outlives its test."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

pytest_plugins = ["tests.cpu", "tests.hip.tier"]


def shared_memory_files() -> set[str]:
    """Files in shared memory, but for those of other programs and of MPI itself, which a killed mpirun may leave."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "mpich_shm"))}


def left_behind(before: set[str], wait_s: float = 30.0) -> set[str]:
    """New files in shared memory that stay. Another worker's mpirun has some too, for as long as it attaches them."""
    left, end = shared_memory_files() - before, time.monotonic() + wait_s
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left &= shared_memory_files()
    return left


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    before = shared_memory_files()
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert not multiprocessing.active_children()
    assert not left_behind(before)
    if not any(map(request.node.get_closest_marker, ("cuda", "hip"))):  # their drivers open dozens, once a process
        assert len(os.listdir("/proc/self/fd")) <= fds + 3  # a library, two fonts, multiprocessing's pipe
