"""kosmos_raw.trace on traces made by hand, by hypothesis, and by a small simulator of ag_gemm: spans and numbers."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kosmos_raw.build.params import EVENTS, KINDS
from kosmos_raw.trace import Span, Trace, decode, decode_rank, summarise, to_perfetto
from kosmos_raw.trace.events import ROLES
from tests.traces import (
    A_DRAIN,
    A_PULL,
    A_TILE,
    CLAIMED,
    DONE,
    DRAIN,
    LEFT,
    ONE_WG,
    PULL,
    READY,
    SIMULATED_RATE,
    TILE,
    Mark,
    Work,
    check_perfetto,
    raw,
    simulated_ag_gemm,
    two_rows,
    work,
)


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


def test_two_groups_that_work_in_turn_have_a_row_each():
    """The decider's, the first group's, the mover's and the second group's."""
    tiles = [(TILE, 0, 0, column) for column in range(3)]
    decider = [mark for i, t in enumerate(tiles) for mark in ((10 + 10 * i, CLAIMED, t), (11 + 10 * i, READY, t))]
    groups = [[(30, DONE, tiles[0]), (48, DONE, tiles[2])], [(41, DONE, tiles[1])]]
    rows = [[*decider, (40, CLAIMED, LEFT)], groups[0], [], groups[1]]
    (wg,) = decode_rank(raw(rows, 8), 1.0, rows_per_wg=4).wgs
    assert [(s.part, s.t_claimed, s.t_ready, s.t_done) for s in wg.spans] == [
        (0, 0, 1, 20),
        (1, 10, 11, 31),
        (2, 20, 21, 38),
    ]
    assert wg.lost_marks == 0 and (wg.t_left, wg.t_end) == (30, 38)
    agent = [(12, CLAIMED, (PULL, 1, 0, 0)), (13, READY, (PULL, 1, 0, 0)), (20, DONE, (PULL, 1, 0, 0))]
    both = decode_rank(raw([*rows[:2], agent, rows[3]], 8), 1.0, rows_per_wg=4).wgs
    assert [len(w.spans) for w in both] == [3, 1]


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


def test_summary_of_a_whole_launch():
    s = summarise(decode(simulated_ag_gemm(), SIMULATED_RATE))
    assert len(s.switches) == 16 and {x.wg for x in s.switches} == {0, 1}
    assert s.times.shares()["building"] > 0.8 and s.notes == []
    slow = summarise(decode(simulated_ag_gemm(pull=5000), SIMULATED_RATE))
    assert slow.times.shares()["waiting"] > 10 * s.times.shares()["waiting"]
