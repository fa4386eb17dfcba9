"""Builds and runs blocks.hip, on the host or as gfx950 code in the emulator."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kosmos_raw import emulator
from kosmos_raw.build import gfx950, sources, zig
from kosmos_raw.numerics.mxfp8 import RULES

SOURCE = Path(__file__).parent / "blocks.hip"
PARAMS = np.dtype(
    [(name, "u8") for name in "x elements scales values".split()]
    + [(name, "u4") for name in "blocks rule wgs zero".split()]
)

# Of FP32 bits [blocks, 32]: elements [blocks, 32], scales [blocks], and values, float32 [blocks, 32].
Quantised = tuple[np.ndarray, np.ndarray, np.ndarray]
Run = Callable[[np.ndarray, str], Quantised]


def copy_of_sources(to: Path) -> Path:
    """hip_kernels/ and blocks.hip, to be spoilt. Returns where the latter is."""
    shutil.copytree(sources.folder(), to / "hip_kernels")
    source = to / "tests" / "mxfp8" / SOURCE.name
    source.parent.mkdir(parents=True)
    shutil.copy(SOURCE, source)
    return source


def host(source: Path = SOURCE) -> Run:
    """On the CPU."""
    headers = sorted((source.parents[2] / "hip_kernels").rglob("*.h"))
    library = ctypes.CDLL(str(zig.shared_library(source, depends=headers, kernel_sources=False)))

    def start(p: np.ndarray, arrays: list[np.ndarray]) -> None:
        assert library.blocks_main(ctypes.c_void_p(p.ctypes.data)) == 0

    return _runner(start)


def emulated(source: Path, text: Path) -> Run:
    """In the emulator. text: where to put what the compiler makes."""
    gfx950.compile_text(source, text)
    module = emulator.Module(text)

    def start(p: np.ndarray, arrays: list[np.ndarray]) -> None:
        emulator.run([emulator.Launch(module, "blocks_main", int(p["wgs"][0]), 512, p.tobytes())], None, arrays)

    return _runner(start)


def _runner(start: Callable[[np.ndarray, list[np.ndarray]], None]) -> Run:
    def run(bits: np.ndarray, rule: str) -> Quantised:
        bits = np.ascontiguousarray(bits, np.uint32)
        elements, scales = np.full((len(bits), 8), 0xDDDDDDDD, np.uint32), np.full(len(bits), 0xDDDDDDDD, np.uint32)
        values = np.full((len(bits), 32), -7, np.float32)
        p = np.zeros(1, PARAMS)
        for name, array in (("x", bits), ("elements", elements), ("scales", scales), ("values", values)):
            p[name] = array.ctypes.data
        p["blocks"], p["rule"], p["wgs"] = len(bits), RULES.index(rule), 2
        start(p, [bits, elements, scales, values])
        return elements.view(np.uint8), scales, values

    return run
