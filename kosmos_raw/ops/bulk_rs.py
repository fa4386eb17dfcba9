"""bulk_rs: add over ranks and deal the rows out beside a weight gradient, in one launch a rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..build.params import BULK_RS, BULK_RS_MXFP8, INTO
from ..device.base import Matrix
from ..plan.bulk import BulkRsPlan, plan_bulk_rs
from ..plan.shapes import BF16_FORMAT, MXFP8_FORMAT, split_rows
from ..ranks.communicator import Communicator
from .arguments import (
    as_matrix,
    call_again,
    dealt_rows,
    factors,
    fill_addresses,
    fill_geometry,
    grid_of,
    hand_over,
    in_arena,
    is_plain,
    local_operand,
    result,
    result_address,
    symmetric_operand,
)
from .mx_arguments import fill_factor, mx_factors, mx_is_plain
from .quantize import MxArray

OP = "bulk_rs"


def bulk_rs(
    comm: Communicator,
    x: Any,
    a: Any,
    b: Any,
    *,
    rows: Sequence[int] | None = None,
    out: Any | None = None,
    c: Any | None = None,
    accumulate: bool = False,
    policy: str | None = None,
    movers: int | None = None,
    max_movers: int | None = None,
    split: int | None = None,
) -> tuple[Any, Any]:
    """Adds X over all ranks, keeps this rank's rows and, beside that, multiplies C = A.T @ B of this rank.

    X is BF16, added in FP32 in rank order and rounded once; the product is accumulated in FP32. All ranks call it
    together. The weight gradient of a column-parallel linear layer under TP+SP (paper section 3.2.3): X is dX of the
    data gradient before, A is dY and B the gathered input.

    Args:
        x: bf16 [M, width], of the same shape on all ranks; in memory of `comm.empty` on every rank it needs no copy.
        a: bf16 [K, M']. b: bf16 [K, N']. Both of this rank alone. Or MxArrays of these shapes along axis 0, in equal
            groups.
        rows: how many of the M rows each rank gets, in order; any may be 0. None deals them evenly.
        out: bf16 [rows[rank], width] to fill; None allocates it.
        c: bf16 or float32 [M', N'] to fill, or to add to with `accumulate`; None allocates bf16.
        policy: "one_way" (who finds no more work of its own kind takes the other kind), "fixed" (it leaves), or on cuda
            "beside" (all WGs build, and a warp of each adds meanwhile; the contraction is not cut). None: "one_way", or
            "beside" where there is such a warp, no cut, and a product long enough that it is expected to end sooner.
        movers, max_movers: WGs that begin as movers (with "beside": whose warp adds), and how many may be; None asks
            plan.bulk.
        split: into how many parts the contraction is cut, each added in FP32 in order; None asks plan.bulk.
    Returns: (this rank's rows of the sum of X, C).
    Raises: as ag_gemm.
    """
    options = (rows if rows is None else tuple(rows), accumulate, policy, movers, max_movers, split)
    key, again = call_again(comm, OP, (x, a, b, out, c), *options)
    if again:
        return out, c
    x = as_matrix(comm, OP, "x", x)
    a, b = _factors(comm, a, b)
    every = tuple(split_rows(x.shape[0], comm.ranks)) if rows is None else dealt_rows(comm, OP, "x", x.shape[0], rows)
    out = result(comm, OP, out, (every[comm.rank], x.shape[1]), x.dtype, {"x": x, **_arrays(a, b)})
    c = _product(comm, every, x, a, b, out, c, accumulate, policy, movers, max_movers, split, key)
    return out, c


def gemm_wgrad(
    comm: Communicator, a: Any, b: Any, *, c: Any | None = None, accumulate: bool = False, split: int | None = None
) -> Any:
    """C = A.T @ B of this rank, with nothing beside it: the weight gradient of a row-parallel layer, whose dY is there
    already. All ranks call it together, though nothing is exchanged. Arguments as of bulk_rs.
    """
    key, again = call_again(comm, "gemm_wgrad", (a, b, c), accumulate, split)
    if again:
        return c
    a, b = _factors(comm, a, b)
    nothing = comm.device.xp.empty((0, 0), np.uint16)
    return _product(comm, (0,) * comm.ranks, nothing, a, b, nothing, c, accumulate, "one_way", None, None, split, key)


def _factors(comm: Communicator, a: Any, b: Any) -> tuple[Any, Any]:
    if isinstance(a, MxArray) or isinstance(b, MxArray):
        return mx_factors(comm, OP, a, b, 0, 0)
    return factors(comm, OP, a, b, 0, 0)


def _arrays(a: Any, b: Any) -> dict[str, Any]:
    """What must not overlap results."""
    return {name: x.elements if isinstance(x, MxArray) else x for name, x in (("a", a), ("b", b))}


def _product(
    comm: Communicator,
    every: tuple[int, ...],
    x: Any,
    a: Any,
    b: Any,
    out: Any,
    c: Any | None,
    accumulate: bool,
    policy: str | None,
    movers: int | None,
    max_movers: int | None,
    split: int | None,
    key: Hashable | None,
) -> Any:
    form = MXFP8_FORMAT if isinstance(a, MxArray) else BF16_FORMAT
    (m, n), k = (a.shape[1], b.shape[1]), a.depth if isinstance(a, MxArray) else a.shape[0]
    if accumulate and c is None:
        raise ValueError(f"{OP}: accumulate=True adds to c; give the array c")
    dtype = np.uint16 if isinstance(a, MxArray) else a.dtype
    c = result(comm, OP, c, (m, n), dtype, {"x": x, **_arrays(a, b), "out": out}, "c", float32=True)
    plan = plan_bulk_rs(
        every,
        x.shape[1],
        (m, n, k),
        grid_of(comm, OP if form is BF16_FORMAT else f"{OP}_{form.dtype}"),
        policy=policy,
        movers=movers,
        max_movers=max_movers,
        split=split,
        form=form,
    )
    _launch(comm, plan, x, a, b, out, c, accumulate, key)
    return c


def _launch(
    comm: Communicator,
    plan: BulkRsPlan,
    x: Any,
    a: Any,
    b: Any,
    out: Any,
    c: Any,
    accumulate: bool,
    key: Hashable | None,
) -> None:
    params = np.zeros(1, BULK_RS if plan.form is BF16_FORMAT else BULK_RS_MXFP8)
    offset = symmetric_operand(comm, OP, x, plan.padded_width, plan.x_bytes)
    fill_addresses(comm, params["x_of"], offset)
    fill_geometry(params, plan)
    params["out"] = rows = result_address(comm, f"{OP}.out", out, plan.padded_width)
    operands = _operands(comm, plan, params, a, b)
    params["c"], copy = result_or_copy(comm, f"{OP}.c", c, plan.padded_n, accumulate)
    params["split"]["parts"], params["split"]["step"] = plan.cut.parts, plan.cut.step
    params["split"]["sums"] = comm.local(f"{OP}.sums", plan.sums_bytes)
    params["width"], params["M"], params["N"], params["K"] = plan.padded_width, plan.gemm_m, plan.n, plan.k
    params["lda"], params["ldc"] = plan.padded_m, plan.padded_n
    params["max_movers"], params["slices"], params["halved"] = plan.crew.max_movers, plan.slices, plan.halved
    params["into"] = into_number(c, accumulate)
    call = (plan.form.dtype, plan.rows, plan.width, offset)
    if plan.form is MXFP8_FORMAT:
        plain = mx_is_plain(comm, a) and mx_is_plain(comm, b)
    else:
        plain = is_plain(comm, a, plan.padded_m) and is_plain(comm, b, plan.padded_n)
    plain = plain and is_plain(comm, out, plan.padded_width) and copy is None
    if not (plain and (x.size == 0 or in_arena(comm, x, plan.padded_width))):
        key = None
    comm.launch(OP, params, call, plan.counter_words, operands, kernel=plan.kernel, key=key)
    hand_over(comm, rows, out, plan.padded_width)
    if copy is not None:
        bits(c)[...] = copy[:, : plan.n]


def _operands(comm: Communicator, plan: BulkRsPlan, params: np.ndarray, a: Any, b: Any) -> list[Matrix]:
    """Fills in both factors. Returns: what tiles read."""
    if plan.form is MXFP8_FORMAT:
        return [fill_factor(comm, params, side, f"{OP}.{side}", factor) for side, factor in (("a", a), ("b", b))]
    params["a"] = local_operand(comm, f"{OP}.a", a, plan.padded_m)
    params["b"] = local_operand(comm, f"{OP}.b", b, plan.padded_n)
    return [
        Matrix(int(params["a"][0]), plan.k, plan.padded_m, plan.padded_m),
        Matrix(int(params["b"][0]), plan.k, plan.padded_n, plan.padded_n),
    ]


def into_number(c: Any, accumulate: bool) -> int:
    """An Into (hip_kernels/work/sum.h) for a result in `c`."""
    return INTO.index(f"{'add' if accumulate else 'set'}_{'f32' if c.dtype == np.float32 else 'bf16'}")


def bits(array: Any) -> Any:
    """BF16 as uint16, which every array library knows."""
    return array if array.dtype == np.float32 else array.view(np.uint16)


def result_or_copy(comm: Communicator, name: str, c: Any, columns: int, accumulate: bool) -> tuple[int, Any | None]:
    """Where the kernel writes C with rows of `columns`, and that place as an array when it is not C itself."""
    if is_plain(comm, c, columns):
        return comm.device.address_of(c), None
    given = bits(c)
    address = comm.local(name, len(c) * columns * given.dtype.itemsize)
    copy = comm.device.array(address, (len(c), columns), given.dtype, comm)
    if accumulate:
        copy[:, : c.shape[1]] = given
    return address, copy
