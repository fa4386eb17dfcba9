"""Launches with arrays as arguments."""

from __future__ import annotations

import numpy as np

from kosmos_raw import emulator


def params(*arguments: np.ndarray | int) -> bytes:
    """Pointers for arrays (8 bytes), numbers as unsigned 32 bits; as the compiler lays arguments out."""
    out = b""
    for x in arguments:
        if isinstance(x, np.ndarray):
            assert x.flags.c_contiguous
            out = out.ljust(-(-len(out) // 8) * 8, b"\0") + int(x.ctypes.data).to_bytes(8, "little")
        else:
            out += int(x).to_bytes(4, "little")
    return out


def launch(
    module: emulator.Module,
    kernel: str,
    grid: int,
    block: int,
    *arguments: np.ndarray | int,
    options: emulator.Options | None = None,
) -> emulator.RunReport:
    """One launch to its end."""
    arrays = [x for x in arguments if isinstance(x, np.ndarray)]
    return emulator.run([emulator.Launch(module, kernel, grid, block, params(*arguments))], options, arrays)
