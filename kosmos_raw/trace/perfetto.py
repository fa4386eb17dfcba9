"""A trace as Chrome trace JSON: open it in ui.perfetto.dev or chrome://tracing. One process a rank, one thread a WG."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from .events import RankTrace, Trace, WgTrace

# Perfetto takes thread 0 for the idle task and a thread with its process's number for the main thread; and numbers of
# threads are best unique over all processes.
THREADS_PER_RANK = 10_000


def to_perfetto(trace: Trace, *, offsets: Sequence[float] | None = None) -> dict[str, Any]:
    """The trace as Chrome trace events, ready for json.dump.

    Works are slices named by their kind, waits are slices of their own ("wait for tile"); both carry chunk, row and
    part. Role switches, and places where a trace ends early, are instant events.

    Args:
        offsets: seconds to add to the times of each rank, for ranks whose clocks differ; None when they share one.
    """
    if offsets is not None:
        trace = trace.shifted(offsets)
    start = trace.t_first or 0.0
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for rank in trace.ranks:
        names += _names(rank)
        for wg in rank.wgs:
            events += _events(rank.rank, wg, start)
    events.sort(key=lambda e: (e["ts"], e["pid"], e["tid"]))
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ns",
        "otherData": {"made by": "kosmos_raw", "notes": "; ".join(trace.notes())},
    }


def write_perfetto(trace: Trace, path: str | os.PathLike[str], *, offsets: Sequence[float] | None = None) -> None:
    """Writes what `to_perfetto` makes."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(to_perfetto(trace, offsets=offsets), file, separators=(",", ":"))


def _ids(rank: int, wg: int) -> dict[str, int]:
    return {"pid": rank + 1, "tid": (rank + 1) * THREADS_PER_RANK + wg}


def _names(rank: RankTrace) -> list[dict[str, Any]]:
    def meta(name: str, ids: dict[str, int], args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, **ids, "args": args}

    process = {"pid": rank.rank + 1}
    out = [
        meta("process_name", process, {"name": f"rank {rank.rank}"}),
        meta("process_sort_index", process, {"sort_index": rank.rank}),
    ]
    for wg in rank.wgs:
        ids = _ids(rank.rank, wg.wg)
        die = "" if wg.die is None else f", die {wg.die}"
        out.append(meta("thread_name", ids, {"name": f"WG {wg.wg}{die}"}))
        out.append(meta("thread_sort_index", ids, {"sort_index": wg.wg}))
    return out


def _events(rank: int, wg: WgTrace, start: float) -> list[dict[str, Any]]:
    ids = _ids(rank, wg.wg)

    def ns(t: float) -> int:
        return round((t - start) * 1e9)

    def instant(name: str, t: float) -> dict[str, Any]:
        return {"ph": "i", "s": "t", "name": name, "cat": "role", "ts": ns(t) / 1e3, **ids}

    out: list[dict[str, Any]] = []
    for segment in wg.segments():
        if segment.state == "claiming" or segment.span is None:
            continue
        span = segment.span
        # Both ends are rounded, not the length: neighbours then meet exactly, and slices never half overlap.
        begin, end = ns(segment.start), ns(segment.end)
        waiting = segment.state == "waiting"
        out.append(
            {
                "ph": "X",
                "name": f"wait for {span.kind}" if waiting else span.kind,
                "cat": "wait" if waiting else span.role,
                "ts": begin / 1e3,
                "dur": (end - begin) / 1e3,
                **ids,
                "args": {"chunk": span.chunk, "row": span.row, "part": span.part},
            }
        )
    out += [instant(f"{s.old} to {s.new}", s.t) for s in wg.switches()]
    if wg.t_end is not None and (wg.truncated or wg.gave_up):
        out.append(instant("trace full" if wg.truncated else "gave up", wg.t_end))
    return out
