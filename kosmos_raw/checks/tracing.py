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

Call = Callable[[], object]


def run(
    comm: Communicator, case: Case | moe.MoeCase, events_per_row: int, backward: bool = False
) -> tuple[np.ndarray, int, int]:
    """Warms up, then traces one call of `case`; of an MoE layer its backward if asked.

    Returns (events, ticks a second, rows of events a WG).
    """
    before, call = _moe_calls(comm, case, backward) if isinstance(case, moe.MoeCase) else _calls(comm, case)
    before()
    call()
    before()
    with comm.tracing(events_per_row) as buffer:
        comm.barrier()  # ranks begin together, so that the picture shows the kernel and not their start
        call()
    assert buffer.events is not None
    return buffer.events, buffer.tick_hz, buffer.rows_per_wg


def _nothing() -> None:
    pass


def _calls(comm: Communicator, case: Case) -> tuple[Call, Call]:
    """What a call needs done before it, and the call."""
    case = replace(case, iters=1)
    return _nothing, lambda: call_once(comm, case)


def _moe_calls(comm: Communicator, case: moe.MoeCase, backward: bool) -> tuple[Call, Call]:
    given, xp = case.inputs(0), comm.device.xp
    layer = moe.make_layer(comm, case, given.weights)
    x, dy = (xp.asarray(rows[comm.rank].astype(ml_dtypes.bfloat16).view(np.uint16)) for rows in (given.x, given.dout))
    outside = moe.from_outside(case, given, comm.rank, xp)

    def forward() -> object:
        return layer.forward(x, **outside)

    return (forward, lambda: layer.backward(dy, aux_grad=case.aux_grad)) if backward else (_nothing, forward)
