"""Cubins for sm_90a (H100, H200), built by nvcc where there is one. Without nvcc CuPy compiles `inline.source_text`.

Kernels for sm_90a take a second struct beside their params: descriptors of the matrices that tiles are loaded from.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path

import numpy as np

from . import cache, sources
from .zig import BuildError

COMPILE = ("-x", "cu", "-std=c++20", "-arch=sm_90a", "-O3", "-Werror", "all-warnings", "-ptx")
ASSEMBLE = ("-arch=sm_90a", "-O3", "-cubin", "-Xptxas", "-v")

MAX_OPERANDS = 18  # hip_kernels/target/sm90_tile.h
OPERANDS = np.dtype(  # the mirror of target::Operands
    [
        ("maps", "V128", (MAX_OPERANDS,)),
        ("begin", "u8", (MAX_OPERANDS,)),
        ("end", "u8", (MAX_OPERANDS,)),
        ("line_words", "u4", (MAX_OPERANDS,)),
        ("count", "u4"),
        ("by_rows", "u4"),
        ("zero", "u4", (4,)),
    ]
)


@dataclass(frozen=True)
class SmBuild:
    """Files of one built operator."""

    op: str
    text: Path  # .ptx
    log: Path  # what ptxas said: registers, spills, and warnings that it does not count as such
    cubin: Path  # what RawModule(path=...) loads


def find_nvcc() -> Path | None:
    """nvcc on PATH, else in CUDA_HOME or CUDA_PATH."""
    found = shutil.which("nvcc")
    places = [Path(found)] if found else []
    places += [Path(os.environ[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return next((place for place in places if place.is_file()), None)


def missing() -> str | None:
    """What this machine lacks to build for sm_90a; None when nothing."""
    if find_nvcc():
        return None
    return "kosmos_raw: building for sm_90a needs nvcc (CUDA 12.8 or later) on PATH or in CUDA_HOME/bin"


def run(nvcc: Path, *arguments: str) -> str:
    """Runs nvcc; returns what it printed, raises BuildError when it fails."""
    command = [str(nvcc), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        printed = (done.stdout + done.stderr).strip()
        raise BuildError(f"kosmos_raw: nvcc failed ({done.returncode}): {' '.join(command)}\n{printed}")
    return done.stdout + done.stderr


@once
def version(nvcc: Path) -> str:
    """What `nvcc --version` prints."""
    return run(nvcc, "--version")


def compile_text(source: Path, to: Path) -> None:
    """One .hip file to PTX."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(str(missing()))
    run(nvcc, *COMPILE, "-o", str(to), str(source))


def assemble(text: Path, to: Path) -> None:
    """PTX to a cubin; the messages of ptxas are left beside it as .log."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(str(missing()))
    to.with_suffix(".log").write_text(run(nvcc, *ASSEMBLE, "-o", str(to), str(text)))


def cubin(op: str, source: Path | None = None) -> SmBuild:
    """The built operator, or that of another `source`, from the cache when compiler, flags and sources are the same.

    Raises: BuildError when nvcc is absent or refuses the source.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(str(missing()))

    def make(to: Path) -> None:
        text = to.with_suffix(".ptx")
        compile_text(source or sources.kernel(op), text)
        assemble(text, to)

    key = [version(nvcc), sources.digest(), *COMPILE, *ASSEMBLE, *([source.read_text()] if source else [])]
    made = cache.cached(f"{op}.cubin", key, make)
    return SmBuild(op, made.with_suffix(".ptx"), made.with_suffix(".log"), made)
