"""From the raw marks of a launch to spans of work: who did what, when it was claimed, begun and finished.

The marks are those of hip_kernels/schedule/trace.h: rows of [trace_events][2] uint64, each mark {ticks, event << 62 |
kind << 56 | chunk << 48 | row << 24 | part}; ticks 0 ends a row. On most targets a WG owns one row. Where one thread
decides while others work, it owns two: row 2 * wg of the thread that decides (CLAIMED, READY), row 2 * wg + 1 of those
that work (READY when they begin, DONE). There the next work may be claimed before the last one is done. A third row is
that of an agent which moves beside the builders of its WG (policy "beside"); it becomes a WgTrace of its own, after
those of all WGs. Where a device is made of several dies, a row begins with PLACED: `part` is the WG's die.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ..build.params import EVENTS, KINDS

Role = Literal["builder", "mover", "other"]
State = Literal["claiming", "waiting", "working"]

# What a kind of work makes of the WG that does it. Kinds not named here are `other` and change no role: whoever comes
# by does them, as DRAIN or the planning of a MoE layer.
ROLES: dict[str, Role] = {
    "tile": "builder",
    "half": "builder",
    "wgrad": "builder",
    "gemm1": "builder",
    "gemm2": "builder",
    "shared1": "builder",
    "shared2": "builder",
    "dgrad1": "builder",
    "dgrad2": "builder",
    "wgrad1": "builder",
    "wgrad2": "builder",
    **dict.fromkeys(("quant", "shared_d2", "shared_w2", "shared_w1", "own_dx", "router_dw"), "builder"),
    "pull": "mover",
    "pull_columns": "mover",
    "push": "mover",
    "send": "mover",
    "reduce": "mover",
    "poison": "mover",
    "fold": "mover",
}

CLAIMED, READY, DONE, PLACED = (EVENTS.index(name) for name in ("claimed", "ready", "done", "placed"))
WORK_BITS = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one WG. Times are seconds; None = the trace does not say (row full, or the WG gave up).

    These are the marks as they are. Where a WG claims ahead, they overlap with the work before; WgTrace.segments cuts
    the overlap away.
    """

    kind: str  # a name of build.params.KINDS
    chunk: int  # whose rows
    row: int
    part: int
    t_claimed: float
    t_ready: float | None  # its inputs are there and the work begins
    t_done: float | None

    @property
    def role(self) -> Role:
        return ROLES.get(self.kind, "other")


class Segment(NamedTuple):
    """A stretch of a WG's life in which it does one thing. `span` is None only for the claim that was told to leave."""

    state: State
    span: Span | None
    start: float
    end: float


class Switch(NamedTuple):
    """The moment at which a WG turns to the first work of another role."""

    t: float
    old: Role
    new: Role


@dataclass(frozen=True, slots=True)
class WgTrace:
    """The life of one WG, from its first claim until it leaves."""

    wg: int
    spans: tuple[Span, ...]  # in the order of the claims
    t_left: float | None = None  # it was told to leave; None = the row was full before, or it gave up in a wait
    truncated: bool = False  # a row was full before the WG had left: what came later is not known
    lost_marks: int = 0  # marks whose partner is missing
    die: int | None = None  # of the device that it runs on, where a device has several

    @property
    def gave_up(self) -> bool:
        """It stopped in the middle of its work: a wait took too long, or it was told to stop."""
        unfinished = self.t_left is None or any(span.t_done is None for span in self.spans)
        return unfinished and not self.truncated and bool(self.spans)

    @property
    def t_first(self) -> float | None:
        """The first claim; None for a WG without marks."""
        return self.spans[0].t_claimed if self.spans else self.t_left

    @property
    def t_end(self) -> float | None:
        """The last moment that is known of this WG. Work claimed ahead may end after the WG was told to leave."""
        times = [t for s in self.spans for t in (s.t_claimed, s.t_ready, s.t_done) if t is not None]
        return max([*times, *([] if self.t_left is None else [self.t_left])], default=None)

    def segments(self) -> Iterator[Segment]:
        """Cuts the life, t_first to t_end, into stretches without gap or overlap.

        A WG that claims ahead works until it is done; only what is left of the next wait after that counts as waiting.
        """
        now = self.t_first
        if now is None:
            return
        for span in self.spans:
            steps: tuple[tuple[State, float | None], ...] = (
                ("claiming", span.t_claimed),
                ("waiting", span.t_ready),
                ("working", span.t_done),
            )
            for state, until in steps:
                if until is not None and (until > now or state == "working"):
                    yield Segment(state, span, now, max(now, until))
                    now = max(now, until)
        if self.t_left is not None and self.t_left > now:
            last = self.spans[-1]  # there is one, or now would be t_left
            if last.t_done is not None:
                yield Segment("claiming", None, now, self.t_left)
            else:  # it gave up
                yield Segment("waiting" if last.t_ready is None else "working", last, now, self.t_left)

    def switches(self) -> tuple[Switch, ...]:
        """Every change between mover and builder, at the end of the last work of the old role or the claim after it."""
        found: list[Switch] = []
        old: Role | None = None
        done = float("-inf")
        for span in self.spans:
            if span.role != "other":
                if old is not None and span.role != old:
                    found.append(Switch(max(span.t_claimed, done), old, span.role))
                old = span.role
            if span.t_done is not None:
                done = max(done, span.t_done)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class RankTrace:
    """All WGs of one rank."""

    rank: int
    wgs: tuple[WgTrace, ...]

    @property
    def t_first(self) -> float | None:
        return min((wg.t_first for wg in self.wgs if wg.t_first is not None), default=None)

    @property
    def t_end(self) -> float | None:
        return max((wg.t_end for wg in self.wgs if wg.t_end is not None), default=None)


@dataclass(frozen=True, slots=True)
class Trace:
    """One launch on all ranks. Second 0 is the first mark of any rank, or of each rank where clocks are not shared."""

    ranks: tuple[RankTrace, ...]

    @property
    def t_first(self) -> float | None:
        return min((r.t_first for r in self.ranks if r.t_first is not None), default=None)

    @property
    def t_end(self) -> float | None:
        return max((r.t_end for r in self.ranks if r.t_end is not None), default=None)

    @property
    def makespan(self) -> float:
        """Seconds from the first claim of any WG to the end of the last one."""
        first, end = self.t_first, self.t_end
        return 0.0 if first is None or end is None else end - first

    def shifted(self, offsets: Sequence[float]) -> Trace:
        """The same launch with offsets[i] seconds added to every time of ranks[i]: for ranks whose clocks differ."""
        if len(offsets) != len(self.ranks):
            raise ValueError(f"trace: {len(offsets)} clock offsets for {len(self.ranks)} ranks; give one a rank")
        return Trace(tuple(_shift(rank, by) for rank, by in zip(self.ranks, offsets, strict=True)))

    def notes(self) -> list[str]:
        """What is missing from this trace, in plain words; empty when it is whole."""
        said = []
        for rank in self.ranks:
            full = [wg.wg for wg in rank.wgs if wg.truncated]
            silent = [wg.wg for wg in rank.wgs if wg.t_first is None]
            gave_up = [wg.wg for wg in rank.wgs if wg.gave_up]
            lost = sum(wg.lost_marks for wg in rank.wgs if not wg.truncated)
            if full:
                said.append(f"rank {rank.rank}: the trace of {_wgs(full)} is full and ends early; raise trace_events")
            if silent:
                said.append(f"rank {rank.rank}: no marks from {_wgs(silent)}")
            if gave_up:
                said.append(f"rank {rank.rank}: {_wgs(gave_up)} stopped before the end: a wait gave up")
            if lost:
                said.append(f"rank {rank.rank}: {lost} marks have no partner")
        return said


def decode(
    raws: Sequence[Any],
    ticks_per_second: float,
    *,
    rows_per_wg: int = 1,
    shared_clock: bool = True,
    kinds: Sequence[str] = KINDS,
) -> Trace:
    """Decode the marks of all ranks of one launch.

    Args:
        raws: one array a rank, by rank: uint64 [WGs * rows_per_wg, trace_events, 2], zero where unused.
        ticks_per_second: rate of the clock behind the marks.
        rows_per_wg: 1, or 2 where one thread decides and others work, or 3 where one may move beside them, or 4 where
            there are two groups of those that work; the mover's row is the third then too.
        shared_clock: the ranks read one clock (the CPU device does). False: every rank begins at second 0; put them in
            place with Trace.shifted.
        kinds: names of the kinds of work, by number.
    Raises: ValueError for another shape or dtype, and for marks of more than one launch.
    """
    marks = [_checked(raw, rank, rows_per_wg) for rank, raw in enumerate(raws)]
    if not ticks_per_second > 0:
        raise ValueError(f"trace: ticks_per_second is {ticks_per_second}, want more than 0")
    firsts = [int(ticks[ticks > 0].min(initial=2**64 - 1)) for ticks in (m[:, :, 0] for m in marks)]
    zeros = [min(firsts, default=0)] * len(firsts) if shared_clock else firsts
    return Trace(
        tuple(
            _decode_rank(m, rank, zero, float(ticks_per_second), rows_per_wg, kinds)
            for rank, (m, zero) in enumerate(zip(marks, zeros, strict=True))
        )
    )


def decode_rank(
    raw: Any, ticks_per_second: float, *, rank: int = 0, rows_per_wg: int = 1, kinds: Sequence[str] = KINDS
) -> RankTrace:
    """Decode the marks of one rank alone; second 0 is its first mark. See `decode`."""
    only = decode([raw], ticks_per_second, rows_per_wg=rows_per_wg, kinds=kinds).ranks[0]
    return replace(only, rank=rank)


class _Mark(NamedTuple):
    ticks: int
    event: int
    work: int  # kind, chunk, row and part as they stand in the mark


def _checked(raw: Any, rank: int, rows_per_wg: int) -> np.ndarray:
    marks = np.asarray(raw)
    if marks.dtype != np.uint64 or marks.ndim != 3 or marks.shape[2] != 2:
        raise ValueError(
            f"trace: rank {rank} gave {marks.dtype} {list(marks.shape)}, "
            f"want uint64 [WGs * {rows_per_wg}, trace_events, 2]"
        )
    if rows_per_wg not in (1, 2, 3, 4) or marks.shape[0] % rows_per_wg:
        raise ValueError(f"trace: rank {rank} has {marks.shape[0]} rows with {rows_per_wg} a WG; want 1 to 4 rows a WG")
    return marks


def _decode_rank(
    marks: np.ndarray, rank: int, zero: int, rate: float, rows_per_wg: int, kinds: Sequence[str]
) -> RankTrace:
    every = [_marks_of_row(row, f"rank {rank} row {i}") for i, row in enumerate(marks)]
    wgs = [every[i : i + rows_per_wg] for i in range(0, len(every), rows_per_wg)]
    lives = [rows[:2] + rows[3:] for rows in wgs]
    beside = [rows[2:3] for rows in wgs if rows_per_wg > 2]
    if any(rows[0] for rows in beside):
        lives += beside
    full = [any(len(row) == marks.shape[1] for row in rows) for rows in lives]
    return RankTrace(rank, tuple(_decode_wg(i, rows, full[i], zero, rate, kinds) for i, rows in enumerate(lives)))


def _marks_of_row(row: np.ndarray, where: str) -> list[_Mark]:
    marks: list[_Mark] = []
    left = False
    for ticks, word in row.tolist():
        if ticks == 0:
            break
        mark = _Mark(ticks, word >> 62, word & WORK_BITS)
        claim = mark.event == CLAIMED
        if (marks and ticks < marks[-1].ticks) or (claim and left):
            raise ValueError(
                f"trace: {where} mark {len(marks)} is of another launch; clear the trace before each launch"
            )
        left = left or (claim and mark.work >> 56 == 0)
        marks.append(mark)
    return marks


def _decode_wg(wg: int, rows: list[list[_Mark]], full: bool, zero: int, rate: float, kinds: Sequence[str]) -> WgTrace:
    # Marks meet their partners by the work they name, not by time: two threads of a WG may read the same tick.
    ready: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in rows]
    done: dict[int, deque[int]] = defaultdict(deque)
    claims: list[_Mark] = []
    left: int | None = None
    die: int | None = None
    for i, row in enumerate(rows):
        for mark in row:
            if mark.event == PLACED:
                die = mark.work
            elif mark.work >> 56 == 0:  # LEAVE; after a wait that gave up there may be no claim of it, only READY
                left = mark.ticks if left is None else left
            elif mark.event == READY:
                ready[i][mark.work].append(mark.ticks)
            elif mark.event == DONE:
                done[mark.work].append(mark.ticks)
            else:
                claims.append(mark)

    def seconds(ticks: int | None) -> float | None:
        return None if ticks is None else (ticks - zero) / rate  # subtracted as integers: ticks have more than 53 bits

    spans = []
    lost = 0
    for claim in claims:
        begun = [of_row[claim.work].popleft() for of_row in ready if of_row.get(claim.work)]
        t_done = done[claim.work].popleft() if done.get(claim.work) else None
        t_ready = begun[-1] if begun else None  # those that work know best when they began
        if t_ready is None and t_done is not None:
            t_ready, lost = claim.ticks, lost + 1
        if t_ready is not None:
            t_ready = max(t_ready, claim.ticks)
            t_done = None if t_done is None else max(t_done, t_ready)
        kind = claim.work >> 56
        name = kinds[kind] if kind < len(kinds) else f"kind{kind}"
        chunk, row_idx, part = claim.work >> 48 & 0xFF, claim.work >> 24 & 0xFFFFFF, claim.work & 0xFFFFFF
        spans.append(Span(name, chunk, row_idx, part, (claim.ticks - zero) / rate, seconds(t_ready), seconds(t_done)))
    lost += sum(len(ticks) for of_event in (*ready, done) for ticks in of_event.values())
    open_spans = any(span.t_done is None for span in spans)
    return WgTrace(wg, tuple(spans), seconds(left), full and (left is None or open_spans), lost, die)


def _shift(rank: RankTrace, by: float) -> RankTrace:
    def moved(t: float | None) -> float | None:
        return None if t is None else t + by

    wgs = []
    for wg in rank.wgs:
        spans = tuple(
            replace(s, t_claimed=s.t_claimed + by, t_ready=moved(s.t_ready), t_done=moved(s.t_done)) for s in wg.spans
        )
        wgs.append(replace(wg, spans=spans, t_left=moved(wg.t_left)))
    return RankTrace(rank.rank, tuple(wgs))


def _wgs(wgs: list[int]) -> str:
    """WGs in words, runs shortened: "WG 3", "WGs 0-15, 17"."""
    runs: list[list[int]] = []
    for wg in wgs:
        if runs and runs[-1][1] == wg - 1:
            runs[-1][1] = wg
        else:
            runs.append([wg, wg])
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"WG {listed}" if len(wgs) == 1 else f"WGs {listed}"
