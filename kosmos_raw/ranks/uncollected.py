"""No garbage collection while ranks of one process launch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0  # threads of this process that are in an `uncollected` block
_was_enabled = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python's collector from running in any thread until the last block of this process ends.

    What it would free may hold a module or pinned memory, and letting go of those waits for all kernels of all GPUs of
    the process. Collection runs in whichever thread allocates next: in one that has yet to launch, it would wait for
    kernels that wait for that launch.
    """
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()
