"""One operator under every policy and queue order (paper tables 1, 2, A.2, A.3), on the same data.

Checked first: against float64 where that is quick, and everywhere by bits, which must be equal for all variants. Then
all variants run in each round, in an order shuffled anew, alike on all ranks.

What a device can show. GPUs: speed. The CPU: that policies change who waits for how long, but not what that costs, for
workgroups are threads that share a few cores, and one that waits leaves its core to the others. Emulated: time is the
emulator's.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from ..checks import tracing, validate
from ..checks.operators import Case
from ..plan.crew import policies_of
from ..plan.heuristics import crew
from ..plan.shapes import ORDERS_OF, split_rows
from ..ranks.communicator import Communicator
from ..trace import decode, summarise
from .cuda_ops import alternate

FIXED_PER_PEER = 8  # the fixed crew of table 2
CHECKED_FLOPS = 4e9  # up to which float64 on one core is quick
CALLS = 10  # of a GPU between two looks at its clock
FILLED, FILLS = 1 << 28, 64  # bytes, and how often: 5 ms or more of an H200
SHARES = ("building", "moving", "waiting", "idle")
CHOSEN = ("policy", "movers", "transport")  # columns that may say "planned"
WHAT_IT_SHOWS = {
    "cpu": "WGs are threads that share cores: shares say who waits for whom, milliseconds say little of a GPU.",
    "emulated": "Milliseconds are the emulator's: they say nothing of a GPU.",
}


@dataclass(frozen=True)
class Variant:
    """None: as planned."""

    name: str
    policy: str | None
    order: str = "as_consumed"
    movers: int | None = None
    transport: str | None = None  # of gemm_rs

    def of(self, case: Case) -> Case:
        one = replace(case, policy=self.policy, order=self.order, movers=self.movers)
        return replace(one, transport=self.transport, iters=1)


@dataclass
class PolicyRow:
    """One variant: milliseconds a call of the slowest rank, one a round, and where the time of one call went."""

    variant: Variant
    samples: list[float] = field(repr=False)
    shares: dict[str, float] | None = None  # of all WGs' time, where ranks share a clock
    switches: int | None = None

    @property
    def ms(self) -> float:
        return median(self.samples)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ms": self.ms}


def variants(op: str, ranks: int, workgroups: int, *, beside: bool = False, measured: bool = False) -> list[Variant]:
    """What is shipped first: where links were measured the planned call, else one_way. Then all policies with the
    planned crew, the fixed crew of the paper, and all other orders with its policy; gemm_rs as the paper's, by pull."""
    pull = "pull" if op == "gemm_rs" else None
    found = [Variant("planned", None)] if measured else []
    found += [Variant(policy, policy, transport=pull) for policy in policies_of(op, beside)]
    by_paper = min(crew(FIXED_PER_PEER, ranks, workgroups), workgroups - 1)
    found.append(Variant(f"fixed, {FIXED_PER_PEER} a peer", "fixed", movers=by_paper, transport=pull))
    found += [Variant(order, "one_way", order, transport=pull) for order in ORDERS_OF[op][1:]]
    return found


def run(
    comm: Communicator, cases: Sequence[Case], rounds: int = 9, progress: bool = False, events: int = 4096
) -> list[tuple[list[PolicyRow], float]]:
    """Measures every variant of each case. Every rank calls it; results are alike on all: of each case its rows, and
    how much of the error bound was used."""
    return [_run(comm, case, rounds, progress, events) for case in cases]


def _run(comm: Communicator, case: Case, rounds: int, progress: bool, events: int) -> tuple[list[PolicyRow], float]:
    device = comm.device
    found = variants(case.op, comm.ranks, comm.workgroups, beside=device.beside, measured=device.link is not None)
    cases = {v: v.of(case) for v in found}
    operator, inputs = validate.judge_of(case), validate.on_device(comm, case)
    used = _check(comm, cases, inputs)
    outputs = {
        name: comm.device.xp.empty(shape, np.uint16) for name, shape in operator.outputs(case, comm.rank).items()
    }

    def call_of(one: Case) -> Callable[[], None]:
        return lambda: operator.call(comm, one, inputs, outputs)

    samples = _alternate(comm, {v: call_of(one) for v, one in cases.items()}, rounds, progress)
    rows = [PolicyRow(v, samples[v]) for v in found]
    if comm.device.name == "cpu":  # where all ranks read one clock
        for row in rows:
            row.shares, row.switches = _shares(comm, cases[row.variant], events)
    return rows, used


def _check(comm: Communicator, cases: dict[Variant, Case], inputs: dict[str, Any]) -> float:
    """Raises ValueError, on all ranks, when a variant is wrong or has other bits than the first."""
    first = next(iter(cases.values()))
    flops = 2 * max(first.m, 1) * first.n * first.k
    small = replace(first, rows=tuple(min(r, 64) for r in first.rows), n=min(first.n, 128), k=min(first.k, 128))
    used, kept = 0.0, None
    for variant, case in cases.items():
        judged = case if flops <= CHECKED_FLOPS else replace(variant.of(small), movers=None)
        outcome = validate.run(comm, replace(judged, repeats=1))
        bits = validate.bits_of(comm, case, inputs)
        same = kept is None or all(np.array_equal(bits[name], kept[name]) for name in bits)
        kept = kept or bits
        every = comm.allgather((outcome.passed, same, outcome.over_bound, outcome.problems))
        if not all(passed and same for passed, same, _, _ in every):
            problems = [problem for *_, of_rank in every for problem in of_rank]
            what = problems[0] if problems else f"other bits than {next(iter(cases)).name}"
            raise ValueError(f"bench policies: {case.op}, {variant.name}: {what}")
        used = max(used, *(over for _, _, over, _ in every))
    return used


def _alternate(
    comm: Communicator, calls: dict[Variant, Callable[[], None]], rounds: int, progress: bool
) -> dict[Variant, list[float]]:
    """Milliseconds a call of the slowest rank. The first round, or two, warms up."""
    if comm.device.queues_launches:
        return _alternate_queued(comm, calls, rounds)
    dice, order = random.Random(0), list(calls)
    samples: dict[Variant, list[float]] = {variant: [] for variant in calls}
    for round_ in tqdm(range(rounds + 1), disable=None if progress and comm.rank == 0 else True, leave=False):
        dice.shuffle(order)
        for variant in order:
            comm.barrier()
            start = time.perf_counter()
            calls[variant]()
            slowest = max(comm.allgather((time.perf_counter() - start) * 1e3))
            if round_:
                samples[variant].append(slowest)
    return samples


def _alternate_queued(
    comm: Communicator, calls: dict[Variant, Callable[[], None]], rounds: int
) -> dict[Variant, list[float]]:
    """The device's own time of calls that lie in its queue before the first one begins."""
    device, by_name = comm.device, {variant.name: call for variant, call in calls.items()}
    filler = device.xp.empty(FILLED if device.link else 1, np.uint8)

    def start_together(_mode: str) -> None:
        for _ in range(FILLS):  # meanwhile the host queues what follows
            device.zero(device.address_of(filler), filler.nbytes)
        next(iter(calls.values()))()  # in which ranks meet

    samples = alternate(comm, by_name, rounds, start_together, {"steady": CALLS})
    return {variant: samples[variant.name, "steady"] for variant in calls}


def _shares(comm: Communicator, case: Case, events: int) -> tuple[dict[str, float], int]:
    traced = comm.allgather(tracing.run(comm, case, events))
    summary = summarise(decode([raw for raw, _, _ in traced], traced[0][1], rows_per_wg=traced[0][2]))
    shares = summary.times.shares()
    return {name: shares[name] for name in SHARES}, len(summary.switches)


def table(rows: Sequence[PolicyRow]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: milliseconds, and over the shipped variant and the fixed crew of the paper."""
    shipped, fixed = rows[0].ms, next(r.ms for r in rows if r.variant.movers is not None)
    header = ["variant", "ms", "lowest", "highest", "over shipped", "speedup over fixed"]
    traced = rows[0].shares is not None
    header += [*SHARES, "switches"] if traced else []
    lines = []
    for r in rows:
        name = r.variant.name + (" (shipped)" if r is rows[0] else "")
        line = [name, *(f"{x:.3f}" for x in (r.ms, min(r.samples), max(r.samples), r.ms / shipped, fixed / r.ms))]
        if r.shares is not None:
            line += [*(f"{100 * r.shares[share]:.1f} %" for share in SHARES), str(r.switches)]
        lines.append(line)
    return header, lines


def write_csv(found: Sequence[tuple[Case, Sequence[PolicyRow]]], device: str, path: Path) -> None:
    """Every sample of every case, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow("op device ranks m n k variant policy order movers transport round ms".split())
        for case, rows in found:
            fixed = [case.op, device, case.ranks, case.m, case.n, case.k]
            for row in rows:
                v = row.variant
                chosen = [v.policy or "planned", v.order, v.movers or "planned", v.transport or "planned"]
                for i, ms in enumerate(row.samples):
                    out.writerow([*fixed, v.name, *chosen, i, f"{ms:.5f}"])


def read_csv(path: Path) -> tuple[str, list[tuple[Case, list[PolicyRow]]]]:
    """What write_csv wrote: the device, and its cases."""
    device, found = "", dict[Case, dict[Variant, PolicyRow]]()
    with path.open() as file:
        for line in csv.DictReader(file):
            device = line["device"]
            m, n, k, ranks = (int(line[name]) for name in ("m", "n", "k", "ranks"))
            policy, movers, transport = (None if line[x] == "planned" else line[x] for x in CHOSEN)
            variant = Variant(line["variant"], policy, line["order"], int(movers) if movers else None, transport)
            rows = found.setdefault(Case(tuple(split_rows(m, ranks)), n, k, line["op"]), {})
            rows.setdefault(variant, PolicyRow(variant, [])).samples.append(float(line["ms"]))
    return device, [(case, list(rows.values())) for case, rows in found.items()]


def draw(found: Sequence[tuple[Case, Sequence[PolicyRow]]], title: str, note: str, path: Path) -> None:
    """A bar a variant with its samples, a panel a case; where the time went beside it, if that is known."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'kosmos-raw[plot]'") from error
    traced = found[0][1][0].shares is not None
    across = 1 if traced else min(3, len(found))
    lines = -(-len(found) // across)
    height = 1.2 + lines * (0.8 + 0.3 * max(len(rows) for _, rows in found))
    figure = Figure(figsize=(11 if traced else 3.5 + 3.5 * across, height), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(lines, 2 if traced else across, sharey="row", squeeze=False)
    places = list(every) if traced else [[panel] for panel in every.flat]
    for (case, rows), panels in zip(found, places, strict=False):
        _draw_case(case, rows, panels)
    for panel in every.flat[len(found) * (1 + traced) :]:
        panel.set_visible(False)
    figure.suptitle(title + (f"\n{note}" if note else ""), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_case(case: Case, rows: Sequence[PolicyRow], panels: Any) -> None:
    at, traced = np.arange(len(rows)), rows[0].shares is not None
    names = [row.variant.name for row in rows]
    colours = ["#117733" if i == 0 else "#88CCEE" if row.variant.order == "as_consumed" else "#DDAA33"
               for i, row in enumerate(rows)]  # fmt: skip
    panels[0].barh(at, [row.ms for row in rows], color=colours, height=0.7)
    for y, row in zip(at, rows, strict=True):
        panels[0].plot(row.samples, [y] * len(row.samples), "|", color="black", markersize=7)
    panels[0].set_yticks(at, names)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    panels[0].set_title(f"M={case.m} N={case.n} K={case.k}", fontsize=9, loc="left")
    panels[0].set_xlabel("ms a call of the slowest rank: median, every sample", fontsize=8)
    if traced:
        left = np.zeros(len(rows))
        for share, colour in zip(SHARES, ("#332288", "#44AA99", "#A8A8A8", "#E8E8E8"), strict=True):
            part = np.array([100 * (row.shares or {})[share] for row in rows])
            panels[1].barh(at, part, left=left, color=colour, height=0.7, label=share)
            left += part
        panels[1].set_xlabel("% of all WGs' time, one traced call")
        panels[1].legend(ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
