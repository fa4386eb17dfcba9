"""The shipped code objects hold what the emulator is given: an independent decoder reads the text back out of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kosmos_raw.build import cache as build_cache
from kosmos_raw.build import gfx950, sources, zig
from kosmos_raw.emulator import asm

decoder = pytest.importorskip("tests.emulator.decoder", reason="tinygrad, of the extra `dev`, needs Python 3.11")

from . import text  # noqa: E402

pytestmark = [pytest.mark.compile, pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))]

SHIPPED = sorted(path.stem for path in (sources.folder() / "kernels").glob("*.hip"))
TESTS = ("matrix", "exchange")  # kernels/NAME.hip here: types and instructions that no shipped kernel has

Built = tuple[asm.Program, "decoder.CodeObject"]


@pytest.fixture(scope="module")
def built() -> Callable[[str], Built]:
    made: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in made:
            written, linked = _files(name)
            made[name] = asm.parse(written.read_text()), decoder.CodeObject(linked.read_bytes())
        return made[name]

    return get


def _files(name: str) -> tuple[Path, Path]:
    if name in SHIPPED:
        build = gfx950.code_object(name)
        return build.text, build.code_object
    written = text.compiled(name)
    key = [zig.version(), gfx950.flags(), written.read_text()]
    return written, build_cache.cached(f"{name}.hsaco", key, lambda to: gfx950.assemble(written, to))


@pytest.mark.parametrize("name", [*SHIPPED, *TESTS])
def test_the_code_is_the_text(built: Callable[[str], Built], name: str) -> None:
    program, linked = built(name)
    assert program.kernels
    for kernel in program.kernels:
        got, want = decoder.decoded(linked.bytes_of(kernel.name)), decoder.of_text(kernel)
        for i, a, b in zip(kernel.instructions, got, want, strict=True):
            assert a == b, f"{name}, line {i.line}: {i.text}"


@pytest.mark.parametrize("name", SHIPPED)
def test_what_a_dispatch_reads_is_the_text(built: Callable[[str], Built], name: str) -> None:
    """The kernel descriptor: registers, LDS, which scalars are given at the start."""
    program, linked = built(name)
    (kernel,) = program.kernels
    got = linked.descriptor(kernel.name)
    want = {field: kernel.metadata.get(field, 0) for field in got}
    want["next_free_vgpr"] = -(-want["next_free_vgpr"] // 8) * 8  # given out by eights
    assert got == want and got["user_sgpr_kernarg_segment_ptr"] == 1


def test_every_bit_counts(built: Callable[[str], Built]) -> None:
    """Of one instruction of each kind in the shipped code, any bit is flipped: it reads as another one, or as none."""
    seen = {}
    for name in SHIPPED:
        program, linked = built(name)
        for kernel in program.kernels:
            data, at = linked.bytes_of(kernel.name), 0
            while at < len(data):
                line, size = decoder.decode(data[at : at + 16])
                seen.setdefault((line.mnemonic, line.short, size), data[at : at + 16])
                at += size
    assert len(seen) > 150
    unnoticed = []
    for (mnemonic, _, size), data in seen.items():
        right = decoder.decode(data)
        for bit in range(8 * size):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                if decoder.decode(bytes(flipped)) == right:
                    unnoticed.append((mnemonic, bit))
            except (ValueError, NotImplementedError, StopIteration, KeyError):
                pass
    assert unnoticed == []
