"""Launches that are made again: all that does not change from call to call is worked out once.

An operator's plan, params and checks take a few hundred microseconds of Python, which is more than the GPU needs for a
small layer. A training step makes the same calls again and again, on the same arrays.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from struct import pack_into
from typing import Any

import numpy as np

from ..build.params import GROUP

MOST = 256  # remembered; a caller with ever new arrays must not fill the memory
_TRACE, _EPOCH, _EVENTS = (GROUP.fields[name][1] for name in ("trace", "epoch", "trace_events"))  # type: ignore[index]


class Prepared:
    """One launch of an operator, ready to be made any number of times.

    Args: params: with all that does not change; kept. fingerprint: of the operator and its call. counter_words: see
        Communicator.launch. begin: launches so many WGs with what params holds then.
    """

    __slots__ = ("_at_counters", "_at_group", "_bytes", "begin", "counter_words", "fingerprint", "op", "params")

    def __init__(
        self, op: str, params: np.ndarray, fingerprint: int, counter_words: int, begin: Callable[[int], None]
    ) -> None:
        self.op, self.params, self.fingerprint = op, params, fingerprint
        self.counter_words, self.begin = counter_words, begin
        fields = params.dtype.fields
        assert fields is not None
        self._at_group, self._at_counters = fields["g"][1], fields["counters"][1]
        self._bytes = params.view(np.uint8).data

    def fill(self, epoch: int, counters: tuple[int, int, int], trace: tuple[int, int]) -> None:
        """What every launch has of its own. By offsets: NumPy takes ten times as long for the fields.

        Args: counters: sets, per_set and to_clear. trace: address, and events a row.
        """
        to, group = self._bytes, self._at_group
        call = zlib.crc32(epoch.to_bytes(4, "little"), self.fingerprint)
        pack_into("<II", to, group + _EPOCH, epoch, call)
        pack_into("<Q", to, group + _TRACE, trace[0])
        pack_into("<I", to, group + _EVENTS, trace[1])
        pack_into("<QII", to, self._at_counters, *counters)


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


def parts_of(given: Any) -> Iterable[Any]:
    """The arrays that an argument is made of: its `parts` (MxArray), or itself."""
    return getattr(given, "parts", (given,))


def key_of(op: str, address_of: Callable[[Any], int], given: Sequence[Any], *options: Hashable) -> Hashable:
    """Of a call: the same arrays, by place and shape and type, and the same options. What has `parts` is known by these
    and by its `form`."""
    arrays = tuple(
        (getattr(x, "form", None), tuple((address_of(a), a.shape, a.strides, a.dtype) for a in parts_of(x)))
        for x in given
    )
    return op, arrays, options
