"""quantize_mxfp8: BF16 to MXFP8 on the device, along rows, columns, or both in one pass; back for tiles of BF16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..build.params import DEQUANTIZE_MXFP8, MAX_RANKS, QUANTIZE_MXFP8
from ..numerics import mxfp8
from ..numerics.mxfp8 import BLOCK, RULES
from ..plan.shapes import VECTOR, round_up
from ..ranks.communicator import Communicator
from .arguments import as_matrix, local_operand

OP, BACK = "quantize_mxfp8", "dequantize_mxfp8"
STEP = 128  # hip_kernels/work/mxfp8.h: depths are padded to it
TILE = 128  # hip_kernels/work/quantize.h


@dataclass(frozen=True)
class MxArray:
    """A matrix of `shape`, quantised along one axis: what contracts over that axis takes it.

    Lines run along the axis, so a copy of columns (axis 0) is transposed: lines are the source's rows (axis 1) or
    columns (axis 0). `groups` are counts of rows of which none shares a block with another: along axis 0 each is padded
    with zeros to 128, and so are the columns along axis 1.
    """

    elements: Any  # uint8 [lines, depth]: E4M3, as ml_dtypes.float8_e4m3fn has them
    scales: Any  # uint8 [depth / 128, lines rounded up to 4, 4]: E8M0, four bytes for 128 elements of a line
    axis: int
    shape: tuple[int, int]
    groups: tuple[int, ...]
    values: Any = None  # bf16 bits [lines rounded up to 8, depth] for tiles, where they multiply that: see `reused`

    @property
    def parts(self) -> tuple[Any, ...]:
        """The arrays that hold it."""
        return (self.elements, self.scales) if self.values is None else (self.elements, self.scales, self.values)

    @property
    def form(self) -> tuple[Any, ...]:
        """What they do not say themselves."""
        return self.axis, self.shape, self.groups

    @property
    def lines(self) -> int:
        return self.shape[1 - self.axis]

    @property
    def depth(self) -> int:
        """The contraction as it lies in memory."""
        return depth_of(self.shape, self.axis, self.groups)

    @property
    def nbytes(self) -> int:
        return int(self.elements.nbytes + self.scales.nbytes)

    def scales_by_line(self) -> np.ndarray:
        """On the host, uint8 [lines, depth / 32]: as most others keep them."""
        return _on_host(self.scales)[:, : self.lines].transpose(1, 0, 2).reshape(self.lines, self.depth // BLOCK)

    def dequantize(self) -> np.ndarray:
        """On the host, in float64, of `shape`: without padding, and never transposed."""
        values = mxfp8.dequantize(_on_host(self.elements), self.scales_by_line())
        if self.axis == 1:
            return values[:, : self.shape[1]]
        starts = group_starts(self.groups)
        parts = [values[:, at : at + rows] for at, rows in zip(starts, self.groups, strict=False)]
        return np.concatenate(parts, axis=1).T

    @classmethod
    def empty(
        cls,
        comm: Communicator,
        shape: tuple[int, int],
        axis: int = 1,
        *,
        groups: Sequence[int] | None = None,
        symmetric: bool = False,
        most_rows: int | None = None,
    ) -> MxArray:
        """One to fill. symmetric: in the arena (`Communicator.empty`), where peers read it without a copy; most_rows:
        the most rows that any rank's has then, if they differ."""
        groups = _groups(shape[0], groups)

        def shapes(shape: tuple[int, int], groups: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
            lines, depth = shape[1 - axis], depth_of(shape, axis, groups)
            return (lines, depth), (depth // STEP, round_up(lines, 4), 4)

        most = shapes((most_rows, shape[1]), (most_rows,)) if most_rows is not None else shapes(shape, groups)
        parts = []
        for want, room in zip(shapes(shape, groups), most, strict=True):
            count, all_bytes = int(np.prod(want)), int(np.prod(room))
            made = comm.empty((all_bytes,), np.uint8) if symmetric else comm.device.xp.empty((count,), np.uint8)
            parts.append(made[:count].reshape(want))
        elements, scales = parts
        if scales.shape[1] > shape[1 - axis]:
            scales[:, shape[1 - axis] :] = 0  # words of no line: equal bits, whoever copies them
        return cls(elements, scales, axis, shape, groups)

    def free(self, comm: Communicator) -> None:
        """Gives one of `empty(symmetric=True)` back; see `Communicator.free`."""
        for part in (self.elements, self.scales):
            comm.free(part)


def depth_of(shape: tuple[int, int], axis: int, groups: Sequence[int]) -> int:
    """The padded contraction of a copy along `axis`."""
    return round_up(shape[1], STEP) if axis == 1 else group_starts(groups)[-1]


def group_starts(groups: Sequence[int]) -> list[int]:
    """Where each group of rows begins in a line of a copy along axis 0; the last entry is where the last one ends."""
    starts = [0]
    for rows in groups:
        starts.append(starts[-1] + round_up(rows, STEP))
    return starts


def quantize_mxfp8(
    comm: Communicator,
    x: Any,
    axis: int | tuple[int, ...] = 1,
    *,
    rule: str = "up",
    groups: Sequence[int] | None = None,
    reused: bool = False,
    out: MxArray | tuple[MxArray, ...] | None = None,
) -> Any:
    """Quantises a matrix of this rank to MXFP8. Nothing is exchanged; the first call is made on all ranks together.

    Blocks of 32 along the contraction share a scale; numerics/mxfp8.py says which, and what becomes of NaNs. Both
    copies come from the BF16 source: one made from the other would be rounded twice.

    Args:
        x: bf16 [rows, columns].
        axis: 1 for what contracts over columns (forward, data gradients), 0 for what contracts over rows (weight
            gradients); (1, 0) for both copies in one pass.
        rule: "up" (as Transformer Engine), "floor" or "even".
        groups: at most 8 counts whose sum is rows: along axis 0 no block has rows of two groups. None: all are one.
        reused: many calls will multiply it, as a weight. Where tiles multiply BF16 (sm_90a), that is then made of it
            now, and kept with it, instead of by every call. Nothing elsewhere.
        out: to fill, one for each axis asked for; None allocates. What is kept with it is made anew.
    Returns: an MxArray, or a tuple of two.
    Raises: TypeError, ValueError: a wrong argument, before anything is launched.
    """
    x = as_matrix(comm, OP, "x", x)
    axes = axis if isinstance(axis, tuple) else (axis,)
    if sorted(axes) not in ([0], [1], [0, 1]):
        raise ValueError(f"{OP}: axis is {axis!r}, want 0, 1, or both as a tuple")
    if rule not in RULES:
        raise ValueError(f"{OP}: rule is {rule!r}, want one of {', '.join(RULES)}")
    shape = (int(x.shape[0]), int(x.shape[1]))
    groups = _groups(shape[0], groups)
    given = (out,) if isinstance(out, MxArray) else out
    copies = tuple(MxArray.empty(comm, shape, a, groups=groups) for a in axes) if given is None else given
    for asked, copy in zip(axes, copies, strict=True):
        if (copy.axis, copy.shape, copy.groups) != (asked, shape, groups):
            raise ValueError(
                f"{OP}: out has axis {copy.axis}, shape {copy.shape} and groups {copy.groups}, want {asked}, {shape} "
                f"and {groups}"
            )
    if reused and not comm.device.multiplies_mxfp8:
        copies = tuple(_with_values(comm, copy) for copy in copies)
    _launch(comm, x, copies, rule)
    for copy in copies:
        if copy.values is not None:
            dequantize(comm, copy, comm.device.address_of(copy.values), copy.depth)
    return copies if isinstance(axis, tuple) else copies[0]


def _launch(comm: Communicator, x: Any, copies: Sequence[MxArray], rule: str) -> None:
    columns, groups = int(x.shape[1]), copies[0].groups
    params = np.zeros(1, QUANTIZE_MXFP8)
    width = round_up(columns, VECTOR)
    params["x"] = local_operand(comm, f"{OP}.x", x, width)
    for copy in copies:
        place = params["by_row" if copy.axis == 1 else "by_column"]
        place["elements"] = comm.device.address_of(copy.elements)
        place["scales"] = comm.device.address_of(copy.scales)
        place["depth"], place["ld_scales"] = copy.depth, copy.scales.shape[1]
    params["m"]["first"][0] = [sum(groups[:q]) for q in range(MAX_RANKS + 1)]
    params["m"]["tile_m"] = TILE
    params["columns"], params["ld"], params["rule"] = columns, width, RULES.index(rule)
    comm.launch_plain(OP, params)


def _with_values(comm: Communicator, x: MxArray) -> MxArray:
    """With room for BF16; lines beyond its own are zeros, as gemm_rs wants them of its weight."""
    if x.values is not None:
        return x
    return replace(x, values=comm.device.xp.zeros((round_up(x.lines, VECTOR), x.depth), np.uint16))


def dequantize(comm: Communicator, x: MxArray, address: int, ld: int) -> None:
    """Makes BF16 of what `x` stands for, lines `ld` elements apart, on the device. The first call is made on all ranks
    together."""
    params = np.zeros(1, DEQUANTIZE_MXFP8)
    params["elements"], params["scales"] = (comm.device.address_of(part) for part in (x.elements, x.scales))
    params["to"], params["ld"] = address, ld
    params["lines"], params["depth"], params["ld_scales"] = x.lines, x.depth, x.scales.shape[1]
    comm.launch_plain(BACK, params)


def _groups(rows: int, groups: Sequence[int] | None) -> tuple[int, ...]:
    every = (rows,) if groups is None else tuple(int(r) for r in groups)
    if len(every) > MAX_RANKS or sum(every) != rows or min(every, default=0) < 0:
        raise ValueError(f"{OP}: groups is {list(every)}, want at most {MAX_RANKS} counts of rows whose sum is {rows}")
    return every


def _on_host(array: Any) -> np.ndarray:
    return np.asarray(array.get() if hasattr(array, "get") else array)
