"""Faults on purpose: what a user would see when a rank goes wrong. `demo` shows them."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import CommunicatorBroken, RankLost, WaitError
from ..ops.ag_gemm import ag_gemm
from ..ranks.communicator import Communicator
from ..ranks.launch import launch


def _call(comm: Communicator, rows: int = 40) -> None:
    rng = np.random.default_rng(comm.rank)
    ag_gemm(comm, *(_matrix(comm, rng.standard_normal((n, 64), np.float32)) for n in (rows, 32)))
    comm.synchronize()


def _matrix(comm: Communicator, values: np.ndarray) -> Any:
    return comm.device.xp.asarray(values.astype(ml_dtypes.bfloat16).view(np.uint16))


def _options(ranks: int, timeout_s: float, device: str) -> dict[str, Any]:
    return {"ranks": ranks, "timeout_s": timeout_s, "device": device, "arena_bytes": 1 << 20}


def _killed(comm: Communicator, victim: int) -> None:
    _call(comm)
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(3):
            _call(comm)
    except (WaitError, CommunicatorBroken) as error:
        raise RuntimeError(f"survivor after {time.monotonic() - start:.3f} s: {error}") from None


def killed_rank(ranks: int, timeout_s: float, device: str) -> tuple[bool, str]:
    """Kills one rank process between two calls. Passes when every other rank reports it at once, long before the time
    limit of a wait."""
    try:
        launch(_killed, ranks - 1, mode="processes", **_options(ranks, timeout_s, device))
    except (RankLost, RuntimeError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", []), str(error.__cause__)])
        seconds = [float(after) for after in re.findall(r"RuntimeError: survivor after ([\d.]+) s", text)]
        if len(seconds) < ranks - 1 or max(seconds) > timeout_s / 2:
            return False, f"others raised after {seconds} s, of {timeout_s} s that a wait may last"
        return True, f"all {ranks - 1} others raised at once"
    return False, "nobody noticed"


def _different(comm: Communicator) -> tuple[bool, str]:
    try:
        _call(comm, rows=40 + (comm.rank == 0))
    except WaitError as error:
        comm.rebuild()
        _call(comm)
        return error.record is not None and error.record.reason == "different call", "reported, then rebuilt"
    return False, "nobody noticed"


def different_call(ranks: int, timeout_s: float, device: str) -> tuple[bool, str]:
    """One rank calls with another shape. Passes when all report that, and the communicator works after rebuild()."""
    results = launch(_different, mode="threads", **_options(ranks, timeout_s, device))
    return all(passed for passed, _ in results), results[0][1]


def _bad_input(comm: Communicator) -> tuple[bool, str]:
    try:
        ag_gemm(comm, _matrix(comm, np.zeros((4, 16))), _matrix(comm, np.zeros((8, 24))))
    except ValueError as error:
        _call(comm)
        return "want the same K" in str(error), "refused before launch, then usable"
    return False, "accepted"


def bad_input(ranks: int, timeout_s: float, device: str) -> tuple[bool, str]:
    """A shape that cannot be. Passes when it is refused before anything is launched."""
    results = launch(_bad_input, mode="threads", **_options(ranks, timeout_s, device))
    return all(passed for passed, _ in results), results[0][1]


DRILLS = {"wrong shape": bad_input, "ranks disagree": different_call, "a rank is killed": killed_rank}
