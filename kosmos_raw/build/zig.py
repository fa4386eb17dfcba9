"""The one compiler: clang and lld from the `ziglang` wheel, for the host and for gfx950 alike."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from . import cache as build_cache
from . import sources


class BuildError(RuntimeError):
    """A compiler refused, or is not there. The message holds the command and what it printed."""


def require() -> None:
    """Raises BuildError with the name of the extra when the compiler is not installed."""
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError("kosmos_raw: building kernels needs the package 'ziglang'; pip install 'kosmos-raw[cpu]'")


@cache
def version() -> str:
    """Version of the installed compiler wheel, for example "0.17.1"."""
    require()
    from importlib.metadata import version as installed

    return installed("ziglang")


def run(arguments: Sequence[str]) -> str:
    """Runs `python -m ziglang ARGUMENTS`; returns what it printed, raises BuildError when it fails."""
    require()
    command = [sys.executable, "-m", "ziglang", *arguments]
    env = dict(os.environ)
    env.setdefault("ZIG_GLOBAL_CACHE_DIR", str(build_cache.folder() / "zig"))
    done = subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise BuildError(f"kosmos_raw: compiler failed ({done.returncode}): {' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout + done.stderr


@cache
def cpu_identity() -> str:
    """What -march=native depends on: a binary built here must not be taken for another machine's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


# Of what -nostdlib leaves out, all that our libraries use. The rest is the compiler's own run-time library, which zig
# would first compile: 20 seconds before the first link. What is missing for it fails here and not when it is loaded.
LIBC = ("-lc", "-lm", "-Wl,-z,defs")

# Flags given by a caller come after these and win.
_LIBRARY = (
    *("-x", "c++", "-std=c++20", "-march=native", "-O3", "-g1", "-ffp-contract=fast"),
    # Vectors wider than those of this machine go between functions of one file alone: no ABI matters.
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-fno-exceptions", "-fno-rtti", "-nostdlib", "-fno-sanitize=all", "-fPIC", "-shared", "-pthread"),
)


def shared_library(
    source: Path,
    flags: Sequence[str] = (),
    depends: Sequence[Path] = (),
    *,
    name: str | None = None,
    kernel_sources: bool = True,
) -> Path:
    """A host library from one C++20 source that uses no C++ standard library (which would take minutes to build).

    The key covers the source, the files in `depends`, the flags, compiler and CPU, and, unless the source includes none
    of it, everything in hip_kernels/.
    """
    texts = [path.read_text() for path in (source, *depends)]
    key = [version(), cpu_identity(), sources.digest() if kernel_sources else "", *_LIBRARY, *flags, *texts]

    def make(to: Path) -> None:
        run(["c++", *_LIBRARY, *flags, "-o", str(to), str(source), *LIBC])

    return build_cache.cached(f"{name or source.stem}.so", key, make)
