"""Marks of launches: made by hand, and by a small simulator of ag_gemm; and what a Perfetto file must be."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from itertools import pairwise

import numpy as np

from kosmos_raw.build.params import KINDS

CLAIMED, READY, DONE, PLACED = range(4)
LEAVE, PULL, TILE, DRAIN = (KINDS.index(kind) for kind in ("leave", "pull", "tile", "drain"))

Work = tuple[int, int, int, int]  # kind, chunk, row, part
Mark = tuple[int, int, Work]  # ticks, event, work
LEFT: Work = (LEAVE, 0, 0, 0)


def raw(rows: list[list[Mark]], trace_events: int) -> np.ndarray:
    """What a kernel writes: one row of marks for each in `rows`, cut where the row is full."""
    out = np.zeros((len(rows), trace_events, 2), np.uint64)
    for i, row in enumerate(rows):
        for n, (ticks, event, (kind, chunk, row_idx, part)) in enumerate(row[:trace_events]):
            out[i, n] = ticks, event << 62 | kind << 56 | chunk << 48 | row_idx << 24 | part
    return out


def work(w: Work, claimed: int, ready: int, done: int) -> list[Mark]:
    return [(claimed, CLAIMED, w), (ready, READY, w), (done, DONE, w)]


def simulated_ag_gemm(
    ranks: int = 8,
    wgs: int = 4,
    movers: int = 2,
    tile_rows: int = 4,
    columns: int = 4,
    pull: int = 500,
    seed: int = 1,
) -> list[np.ndarray]:
    """The marks that hip_kernels/schedule/ag_gemm.h would leave: movers pull, then build. pull: ticks of one pull."""
    rng = random.Random(seed)
    peers = ranks - 1
    marks: list[list[list[Mark]]] = [[[] for _ in range(wgs)] for _ in range(ranks)]
    begins = [[1_000_000 + rng.randrange(200) + 60 * rank + 15 * wg for wg in range(wgs)] for rank in range(ranks)]
    landed: list[dict[tuple[int, int], int]] = [{} for _ in range(ranks)]
    now = [list(times) for times in begins]
    reads_done = [0] * ranks  # when the last peer has read this rank's rows
    for rank in range(ranks):  # pulls wait for the source to have started, and for nothing else
        stride = min(movers, peers)
        for mover in range(stride):
            mine = [(rank + 1 + i) % ranks for i in range(mover, peers, stride)]
            for row in range(tile_rows):
                for q in mine:
                    claimed = now[rank][mover]
                    ready = max(claimed + 6, begins[q][0] + 40)
                    done = ready + rng.randrange(pull * 9 // 10, pull * 11 // 10)
                    marks[rank][mover] += work((PULL, q, row, 0), claimed, ready, done)
                    landed[rank][q, row] = done
                    reads_done[q] = max(reads_done[q], done)
                    now[rank][mover] = done + 5
    for rank in range(ranks):
        order = [(rank, row) for row in range(tile_rows)]
        order += [((rank + 1 + i) % ranks, row) for row in range(tile_rows) for i in range(peers)]
        queue: list[Work] = [(TILE, q, row, column) for q, row in order for column in range(columns)]
        queue += [(DRAIN, rank, 0, 0)] if peers else []
        heap = [(t, wg) for wg, t in enumerate(now[rank])]
        heapq.heapify(heap)
        while heap:
            claimed, wg = heapq.heappop(heap)
            if not queue:
                marks[rank][wg].append((claimed, CLAIMED, LEFT))
                continue
            w = queue.pop(0)
            kind, q, row, _ = w
            inputs = reads_done[rank] if kind == DRAIN else landed[rank].get((q, row), 0)
            ready = max(claimed + 4, inputs + 8)
            done = ready + (2 if kind == DRAIN else rng.randrange(820, 940))
            marks[rank][wg] += work(w, claimed, ready, done)
            heapq.heappush(heap, (done + 6, wg))
    return [raw(rows, 1 + max(len(row) for row in rows)) for rows in marks]


SIMULATED_RATE = 1e8


def two_rows(*lives: list[tuple[Work, int, int, int]], left: int, worker_ready: bool) -> list[list[Mark]]:
    """The marks of WGs whose workers write a row of their own; the decider is ready 1 tick before they begin."""
    rows: list[list[Mark]] = []
    for life in lives:
        decides = [m for w, claimed, ready, _ in life for m in ((claimed, CLAIMED, w), (ready - 1, READY, w))]
        works = [
            m
            for w, _, ready, done in life
            for m in ((ready, READY, w), (done, DONE, w))
            if worker_ready or m[1] == DONE
        ]
        rows += [[*decides, (left, CLAIMED, LEFT)], works]
    return rows


A_PULL: Work = (PULL, 1, 2, 3)
A_TILE: Work = (TILE, 5, 70_000, 4)
A_DRAIN: Work = (DRAIN, 0, 0, 0)
ONE_WG = [
    *work(A_PULL, 100, 110, 150),
    *work(A_TILE, 155, 160, 200),
    *work(A_DRAIN, 201, 231, 232),
    (240, CLAIMED, LEFT),
]


def check_perfetto(data: dict) -> dict[tuple[int, int], list[dict]]:
    """What ui.perfetto.dev needs: names, whole slices, in order, never half over another. Gives slices by thread."""
    events = data["traceEvents"]
    assert {e["ph"] for e in events} <= {"M", "X", "i"}
    timed = [e for e in events if e["ph"] != "M"]
    assert events == [e for e in events if e["ph"] == "M"] + timed  # names first
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(timed)) and all(e["ts"] >= 0 for e in timed)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == len(named) and not {tid for _, tid in named} & {pid for pid, _ in named}
    threads = defaultdict(list)
    for e in timed:
        assert (e["pid"], e["tid"]) in named and e["pid"] > 0 and e["tid"] > 0
        if e["ph"] == "X":
            assert e["dur"] >= 0 and set(e["args"]) == {"chunk", "row", "part"}
            threads[e["pid"], e["tid"]].append(e)
    for slices in threads.values():
        for a, b in pairwise(slices):
            assert round(a["ts"] * 1e3) + round(a["dur"] * 1e3) <= round(b["ts"] * 1e3)
    return threads
