"""From assembly text to a loaded library: translate, compile, keep in the build cache."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path

from ..build import zig
from . import asm
from .translate import Translation, translate

RUNTIME = Path(__file__).parent / "runtime"
_FLAGS = ("-O2", "-g0", "-ffp-contract=off", f"-I{RUNTIME}")  # no sum may be contracted that the GPU does not contract


def _compile(source: Path) -> Path:
    """A library from one C++ file over the runtime's headers. Translated text says all about a kernel."""
    headers = sorted(RUNTIME.glob("*.h"))
    return zig.shared_library(source, _FLAGS, headers, name=f"emulator_{source.stem}", kernel_sources=False)


@cache
def runtime_library() -> Path:
    """The runtime, a library that C programs can use as well: see runtime/emulator.h."""
    return _compile(RUNTIME / "runtime.cpp")


def module_library(translation: Translation) -> Path:
    """The translated kernels; exports emulator_module()."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.cpp"
        source.write_text(translation.source)
        return _compile(source)


class Module:
    """The kernels of one assembly file, ready to be launched.

    Args:
        path: assembly text (.s) for gfx950, made with one compiler run and without link-time changes.
    Raises: UnknownInstructions when the text has what the emulator does not know; nothing is ever skipped.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.text = self.path.read_text()
        self.translation = translate(self.text, self.path.name)
        self.library = module_library(self.translation)
        self._loaded = ctypes.CDLL(str(self.library))
        self._loaded.emulator_module.restype = ctypes.c_void_p
        self.handle: int = self._loaded.emulator_module()

    @property
    def kernels(self) -> dict[str, asm.Kernel]:
        return {k.name: k for k in self.translation.kernels}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Instructions that are right here but doubtful on hardware."""
        return self.translation.warnings

    def line(self, number: int) -> str:
        """Line `number` of the assembly text, from 1."""
        return self.text.split("\n")[number - 1].strip()
