"""The shape of the tile's main loop in the compiled text, and what the issue model makes of it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kosmos_raw.build import gfx950, issue_model, loop_shape, report, zig
from kosmos_raw.cli import compile as compile_command

from .gemm import LAYOUTS, MFMA_ROWS, PARAMS, build, copy_of_sources

pytestmark = [pytest.mark.compile, pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))]

KERNELS = [(layout, rows, "RESULT", "BF16") for layout in LAYOUTS for rows in MFMA_ROWS]
KERNELS += [("TN", 32, "STORE", "BF16"), ("NT", 32, "FLOATS", "BF16"), ("NN", 16, "FLOATS", "BF16")]
KERNELS += [("TN", 32, "RESULT", "MXFP8"), ("TN", 16, "RESULT", "MXFP8"), ("TN", 32, "FLOATS", "MXFP8")]
EACH = pytest.mark.parametrize(("layout", "rows", "handed", "element"), KERNELS)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    folder = tmp_path_factory.mktemp("loop")
    root = copy_of_sources(folder / "hip_kernels")
    made: dict[tuple[str, int, str, str], str] = {}

    def get(layout: str, rows: int, handed: str, element: str = "BF16") -> str:
        key = (layout, rows, handed, element)
        if key not in made:
            made[key] = build(root, folder / f"{'_'.join(map(str, key))}.s", *key).text.read_text()
        return made[key]

    return get


def shape_of(text: str) -> loop_shape.Shape:
    shape = loop_shape.of_kernel(text, "gemm_main")
    assert shape is not None
    return shape


@EACH
def test_nothing_is_wrong_with_the_kernel(
    text: Callable[..., str], layout: str, rows: int, handed: str, element: str
) -> None:
    """Registers, spills, scratch, fences, the loop's shape, and the model's estimate."""
    (kernel,) = report.gfx950_text(text(layout, rows, handed, element))
    assert report.check(kernel, PARAMS.itemsize) == []
    assert kernel.registers <= 256 and kernel.spills == kernel.scratch_bytes == 0
    assert kernel.tile is not None and kernel.shared_bytes <= 160 << 10


@EACH
def test_a_k_step(text: Callable[..., str], layout: str, rows: int, handed: str, element: str) -> None:
    shape = shape_of(text(layout, rows, handed, element))
    assert loop_shape.faults(shape) == []
    words = Counter(i.split()[0] for i in shape.loop)
    scaled = element == "MXFP8"
    assert shape.mfma == (32 if rows == 32 else 64) // (2 if scaled else 1)
    # 16 bytes a lane from lines along K; else two transposing reads of 8 bytes. A: 128 rows a wave, B: 64.
    along_k = (layout != "NT") * 16 + (layout == "TN") * 8
    assert words["ds_read_b128"] == along_k and words["ds_read_b64_tr_b16"] == 2 * (24 - along_k)
    # Scales: a word for each line of the wave's share, in as many reads as there are blocks of lines, or half as many.
    reads = words["ds_read_b32"] + 2 * (words["ds_read2_b32"] + words["ds_read2st64_b32"])
    assert reads == (192 // rows if scaled else 0)
    assert shape.lds_bytes == 24 * 1024 + 256 * reads and shape.global_bytes == 8 * 1024 + 256 * scaled
    assert shape.count(loop_shape.BARRIER) == shape.count(loop_shape.WAIT) == 4
    assert len(shape.loop) < shape.mfma + 160
    assert shape.stores == (16 if handed == "RESULT" else 32)


@EACH
def test_the_matrix_cores_are_busy(text: Callable[..., str], layout: str, rows: int, handed: str, element: str) -> None:
    """An estimate, of a model: see issue_model.py. At least 97 % at 16 cycles a barrier."""
    shape = shape_of(text(layout, rows, handed, element))
    at = {barrier: issue_model.estimate(shape, barrier, outside=barrier == 16) for barrier in (4, 8, 16, 32)}
    assert all(e.ideal == 2048 for e in at.values())
    assert at[16].busy >= 0.97 and at[4].busy >= at[8].busy >= at[16].busy >= at[32].busy
    if rows == 32:
        assert at[16].busy >= 0.999
    assert shape.ask and shape.turn and (shape.ask_at, shape.turn_at) == (0, 2)
    # The next tile's first step waits for stores that nobody has counted, and FP32 is twice as much of them.
    assert at[16].outside is not None and 0 < at[16].outside < (3500 if handed == "RESULT" else 8000)


def test_ag_gemm_has_the_same_loop(text: Callable[..., str]) -> None:
    """The schedule is asked inside the stream, and costs the loop nothing."""
    shape = loop_shape.of_kernel(gfx950.code_object("ag_gemm").text.read_text(), "ag_gemm_main")
    assert shape is not None
    alone = shape_of(text("TN", 32, "RESULT"))
    kinds = [[Counter(map(loop_shape.kind, part)) for part in s.parts] for s in (shape, alone)]
    assert kinds[0] == kinds[1]


def edited(shape: loop_shape.Shape, old: str, new: str, which: int = 0) -> loop_shape.Shape:
    """The loop with one instruction changed: what another compiler might do."""
    loop = list(shape.loop)
    at = [i for i, x in enumerate(loop) if x.startswith(old)][which]
    loop[at : at + 1] = [new] if new else []
    return replace(shape, loop=tuple(loop))


@pytest.mark.parametrize(
    ("old", "new", "which", "word"),
    [
        ("s_waitcnt vmcnt", "s_waitcnt vmcnt(0)", 0, "waits"),
        ("s_waitcnt vmcnt", "", 1, "waits"),
        ("v_mfma", "ds_read_b128 v[0:3], v9", 3, "multiply part"),
        ("v_mfma", "s_waitcnt lgkmcnt(2)", 3, "multiply part"),
        ("ds_read", "v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[0:15]", 0, "load part"),
        ("s_barrier", "", 2, "barriers"),
        ("s_nop 0", "s_mov_b32 m0, s1", 1, "m0"),
    ],
)
def test_a_loop_out_of_shape_is_noticed(text: Callable[..., str], old: str, new: str, which: int, word: str) -> None:
    loop = shape_of(text("TN", 32, "RESULT"))
    if word == "m0":  # the nop between the word written to m0 and its use
        between = next(i for i, x in enumerate(loop.loop) if x.startswith("s_mov_b32 m0")) + 1
        assert loop.loop[between] == old
        which = loop.loop[:between].count(old)
    wrong = loop_shape.faults(edited(loop, old, new, which))
    assert any(word in w for w in wrong), wrong


def test_stores_that_are_not_issued_are_noticed(text: Callable[..., str]) -> None:
    shape = shape_of(text("TN", 32, "RESULT"))
    border = list(shape.border)
    border.remove(next(i for i in border if loop_shape.is_store(i)))
    wrong = loop_shape.faults(replace(shape, border=tuple(border)))
    assert any("15 stores" in w for w in wrong), wrong


def test_a_slower_loop_fails_the_report(text: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = report.gfx950_text(text("TN", 16, "RESULT"))
    monkeypatch.setattr(report, "LEAST_BUSY", 0.99)
    assert any("issue model" in problem for problem in report.check(kernel, PARAMS.itemsize))


def test_an_epilogue_that_waits_fails_the_report(text: Callable[..., str]) -> None:
    """As where code for several kinds of results is one, and waits for what only some of them read."""
    whole = text("TN", 16, "FLOATS")
    (kernel,) = report.gfx950_text(whole)
    assert report.check(kernel, PARAMS.itemsize) == []
    store = "\tglobal_store_dwordx4"
    assert whole.count(store) >= 32
    (slower,) = report.gfx950_text(whole.replace(store, "\ts_waitcnt vmcnt(0)\n" + store))
    assert any("outside the main loop" in problem for problem in report.check(slower, PARAMS.itemsize))


def test_the_model_waits_for_memory_and_for_other_waves(text: Callable[..., str]) -> None:
    shape = shape_of(text("TN", 32, "RESULT"))
    assert issue_model.estimate(shape, machine=issue_model.Machine(round_trip=4000)).busy < 0.7
    assert issue_model.estimate(shape, machine=issue_model.Machine(in_flight=16 << 10)).busy < 0.7
    with pytest.raises(RuntimeError, match="no progress"):
        programs = [shape.loop] * 7 + [tuple(i for i in shape.loop if i != "s_barrier")]
        issue_model.simulate(programs, issue_model.Machine(), 10, 4)


def test_a_kernel_without_the_loop(text: Callable[..., str]) -> None:
    plain = "\nk_main:\n\ts_endpgm\n.Lfunc_end0:\n"
    assert loop_shape.of_kernel(plain, "k_main") is None
    broken = text("TN", 32, "RESULT").replace("\ts_barrier\n", "\ts_nop 0\n")
    (kernel,) = report.gfx950_text(broken)
    assert kernel.tile is None and any("main loop" in r for r in kernel.remarks)


@pytest.mark.parametrize("spoilt", [False, True])
def test_fragments_are_read_without_bank_conflicts(spoilt: bool, tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path / "hip_kernels")
    header = root / "target" / "gfx950_lds.h"
    if spoilt:
        header.write_text(header.read_text().replace("return line >> 1 & 7;", "return line & 7;"))
    source = root / "kernels" / "banks.hip"
    source.write_text('#include "banks.h"\n')
    if not spoilt:
        gfx950.compile_text(source, tmp_path / "banks.s")
        return
    with pytest.raises(zig.BuildError, match="2 == 1"):
        gfx950.compile_text(source, tmp_path / "banks.s")


def test_movers_keep_loads_in_flight() -> None:
    """Eight loads of 16 bytes a lane before the first store: 64 KiB a WG on their way."""
    graph = loop_shape.Graph.of(gfx950.code_object("ag_gemm").text.read_text(), "ag_gemm_main")
    runs = []
    for body in graph.blocks.values():
        loads = 0
        for i in body:
            if i.startswith("global_load_dwordx4"):
                loads += 1
            elif i.startswith("global_store_dwordx4"):
                runs.append(loads)
                loads = 0
    assert max(runs) == 8


def test_command_says_what_the_loop_is(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    compile_command.add_arguments(parser)
    assert compile_command.run(parser.parse_args(["--target", "gfx950", "--op", "ag_gemm"])) == 0
    out = capsys.readouterr().out
    assert "32 MFMA, each with 768 bytes of LDS and 256 bytes of memory" in out and "Estimate, not measured" in out
