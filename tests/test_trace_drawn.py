"""Perfetto files and pictures of traces."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from kosmos_raw.cli import trace as cli_trace
from kosmos_raw.cli.main import main
from kosmos_raw.trace import MOE_BACKWARD_PHASES, MOE_FORWARD_PHASES, decode, draw_timeline, to_perfetto, write_perfetto
from kosmos_raw.trace.events import ROLES
from kosmos_raw.trace.timeline import COLOURS
from tests.traces import (
    CLAIMED,
    LEAVE,
    LEFT,
    ONE_WG,
    PLACED,
    SIMULATED_RATE,
    TILE,
    check_perfetto,
    raw,
    simulated_ag_gemm,
    work,
)


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
