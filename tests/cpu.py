"""The CPU device as it is not: with tiles that know BF16 alone, or with kernels that have a bug on purpose. Ranks are
threads, for what is patched here is patched in this process."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kosmos_raw.build import sources, zig
from kosmos_raw.build.inline import source_text
from kosmos_raw.device import cpu
from kosmos_raw.device.cpu import CpuDevice
from kosmos_raw.ranks import communicator


class Bf16Tiles(CpuDevice):
    """What multiplies BF16 alone, as sm_90a does."""

    multiplies_mxfp8 = False
    flags = ("-DKOSMOS_BF16_TILES",)


@pytest.fixture
def bf16_tiles(monkeypatch) -> None:
    """Ranks get Bf16Tiles."""
    lock = threading.Lock()

    def open_device(name: str, rank: int, ranks: int) -> CpuDevice:
        with lock:  # the first one to ask has it compiled
            return Bf16Tiles(rank, ranks)

    monkeypatch.setattr(communicator, "open_device", open_device)


@pytest.fixture
def mutated(monkeypatch, tmp_path) -> Callable[[str, str, str], None]:
    """mutated(file, right, wrong): from now on kernels are built of sources in which `file` says `wrong` where it said
    `right`. Fails if it does not say that once."""
    folder, built, shipped = tmp_path / "hip_kernels", tmp_path / "built", cpu._library

    def library(op: str, flags: tuple[str, ...]) -> Path:
        """Those that the change reaches, of one text each: a cache then knows them from the right ones."""
        source = built / f"{op}.hip"
        if not source.exists():
            return shipped(op, flags)
        # Compiling takes longer than what is run. In one text, no constant of a header is excused from being used.
        flags = (*flags, "-O1", "-Wno-unused-const-variable")
        return zig.shared_library(source, flags, kernel_sources=False)

    def mutate(file: str, right: str, wrong: str) -> None:
        if not folder.exists():
            shutil.copytree(sources.folder(), folder)
            built.mkdir()
        text = (folder / file).read_text()
        assert text.count(right) == 1, f"{file} has {text.count(right)} of: {right}"
        (folder / file).write_text(text.replace(right, wrong))
        for op in (path.stem for path in sources.kernels()):
            if (text := source_text(op, folder)) != source_text(op):
                (built / f"{op}.hip").write_text(text)
        monkeypatch.setattr(cpu, "_library", library)

    return mutate
