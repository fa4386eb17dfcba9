"""What operators share of their arguments in MXFP8: checks, and where kernels find elements and scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.params import DEQUANTIZE_MXFP8
from ..device.base import Matrix
from ..plan.shapes import MXFP8_FORMAT, round_up
from ..ranks.communicator import Communicator
from .quantize import MxArray, group_starts

DEQUANTIZE = "dequantize_mxfp8"
STEP = MXFP8_FORMAT.step


def checked(comm: Communicator, op: str, name: str, value: Any, axis: int) -> MxArray:
    """`value`, if it is an MxArray along `axis` as kernels take it."""
    if not isinstance(value, MxArray):
        raise TypeError(
            f"{op}: {name} is a {type(value).__name__}, want an MxArray as the other factors are: "
            f"quantize_mxfp8(comm, {name}, {axis})"
        )
    if value.axis != axis:
        lines = "rows" if axis == 1 else "columns"
        raise ValueError(
            f"{op}: {name} is quantised along axis {value.axis}, want {axis}: {lines} of it are lines of the "
            "contraction"
        )
    device = comm.device
    lies = [device.address_of(x) % 16 == 0 and x.flags.c_contiguous for x in (value.elements, value.scales)]
    shapes = (tuple(value.elements.shape), tuple(value.scales.shape))
    want = ((value.lines, value.depth), (value.depth // STEP, round_up(value.lines, 4), 4))
    if shapes != want or not all(lies):
        raise ValueError(
            f"{op}: {name} has elements and scales of shapes {shapes}, want {want}, contiguous and on 16 bytes, as "
            "MxArray.empty makes them"
        )
    return value


def mx_factors(comm: Communicator, op: str, a: Any, b: Any, a_axis: int, b_axis: int) -> tuple[MxArray, MxArray]:
    """Both sides of a product, contracted over the axes along which they are quantised."""
    a, b = checked(comm, op, "a", a, a_axis), checked(comm, op, "b", b, b_axis)
    if a.shape[a_axis] != b.shape[b_axis] or contraction(a) != contraction(b):
        raise ValueError(
            f"{op}: a is {a.shape} along axis {a_axis} in groups of {contraction(a)} and b is {b.shape} along axis "
            f"{b_axis} in groups of {contraction(b)}; want the same contraction"
        )
    return a, b


def contraction(x: MxArray) -> tuple[int, ...]:
    """The groups of what is contracted over. Along axis 1 it is one, and groups without rows take no room."""
    return (x.shape[1],) if x.axis == 1 else tuple(rows for rows in x.groups if rows) or (0,)


def symmetric_copies(comm: Communicator, op: str, sizes: Sequence[int], given: Sequence[MxArray]) -> list[int]:
    """Offsets in the arena of elements and scales of each of `given`, which peers will read: their own, or those of
    copies in the workspace of this call. sizes: bytes that each may take, equal on all ranks."""
    arena, address_of = comm.arena, comm.device.address_of
    starts = np.cumsum([0, *(round_up(n, 256) for n in sizes)])
    workspace: int | None = None
    offsets: list[int] = []
    for i, x in enumerate(given):
        parts = (x.elements, x.scales)
        found = [arena.offset_of(address_of(part), part.nbytes) for part in parts]
        if None in found:
            if workspace is None:
                workspace = arena.workspace(int(starts[-1]), op)
            at = workspace + int(starts[i])
            found = [at, at + x.elements.nbytes]
            # Where scales begin follows from the largest shard: it must be the same on all ranks.
            found[1] = at + int(sizes[i]) - _scales_bytes(sizes[i], x)
            for offset, part in zip(found, parts, strict=True):
                comm.device.array(arena.address(comm.rank, offset), part.shape, np.uint8, arena.owner)[...] = part
        offsets += [int(offset) for offset in found if offset is not None]
    return offsets
