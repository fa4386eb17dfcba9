"""What a built kernel takes of a compute unit, and what must not be in it.

gfx950: read from the metadata in the assembly text. sm_90a: from the PTX and from what ptxas printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import issue_model, loop_shape, params, sources
from .gfx950 import GfxBuild
from .sm90 import OPERANDS, SmBuild

BARRIER_CYCLES = 16  # what the estimate of the main loop takes a barrier to cost; nobody has published it
LEAST_BUSY = 0.97  # share of the main loop's cycles in which that estimate keeps the matrix cores busy
# Cycles of a tile outside the main loop, by that estimate. An epilogue that waits before every store takes 35,000.
MOST_OUTSIDE = 15_000
MAX_REGISTERS = 256  # a lane, at eight waves a compute unit on gfx950; sm_90a stops at 255 by itself


@dataclass(frozen=True)
class TileReport:
    """The GEMM tile of a gfx950 kernel: one K step of its main loop, as a wave sees it, and two ESTIMATES."""

    mfma: int
    lds_bytes_per_mfma: float  # read from LDS
    global_bytes_per_mfma: float  # asked of memory
    waits: int
    barriers: int
    busy_estimate: float  # share of the cycles in which the matrix cores work, in the model of issue_model.py
    outside_cycles_estimate: float | None  # of a tile, beyond its K steps: epilogue, asking the schedule, turning


@dataclass(frozen=True)
class KernelReport:
    """One kernel in one code object."""

    target: str
    kernel: str
    threads: int  # of a WG
    registers: int  # 32-bit, a lane; on gfx950 `accumulators` are among them
    accumulators: int
    scalars: int  # scalar registers a wave; 0 where a target has none
    scalar_spills: int  # scalars kept in lanes of a vector register: slower, but no memory
    spills: int  # gfx950: vector registers; sm_90a: bytes stored and loaded
    scratch_bytes: int  # memory a lane (stack)
    shared_bytes: int  # a WG, static
    param_bytes: int
    arguments: tuple[int, ...]  # bytes of each
    code_bytes: int | None
    remarks: tuple[str, ...]  # what the text or the compiler's messages should not have said
    tile: TileReport | None = None


def gfx950(build: GfxBuild) -> list[KernelReport]:
    """Reports of all kernels of a gfx950 build."""
    return gfx950_text(build.text.read_text())


def gfx950_arguments(build: GfxBuild, kernel: str) -> tuple[int, ...]:
    """Bytes of each argument of one kernel, by its metadata; quick, for whoever only launches it."""
    found = next(one for one in _gfx950_metadata(build.text.read_text()) if f".name: {kernel}\n" in _squeezed(one))
    return _arguments(found)


def _squeezed(metadata: str) -> str:
    return re.sub(r" +", " ", metadata)


def _gfx950_metadata(text: str) -> list[str]:
    """The metadata of each kernel in assembly text."""
    return re.split(r"^  - ", text.partition("amdhsa.kernels:")[2].partition("amdhsa.target:")[0], flags=re.M)[1:]


def _arguments(metadata: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"^ {6}[- ] \.size: +(\d+)", metadata, flags=re.M)))


def gfx950_text(text: str) -> list[KernelReport]:
    """The same from the assembly text itself."""
    sizes = dict(re.findall(r"\.size\s+(\w+), \.Lfunc_end\d+-\w+\n(?:.*\n)*?; codeLenInByte = (\d+)", text))
    reports = []
    for one in _gfx950_metadata(text):
        field = dict(re.findall(r"^ *(\.\w+): +(\S+)$", re.sub(r"^ {6}.*\n", "", one, flags=re.M), flags=re.M))
        tile, faults = _gfx950_tile(text, field[".name"])
        reports.append(
            KernelReport(
                target="gfx950",
                kernel=field[".name"],
                threads=int(field[".max_flat_workgroup_size"]),
                registers=int(field[".vgpr_count"]),
                accumulators=int(field[".agpr_count"]),
                scalars=int(field[".sgpr_count"]),
                scalar_spills=int(field[".sgpr_spill_count"]),
                spills=int(field[".vgpr_spill_count"]),
                scratch_bytes=int(field[".private_segment_fixed_size"]),
                shared_bytes=int(field[".group_segment_fixed_size"]),
                param_bytes=int(field[".kernarg_segment_size"]),
                arguments=_arguments(one),
                code_bytes=int(sizes[field[".name"]]),
                remarks=(*gfx950_remarks(text), *faults),
                tile=tile,
            )
        )
    return reports


@lru_cache(maxsize=32)
def _gfx950_tile(text: str, kernel: str) -> tuple[TileReport | None, tuple[str, ...]]:
    """The tile of a kernel, if it has one, and what is wrong with its main loop."""
    shape = loop_shape.of_kernel(text, kernel)
    if shape is None:
        return None, ("matrix instructions, but no main loop of four barriers",) if "\tv_mfma" in text else ()
    estimate = issue_model.estimate(shape, BARRIER_CYCLES, outside=True)
    report = TileReport(
        mfma=shape.mfma,
        lds_bytes_per_mfma=shape.lds_bytes / shape.mfma,
        global_bytes_per_mfma=shape.global_bytes / shape.mfma,
        waits=shape.count(loop_shape.WAIT),
        barriers=shape.count(loop_shape.BARRIER),
        busy_estimate=estimate.busy,
        outside_cycles_estimate=estimate.outside,
    )
    return report, (*loop_shape.faults(shape), *loop_shape.hazards(loop_shape.instructions_of(text)))


def sm90(build: SmBuild) -> list[KernelReport]:
    """Reports of all kernels of an sm_90a build."""
    return sm90_text(build.text.read_text(), build.log.read_text())


def sm90_text(ptx: str, log: str) -> list[KernelReport]:
    """The same from PTX and from what ptxas printed about it."""
    reports = []
    for name, head, limits in re.findall(r"\.entry (\w+)\(([^)]*)\)([^{]*)\{", ptx):
        said = log.partition(f"Function properties for {name}\n")[2]

        def number(pattern: str, said: str = said) -> int:
            found = re.search(pattern, said.partition("Compiling entry")[0])
            return int(found[1]) if found else 0

        arguments = tuple(map(int, re.findall(r"\.b8 \w+\[(\d+)\]", head)))
        threads = re.search(r"\.maxntid (\d+)", limits)
        reports.append(
            KernelReport(
                target="sm_90a",
                kernel=name,
                threads=int(threads[1]) if threads else 0,
                registers=number(r"Used (\d+) registers"),
                accumulators=0,
                scalars=0,
                scalar_spills=0,
                spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
                scratch_bytes=number(r"(\d+) bytes stack frame"),
                shared_bytes=number(r"(\d+) bytes smem"),
                param_bytes=sum(arguments),
                arguments=arguments,
                code_bytes=None,
                remarks=tuple(sm90_remarks(ptx, log)),
            )
        )
    return reports


def check(report: KernelReport, param_bytes: int) -> list[str]:
    """What is wrong with a kernel whose params struct has `param_bytes` in Python; nothing, if the list is empty."""
    wrong = list(report.remarks)
    if report.spills:
        wrong.append(f"{report.spills} spills")
    if report.scratch_bytes:
        wrong.append(f"{report.scratch_bytes} bytes of scratch memory a lane")
    if not 0 < report.registers <= MAX_REGISTERS:
        wrong.append(f"{report.registers} registers, want 1 to {MAX_REGISTERS}")
    if report.tile and report.tile.busy_estimate < LEAST_BUSY:
        wrong.append(
            f"the issue model keeps matrix cores busy in {report.tile.busy_estimate:.1%} of the main loop at a barrier "
            f"cost of {BARRIER_CYCLES} cycles, want {LEAST_BUSY:.0%}"
        )
    outside = report.tile and report.tile.outside_cycles_estimate
    if outside and outside > MOST_OUTSIDE:
        wrong.append(f"the issue model spends {outside:.0f} cycles a tile outside the main loop, want {MOST_OUTSIDE}")
    want = (param_bytes, OPERANDS.itemsize) if report.target == "sm_90a" else (param_bytes,)
    if report.arguments != want or report.param_bytes != sum(want):
        wrong.append(f"arguments of {report.arguments} bytes, {report.param_bytes} in all, want structs of {want}")
    return [f"{report.target} {report.kernel}: {what}" for what in wrong]


def python_param_bytes(op: str) -> int:
    """Size of the NumPy mirror of the operator's params struct."""
    return int(getattr(params, op.upper()).itemsize)


def plain_scratch_bytes(op: str) -> int | None:
    """Memory of a WG of a kernel without a schedule (KOSMOS_PLAIN_KERNEL), whose WGs need not run at once; None of
    others. Read from the text, as target_constants."""
    found = re.search(r"SCRATCH_BYTES = (\d+);", sources.kernel(op).read_text())
    return int(found[1]) if found else None


_WAITED_FOR = ("buffer_wbl2", "buffer_inv")
_MUST_WAIT = ("global_", "flat_", "scratch_", "buffer_", "s_barrier", "s_branch", "s_cbranch", "s_endpgm", "s_setpc")


def unwaited_fences(text: str) -> list[int]:
    """Lines of gfx950 text that touch memory, branch or meet a barrier before a fence's cache operation has ended.

    Compilers forget the wait behind `buffer_wbl2` when they believe that no access is outstanding; then a signal
    overtakes the data that it announces. Nothing but the text shows it: the code works nearly always.
    """
    pending, lines = False, []
    for number, line in enumerate(text.splitlines(), 1):
        word, _, rest = line.split(";")[0].strip().partition(" ")
        if pending and word.startswith(_MUST_WAIT):
            lines.append(number)
            pending = False
        if word in _WAITED_FOR:
            pending = True
        elif word == "s_waitcnt" and "vmcnt(0)" in rest:
            pending = False
    return lines


def overlapping_results(text: str) -> list[int]:
    """Lines of gfx950 text where a matrix instruction of more than four passes writes over a factor that it is still
    reading. Compilers know that of most of these instructions, but not of the scaled ones."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("v_mfma_"):
            continue
        operands = [o.strip() for o in re.split(r",(?![^\[]*\])", line.split(";")[0].strip().partition(" ")[2])]
        spans = [re.match(r"([va])\[(\d+):(\d+)\]", o) for o in operands[:4]]
        result, *factors, before = (m and (m[1], int(m[2]), int(m[3])) for m in spans)
        if not result or result == before or result[2] - result[1] < 4:
            continue
        if any(f and f[0] == result[0] and f[1] <= result[2] and result[1] <= f[2] for f in (*factors, before)):
            lines.append(number)
    return lines


def gfx950_remarks(text: str) -> list[str]:
    """What must not be in gfx950 text."""
    remarks = []
    for line in overlapping_results(text):
        remarks.append(f"a matrix instruction's result overlaps what it reads, in line {line} of the text")
    lines = unwaited_fences(text)
    if lines:
        remarks.append(f"no s_waitcnt vmcnt(0) behind the fence before line {', '.join(map(str, lines))} of the text")
    for word, why in (("s_swappc_b64", "a call"), ("flat_", "an access to an unknown address space")):
        if re.search(rf"^\s+{word}", text, flags=re.M):
            remarks.append(f"{word} in the text: {why}")
    return remarks


def sm90_remarks(ptx: str, log: str) -> list[str]:
    """What must not be in PTX, nor be said by ptxas."""
    remarks = [line.strip() for line in log.splitlines() if re.search(r"serializ|warning|advisory", line, re.I)]
    if "ld.global.nc" in ptx:  # another SM, or a peer, may write the line while the kernel runs
        remarks.append("ld.global.nc in the PTX: the non-coherent path may give old data")
    if re.search(r"^\s*call", ptx, flags=re.M):
        remarks.append("a call in the PTX")
    return remarks


_HEADERS = {
    "gfx950": ("gfx950.h", "gfx950_tile.h", "gfx950_run.h"),
    "sm_90a": ("sm90.h", "sm90_mma.h", "sm90_tile.h", "sm90_epilogue.h", "sm90_move.h", "sm90_push.h", "sm90_run.h"),
}


def target_constants(target: str, folder: Path | None = None) -> dict[str, int]:
    """The plain numbers that a GPU target's headers define: TILE_M, TILE_N, WG_THREADS, TRACE_ROWS and others.

    Read from the text, for a GPU's code object cannot be asked and may not be built yet when a plan needs them.
    """
    texts = [((folder or sources.folder()) / "target" / name).read_text() for name in _HEADERS[target]]
    lines = re.findall(r"^constexpr u32 ([^;]*);", "\n".join(texts), flags=re.M)
    return {name: int(value) for line in lines for name, value in re.findall(r"(\w+) = (\d+)(?=,|$)", line)}
