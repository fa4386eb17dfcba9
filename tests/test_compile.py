"""The GPU targets compile, take what they may of a compute unit, and hold the rules that only the text can show."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kosmos_raw.build import gfx950, inline, params, report, sm90, sources, zig
from kosmos_raw.cli import compile as compile_command

pytestmark = pytest.mark.compile

OPS = compile_command.operators()
needs_nvcc = pytest.mark.skipif(sm90.missing() is not None, reason=str(sm90.missing()))


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compile_command.add_arguments(parser)
    return parser.parse_args(words)


def copy_of_sources(to: Path) -> Path:
    shutil.copytree(sources.folder(), to)
    return to


def mutate(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file.name}"
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def gfx950_text() -> dict[str, str]:
    return {op: gfx950.code_object(op).text.read_text() for op in OPS}


@pytest.mark.parametrize("op", OPS)
def test_gfx950_report_holds(op: str) -> None:
    build = gfx950.code_object(op)
    kernels = report.gfx950(build)
    assert [k.kernel for k in kernels] == [f"{op}_main"]
    assert [report.check(k, report.python_param_bytes(op)) for k in kernels] == [[]]
    assert kernels[0].threads == report.target_constants("gfx950")["WG_THREADS"]
    assert kernels[0].shared_bytes <= 160 << 10
    assert build.code_object.read_bytes()[:4] == b"\x7fELF"


# ptxas takes up to a minute and a half for these; or they differ from another one in addresses alone.
LONG_FOR_PTXAS = {op for op in OPS if op.startswith(("moe_", "bulk_", "gemm_rs")) and op.endswith("_mxfp8")}
LONG_FOR_PTXAS |= {"moe_forward", "moe_backward", "ag_gemm_grads"}


@needs_nvcc
@pytest.mark.parametrize("op", [pytest.param(op, marks=[pytest.mark.slow] * (op in LONG_FOR_PTXAS)) for op in OPS])
def test_sm90_report_holds(op: str) -> None:
    build = sm90.cubin(op)
    kernels = report.sm90(build)
    assert [k.kernel for k in kernels] == [f"{op}_main"]
    assert [report.check(k, report.python_param_bytes(op)) for k in kernels] == [[]]
    assert kernels[0].threads == report.target_constants("sm_90a")["WG_THREADS"]
    assert kernels[0].registers * kernels[0].threads <= 65536
    assert build.cubin.read_bytes()[:4] == b"\x7fELF"


@needs_nvcc
def test_sm90_tile_in_every_layout_holds() -> None:
    """Both ways out of the tile: no spill, and nothing between WGMMAs that makes them wait."""
    build = sm90.cubin("layouts", Path(__file__).parent / "sm90" / "layouts.hip")
    kernels = report.sm90(build)
    assert {k.kernel for k in kernels} == {"tn_main", "nn_main", "nt_main", "fours_main"}
    assert [report.check(k, params.AG_GEMM.itemsize) for k in kernels] == [[]] * len(kernels)
    ptx = build.text.read_text()
    assert set(re.findall(r"m64n(\d+)k16", ptx)) == {"128"}  # the others multiply 256 columns: OPS has them


@needs_nvcc
def test_sm90_operands_have_the_size_of_their_mirror(tmp_path: Path) -> None:
    folder = sources.folder() / "target"
    lines = [
        f'#include "{folder}/target.h"',
        f'#include "{folder}/run.h"',
        "#define AT(f) __builtin_offsetof(target::Operands, f)",
    ]
    lines += [f"static_assert(sizeof(target::Operands) == {sm90.OPERANDS.itemsize});"]
    lines += [f"static_assert(AT({name}) == {sm90.OPERANDS.fields[name][1]});" for name in sm90.OPERANDS.names]
    lines += [f"static_assert(target::MAX_OPERANDS == {sm90.MAX_OPERANDS});"]
    (tmp_path / "operands.hip").write_text("\n".join(lines) + "\n")
    sm90.compile_text(tmp_path / "operands.hip", tmp_path / "out")


@pytest.mark.parametrize("op", OPS)
def test_host_params_have_the_size_of_their_mirror(op: str) -> None:
    assert compile_command.build("host", op)["problems"] == []


def test_check_finds_what_is_wrong(gfx950_text: dict[str, str]) -> None:
    text = gfx950_text["quantize_mxfp8"]  # without a tile, whose loop takes seconds to find
    size = params.QUANTIZE_MXFP8.itemsize
    (good,) = report.gfx950_text(text)
    assert "want structs of" in report.check(good, size + 8)[0]
    for field, value, word in (
        ("vgpr_spill_count", "3", "spills"),
        ("private_segment_fixed_size", "16", "scratch"),
        ("vgpr_count", "257", "registers"),
        ("kernarg_segment_size", "560", "arguments"),  # hidden arguments: what a launch by hand would not fill
    ):
        changed, n = re.subn(rf"^( +\.{field}: +)\d+$", rf"\g<1>{value}", text, flags=re.M)
        assert n == 1
        (bad,) = report.gfx950_text(changed)
        assert any(word in problem for problem in report.check(bad, size)), field
    (bad,) = report.gfx950_text(text.replace("\ts_endpgm", "\ts_swappc_b64 s[30:31], s[4:5]\n\ts_endpgm", 1))
    assert "call" in report.check(bad, size)[0]


PTX = (
    ".visible .entry k_main(\n\t.param .align 8 .b8 k_main_param_0[304],\n\t.param .align 64 .b8 k_main_param_1["
    f"{sm90.OPERANDS.itemsize}]\n)\n.maxntid 384\n{{\n}}\n"
)
LOG = (
    "ptxas info    : Compiling entry function 'k_main' for 'sm_90a'\n"
    "ptxas info    : Function properties for k_main\n"
    "    {stack} bytes stack frame, {spill} bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 162 registers, used 2 barriers, 36896 bytes smem\n"
)


def test_what_ptxas_says_is_heard() -> None:
    def problems(ptx: str, log: str) -> list[str]:
        return report.check(report.sm90_text(ptx, log)[0], 304)

    good = LOG.format(stack=0, spill=0)
    assert problems(PTX, good) == []
    assert "8 spills" in problems(PTX, LOG.format(stack=8, spill=8))[0]
    serialized = "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in 'k_main'\n"
    assert "serialized" in problems(PTX, "ptxas info    : (C7510) " + serialized + good)[0]
    assert "non-coherent" in problems(PTX.replace("{\n}", "{\nld.global.nc.u32 %r1, [%rd1];\n}"), good)[0]
    assert "304" in problems(PTX.replace("[304]", "[296]"), good)[0]
    assert "304" in problems(PTX.replace(f"[{sm90.OPERANDS.itemsize}]", "[64]"), good)[0]


@pytest.mark.parametrize("op", OPS)
def test_every_release_is_waited_for(op: str, gfx950_text: dict[str, str]) -> None:
    waits_for_others = report.plain_scratch_bytes(op) is None
    assert ("buffer_wbl2" in gfx950_text[op] and "buffer_inv" in gfx950_text[op]) == waits_for_others
    assert report.unwaited_fences(gfx950_text[op]) == []


@pytest.mark.parametrize("fence", ["RELEASE", "ACQUIRE"])
def test_a_fence_without_its_wait_is_found(fence: str, tmp_path: Path) -> None:
    """The compiler's own wait is not enough: with ours gone from the source, the text must show it."""
    root = copy_of_sources(tmp_path / "hip_kernels")
    line = f'  else __builtin_amdgcn_fence(__ATOMIC_{fence}, "agent");\n'
    mutate(root / "target" / "gfx950.h", line + "  wait_own_stores();\n", line)
    text = tmp_path / "bulk_ag.s"
    gfx950.compile_text(root / "kernels" / "bulk_ag.hip", text)
    assert report.unwaited_fences(text.read_text()) != []
    assert "fence" in report.check(report.gfx950_text(text.read_text())[0], params.BULK_AG.itemsize)[0]


def test_no_result_overlaps_a_factor(gfx950_text: dict[str, str]) -> None:
    """Found in every MXFP8 kernel: a tile's first products, into registers of the fragments that they multiplied."""
    scaled = "\tv_mfma_scale_f32_32x32x64_f8f6f4 {}, v[74:81], v[2:9], 0, v170, v105 op_sel:[1,1,0] op_sel_hi:[0,0,0]\n"
    assert report.overlapping_results(scaled.format("v[2:17]")) == [1]
    assert report.overlapping_results(scaled.format("v[66:81]")) == [1]
    assert report.overlapping_results(scaled.format("v[10:25]")) == []
    in_place = "\tv_mfma_f32_32x32x16_bf16 v[0:15], v[20:23], v[24:27], {}\n"
    assert report.overlapping_results(in_place.format("v[0:15]")) == []
    assert report.overlapping_results(in_place.format("v[4:19]")) == [1]
    assert [op for op, text in gfx950_text.items() if report.overlapping_results(text)] == []


def test_unwaited_fences_reads_text() -> None:
    wait, store = "\ts_waitcnt vmcnt(0) lgkmcnt(0)\n", "\tglobal_store_dword v0, v1, s[0:1] sc1 ; comment\n"
    assert report.unwaited_fences("\tbuffer_wbl2 sc1\n" + wait + store) == []
    assert report.unwaited_fences("\tbuffer_wbl2 sc1\n\ts_mov_b32 s0, 1\n" + store + wait) == [3]
    assert report.unwaited_fences("\tbuffer_wbl2 sc1\n\ts_waitcnt vmcnt(1)\n\ts_barrier\n") == [3]
    assert report.unwaited_fences("\tbuffer_wbl2 sc0 sc1\n\ts_cbranch_execz .LBB0_1\n" + store) == [2]
    assert report.unwaited_fences("\tbuffer_inv sc1\n\tglobal_load_dword v0, v1, s[0:1]\n") == [2]


def test_code_objects_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path / "another/much/deeper" / "hip_kernels")
    text = tmp_path / "ag_gemm.s"
    gfx950.compile_text(root / "kernels" / "ag_gemm.hip", text)
    gfx950.assemble(text, text.with_suffix(".hsaco"))
    here = gfx950.build("ag_gemm")
    assert text.read_bytes() == here.text.read_bytes()
    assert text.with_suffix(".hsaco").read_bytes() == here.code_object.read_bytes()


def preprocessed(source: Path, target: str) -> list[str]:
    """What a compiler for the target sees, without places: equal words make equal kernels."""
    text = zig.run(["clang", "-x", "c++", "-std=c++20", "-nostdinc", "-E", "-P", f"-D{target}", str(source)])
    return text.split()


@pytest.mark.parametrize("target", ["__HIP__", "__CUDACC__"])
@pytest.mark.parametrize("op", OPS)
def test_inlined_text_says_the_same(op: str, target: str, tmp_path: Path) -> None:
    source = tmp_path / f"{op}.hip"
    source.write_text(inline.source_text(op))
    assert '#include "' not in source.read_text()
    words = preprocessed(source, target)
    assert f"{op}_main" in " ".join(words) and words == preprocessed(sources.kernel(op), target)


def test_inlined_text_is_the_same_kernel(tmp_path: Path, gfx950_text: dict[str, str]) -> None:
    source = tmp_path / "ag_gemm.hip"
    source.write_text(inline.source_text("ag_gemm"))
    gfx950.compile_text(source, tmp_path / "text.s")
    assert (tmp_path / "text.s").read_text() == gfx950_text["ag_gemm"]


@needs_nvcc
def test_inlined_text_is_the_same_ptx(tmp_path: Path) -> None:
    source = tmp_path / "ag_gemm.hip"
    source.write_text(inline.source_text("ag_gemm"))
    sm90.compile_text(source, tmp_path / "text.ptx")
    assert (tmp_path / "text.ptx").read_text() == sm90.cubin("ag_gemm").text.read_text()


def test_a_compiler_error_in_inlined_text_names_the_header(tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path / "hip_kernels")
    mutate(root / "schedule" / "chunks.h", "  u32 tile_m; ", "  nonsense here;\n  u32 tile_m; ")
    wrong = next(i for i, line in enumerate((root / "schedule" / "chunks.h").open(), 1) if "nonsense" in line)
    (tmp_path / "all.hip").write_text(inline.source_text("ag_gemm", root))
    with pytest.raises(zig.BuildError, match=f"schedule/chunks.h:{wrong}:.*nonsense"):
        gfx950.compile_text(tmp_path / "all.hip", tmp_path / "all.s")


@pytest.mark.parametrize("target", ["gfx950", "sm_90a"])
def test_target_constants_are_what_the_compiler_sees(target: str, tmp_path: Path) -> None:
    if target == "sm_90a" and sm90.missing():
        pytest.skip(str(sm90.missing()))
    constants = report.target_constants(target)
    assert {"TILE_M", "TILE_N", "WG_THREADS", "TRACE_ROWS"} <= constants.keys()
    folder = sources.folder() / "target"
    lines = [f'#include "{folder}/target.h"', f'#include "{folder}/run.h"']
    lines += [f"static_assert(target::{name} == {value});" for name, value in constants.items()]
    (tmp_path / "constants.hip").write_text("\n".join(lines) + "\n")
    build = gfx950 if target == "gfx950" else sm90
    build.compile_text(tmp_path / "constants.hip", tmp_path / "out")


def test_compilers_that_make_wrong_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zig, "version", lambda: "0.15.2")
    with pytest.raises(zig.BuildError, match=r"0\.15\.2 makes wrong code.*0\.17\.1"):
        gfx950.code_object("ag_gemm")
    monkeypatch.setattr(zig, "version", lambda: "0.18.0")
    with pytest.warns(UserWarning, match=r"0\.18\.0 is unchecked"):
        gfx950.require_compiler()


def test_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_command.run(command("--target", "gfx950", "--op", "ag_gemm", "-o", str(tmp_path))) == 0
    out = capsys.readouterr().out
    assert "ag_gemm_main" in out and "registers" in out
    assert {path.suffix for path in (tmp_path / "gfx950").iterdir()} == {".s", ".hsaco"}


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_command.run(command("--target", "gfx950", "--json")) == 0
    results = json.loads(capsys.readouterr().out)
    assert [r["op"] for r in results] == OPS
    assert results[0]["kernels"][0]["spills"] == 0 and results[0]["problems"] == []


def test_an_absent_compiler_fails_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sm90, "find_nvcc", lambda: None)
    assert compile_command.run(command()) == 0
    assert "sm_90a ag_gemm not built: building for sm_90a needs nvcc" in capsys.readouterr().out
    assert compile_command.run(command("--target", "sm_90a")) == 1
    with pytest.raises(zig.BuildError, match="needs nvcc"):
        sm90.cubin("ag_gemm")


def test_a_spill_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "MAX_REGISTERS", 8)
    assert compile_command.run(command("--target", "gfx950", "--op", "ag_gemm")) == 1
    assert "FAILED" in capsys.readouterr().out


def test_building_imports_no_gpu_package() -> None:
    code = "import kosmos_raw.cli.compile, sys; print(sorted({'cupy', 'hip', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
