"""What a linear layer multiplies: its matrices as they are, or copies of them in MXFP8.

What is quantised serves products that contract over its columns, or over its rows. So each matrix becomes a pair: for
the forward and data gradients, and for weight gradients. In BF16 both are the matrix itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .ops.bulk_ag import bulk_ag
from .ops.quantize import MxArray, quantize_mxfp8
from .ranks.communicator import Communicator

DTYPES = ("bf16", "mxfp8")


class Factors:
    """Of one layer, in BF16."""

    def __init__(self, comm: Communicator, weight: Any):
        self.comm, self.weight = comm, weight

    def of_weight(self) -> tuple[Any, Any]:
        """To be contracted over input features, and over output features."""
        return self.weight, self.weight

    def weight_changed(self) -> None:
        """Nothing was kept of it."""

    def shared(self, x: Any, rows: Sequence[int]) -> tuple[Any, Any]:
        """Of this rank's rows, which peers will read until `shared` is called again."""
        return x, x

    def own(self, x: Any, groups: Sequence[int]) -> tuple[Any, Any]:
        """Of what no peer reads, all ranks' rows in groups."""
        return x, x


class MxFactors(Factors):
    """Of one layer, in MXFP8. Both of a pair are made from the BF16 source, in one pass."""

    _of_weight: tuple[MxArray, MxArray] | None = None
    _is_old = True
    _room: tuple[MxArray, ...] = ()
    _rows: tuple[int, ...] = ()

    def of_weight(self) -> tuple[Any, Any]:
        if self._is_old:
            self._of_weight = quantize_mxfp8(self.comm, self.weight, (1, 0), reused=True, out=self._of_weight)
            self._is_old = False
        assert self._of_weight is not None
        return self._of_weight

    def weight_changed(self) -> None:
        self._is_old = True

    def shared(self, x: Any, rows: Sequence[int]) -> tuple[Any, Any]:
        """In the arena, so that peers read it where it is written. Kept as long as shapes stay."""
        if tuple(rows) != self._rows or not self._room:
            for old in self._room:
                old.free(self.comm)
            shape, most = (int(x.shape[0]), int(x.shape[1])), max(rows)
            make = MxArray.empty
            self._room = tuple(make(self.comm, shape, axis, symmetric=True, most_rows=most) for axis in (1, 0))
            self._rows = tuple(rows)
        by_columns, by_rows = quantize_mxfp8(self.comm, x, (1, 0), out=self._room)
        return by_columns, by_rows

    def own(self, x: Any, groups: Sequence[int]) -> tuple[Any, Any]:
        by_columns, by_rows = quantize_mxfp8(self.comm, x, (1, 0), groups=groups)
        return by_columns, by_rows


def sum_over_ranks(comm: Communicator, sums: Any) -> Any:
    """Of a few float32, in rank order, alike on all ranks: a gather beside no product, which takes bits for bits."""
    nothing = comm.device.xp.empty((0, 0), np.uint16)
    _, every = bulk_ag(comm, sums.view(np.uint16).reshape(1, -1), nothing, nothing)
    return every.view(np.float32).sum(axis=0, dtype=np.float32)
