"""What every test may count on: nothing is left in shared memory, and no rank process outlives its test."""

from __future__ import annotations

import multiprocessing
import os

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = set(os.listdir("/dev/shm"))
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert not multiprocessing.active_children()
    assert set(os.listdir("/dev/shm")) <= before
    assert len(os.listdir("/proc/self/fd")) <= fds + 2  # libraries that were loaded meanwhile may keep one
