"""Checks and conversions that operators share. Messages name operator, argument, what came and what was wanted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..build.params import POLICIES
from ..device.base import Device
from ..plan.crew import Grid
from ..plan.link import Pulls
from ..plan.shapes import VECTOR, Plan
from ..ranks.communicator import Communicator
from ..ranks.prepared import key_of, parts_of

BF16 = np.dtype(ml_dtypes.bfloat16)


def as_matrix(comm: Communicator, op: str, name: str, value: Any, *, float32: bool = False) -> Any:
    """`value` as an array of the device, bf16 (its bits as uint16; float32 if allowed), two dimensions. No copy."""
    array = value if isinstance(value, comm.device.xp.ndarray) else _import(comm.device, op, name, value)
    if array.ndim != 2:
        raise ValueError(f"{op}: {name} has shape {tuple(array.shape)}, want two dimensions (on rank {comm.rank})")
    if array.dtype not in (BF16, np.uint16) and not (float32 and array.dtype == np.float32):
        raise TypeError(
            f"{op}: {name} has dtype {array.dtype}, want bfloat16 (ml_dtypes.bfloat16, or its bits as uint16); "
            f"convert it with {name}.astype(ml_dtypes.bfloat16)"
        )
    return array


def factors(comm: Communicator, op: str, a: Any, b: Any, a_axis: int, b_axis: int) -> tuple[Any, Any]:
    """Both sides of a product as arrays of the device, contracted over the given dimensions."""
    a, b = as_matrix(comm, op, "a", a), as_matrix(comm, op, "b", b)
    if a.shape[a_axis] != b.shape[b_axis]:
        order = ("first", "second")
        raise ValueError(
            f"{op}: a is {tuple(a.shape)} and b is {tuple(b.shape)}; want the same K in a's {order[a_axis]} and b's "
            f"{order[b_axis]} dimension (a weight is [features out, features in], as a linear layer keeps it)"
        )
    return a, b


def _import(device: Device, op: str, name: str, value: Any) -> Any:
    if not hasattr(value, "__dlpack__"):
        raise TypeError(
            f"{op}: {name} is a {type(value).__name__}, want a {device.xp.__name__} array or one with __dlpack__ "
            f"in the memory of device {device.name}"
        )
    from ..memory import dlpack

    return dlpack.as_array(value, device)


def shard_rows(comm: Communicator, op: str, own: int, rows: Sequence[int] | None, name: str = "a") -> tuple[int, ...]:
    """Rows of every rank's shard: as given, or as many as this rank has on each."""
    if rows is None:
        return (own,) * comm.ranks
    rows = _counts(comm, op, rows)
    if rows[comm.rank] != own:
        raise ValueError(
            f"{op}: {name} has {own} rows on rank {comm.rank}, but rows says {rows[comm.rank]} (rows={list(rows)})"
        )
    return rows


def dealt_rows(comm: Communicator, op: str, name: str, all_rows: int, rows: Sequence[int]) -> tuple[int, ...]:
    """Rows that each rank gets of a matrix that all have whole."""
    rows = _counts(comm, op, rows)
    if sum(rows) != all_rows:
        raise ValueError(f"{op}: {name} has {all_rows} rows, but rows deals out {sum(rows)} (rows={list(rows)})")
    return rows


def _counts(comm: Communicator, op: str, rows: Sequence[int]) -> tuple[int, ...]:
    rows = tuple(int(r) for r in rows)
    if len(rows) != comm.ranks or min(rows) < 0:
        raise ValueError(f"{op}: rows is {list(rows)}, want {comm.ranks} counts, one a rank, none negative")
    return rows


def is_plain(comm: Communicator, array: Any, columns: int) -> bool:
    """Whether a kernel can use the array where it lies: rows follow each other, each begins on 16 bytes."""
    return (
        array.shape[1] == columns
        and array.flags.c_contiguous
        and columns % VECTOR == 0
        and comm.device.address_of(array) % 16 == 0
    )


def in_arena(comm: Communicator, array: Any, columns: int) -> bool:
    """Whether peers can read the array where it lies."""
    address = comm.device.address_of(array)
    return is_plain(comm, array, columns) and comm.arena.offset_of(address, array.nbytes) is not None


def call_again(comm: Communicator, op: str, given: Sequence[Any], *options: Hashable) -> tuple[Hashable | None, bool]:
    """Makes a launch again that was made for the same arrays and options. Returns: what to remember it by, None where
    an array is none of the device's; and whether it has been made."""
    ndarray = comm.device.xp.ndarray
    if any(type(array) is not ndarray for x in given for array in parts_of(x)):
        return None, False
    key = key_of(op, comm.device.address_of, given, *options)
    return key, comm.launch_again(key)


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


def grid_of(comm: Communicator, op: str) -> Grid:
    """What a launch of `op` may use here."""
    kernel = comm.kernel(op)
    device = comm.device
    tiles = (kernel.tile, *kernel.other_tiles)
    return Grid(tiles, comm.workgroups, device.default_workgroups, device.dies, device.link, device.beside)


# -- where a kernel finds an operand, and leaves its result


def symmetric_operand(comm: Communicator, op: str, array: Any, columns: int, nbytes: int) -> int:
    """The offset in the arena of a matrix that peers will read: its own, or that of a copy in the workspace of this
    call. `nbytes` is what the copy may take, equal on all ranks."""
    arena = comm.arena
    if is_plain(comm, array, columns):
        offset = arena.offset_of(comm.device.address_of(array), array.nbytes)
        if offset is not None:
            return offset
    offset = arena.workspace(nbytes, op)
    padded_copy(comm, array, arena.address(comm.rank, offset), columns, arena.owner)
    return offset


def local_operand(comm: Communicator, name: str, array: Any, columns: int, rows: int | None = None) -> int:
    """The address of a matrix that this rank alone reads: its own, or that of a copy kept under `name`, padded with
    zeros to `rows` and `columns`."""
    rows = array.shape[0] if rows is None else rows
    if is_plain(comm, array, columns) and array.shape[0] == rows:
        return comm.device.address_of(array)
    address = comm.local(name, rows * columns * 2)
    padded_copy(comm, array, address, columns, comm)
    if rows > array.shape[0]:
        comm.device.array(address, (rows, columns), np.uint16, comm)[array.shape[0] :] = 0
    return address


def result_address(comm: Communicator, name: str, out: Any, columns: int) -> int:
    """Where a kernel writes rows of `columns` for `out`: into it, or into memory kept under `name`; see `hand_over`."""
    if is_plain(comm, out, columns):
        return comm.device.address_of(out)
    return comm.local(name, out.shape[0] * columns * 2)


def hand_over(comm: Communicator, address: int, out: Any, columns: int) -> None:
    """Copies a result to `out`, if it is not there already."""
    if not is_plain(comm, out, columns):
        found = comm.device.array(address, (out.shape[0], columns), np.uint16, comm)
        out.view(np.uint16)[...] = found[:, : out.shape[1]]


def result(
    comm: Communicator,
    op: str,
    out: Any | None,
    shape: tuple[int, int],
    dtype: Any,
    inputs: dict[str, Any],
    name: str = "out",
    *,
    float32: bool = False,
) -> Any:
    """`out`, checked, or a new array of `dtype`. `inputs`, by name, must not overlap it."""
    if out is None:
        return comm.device.xp.empty(shape, dtype)
    out = as_matrix(comm, op, name, out, float32=float32)
    if tuple(out.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(out.shape)}, want {shape} on rank {comm.rank}")
    for other_name, other in inputs.items():
        if overlaps(comm, out, other):
            raise ValueError(
                f"{op}: {name} overlaps {other_name}, which is still used while {name} is written; give another array"
            )
    return out


def keep_own_rows(comm: Communicator, rows: Sequence[int], own: Any, gathered: Any) -> None:
    """Kernels gather peers' rows alone."""
    first = sum(rows[: comm.rank])
    gathered.view(np.uint16)[first : first + rows[comm.rank]] = own.view(np.uint16)


def fill_pulls(pulls: np.ndarray, cut: Pulls) -> None:
    """The struct Pulls of a params struct."""
    pulls["slices"], pulls["slabs"], pulls["slab_words"], pulls["band"] = (
        cut.slices,
        cut.slabs,
        cut.slab_words,
        cut.band,
    )


def fill_geometry(params: np.ndarray, plan: Plan) -> None:
    """What params structs of all operators have: rows, tile and crew."""
    chunks = params["m"]
    chunks["first"][0] = plan.first
    chunks["tile_m"], chunks["tile_rows_max"], chunks["side_by_side"] = (
        plan.tile.m,
        plan.tile_rows_max,
        plan.side_by_side,
    )
    params["tile_n"] = plan.tile.n
    if "movers" in (params.dtype.names or ()):
        params["movers"], params["policy"] = plan.crew.movers, POLICIES.index(plan.crew.policy)


def fill_addresses(comm: Communicator, addresses: np.ndarray, offset: int) -> None:
    """Where each rank's matrix lies, all at one offset of the arena."""
    addresses[0, : comm.ranks] = [comm.arena.address(q, offset) for q in range(comm.ranks)]
