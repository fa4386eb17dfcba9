"""Assembly text for tests: single kernels written by hand, in the shape that clang gives a file."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from kosmos_raw import emulator
from kosmos_raw.build import cache as build_cache
from kosmos_raw.build import gfx950, zig

KERNELS = Path(__file__).parent / "kernels"


def kernel(name: str, body: str, vgprs: int = 64, lds: int = 0, kernarg: int = 64, denormals: int = 3) -> str:
    """A kernel whose arguments are at s[0:1], its workgroup's id in s2, and its threads' ids in v0."""
    lines = "\n".join(line if line.endswith(":") else f"\t{line.strip()}" for line in body.strip().split("\n"))
    return f"""\
\t.text
\t.globl\t{name}
\t.p2align\t8
\t.type\t{name},@function
{name}:
{lines}
\ts_endpgm
\t.section\t.rodata,"a",@progbits
\t.p2align\t6, 0x0
\t.amdhsa_kernel {name}
\t\t.amdhsa_group_segment_fixed_size {lds}
\t\t.amdhsa_private_segment_fixed_size 0
\t\t.amdhsa_kernarg_size {kernarg}
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_system_vgpr_workitem_id 0
\t\t.amdhsa_next_free_vgpr {vgprs}
\t\t.amdhsa_next_free_sgpr 96
\t\t.amdhsa_accum_offset {vgprs}
\t\t.amdhsa_float_denorm_mode_32 {denormals}
\t.end_amdhsa_kernel
"""


TARGET = '\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n\t.amdhsa_code_object_version 6\n'


def module(name: str, *kernels: str, assemble: bool = True) -> emulator.Module:
    """The kernels as one module. They are assembled first: what is no gfx950 code proves nothing."""
    text = TARGET + "".join(kernels)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.s"
        path.write_text(text)
        if assemble:
            zig.run(["clang", *gfx950.ASSEMBLE, "-o", f"{folder}/{name}.o", str(path)])
        return emulator.Module(path)


@cache
def compiled(name: str) -> Path:
    """Assembly text of kernels/NAME.hip."""
    source = KERNELS / f"{name}.hip"
    texts = [path.read_text() for path in (source, KERNELS / "device.h")]

    def make(to: Path) -> None:
        gfx950.compile_text(source, to)

    return build_cache.cached(f"{name}.s", [zig.version(), *gfx950.COMPILE, *texts], make)


@cache
def compiled_module(name: str) -> emulator.Module:
    return emulator.Module(compiled(name))


def changed_module(name: str, old: str, new: str = "", count: int = 1) -> emulator.Module:
    """kernels/NAME.hip with the first `count` places of `old` in its assembly text replaced (0: all)."""
    text = compiled(name).read_text()
    assert old in text, f"{old!r} is not in {name}.s"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.s"
        path.write_text(text.replace(old, new, count or -1))
        return emulator.Module(path)
