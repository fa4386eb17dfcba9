"""kosmos_raw.trace on traces made by hand, by hypothesis, and by a small simulator of ag_gemm."""

from __future__ import annotations

import heapq
import json
import random
import sys
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kosmos_raw.build.params import EVENTS, KINDS
from kosmos_raw.cli import trace as cli_trace
from kosmos_raw.cli.main import main
from kosmos_raw.trace import (
    MOE_BACKWARD_PHASES,
    MOE_FORWARD_PHASES,
    Span,
    Trace,
    decode,
    decode_rank,
    draw_timeline,
    summarise,
    to_perfetto,
    write_perfetto,
)
from kosmos_raw.trace.events import ROLES
from kosmos_raw.trace.timeline import COLOURS

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


def test_events_and_roles_are_those_of_the_kernels():
    assert EVENTS == ("claimed", "ready", "done", "placed")
    for kind in ("pull", "tile", "drain", "reduce", "poison"):
        if kind in KINDS:
            assert (ROLES.get(kind) is None) == (kind == "drain")


def test_one_row_per_wg():
    rank = decode_rank(raw([ONE_WG, [(90, CLAIMED, LEFT)]], 12), 10.0, rank=3)
    assert rank.rank == 3 and [wg.wg for wg in rank.wgs] == [0, 1]
    assert rank.wgs[0].spans == (
        Span("pull", 1, 2, 3, 1.0, 2.0, 6.0),
        Span("tile", 5, 70_000, 4, 6.5, 7.0, 11.0),
        Span("drain", 0, 0, 0, 11.1, 14.1, 14.2),
    )
    assert rank.wgs[0].t_left == 15.0
    assert rank.wgs[1].spans == () and (rank.wgs[1].t_first, rank.wgs[1].t_left, rank.wgs[1].t_end) == (0.0, 0.0, 0.0)
    assert [wg.switches() for wg in rank.wgs] == [((6.5, "mover", "builder"),), ()]
    assert Trace((rank,)).notes() == []


def test_ticks_keep_their_precision_far_from_zero():
    start = 2**63  # a double has 53 bits
    life = [(ticks + start, event, w) for ticks, event, w in ONE_WG]
    assert decode_rank(raw([life], 12), 10.0).wgs == decode_rank(raw([ONE_WG], 12), 10.0).wgs


@pytest.mark.parametrize("worker_ready", [True, False])
def test_two_rows_per_wg_with_the_next_work_claimed_ahead(worker_ready):
    tiles: list[Work] = [(TILE, 0, 0, column) for column in range(3)]
    # The second is claimed and ready while the first is worked on; the third still waits when the second is done.
    life = [(tiles[0], 10, 20, 60), (tiles[1], 21, 60, 100), (tiles[2], 62, 130, 170)]
    rank = decode_rank(raw(two_rows(life, left=131, worker_ready=worker_ready), 8), 1.0, rows_per_wg=2)
    (wg,) = rank.wgs
    begun = [10, 50, 120] if worker_ready else [9, 49, 119]
    assert [(s.t_claimed, s.t_ready, s.t_done) for s in wg.spans] == list(
        zip([0, 11, 52], begun, [50, 90, 160], strict=True)
    )
    assert [(s.state, s.start, s.end) for s in wg.segments()] == [
        ("waiting", 0, begun[0]),
        ("working", begun[0], 50),
        ("working", 50, 90),
        ("waiting", 90, begun[2]),
        ("working", begun[2], 160),
    ]
    assert (wg.t_left, wg.t_end, wg.truncated, wg.lost_marks) == (121, 160, False, 0)


def test_an_agent_that_moves_beside_has_a_life_of_its_own():
    builders = two_rows([(A_TILE, 10, 20, 60)], left=61, worker_ready=False)
    pulls = [(PULL, 1, row, 0) for row in range(2)]
    agent = [(11, CLAIMED, pulls[0]), (12, READY, pulls[0]), (30, CLAIMED, pulls[1]), (31, READY, pulls[1])]
    agent += [(40, DONE, pulls[0]), (50, CLAIMED, LEFT), (55, DONE, pulls[1])]
    first, second, mover, idle = decode_rank(raw([*builders, agent, *builders, []], 8), 1.0, rows_per_wg=3).wgs
    assert [w.wg for w in (first, second, mover, idle)] == [0, 1, 2, 3]
    assert [(s.kind, s.t_claimed, s.t_ready, s.t_done) for s in mover.spans] == [
        ("pull", 1, 2, 30),
        ("pull", 20, 21, 45),
    ]
    assert (mover.t_left, mover.t_end, mover.lost_marks) == (40, 45, 0) and idle.t_first is None
    assert len(decode_rank(raw([*builders, []], 8), 1.0, rows_per_wg=3).wgs) == 1  # no agent moved


def test_two_rows_whose_clocks_read_the_same_tick():
    life = [((TILE, 0, 0, column), 5, 5, 5) for column in range(2)]
    rows = [[(5, event, w) for w, *_ in life for event in (CLAIMED, READY)] + [(5, CLAIMED, LEFT)]]
    rows.append([(5, event, w) for w, *_ in life for event in (READY, DONE)])
    (wg,) = decode_rank(raw(rows, 8), 1.0, rows_per_wg=2).wgs
    assert [(s.part, s.t_claimed, s.t_ready, s.t_done) for s in wg.spans] == [(0, 0, 0, 0), (1, 0, 0, 0)]
    assert wg.t_end == 0 and wg.lost_marks == 0


def test_one_row_with_the_next_work_claimed_ahead():
    first, second = (TILE, 0, 0, 0), (TILE, 0, 0, 1)
    row = [(10, CLAIMED, first), (12, READY, first), (40, CLAIMED, second), (41, READY, second), (50, DONE, first)]
    row += [(80, CLAIMED, LEFT), (90, DONE, second)]
    (wg,) = decode_rank(raw([row], 8), 1.0).wgs
    assert [(s.state, s.start, s.end) for s in wg.segments()] == [
        ("waiting", 0, 2),
        ("working", 2, 40),
        ("working", 40, 80),
    ]
    assert (wg.t_left, wg.t_end) == (70, 80)


@pytest.mark.parametrize("trace_events", range(1, len(ONE_WG) + 2))
def test_full_rows_are_reported(trace_events):
    (wg,) = decode_rank(raw([ONE_WG], trace_events), 1.0).wgs
    trace = Trace((decode_rank(raw([ONE_WG], trace_events), 1.0),))
    whole = trace_events >= len(ONE_WG)
    assert wg.truncated == (not whole) and wg.lost_marks == 0 and not wg.gave_up
    assert len(wg.spans) == min(3, -(-trace_events // 3))  # the last claim counts, though its end is not known
    assert wg.t_end == ONE_WG[min(trace_events, len(ONE_WG)) - 1][0] - 100
    expected = [] if whole else ["rank 0: the trace of WG 0 is full and ends early; raise trace_events"]
    assert trace.notes() == expected == summarise(trace).notes
    assert all(note in summarise(trace).text() for note in expected)


def test_full_rows_of_two_are_reported():
    life = [((TILE, 0, 0, column), 10 * column + 1, 10 * column + 3, 10 * column + 9) for column in range(4)]
    for worker_ready in (True, False):
        for trace_events in range(1, 11):
            (wg,) = decode_rank(
                raw(two_rows(life, left=99, worker_ready=worker_ready), trace_events), 1.0, rows_per_wg=2
            ).wgs
            assert wg.truncated == (trace_events < 9)


def test_a_wait_that_gave_up_is_not_called_a_full_row():
    gave_up = [*ONE_WG[:6], (201, CLAIMED, A_DRAIN)]  # wait_inputs said no, the loop left without a mark
    told = [*gave_up, (300, READY, LEFT)]  # or with one
    trace = decode([raw([ONE_WG, gave_up, told, []], 12)], 1.0)
    assert [wg.gave_up for wg in trace.ranks[0].wgs] == [False, True, True, False]
    assert trace.notes() == ["rank 0: no marks from WG 3", "rank 0: WGs 1-2 stopped before the end: a wait gave up"]
    assert list(trace.ranks[0].wgs[2].segments())[-1][::2] == ("waiting", 101)
    assert [w.times.unseen for w in summarise(trace).ranks[0].wgs] == [0, 99, 0, 200]


def test_marks_without_partners_are_counted():
    row = [(1, DONE, A_TILE), (2, CLAIMED, A_PULL), (4, DONE, A_PULL), (5, CLAIMED, LEFT)]
    trace = decode([raw([row], 9)], 1.0)
    assert trace.ranks[0].wgs[0].spans == (Span("pull", 1, 2, 3, 1, 1, 3),)
    assert trace.notes() == ["rank 0: 2 marks have no partner"]


@pytest.mark.parametrize(
    ("marks", "rows_per_wg", "message"),
    [
        (np.zeros((4, 4), np.uint64), 1, r"want uint64 \[WGs \* 1, trace_events, 2\]"),
        (np.zeros((4, 4, 2), np.int64), 1, "rank 0 gave int64"),
        (np.zeros((3, 4, 2), np.uint64), 2, "rank 0 has 3 rows with 2 a WG"),
        (raw([[(9, CLAIMED, A_PULL), (3, READY, A_PULL)]], 4), 1, "row 0 mark 1 is of another launch"),
        (raw([[(9, CLAIMED, LEFT), (9, CLAIMED, A_PULL)]], 4), 1, "clear the trace before each launch"),
    ],
)
def test_what_is_no_trace_is_refused(marks, rows_per_wg, message):
    with pytest.raises(ValueError, match=message):
        decode([marks], 1.0, rows_per_wg=rows_per_wg)


def test_summary_has_exact_numbers():
    builder = [*work((TILE, 0, 0, 0), 130, 132, 190), (192, CLAIMED, LEFT)]
    later = [(ticks + 1000, event, w) for ticks, event, w in builder]
    s = summarise(decode([raw([ONE_WG, builder], 12), raw([later], 12)], 1.0))
    assert s.makespan == 1092 and [r.makespan for r in s.ranks] == [140, 62]
    first, second = (w.times for w in s.ranks[0].wgs)
    assert (first.building, first.moving, first.other, first.waiting, first.claiming) == (
        40,
        40,
        1,
        10 + 5 + 30,
        5 + 1 + 8,
    )
    assert (first.starting, first.idle, first.unseen, first.life, first.total) == (0, 0, 0, 140, 140)
    assert (second.building, second.waiting, second.claiming, second.starting, second.idle) == (58, 2, 2, 30, 48)
    assert s.times.total == 140 + 140 + 62
    assert s.ranks[0].times.shares()["building"] == 98 / 280
    assert [(r.role, r.wgs, r.works, r.working, r.waiting) for r in s.roles] == [
        ("builder", 3, 3, 40 + 58 + 58, 5 + 2 + 2),
        ("mover", 1, 1, 40, 10),
        ("other", 1, 1, 1, 30),
    ]
    assert [(k.kind, k.role, k.wgs, k.works, k.working, k.waiting) for k in s.kinds] == [
        ("tile", "builder", 3, 3, 40 + 58 + 58, 5 + 2 + 2),
        ("pull", "mover", 1, 1, 40, 10),
        ("drain", "other", 1, 1, 1, 30),
    ]
    assert "by kind" not in s.text()  # it would say what "by role" says
    assert [(x.rank, x.wg, x.t, x.old, x.new) for x in s.switches] == [(0, 0, 55, "mover", "builder")]
    data = json.loads(json.dumps(s.as_dict()))
    assert data["ranks"][0]["shares"]["building"] == 98 / 280 and sum(data["shares"].values()) == pytest.approx(1)
    words = s.text()
    assert words.startswith("2 ranks, 3 WGs, 1092 s from first claim to last end")
    assert "mover to builder" in words and "not whole" not in words


def test_kinds_of_a_role_are_told_apart():
    gemm, dgrad = KINDS.index("gemm1"), KINDS.index("dgrad2")
    rows = [
        [*work((gemm, 0, 0, 0), 0, 2, 10), *work((dgrad, 0, 0, 0), 10, 13, 20), *work((dgrad, 0, 1, 0), 20, 20, 24)],
        work((dgrad, 0, 2, 0), 4, 9, 15),
    ]
    rows = [[*((t + 1, e, w) for t, e, w in row), (30, CLAIMED, LEFT)] for row in rows]
    s = summarise(decode([raw(rows, 12)], 1.0))
    assert [(k.kind, k.wgs, k.works, k.working, k.waiting) for k in s.kinds] == [
        ("dgrad2", 2, 3, 7 + 4 + 6, 3 + 5),
        ("gemm1", 1, 1, 8, 2),
    ]
    (builder, *_) = s.roles
    assert (builder.wgs, builder.works, builder.working, builder.waiting) == (2, 4, 25, 10)
    lines = s.text().split("by kind")[1].splitlines()
    assert lines[1].split() == ["dgrad2", "2", "3", "29.3", "%", "13.8", "%", "5.67", "s"]  # of two WGs' 29 seconds


def test_switches_both_ways_are_all_found():
    row: list[Mark] = []
    for n, kind in enumerate((TILE, PULL, DRAIN, PULL, TILE, TILE)):
        row += work((kind, 0, n, 0), 10 * n + 1, 10 * n + 2, 10 * n + 9)
    (wg,) = decode_rank(raw([row], 20), 1.0).wgs
    assert [s.t for s in wg.switches()] == [10, 40]
    assert [s.new for s in wg.switches()] == ["mover", "builder"]


def test_clocks_of_ranks():
    early, late = raw([ONE_WG], 12), raw([[(t + 1000, e, w) for t, e, w in ONE_WG]], 12)
    assert [r.t_first for r in decode([early, late], 1.0).ranks] == [0, 1000]
    own = decode([early, late], 1.0, shared_clock=False)
    assert [r.t_first for r in own.ranks] == [0, 0]
    assert [r.t_end for r in own.shifted([0.0, 7.0]).ranks] == [140, 147] and own.makespan == 140
    with pytest.raises(ValueError, match="1 clock offsets for 2 ranks"):
        own.shifted([0.0])
    starts = {
        e["pid"]: e["ts"] for e in reversed(to_perfetto(own, offsets=[0.0, 7.0])["traceEvents"]) if e["ph"] == "X"
    }
    assert starts == {1: 0, 2: 7e6}


lives = st.lists(
    st.tuples(st.sampled_from([PULL, TILE, DRAIN]), *[st.integers(0, 50)] * 3),  # claiming, waiting, working
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(lives, min_size=1, max_size=4), st.integers(1, 70), st.booleans(), st.integers(0, 9))
def test_times_of_a_wg_sum_to_its_life(lives, trace_events, two, ahead):
    rows: list[list[Mark]] = []
    for life in lives:
        now = claim_at = 1000
        decides, works = [], []
        for n, (kind, claiming, waiting, working) in enumerate(life):
            w = (kind, 0, n, 0)
            claimed = max(claim_at, now + claiming - (ahead if two else 0))
            begun = max(now, claimed) + waiting
            now, claim_at = begun + working, begun
            decides += [(claimed, CLAIMED, w), (begun, READY, w)]
            works += [(begun, READY, w), (now, DONE, w)] if two else []
            decides += [] if two else [(now, DONE, w)]
            claim_at = begun if two else now
        decides.append((max(claim_at, now + 3 - (ahead if two else 0)), CLAIMED, LEFT))
        rows += [decides, works] if two else [decides]
    trace = decode([raw(rows, trace_events)], 1.0, rows_per_wg=1 + two)
    s = summarise(trace)
    for wg, told in zip(trace.ranks[0].wgs, s.ranks[0].wgs, strict=True):
        assert told.times.life == wg.t_end - wg.t_first  # ticks are whole seconds here, so sums are exact
        assert told.times.total == s.ranks[0].makespan
        assert all(a.end == b.start for a, b in pairwise(wg.segments()))
        assert wg.truncated or len(wg.spans) == len(lives[wg.wg])
    assert s.times.total == len(lives) * trace.makespan
    if trace.makespan:
        assert sum(s.times.shares().values()) == pytest.approx(1)
    check_perfetto(to_perfetto(trace))


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


def test_perfetto_of_a_whole_launch(tmp_path):
    trace = decode(simulated_ag_gemm(), SIMULATED_RATE)
    write_perfetto(trace, tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    threads = check_perfetto(data)
    assert len(threads) == 8 * 4
    slices = [e for of_thread in threads.values() for e in of_thread]
    count = {kind: sum(e["name"] == kind for e in slices) for kind in ("pull", "tile", "drain")}
    assert count == {"pull": 8 * 7 * 4, "tile": 8 * 8 * 4 * 4, "drain": 8}
    assert any(e["name"] == "wait for pull" and e["cat"] == "wait" for e in slices)
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"rank {rank}" for rank in range(8)}
    switches = [e for e in data["traceEvents"] if e["ph"] == "i"]
    assert len(switches) == 16 and {e["name"] for e in switches} == {"mover to builder"}


def test_the_die_of_a_wg(fonts):
    """Where a device has several, a row begins with the die; it is no claim, and names the WG in pictures."""
    rows = [[(100, PLACED, (LEAVE, 0, 0, 5)), *work((TILE, 0, 0, 1), 110, 120, 300), (310, CLAIMED, LEFT)], []]
    trace = decode([raw(rows, 8)], 1e6)
    first, silent = trace.ranks[0].wgs
    assert (first.die, silent.die) == (5, None) and first.t_first == 10e-6 and len(first.spans) == 1
    names = [e["args"]["name"] for e in to_perfetto(trace)["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["WG 0, die 5", "WG 1"]
    figure = draw_timeline(trace)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0 / 5", "1"]
    assert any(text.get_text() == "WG / die" for text in figure.axes[0].texts)
    assert not any(text.get_text() == "WG" for text in figure.axes[0].texts)


def test_perfetto_marks_the_end_of_a_full_row():
    data = to_perfetto(decode([raw([ONE_WG], 4)], 1.0))
    check_perfetto(data)
    assert [e["name"] for e in data["traceEvents"] if e["ph"] == "i"] == ["mover to builder", "trace full"]
    assert "full" in data["otherData"]["notes"]


def test_summary_of_a_whole_launch():
    s = summarise(decode(simulated_ag_gemm(), SIMULATED_RATE))
    assert len(s.switches) == 16 and {x.wg for x in s.switches} == {0, 1}
    assert s.times.shares()["building"] > 0.8 and s.notes == []
    slow = summarise(decode(simulated_ag_gemm(pull=5000), SIMULATED_RATE))
    assert slow.times.shares()["waiting"] > 10 * s.times.shares()["waiting"]


def colours_of(path) -> set[tuple[int, ...]]:
    pixels = pytest.importorskip("matplotlib.image").imread(path)
    return set(map(tuple, np.unique((pixels[::3, ::3, :3] * 255).astype(int).reshape(-1, 3), axis=0)))


@pytest.fixture(scope="module")
def fonts():
    """matplotlib keeps the files of its fonts open; one picture opens them before a test counts open files."""
    pytest.importorskip("matplotlib")
    draw_timeline(decode(simulated_ag_gemm(2), SIMULATED_RATE)).canvas.draw()


@pytest.mark.parametrize("ranks, wgs", [(1, 2), (2, 1), (8, 4), (2, 64)])
def test_picture(tmp_path, fonts, ranks, wgs):
    trace = decode(simulated_ag_gemm(ranks, wgs, movers=max(1, wgs // 4), tile_rows=2, columns=3), SIMULATED_RATE)
    figure = draw_timeline(trace, tmp_path / "out.png", title="ag_gemm, simulated")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    solid = [tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in COLOURS[:ranks]]
    assert set(solid) <= colours_of(tmp_path / "out.png")
    words = [text.get_text() for text in figure.texts]
    assert "ag_gemm, simulated" in words
    assert any("of 64 WGs of each rank are shown" in word for word in words) == (ranks * wgs > 64)


def test_moe_forward_is_drawn_by_its_phases(tmp_path, fonts, capsys, monkeypatch):
    """The roles of the paper's Figure 1 (B)."""
    drawn = []
    monkeypatch.setattr(cli_trace, "draw_timeline", lambda *a, **k: drawn.append((a[0], draw_timeline(*a, **k))))
    small = "--device cpu --mode threads --ranks 2 --model DeepSeek-V3 --scale 64 --tokens 70 --workgroups 3"
    files = [tmp_path / "moe.json", tmp_path / "moe.png"]
    assert main(["trace", "moe_forward", *small.split(), "-o", str(files[0]), "--png", str(files[1])]) == 0
    names = {event.get("name", "").split()[0] for event in json.loads(files[0].read_text())["traceEvents"]}
    assert set("route topk scan plan sort push gemm1 gemm2 send fold shared1 shared2".split()) <= names, names
    assert "mover to builder" in capsys.readouterr().out and files[1].read_bytes()[:4] == b"\x89PNG"
    ((trace, figure),) = drawn
    assert set(MOE_FORWARD_PHASES) <= _labels(figure) and "rank 0" not in _labels(figure)
    plain = draw_timeline(trace)
    assert "rank 0" in _labels(plain) and not set(MOE_FORWARD_PHASES) & _labels(plain)


def test_moe_backward_is_drawn_by_its_phases(tmp_path, fonts, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(cli_trace, "draw_timeline", lambda *a, **k: drawn.append(draw_timeline(*a, **k)))
    small = "--device cpu --mode threads --ranks 2 --model DeepSeek-V3 --scale 64 --tokens 70 --workgroups 3"
    png = tmp_path / "moe.png"
    assert main(["trace", "moe_backward", *small.split(), "--rings", "smallest", "--png", str(png)]) == 0
    text = capsys.readouterr().out
    kinds = {line.split()[0] for line in text.split("by kind")[1].split("role switches")[0].splitlines()[1:] if line}
    wanted = (
        "plan push gemm1 dgrad2 wgrad2 wgrad1 dgrad1 send fold dweight shared_d2 shared_w2 shared_w1 own_dx router_dw"
    )
    assert set(wanted.split()) <= kinds, kinds  # gemm1: of rounds that are replayed
    assert kinds.isdisjoint({"route", "gemm2", "topk"})  # its forward is not in it
    assert set(MOE_BACKWARD_PHASES) <= _labels(drawn[0]) and png.read_bytes()[:4] == b"\x89PNG"
    of_phases = {kind for kinds in MOE_BACKWARD_PHASES.values() for kind in kinds}
    assert {kind for kind in kinds if kind in ROLES} == of_phases & kinds  # no mover or builder without a colour


def _labels(figure):
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def test_picture_of_a_trace_that_is_not_whole_says_so(tmp_path, fonts):
    figure = draw_timeline(decode([raw([ONE_WG], 4)], 1.0), tmp_path / "out.png")
    assert any("not whole: rank 0" in text.get_text() for text in figure.texts)
    with pytest.raises(ValueError, match="no marks to draw"):
        draw_timeline(decode([raw([[]], 4)], 1.0))


def test_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'kosmos-raw\[plot\]'"):
        draw_timeline(decode([raw([ONE_WG], 12)], 1.0))
