"""Loads the node before any test imports CuPy."""

from __future__ import annotations

import pytest

from kosmos_raw.emulator.node import preload

NODE = preload()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """In place of the check of all other tests: the node keeps a file for its memory and threads for its streams."""


@pytest.fixture(scope="session")
def node():
    return NODE


@pytest.fixture(autouse=True)
def on_gpu_0():
    import cupy

    cupy.cuda.Device(0).use()


@pytest.fixture
def stubs_called(node):
    """Functions that a test may call although the node lacks them; it says which, and no other may be."""
    expected: set[str] = set()
    before = node.stub_calls()
    yield expected
    after = node.stub_calls()
    assert {name for name in after if after[name] != before.get(name, 0)} == expected
