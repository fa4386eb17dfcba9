"""Code objects for gfx950 (MI350X, MI355X), built by the clang and lld of the `ziglang` wheel.

The assembly text is the single source: .hip -> .s -> .o -> .hsaco. What a check or the emulator reads in the text is
what the GPU runs. (An object that clang makes by itself is optimised a second time, and differs.)
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from . import cache, sources, zig
from .zig import BuildError

CHECKED = "0.17.1"  # LLVM 22.1

COMPILE = (
    *("-x", "hip", "-std=c++20", "--cuda-device-only", "--offload-arch=gfx950", "-nogpulib", "-nogpuinc", "-O3"),
    "-fuse-cuid=none",  # else the code object depends on the path of its source
    *("-mllvm", "-amdgpu-sdwa-peephole=0"),  # SDWA forms gain nothing here, and the emulator knows only some
    "-fno-slp-vectorize",  # operands of packed FP32 lie side by side: a kernel that has no register left spills
    *("-Wall", "-Wextra", "-Werror", "-S"),
)
ASSEMBLE = ("-target", "amdgcn-amd-amdhsa", "-mcpu=gfx950", "-c")
LINK = ("-shared",)


@dataclass(frozen=True)
class GfxBuild:
    """Files of one built operator."""

    op: str
    text: Path  # .s
    code_object: Path  # .hsaco: what RawModule(path=...) loads


def missing() -> str | None:
    """What this machine lacks to build for gfx950; None when nothing. (Shipped code objects need nothing.)"""
    try:
        zig.require()
    except BuildError as error:
        return str(error)
    return None


def require_compiler() -> None:
    """Refuses compilers that are known to make wrong gfx950 code; warns about those that nobody has checked."""
    version = zig.version()
    if version == CHECKED:
        return
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 17):
        raise BuildError(
            f"kosmos_raw: ziglang {version} makes wrong code for gfx950 (the scale bytes of MXFP8 MFMAs); "
            f"pip install ziglang=={CHECKED}"
        )
    warnings.warn(f"kosmos_raw: ziglang {version} is unchecked for gfx950; {CHECKED} is checked", stacklevel=3)


def compile_text(source: Path, to: Path) -> None:
    """One .hip file to assembly text."""
    require_compiler()
    zig.run(["clang", *COMPILE, "-o", str(to), str(source)])


def assemble(text: Path, to: Path) -> None:
    """Assembly text to a code object; the .o is left beside it."""
    made = to.with_suffix(".o")
    zig.run(["clang", *ASSEMBLE, "-o", str(made), str(text)])
    zig.run(["ld.lld", *LINK, "-o", str(to), str(made)])


def flags() -> str:
    """Everything that decides what the compiler makes of a source, but for the compiler itself."""
    return " ".join([*COMPILE, "|", *ASSEMBLE, "|", *LINK])


def code_object(op: str) -> GfxBuild:
    """The operator's code object: as shipped in the wheel, when that was made from these sources, else built.

    Raises: BuildError when it must be built and the compiler is absent, of a wrong version, or refuses the source.
    """
    from . import shipped

    return shipped.find(op) or build(op)


def build(op: str) -> GfxBuild:
    """The operator built here, from the cache when compiler, flags and sources are the same."""
    require_compiler()

    def make(to: Path) -> None:
        text = to.with_suffix(".s")
        compile_text(sources.kernel(op), text)
        assemble(text, to)

    made = cache.cached(f"{op}.hsaco", [zig.version(), sources.digest(), flags()], make)
    return GfxBuild(op, made.with_suffix(".s"), made)
