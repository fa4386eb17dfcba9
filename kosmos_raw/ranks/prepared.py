"""Launches that are made again: all that does not change from call to call is worked out once.

An operator's plan, params and checks take a few hundred microseconds of Python, which is more than the GPU needs for a
small layer. A training step makes the same calls again and again, on the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.base import Matrix

MOST = 256  # remembered; a caller with ever new arrays must not fill the memory


@dataclass(slots=True)
class Prepared:
    """One launch of an operator, ready to be made any number of times. See Communicator.launch for the arguments."""

    op: str
    params: np.ndarray
    fingerprint: int  # of the operator and its call; the epoch comes in at each start
    counter_words: int
    operands: tuple[Matrix, ...]
    begin: Callable[[int], None]  # launches so many WGs with what params holds then


class Remembered:
    """Prepared launches by what they were called with. They hold addresses of workspace: whenever that moves, all are
    forgotten."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Prepared] = {}

    def get(self, key: Hashable) -> Prepared | None:
        return self._known.get(key)

    def keep(self, key: Hashable, prepared: Prepared) -> None:
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[key] = prepared

    def forget(self) -> None:
        self._known.clear()


def key_of(op: str, address_of: Callable[[Any], int], arrays: Sequence[Any], *options: Hashable) -> Hashable:
    """Of a call: the same arrays, by place and shape and type, and the same options."""
    return op, tuple((address_of(a), a.shape, a.strides, a.dtype) for a in arrays), options
