"""BF16 by its bits, in any array library: not every one that runs on a GPU knows the type, or can compile for it."""

from __future__ import annotations

from typing import Any

import numpy as np


def widen(x: Any) -> Any:
    """bf16, or its bits as uint16, as float32."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(x: Any) -> Any:
    """float32 as the bits of bf16, to the nearest, ties to even; every NaN becomes 0x7fc0."""
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[x != x] = 0x7FC0
    return rounded
