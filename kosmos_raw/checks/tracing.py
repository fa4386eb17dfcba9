"""One traced call on every rank: what `trace` and `demo` draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..ranks.communicator import Communicator
from .operators import Case
from .validate import call_once


def run(comm: Communicator, case: Case, events_per_row: int) -> tuple[np.ndarray, int, int]:
    """Warms up, then traces one call of `case`. Returns (events, ticks a second, rows of events a WG)."""
    case = replace(case, iters=1)
    call_once(comm, case)
    with comm.tracing(events_per_row) as buffer:
        comm.barrier()  # ranks begin together, so that the picture shows the kernel and not their start
        call_once(comm, case)
    assert buffer.events is not None
    return buffer.events, buffer.tick_hz, buffer.rows_per_wg
