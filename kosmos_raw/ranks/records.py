"""Why a launch gave up: the record of its first wait that did, in words."""

from __future__ import annotations

import numpy as np

from ..build.params import GAVE_UP, KINDS, MAX_RANKS, MOE_SCANS, MOE_SIGNALS, SIGNALS, WAIT_RECORD
from ..device.base import Memory
from ..errors import WaitRecord
from ..memory.arena import SIGNAL_BYTES, TILE_SIGNALS, Arena


def decode(op: str, raw: bytes, rank: int, ranks: int, arena: Arena, counters: Memory | None) -> WaitRecord | None:
    """The record of a launch of `op` on `rank`; None if nothing gave up. `counters`: this rank's, both sets."""
    record = np.frombuffer(raw, WAIT_RECORD)[0]
    if not record["reason"]:
        return None
    return WaitRecord(
        op=op,
        reason=GAVE_UP[int(record["reason"])],
        kind=KINDS[int(record["kind"])],
        signal=_signal_name(int(record["signal"]), rank, ranks, arena, counters),
        **{name: int(record[name]) for name in ("rank", "wg", "chunk", "row", "part", "want", "seen")},
    )


def _signal_name(address: int, rank: int, ranks: int, arena: Arena, counters: Memory | None) -> str:
    offset = address - arena.signals(rank)
    for struct in (SIGNALS, MOE_SIGNALS):
        for name in reversed(struct.names or ()):
            start = struct.fields[name][1]  # type: ignore[index]
            if start <= offset < struct.itemsize and name != "rows":
                word = (offset - start) // 4
                return f"{name}[{word // MOE_SCANS if name == 'counts_in' else word % MAX_RANKS}]"
    if 0 <= offset < SIGNAL_BYTES:
        row, word = divmod((offset - MOE_SIGNALS.fields["rows"][1]) // 4, 2 * MAX_RANKS)  # type: ignore[index]
        return f"{'arrived' if word < MAX_RANKS else 'freed'}[{row}][{word % MAX_RANKS}]"
    if 0 <= offset - SIGNAL_BYTES < TILE_SIGNALS * 4:
        q, tile = divmod((offset - SIGNAL_BYTES) // 4, TILE_SIGNALS // ranks)
        return f"arrived[{q}][{tile}]"
    if counters and 0 <= address - counters.address < counters.nbytes:
        return f"counter[{(address - counters.address) // 4 % (counters.nbytes // 8)}]"
    staging, size = arena.regions().get("staging", (0, 0))
    for q in range(ranks):
        if 0 <= address - arena.address(q, staging) < size:
            return f"staging[{q}]"
    return hex(address)
