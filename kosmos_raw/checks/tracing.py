"""One traced call on every rank: what `trace` and `demo` draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np

from ..ranks.communicator import Communicator
from . import moe
from .operators import Case
from .validate import call_once


def run(comm: Communicator, case: Case | moe.MoeCase, events_per_row: int) -> tuple[np.ndarray, int, int]:
    """Warms up, then traces one call of `case`. Returns (events, ticks a second, rows of events a WG)."""
    call = _moe_call(comm, case) if isinstance(case, moe.MoeCase) else _call(comm, case)
    call()
    with comm.tracing(events_per_row) as buffer:
        comm.barrier()  # ranks begin together, so that the picture shows the kernel and not their start
        call()
    assert buffer.events is not None
    return buffer.events, buffer.tick_hz, buffer.rows_per_wg


def _call(comm: Communicator, case: Case) -> Callable[[], object]:
    case = replace(case, iters=1)
    return lambda: call_once(comm, case)


def _moe_call(comm: Communicator, case: moe.MoeCase) -> Callable[[], object]:
    given, xp = case.inputs(0), comm.device.xp
    layer = moe.make_layer(comm, case, given.weights)
    x = xp.asarray(given.x[comm.rank].astype(ml_dtypes.bfloat16).view(np.uint16))
    outside = moe.from_outside(case, given, comm.rank, xp)
    return lambda: layer.forward(x, **outside)
