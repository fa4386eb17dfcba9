"""What operators share of their arguments in MXFP8: checks, and where kernels find elements and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..device.base import Matrix
from ..plan.crew import Grid
from ..plan.shapes import MXFP8_FORMAT, Plan, round_up
from ..ranks.communicator import Communicator
from .arguments import fill_addresses, grid_of
from .quantize import MxArray, dequantize, group_starts

STEP = MXFP8_FORMAT.step
ALIGNED = 256


def checked(comm: Communicator, op: str, name: str, value: Any, axis: int) -> MxArray:
    """`value`, if it is an MxArray along `axis` that kernels can take as it lies."""
    if not isinstance(value, MxArray):
        raise TypeError(
            f"{op}: {name} is a {type(value).__name__}, want an MxArray as the other factors are: "
            f"quantize_mxfp8(comm, {name}, {axis})"
        )
    if value.axis != axis:
        raise ValueError(
            f"{op}: {name} is quantised along axis {value.axis}, want {axis}, over which it is contracted: "
            f"quantize_mxfp8(comm, {name}, {axis})"
        )
    parts = (value.elements, value.scales)
    shapes = tuple(tuple(part.shape) for part in parts)
    want = ((value.lines, value.depth), (value.depth // STEP, round_up(value.lines, 4), 4))
    if shapes != want or not all(x.flags.c_contiguous and comm.device.address_of(x) % 16 == 0 for x in parts):
        raise ValueError(
            f"{op}: {name} has elements and scales of {shapes}, want {want}, contiguous and on 16 bytes, as "
            "MxArray.empty makes them"
        )
    return value


def mx_factors(comm: Communicator, op: str, a: Any, b: Any, a_axis: int, b_axis: int) -> tuple[MxArray, MxArray]:
    """Both sides of a product, contracted over the axes along which they are quantised."""
    a, b = checked(comm, op, "a", a, a_axis), checked(comm, op, "b", b, b_axis)
    same_contraction(op, "a", a, "b", b)
    return a, b


def same_contraction(op: str, a_name: str, a: MxArray, b_name: str, b: MxArray) -> None:
    """Both sides must be padded alike. Groups without rows take no room."""

    def groups(x: MxArray) -> tuple[int, ...]:
        return tuple(n for n in ((x.shape[1],) if x.axis == 1 else x.groups) if n)

    if groups(a) != groups(b):
        raise ValueError(
            f"{op}: {a_name} is {a.shape}, contracted over axis {a.axis} in groups of {groups(a)}, and {b_name} is "
            f"{b.shape}, over axis {b.axis} in groups of {groups(b)}; want the same K and the same groups"
        )


def mx_grid(comm: Communicator, kernel: str) -> Grid:
    """As grid_of. Nobody moves beside builders: where movers make BF16, that takes all lanes of a WG."""
    return replace(grid_of(comm, kernel), beside=False)


# -- what peers read


def mx_in_arena(comm: Communicator, x: MxArray) -> bool:
    """Whether peers can read it where it lies."""
    return None not in _offsets(comm, x)


def _offsets(comm: Communicator, x: MxArray) -> tuple[int | None, int | None]:
    """Of elements and scales in the arena; None: elsewhere."""
    of, address_of = comm.arena.offset_of, comm.device.address_of
    return of(address_of(x.elements), x.elements.nbytes), of(address_of(x.scales), x.scales.nbytes)


def symmetric_copies(
    comm: Communicator, op: str, given: Sequence[tuple[MxArray, tuple[int, int]]]
) -> list[tuple[int, int]]:
    """Offsets in the arena of elements and scales of each MxArray: its own, or those of copies in the workspace of this
    call. With each goes the most lines and the greatest depth that it has on any rank."""
    arena = comm.arena
    offsets: list[tuple[int, int]] = []
    copies: list[tuple[int, Any]] = []
    end = 0
    for x, (lines, depth) in given:
        elements, scales = _offsets(comm, x)
        if elements is None or scales is None:
            elements, scales = end, end + round_up(lines * depth, ALIGNED)
            end = scales + round_up(MXFP8_FORMAT.scales_nbytes(lines, depth), ALIGNED)
            copies += ((elements, x.elements), (scales, x.scales))
        offsets.append((elements, scales))
    if copies:
        arena.workspace(end, op)
    for at, part in copies:
        comm.device.array(arena.address(comm.rank, at), part.shape, np.uint8, arena.owner)[...] = part
    return offsets


def fill_sources(comm: Communicator, elements: np.ndarray, scales: np.ndarray, offsets: tuple[int, int]) -> None:
    """Where each rank's matrix lies."""
    fill_addresses(comm, elements, offsets[0])
    fill_addresses(comm, scales, offsets[1])


# -- what tiles of this rank read


def mx_is_plain(comm: Communicator, x: MxArray, lines: int = 0) -> bool:
    """Whether tiles can read it as it lies: fill_factor makes no copy."""
    if x.values is not None:
        return lines <= len(x.values)
    return comm.device.multiplies_mxfp8 and lines <= x.lines


def fill_factor(comm: Communicator, params: np.ndarray, name: str, place: str, x: MxArray, lines: int = 0) -> Matrix:
    """Fills the field `name` of a params struct and that of its scales. Copies are kept under `place`: of what is
    padded with lines of zeros to `lines`, and of BF16 where the device multiplies that, if x brings none. Returns: what
    tiles read."""
    if x.values is None or lines > len(x.values):
        x = _padded(comm, place, x, lines)
    address = comm.device.address_of(x.elements)
    if x.values is not None:
        address = comm.device.address_of(x.values)
    elif not comm.device.multiplies_mxfp8:
        address = comm.local(f"{place}.values", x.lines * x.depth * 2)
        dequantize(comm, x, address, x.depth)
    params[name] = address
    params[f"{name}_scales"]["words"] = comm.device.address_of(x.scales)
    params[f"{name}_scales"]["ld"] = x.scales.shape[1]
    return Matrix(address, max(x.lines, lines), x.depth, x.depth, by_rows=True)


def _padded(comm: Communicator, place: str, x: MxArray, lines: int) -> MxArray:
    if lines <= x.lines:
        return x
    own, depth, ld = x.lines, x.depth, round_up(lines, 4)
    shape, groups = ((lines, x.shape[1]), (lines,)) if x.axis == 1 else ((x.shape[0], lines), x.groups)
    address = comm.local(place, MXFP8_FORMAT.nbytes(lines, depth))
    elements = comm.device.array(address, (lines, depth), np.uint8, comm)
    scales = comm.device.array(address + lines * depth, (depth // STEP, ld, 4), np.uint8, comm)
    elements[:own], elements[own:] = x.elements, 0
    scales[:, :own], scales[:, own:] = x.scales[:, :own], 0
    return MxArray(elements, scales, x.axis, shape, groups)


# -- what is gathered


def fill_gathered_rows(comm: Communicator, params: np.ndarray, plan: Plan, own: MxArray) -> list[Matrix]:
    """Room for the rows of all ranks, whose own part is there already. Returns: what tiles read."""
    depth, steps = plan.padded_k, plan.padded_k // STEP
    params["gathered"] = comm.local(f"{plan.op}.gathered", plan.m * depth)
    params["mx"]["scales"] = comm.local(f"{plan.op}.scales", (-(-plan.m // 4) + plan.ranks) * steps * 16)
    if comm.device.multiplies_mxfp8:
        return []
    params["mx"]["values"] = values = comm.local(f"{plan.op}.values", plan.m * depth * 2)
    dequantize(comm, own, values + plan.first[comm.rank] * depth * 2, depth)
    return [Matrix(values, plan.m, depth, depth, by_rows=True)]


def keep_own_columns(comm: Communicator, own: MxArray, gathered: MxArray) -> None:
    """Kernels gather peers' columns alone."""
    first, end = group_starts(gathered.groups)[comm.rank : comm.rank + 2]
    gathered.elements[:, first:end] = own.elements
    gathered.scales[first // STEP : end // STEP] = own.scales


def fill_columns(comm: Communicator, columns: np.ndarray, gathered: MxArray) -> None:
    """The struct MxColumns but for where peers' are."""
    starts = group_starts(gathered.groups)
    columns["gathered"] = comm.device.address_of(gathered.elements)
    columns["mx"]["scales"] = comm.device.address_of(gathered.scales)
    columns["first"][0] = [*starts, *[starts[-1]] * (columns["first"].shape[1] - len(starts))]
    columns["ld"] = gathered.scales.shape[1]


def fill_lines(chunks: np.ndarray, plan: Plan, lines: Sequence[int]) -> None:
    """The struct Chunks of as many lines as each rank has."""
    ends = np.cumsum([0, *lines])
    chunks["first"][0] = [*ends, *[ends[-1]] * (chunks["first"].shape[1] - len(ends))]
    chunks["tile_m"], chunks["tile_rows_max"] = plan.tile.m, -(-max(lines) // plan.tile.m)
