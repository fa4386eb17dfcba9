"""Where the time of a launch went: for each role, kind of work, rank and WG, as data and as tables in plain words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .events import RankTrace, Role, Trace, WgTrace

UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))
ROLE_ORDER: tuple[Role, ...] = ("builder", "mover", "other")


@dataclass(slots=True)
class Times:
    """Seconds of one WG, or of many added up. The fields are disjoint and sum to WGs * makespan of the rank."""

    building: float = 0.0  # GEMM tiles
    moving: float = 0.0  # data to and from peers
    other: float = 0.0  # neither: planning, the drain at the end
    waiting: float = 0.0  # from the claim until the inputs are there
    claiming: float = 0.0  # between two works: from done until the next claim
    starting: float = 0.0  # from the first claim on this rank until the first one of this WG
    idle: float = 0.0  # left; the last WG of this rank has not ended
    unseen: float = 0.0  # the trace was full, or the WG gave up: unknown

    @property
    def life(self) -> float:
        """From the first claim to the last known moment."""
        return self.building + self.moving + self.other + self.waiting + self.claiming

    @property
    def total(self) -> float:
        return self.life + self.starting + self.idle + self.unseen

    def add(self, more: Times) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(more, f.name))

    def shares(self) -> dict[str, float]:
        """Every field as a share of the total; all 0 when there is no time at all."""
        total = self.total
        return {f.name: getattr(self, f.name) / total if total else 0.0 for f in fields(self)}


@dataclass(slots=True)
class RoleTimes:
    """What was done in one role. A WG counts for every role that it had."""

    role: Role
    wgs: int = 0
    works: int = 0  # pieces of work that were finished
    working: float = 0.0
    waiting: float = 0.0  # for the inputs of work of this role

    def add(self, more: RoleTimes) -> None:
        self.wgs += more.wgs
        self.works += more.works
        self.working += more.working
        self.waiting += more.waiting


@dataclass(slots=True)
class KindTimes(RoleTimes):
    """What was done of one kind of work."""

    kind: str = ""  # a name of build.params.KINDS


@dataclass(slots=True)
class RoleSwitch:
    rank: int
    wg: int
    t: float  # seconds since the first claim of the launch
    old: Role
    new: Role


@dataclass(slots=True)
class WgSummary:
    wg: int
    times: Times
    roles: list[RoleTimes]  # builder, mover, other
    kinds: list[KindTimes]  # that it did, by role, then by name


@dataclass(slots=True)
class RankSummary:
    rank: int
    makespan: float  # from the first claim on this rank to the end of its last WG
    times: Times
    roles: list[RoleTimes]
    kinds: list[KindTimes]
    wgs: list[WgSummary]


@dataclass(slots=True)
class Summary:
    """Numbers of one launch, in seconds. `text` says them in words, `as_dict` is ready for json."""

    makespan: float  # from the first claim of any rank to the end of the last WG
    times: Times
    roles: list[RoleTimes]
    kinds: list[KindTimes]
    ranks: list[RankSummary]
    switches: list[RoleSwitch]  # by time
    notes: list[str] = field(default_factory=list)  # what is missing from the trace

    def as_dict(self) -> dict[str, Any]:
        out = asdict(self)
        out["shares"] = self.times.shares()
        for data, rank in zip(out["ranks"], self.ranks, strict=True):
            data["shares"] = rank.times.shares()
        return out

    def text(self) -> str:
        return _text(self)


def summarise(trace: Trace) -> Summary:
    """Adds up who spent how long with what."""
    start = trace.t_first or 0.0
    ranks = [_rank(rank) for rank in trace.ranks]
    switches = [
        RoleSwitch(rank.rank, wg.wg, s.t - start, s.old, s.new)
        for rank in trace.ranks
        for wg in rank.wgs
        for s in wg.switches()
    ]
    switches.sort(key=lambda s: (s.t, s.rank, s.wg))
    return Summary(
        makespan=trace.makespan,
        times=_sum_times(r.times for r in ranks),
        roles=_sum_roles(r.roles for r in ranks),
        kinds=_sum_kinds(r.kinds for r in ranks),
        ranks=ranks,
        switches=switches,
        notes=trace.notes(),
    )


def _rank(rank: RankTrace) -> RankSummary:
    first, end = rank.t_first, rank.t_end
    if first is None or end is None:
        first = end = 0.0
    wgs = [_wg(wg, first, end) for wg in rank.wgs]
    return RankSummary(
        rank=rank.rank,
        makespan=end - first,
        times=_sum_times(w.times for w in wgs),
        roles=_sum_roles(w.roles for w in wgs),
        kinds=_sum_kinds(w.kinds for w in wgs),
        wgs=wgs,
    )


def _wg(wg: WgTrace, rank_first: float, rank_end: float) -> WgSummary:
    times = Times()
    kinds = {span.kind: KindTimes(span.role, wgs=1, kind=span.kind) for span in wg.spans}
    for segment in wg.segments():
        seconds = segment.end - segment.start
        if segment.state == "claiming" or segment.span is None:
            times.claiming += seconds
        elif segment.state == "waiting":
            kinds[segment.span.kind].waiting += seconds
        else:
            kinds[segment.span.kind].working += seconds
    for span in wg.spans:
        kinds[span.kind].works += span.t_done is not None
    roles = {role: RoleTimes(role) for role in ROLE_ORDER}
    for of_kind in kinds.values():
        roles[of_kind.role].add(of_kind)
        roles[of_kind.role].wgs = 1
    times.building, times.moving, times.other = (roles[role].working for role in ROLE_ORDER)
    times.waiting = sum(role.waiting for role in roles.values())
    if wg.t_first is None or wg.t_end is None:
        times.unseen = rank_end - rank_first
    else:
        times.starting = wg.t_first - rank_first
        if wg.truncated or wg.gave_up:
            times.unseen = rank_end - wg.t_end
        else:
            times.idle = rank_end - wg.t_end
    return WgSummary(wg.wg, times, list(roles.values()), _sum_kinds([list(kinds.values())]))


def _sum_times(parts: Iterable[Times]) -> Times:
    out = Times()
    for part in parts:
        out.add(part)
    return out


def _sum_roles(parts: Iterable[list[RoleTimes]]) -> list[RoleTimes]:
    out = [RoleTimes(role) for role in ROLE_ORDER]
    for part in parts:
        for total, more in zip(out, part, strict=True):
            total.add(more)
    return out


def _sum_kinds(parts: Iterable[list[KindTimes]]) -> list[KindTimes]:
    out: dict[str, KindTimes] = {}
    for part in parts:
        for more in part:
            out.setdefault(more.kind, KindTimes(more.role, kind=more.kind)).add(more)
    return sorted(out.values(), key=lambda k: (ROLE_ORDER.index(k.role), k.kind))


def pretty(seconds: float) -> str:
    """Three digits and a unit that suits them."""
    size = abs(seconds)
    scale, unit = next((u for u in UNITS if size * u[0] >= 1), UNITS[-1])
    value = seconds * scale
    digits = max(0, 3 - len(str(int(abs(value))))) if value else 0
    return f"{value:.{digits}f} {unit}"


def _text(s: Summary) -> str:
    num_wgs = sum(len(r.wgs) for r in s.ranks)
    lines = [
        f"{count(len(s.ranks), 'rank')}, {count(num_wgs, 'WG')}, {pretty(s.makespan)} from first claim to last end"
    ]
    columns = ["building", "moving", "waiting", "claiming", "idle"]
    columns += [name for name in ("other", "starting", "unseen") if s.times.shares()[name] >= 0.0005]
    table = [["share of time", "WGs", *columns, "takes"]]
    for r in s.ranks:
        shares = r.times.shares()
        table.append([f"rank {r.rank}", str(len(r.wgs)), *(_percent(shares[c]) for c in columns), pretty(r.makespan)])
    if len(s.ranks) > 1:
        shares = s.times.shares()
        table.append(["all", str(num_wgs), *(_percent(shares[c]) for c in columns), pretty(s.makespan)])
    lines += ["", *_aligned(table)]

    columns = ["WGs", "works", "working", "waiting", "one work takes"]
    table = [["by role", *columns], *(_done(r.role, r, s.times.total) for r in s.roles if r.wgs)]
    lines += ["", *_aligned(table)]
    if len(s.kinds) >= len(table):  # or both would say the same
        lines += ["", *_aligned([["by kind", *columns], *(_done(k.kind, k, s.times.total) for k in s.kinds)])]

    table = [["role switches", "WGs", "switches", "first", "median", "last"]]
    for old, new in (("mover", "builder"), ("builder", "mover")):
        found = [x for x in s.switches if (x.old, x.new) == (old, new)]
        if found:
            at = [found[i].t for i in (0, len(found) // 2, -1)]
            switched = len({(x.rank, x.wg) for x in found})
            table.append([f"{old} to {new}", str(switched), str(len(found)), *map(pretty, at)])
    lines += ["", *(_aligned(table) if len(table) > 1 else ["no WG switched its role"])]
    if s.notes:
        lines += ["", "this trace is not whole:", *(f"  {note}" for note in s.notes)]
    return "\n".join(lines)


def _done(name: str, t: RoleTimes, total: float) -> list[str]:
    mean = pretty(t.working / t.works) if t.works else "-"
    shares = [_percent(seconds / total if total else 0.0) for seconds in (t.working, t.waiting)]
    return [name, str(t.wgs), str(t.works), *shares, mean]


def count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _aligned(table: list[list[str]]) -> list[str]:
    """First column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(widths[i]) for i, cell in enumerate(row[1:], 1))])
        for row in table
    ]
