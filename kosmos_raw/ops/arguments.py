"""Checks and conversions that operators share. Messages name operator, argument, what came and what was wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..device.base import Device
from ..plan.ag_gemm import VECTOR, round_up
from ..ranks.communicator import Communicator

BF16 = np.dtype(ml_dtypes.bfloat16)


def as_matrix(comm: Communicator, op: str, name: str, value: Any) -> Any:
    """`value` as an array of the device, bf16 (or its bits as uint16), two-dimensional. No copy."""
    array = value if isinstance(value, comm.device.xp.ndarray) else _import(comm.device, op, name, value)
    if array.ndim != 2:
        raise ValueError(f"{op}: {name} has shape {tuple(array.shape)}, want two dimensions (on rank {comm.rank})")
    if array.dtype not in (BF16, np.uint16):
        raise TypeError(
            f"{op}: {name} has dtype {array.dtype}, want bfloat16 (ml_dtypes.bfloat16, or its bits as uint16); "
            f"convert it with {name}.astype(ml_dtypes.bfloat16)"
        )
    return array


def _import(device: Device, op: str, name: str, value: Any) -> Any:
    if not hasattr(value, "__dlpack__"):
        raise TypeError(
            f"{op}: {name} is a {type(value).__name__}, want a {device.xp.__name__} array or one with __dlpack__ "
            f"in the memory of device {device.name}"
        )
    from ..memory import dlpack

    return dlpack.as_array(value, device)


def shard_rows(comm: Communicator, op: str, own: int, rows: Sequence[int] | None) -> tuple[int, ...]:
    """Rows of every rank's shard: as given, or as many as this rank has on each."""
    if rows is None:
        return (own,) * comm.ranks
    rows = tuple(int(r) for r in rows)
    if len(rows) != comm.ranks or min(rows) < 0:
        raise ValueError(f"{op}: rows is {list(rows)}, want {comm.ranks} counts, one a rank, none negative")
    if rows[comm.rank] != own:
        raise ValueError(
            f"{op}: a has {own} rows on rank {comm.rank}, but rows says {rows[comm.rank]} (rows={list(rows)})"
        )
    return rows


def is_plain(comm: Communicator, array: Any, columns: int) -> bool:
    """Whether a kernel can use the array where it lies: rows follow each other, each begins on 16 bytes."""
    return (
        array.shape[1] == columns
        and array.flags.c_contiguous
        and columns % VECTOR == 0
        and comm.device.address_of(array) % 16 == 0
    )


def overlaps(comm: Communicator, one: Any, other: Any) -> bool:
    """Whether the bytes from first to last element of two arrays overlap."""

    def span(array: Any) -> tuple[int, int]:
        start = comm.device.address_of(array)
        reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
        low = start + sum(r for r in reach if r < 0)
        return low, start + sum(r for r in reach if r > 0) + array.dtype.itemsize

    if one.size == 0 or other.size == 0:
        return False
    (a, b), (c, d) = span(one), span(other)
    return a < d and c < b


def padded_copy(comm: Communicator, array: Any, address: int, columns: int, owner: Any) -> None:
    """Copies a matrix to `address` with rows of `columns` elements; what is beyond its own columns becomes zero."""
    to = comm.device.array(address, (array.shape[0], columns), np.uint16, owner)
    to[:, : array.shape[1]] = array.view(np.uint16)
    to[:, array.shape[1] :] = 0


__all__ = ["BF16", "as_matrix", "is_plain", "overlaps", "padded_copy", "round_up", "shard_rows"]
