"""A picture of a trace, as Figure 1 of the paper: a line for each WG, grouped by rank, time to the right.

Colour says whose rows, or which phase of a layer; the filling says what is done with them: solid = builds, hatched =
moves, so that roles can be told apart without colours too. A thin grey line = waits, white = claims or has left.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .events import RankTrace, Span, Trace, WgTrace
from .summary import UNITS, count, pretty, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart under the common forms of colour blindness; neighbours differ in lightness too. After Paul Tol's muted set.
COLOURS = ("#332288", "#DDAA33", "#117733", "#88CCEE", "#882255", "#999933", "#CC6677", "#44AA99")
OTHER_COLOUR = "#B0A0C8"
WAIT_COLOUR = "#A8A8A8"
_PLAIN = {"waits": WAIT_COLOUR, "other": OTHER_COLOUR}
MAX_ROWS = 64

Phases = Mapping[str, tuple[str, ...]]  # kinds of work, by what they belong to
# As in the paper's Figure 1 (B); what routes and plans changes no role, and has a colour of its own in any case.
MOE_FORWARD_PHASES: Phases = {
    "dispatch (moves), GEMM1 (builds)": ("push", "pull", "gemm1"),
    "combine (moves), GEMM2 (builds)": ("send", "gemm2"),
    "shared expert": ("shared1", "shared2"),
    "fold": ("fold",),
}
MOE_BACKWARD_PHASES: Phases = {
    "dOut to experts (moves), pre again and dpre (builds)": ("push", "gemm1", "dgrad2"),
    "dX: back (moves), made (builds)": ("send", "dgrad1"),
    "experts' weights": ("wgrad2", "wgrad1"),
    "shared expert": ("shared_d2", "shared_w2", "shared_w1"),
    "router and own dX": ("router_dw", "own_dx"),
    "fold": ("fold",),
}

Bar = tuple[float, float, float]  # start, length, row


def draw_timeline(
    trace: Trace,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str = "Roles of each WG over time",
    wgs: Sequence[int] | None = None,
    max_rows: int = MAX_ROWS,
    chunk_name: str = "rank",
    phases: Phases | None = None,
) -> Figure:
    """Draw who did what when; rows are WGs grouped by rank, colours the ranks whose rows they work on, or phases.

    Args:
        trace: what `decode` gave.
        path: file to write; its ending says the format (.png, .svg, .pdf). None only makes the figure.
        title: first line of the picture.
        wgs: the WGs to show of every rank; None shows all, or evenly spread ones where they are more than max_rows.
        max_rows: rows of the picture that are still readable.
        chunk_name: what a chunk is called in the legend.
        phases: colours say these, and digits alone whose rows are moved.
    Returns: the matplotlib Figure.
    Raises: ImportError without matplotlib; ValueError when there is nothing to draw.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the timeline needs matplotlib: pip install 'kosmos-raw[plot]'") from error

    ranks = [_shown(rank, wgs, max(1, max_rows // max(1, len(trace.ranks)))) for rank in trace.ranks]
    rows = sum(len(rank.wgs) for rank in ranks)
    if not rows or not trace.makespan:
        raise ValueError("timeline: this trace has no marks to draw")
    row_inches = min(0.42, max(0.155, 6.0 / rows))
    gap = 0.5  # rows between two ranks
    plot_inches = row_inches * (rows + gap * (len(ranks) - 1) + 0.5)
    top, bottom, left, right = 1.22, 0.55, 0.95, 1.75
    width, height = 13.0, plot_inches + top + bottom
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "hatch.linewidth": 0.9}):
        figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        plot_width = width - left - right
        axes = figure.add_axes((left / width, bottom / height, plot_width / width, plot_inches / height))
        scale, unit = _unit(trace.makespan)
        _draw_ranks(axes, trace, ranks, scale, gap, row_inches, plot_width, phases)
        axes.set_xlabel(f"time since the first claim ({unit})", fontsize=9)
        _head(figure, trace, ranks, title, chunk_name, phases, left, height)
        if path is not None:
            figure.savefig(path, dpi=150)
    return figure


def _shown(rank: RankTrace, wgs: Sequence[int] | None, most: int) -> RankTrace:
    if wgs is not None:
        return RankTrace(rank.rank, tuple(wg for wg in rank.wgs if wg.wg in set(wgs)))
    n = len(rank.wgs)
    if n <= most:
        return rank
    # The middle of each of `most` equal parts: roles then show in their true proportion.
    return RankTrace(rank.rank, tuple(rank.wgs[(2 * i + 1) * n // (2 * most)] for i in range(most)))


def _unit(seconds: float) -> tuple[float, str]:
    return next((u for u in UNITS if seconds * u[0] >= 2), UNITS[-1])


def _draw_ranks(
    axes: Axes,
    trace: Trace,
    ranks: list[RankTrace],
    scale: float,
    gap: float,
    row_inches: float,
    width: float,
    phases: Phases | None,
) -> None:
    start = trace.t_first or 0.0
    span_of_x = trace.makespan * scale
    inches = width / (span_of_x * 1.01)  # per unit of x
    shares = {r.rank: r.times.shares() for r in summarise(trace).ranks}
    font = min(9.0, row_inches * 72 * 0.62)
    picture = _Picture(phases)
    ticks, names = [], []
    y = 0.0
    for rank in ranks:
        first = y
        for wg in rank.wgs:
            picture.add(wg, y, start, scale, font / 72 / inches)
            ticks.append(y + 0.5)
            names.append(str(wg.wg) if wg.die is None else f"{wg.wg} / {wg.die}")
            y += 1
        middle = (first + y) / 2
        put = axes.get_yaxis_transform()
        axes.text(
            -0.035, middle, f"rank {rank.rank}", transform=put, ha="right", va="center", fontsize=9, weight="bold"
        )
        of = shares[rank.rank]
        said = "".join(f"{100 * of[key]:7.0f}" for key in ("building", "moving", "waiting"))
        axes.text(1.005, middle, said, transform=put, ha="left", va="center", fontsize=8, family="DejaVu Sans Mono")
        y += gap
    picture.draw(axes, inches, font)
    wg_heading = "WG" if all(wg.die is None for rank in ranks for wg in rank.wgs) else "WG / die"
    for x, heading, side in ((-0.003, wg_heading, "right"), (1.005, "  build   move   wait  %", "left")):
        axes.text(
            x, 1.0, heading, transform=axes.transAxes, ha=side, va="bottom", fontsize=8, family="DejaVu Sans Mono",
            color="#404040",
        )  # fmt: skip
    axes.set_xlim(-0.002 * span_of_x, 1.008 * span_of_x)
    axes.set_ylim(y - gap + 0.25, -0.25)
    axes.set_yticks(ticks, names, fontsize=font)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.tick_params(axis="x", labelsize=8, color="#808080")
    axes.xaxis.grid(True, color="#DDDDDD", linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#808080")


@dataclass
class _Picture:
    """Everything to draw, gathered over all rows: a few big collections draw fast, thousands of small ones do not."""

    phases: Phases | None = None
    bars: dict[tuple[str, int], list[Bar]] = field(default_factory=lambda: defaultdict(list))  # by filling and colour
    works: int = 0
    work_length: float = 0.0
    digits: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    switches: list[tuple[float, float]] = field(default_factory=list)
    cut: list[tuple[float, float]] = field(default_factory=list)

    def add(self, wg: WgTrace, y: float, start: float, scale: float, wide: float) -> None:
        """Row y of the picture; a work longer than `wide` has room for one digit."""
        for s in wg.segments():
            if s.span is None or s.state == "claiming":
                continue
            x, length = (s.start - start) * scale, (s.end - s.start) * scale
            if s.state == "waiting":
                self.bars["waits", 0].append((x, length, y))
                continue
            colour_idx = _colour(s.span, self.phases)
            if s.span.role == "other":
                self.bars["other", 0].append((x, length, y))
                continue
            self.bars[s.span.role, colour_idx].append((x, length, y))
            self.works += 1
            self.work_length += length
            digits = str(s.span.chunk)
            if self.phases and s.span.role == "builder":  # a WG builds for its own rank alone
                continue
            if length > wide * (0.4 + 0.6 * len(digits)):
                dark = s.span.role == "builder" and _luminance(COLOURS[colour_idx]) <= 0.45
                how = "white" if dark else "black" if s.span.role == "builder" else "halo"
                self.digits[digits, how].append((x + length / 2, y + 0.5))
        self.switches += [((s.t - start) * scale, y) for s in wg.switches()]
        if wg.t_end is not None and (wg.truncated or wg.gave_up):
            self.cut.append(((wg.t_end - start) * scale, y + 0.5))

    def draw(self, axes: Axes, inches: float, font: float) -> None:
        """`inches` is the width of one unit of x."""
        from matplotlib.collections import LineCollection, PolyCollection

        # Where works are many and narrow, edges would hide the colours.
        edge = 0.5 if self.works and self.work_length / self.works * inches > 0.06 else 0.0
        for (filling, colour_idx), bars in self.bars.items():
            low, high = (0.38, 0.62) if filling == "waits" else (0.06, 0.94)
            style: dict[str, Any] = {"facecolor": _PLAIN.get(filling, COLOURS[colour_idx]), "linewidth": 0}
            if filling == "builder":
                style |= {"edgecolor": "white", "linewidth": edge}
            elif filling == "mover":
                style |= _hatched(COLOURS[colour_idx]) | {"linewidth": edge}
            boxes = [[(x, y + low), (x, y + high), (x + n, y + high), (x + n, y + low)] for x, n, y in bars]
            axes.add_collection(PolyCollection(boxes, zorder=2 if filling == "waits" else 3, **style), autolim=False)
        for (digits, how), at in self.digits.items():
            xs, ys = [x for x, _ in at], [y for _, y in at]
            size = (font * 0.62 * (1.0 if len(digits) == 1 else 0.75 * len(digits))) ** 2
            if how == "halo":  # or the hatch would cross the digits
                axes.scatter(xs, ys, s=size, c="white", marker=f"${digits}$", linewidths=2.4, zorder=4)
            colour = "white" if how == "white" else "black"
            axes.scatter(xs, ys, s=size, c=colour, marker=f"${digits}$", linewidths=0.15, zorder=5)
        ticks = [[(x, y - 0.12), (x, y + 1.12)] for x, y in self.switches]
        axes.add_collection(LineCollection(ticks, colors="white", linewidths=3.4, zorder=6), autolim=False)
        axes.add_collection(LineCollection(ticks, colors="black", linewidths=1.5, zorder=7), autolim=False)
        if self.cut:
            xs, ys = [x for x, _ in self.cut], [y for _, y in self.cut]
            axes.scatter(xs, ys, s=(font * 0.9) ** 2, c="black", marker="x", linewidths=1.2, zorder=8, clip_on=False)


def _colour(span: Span, phases: Phases | None) -> int:
    if phases is None:
        return span.chunk % len(COLOURS)
    return next((i for i, kinds in enumerate(phases.values()) if span.kind in kinds), len(COLOURS) - 1)


def _hatched(colour: str) -> dict[str, Any]:
    return {
        "facecolor": _mixed(colour, "#FFFFFF", 0.78),
        "edgecolor": _mixed(colour, "#000000", 0.1),
        "hatch": "//////",
    }


def _head(
    figure: Figure,
    trace: Trace,
    ranks: list[RankTrace],
    title: str,
    chunk_name: str,
    phases: Phases | None,
    left: float,
    height: float,
) -> None:
    """Title, what is shown, and the legend, above the plot."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    width = figure.get_figwidth()
    x = left / width
    figure.text(x, 1 - 0.2 / height, title, fontsize=13, weight="bold", va="center")
    all_wgs = max(len(r.wgs) for r in trace.ranks)
    shown = max(len(r.wgs) for r in ranks)
    many = len(ranks) > 1
    said = f"{count(len(ranks), 'rank')}, {count(all_wgs, 'WG')}{' each' if many else ''}, {pretty(trace.makespan)}"
    if shown < all_wgs:
        said += f"; {shown} of {all_wgs} WGs{' of each rank' if many else ''} are shown"
    notes = trace.notes()
    if notes:
        said += f"; not whole: {notes[0]}" + (f" (and {len(notes) - 1} more)" if len(notes) > 1 else "")
    figure.text(x, 1 - 0.44 / height, said, fontsize=9, va="center", color="#404040")

    spans = [s for r in ranks for wg in r.wgs for s in wg.spans]
    dark = "#505050"
    what: list[tuple[Any, str]] = []
    for role, verb, patch in (
        ("builder", "builds", Patch(facecolor=dark, edgecolor="white")),
        ("mover", "moves", Patch(linewidth=0.5, **_hatched(dark))),
        ("other", "other", Patch(facecolor=OTHER_COLOUR)),
    ):
        kinds = sorted({s.kind for s in spans if s.role == role})
        if kinds:  # a layer's are too many for one line; phases say what they are
            what.append((patch, f"{verb} ({', '.join(kinds)})" if phases is None or role == "other" else verb))
    what.append((Line2D([], [], color=WAIT_COLOUR, linewidth=2.5), "waits"))
    if any(wg.switches() for r in ranks for wg in r.wgs):
        tick = Line2D([], [], color="black", marker="|", markersize=11, markeredgewidth=1.5, linestyle="none")
        what.append((tick, "role switch"))
    if any(wg.truncated or wg.gave_up for r in ranks for wg in r.wgs):
        what.append((Line2D([], [], color="black", marker="x", linestyle="none"), "the trace ends here"))
    names = _of_chunks(spans, chunk_name) if phases is None else _of_phases(spans, phases)
    whose: list[tuple[Any, str]] = []
    for colour_idx, name in names:
        colour = COLOURS[colour_idx]
        whose.append(((Patch(facecolor=colour), Patch(linewidth=0.5, **_hatched(colour))), name))
    for y, entries, heading in ((0.7, what, "filling:"), (0.93, whose, "rows of:" if phases is None else "phase:")):
        figure.text(x, 1 - y / height, heading, fontsize=8.5, va="center", color="#404040")
        figure.legend(
            [h for h, _ in entries], [label for _, label in entries], ncols=len(entries), loc="center left",
            bbox_to_anchor=(x + 0.045, 1 - y / height), frameon=False, fontsize=8.5, handlelength=2.2,
            columnspacing=1.4, handletextpad=0.5, borderpad=0, borderaxespad=0,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        )  # fmt: skip


def _of_chunks(spans: Sequence[Span], chunk_name: str) -> list[tuple[int, str]]:
    """Colours and what they stand for."""
    chunks = sorted({s.chunk for s in spans if s.role != "other"})
    found = []
    for colour_idx in range(min(len(COLOURS), chunks[-1] + 1 if chunks else 0)):
        same = [c for c in chunks if c % len(COLOURS) == colour_idx]
        if same:
            name = ", ".join(map(str, same[:3])) + (" ..." if len(same) > 3 else "")
            found.append((colour_idx, f"{chunk_name} {name}"))
    return found


def _of_phases(spans: Sequence[Span], phases: Phases) -> list[tuple[int, str]]:
    kinds = {s.kind for s in spans}
    return [(i, name) for i, (name, of) in enumerate(phases.items()) if kinds & set(of)]


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _mixed(colour: str, other: str, share: float) -> str:
    """`share` of the way from a colour to another."""
    mixed = (round(a + (b - a) * share) for a, b in zip(_rgb(colour), _rgb(other), strict=True))
    return "#" + "".join(f"{c:02X}" for c in mixed)


def _luminance(colour: str) -> float:
    r, g, b = _rgb(colour)
    return (0.299 * r + 0.587 * g + 0.114 * b) / 255
