"""Builds and runs the gfx950 tile alone: kernels/gemm.h in every layout, on an emulated compute unit or several."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from kosmos_raw import emulator
from kosmos_raw.build import gfx950, params, sources
from kosmos_raw.numerics import tolerance

HERE = Path(__file__).parent
LAYOUTS = ("TN", "NN", "NT")
MFMA_ROWS = (32, 16)
TILE = 256

PARAMS = np.dtype(
    [("g", params.GROUP)]
    + [(name, "u8") for name in "a b scales_a scales_b c copy head tiles_done".split()]
    + [(name, "u4") for name in "M N K lda ldb ldc ld_scales_a ld_scales_b K_odd stop_every".split()],
    align=True,
)


@dataclass(frozen=True)
class Build:
    """One kernel: which layout, which matrix instruction, how the result is handed over; and its assembly text."""

    layout: str
    mfma_rows: int
    handed: str  # RESULT, STORE or FLOATS
    element: str  # BF16 or MXFP8
    text: Path

    def __str__(self) -> str:
        return f"{self.element.lower()}-{self.layout}-{self.mfma_rows}-{self.handed.lower()}"


def copy_of_sources(to: Path) -> Path:
    """hip_kernels/ with the headers of these tests in it, to be built from or spoilt."""
    shutil.copytree(sources.folder(), to)
    for header in (HERE / "kernels").glob("*.h"):
        shutil.copy(header, to / "kernels")
    return to


def build(root: Path, to: Path, layout: str, mfma_rows: int, handed: str = "RESULT", element: str = "BF16") -> Build:
    """Compiles the kernel that lies in the copied sources at `root`."""
    defines = {"LAYOUT_OF": layout, "ROWS_OF": mfma_rows, "HANDED": handed, "ELEMENT_OF": element}
    source = root / "kernels" / f"{to.stem}.hip"
    source.write_text("".join(f"#define {k} {v}\n" for k, v in defines.items()) + '#include "gemm.h"\n')
    gfx950.compile_text(source, to)
    return Build(layout, mfma_rows, handed, element, to)


@dataclass(frozen=True)
class Case:
    """One launch. K_odd: of tiles with an odd number; 0 = K. stop_every: see gemm.h. MXFP8 wants multiples of 128."""

    M: int
    N: int
    K: int
    wgs: int = 1
    K_odd: int = 0
    stop_every: int = 0
    copies: bool = False
    seed: int = 3

    def __str__(self) -> str:
        more = f"_odd{self.K_odd}" * bool(self.K_odd) + f"_stop{self.stop_every}" * bool(self.stop_every)
        return f"{self.M}x{self.N}x{self.K}_wgs{self.wgs}{more}" + "_copies" * self.copies


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _filled(shape: int | tuple[int, int], value: float, dtype: object) -> np.ndarray:
    """An array as a GPU's allocator gives it: no cache line of it belongs to another array."""
    line = 256
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(_round_up(size, line) + line, np.uint8)
    start = -memory.ctypes.data % line
    array = memory[start : start + size].view(dtype).reshape(shape)
    array[...] = value
    return array


def _padded(x: np.ndarray, lines: int) -> np.ndarray:
    """A copy in memory that has NaNs wherever the kernel must not look, or must not use what it sees."""
    wide = _filled((x.shape[0] + lines, _round_up(x.shape[1], 8) + 8), np.nan, ml_dtypes.bfloat16)
    wide[: x.shape[0], : x.shape[1]] = x
    return wide


@dataclass(frozen=True)
class Operand:
    """One operand: its exact values, and what the kernel is given."""

    values: np.ndarray  # [lines, K] float64
    given: np.ndarray  # bf16, or codes of E4M3; its second dimension is the distance of lines
    scales: np.ndarray | None = None  # [K / 128 + 1, ld] words


def bf16_operand(rng: np.random.Generator, lines: int, k: int, along_k: bool) -> Operand:
    values = rng.standard_normal((lines, k)).astype(ml_dtypes.bfloat16)
    return Operand(values.astype(np.float64), _padded(values if along_k else values.T, 64))


def mxfp8_operand(rng: np.random.Generator, lines: int, k: int, scales: np.ndarray | None = None) -> Operand:
    """Random codes, and scales of every block apart by up to 2^40; NaNs wherever the kernel must not look."""
    codes = rng.integers(0, 256, (lines, k)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x38  # E4M3 has two NaNs
    if scales is None:
        scales = rng.integers(107, 148, (lines, k // 32)).astype(np.uint8)
    given = _filled((lines + 1, k + 16), 0x7F, np.uint8)
    given[:lines, :k] = codes
    words = _filled((k // 128 + 1, _round_up(lines, 4) + 4), 0xFFFFFFFF, np.uint32)
    words[:-1, :lines] = np.ascontiguousarray(scales).view("<u4").T
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return Operand(values * np.exp2(scales.astype(np.float64) - 127).repeat(32, axis=1), given, words)


def _exact(case: Case, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C in float64, and |A| |B|, with every tile's own K."""
    exact, magnitude = np.empty((case.M, case.N)), np.empty((case.M, case.N))
    columns = -(-case.N // TILE)
    for i in range(-(-case.M // TILE)):
        for j in range(columns):
            k = case.K_odd if case.K_odd and (i * columns + j) % 2 else case.K
            at = np.s_[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            x, y = a[at[0], :k], b[at[1], :k]
            exact[at], magnitude[at] = x @ y.T, np.abs(x) @ np.abs(y).T
    return exact, magnitude


def run_kernel(
    module: emulator.Module, wgs: int, arguments: np.ndarray, options: emulator.Options, memory: Sequence[np.ndarray]
) -> str:
    """One launch in the emulator; says what went wrong, or nothing."""
    launch = emulator.Launch(module, "gemm_main", wgs, 512, arguments.tobytes())
    try:
        report = emulator.run([launch], replace(options, limit_seconds=20.0), memory)
    except emulator.RunError as error:
        return str(error)
    return "a barrier was met with lanes masked off" if report.masked_barriers else ""


def operands(build: Build, case: Case) -> tuple[Operand, Operand]:
    rng = np.random.default_rng(case.seed)
    k = max(case.K, case.K_odd)
    if build.element == "MXFP8":
        return mxfp8_operand(rng, case.M, k), mxfp8_operand(rng, case.N, k)
    a = bf16_operand(rng, case.M, k, along_k=build.layout != "NT")
    return a, bf16_operand(rng, case.N, k, along_k=build.layout == "TN")


def faults(
    build: Build,
    module: emulator.Module,
    case: Case,
    options: emulator.Options | None = None,
    given: tuple[Operand, Operand] | None = None,
    bound: float | None = None,
) -> list[str]:
    """Runs one case, with random operands or those that are given; says what is wrong with the result, nothing if the
    list is empty. `bound`: on the error, where it shall not be that of the arithmetic."""
    a, b = given or operands(build, case)
    k_max = max(case.K, case.K_odd)
    exact, magnitude = _exact(case, a.values, b.values)

    floats = build.handed == "FLOATS"
    guard = np.float32(-7)
    shape = (case.M + 1, _round_up(case.N, 8) + 8)
    out, copy = (_filled(shape, guard, np.float32 if floats else ml_dtypes.bfloat16) for _ in range(2))
    tiles = -(-case.M // TILE) * -(-case.N // TILE)
    words = _filled(16 + tiles, 0, np.uint32)  # abort, host's abort, head; then tiles_done
    record = np.zeros(1, params.WAIT_RECORD)

    p = np.zeros(1, PARAMS)
    g = p["g"]
    g["abort"], g["host_abort"], g["record"] = words.ctypes.data, words[1:].ctypes.data, record.ctypes.data
    g["limit_ticks"], g["ranks"], g["epoch"], g["wgs"] = 100_000_000 * 20, 1, 1, case.wgs
    p["a"], p["b"], p["c"] = a.given.ctypes.data, b.given.ctypes.data, out.ctypes.data
    p["copy"] = copy.ctypes.data if case.copies else 0
    p["head"], p["tiles_done"] = words[2:].ctypes.data, words[16:].ctypes.data
    p["M"], p["N"], p["K"], p["K_odd"] = case.M, case.N, case.K, case.K_odd or case.K
    p["lda"], p["ldb"], p["ldc"] = a.given.shape[1], b.given.shape[1], out.shape[1]
    p["stop_every"] = case.stop_every
    memory = [a.given, b.given, out, copy, words]
    for name, scales in (("a", a.scales), ("b", b.scales)):
        if scales is not None:
            p[f"scales_{name}"], p[f"ld_scales_{name}"] = scales.ctypes.data, scales.shape[1]
            memory.append(scales)
    said = run_kernel(module, case.wgs, p, options or emulator.Options(), memory)
    if said:
        return [said]

    wrong = []
    if words[0]:
        wrong.append(f"gave up: {record}")
    if not words[16:].all():
        wrong.append(f"tiles {np.flatnonzero(words[16:] == 0).tolist()} were not published")
    bounds = tolerance.gemm_bound(exact, magnitude, k_max) if bound is None else np.full(exact.shape, bound)
    for name, c in (("C", out), *((("copy", copy),) if case.copies else ())):
        none = np.isnan(exact)
        if not (np.isnan(c[: case.M, : case.N].astype(np.float32)) == none).all():
            wrong.append(f"{name}: numbers where there are none, or the other way round")
        got = tolerance.compare(np.where(none, 0, c[: case.M, : case.N]), np.where(none, 0, exact), bounds)
        if not got.passed:
            wrong.append(f"{name}{got.worst} is {got.got}, want {got.wanted}: {got.over_bound:.1f} times the bound")
        if not (c[case.M :].astype(np.float32) == guard).all():
            wrong.append(f"{name}: a row past the end was written")
        if not (c[:, _round_up(case.N, 8) :].astype(np.float32) == guard).all():
            wrong.append(f"{name}: a column past the end was written")
    return wrong
