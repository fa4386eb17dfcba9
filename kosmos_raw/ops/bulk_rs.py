"""bulk_rs: add over ranks and deal the rows out beside a weight gradient, in one launch a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.params import BULK_RS, INTO
from ..device.base import Matrix
from ..plan.bulk import BulkRsPlan, plan_bulk_rs
from ..plan.shapes import split_rows
from ..ranks.communicator import Communicator
from .arguments import (
    as_matrix,
    dealt_rows,
    factors,
    fill_addresses,
    fill_geometry,
    grid_of,
    hand_over,
    is_plain,
    local_operand,
    result,
    result_address,
    symmetric_operand,
)

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
        a: bf16 [K, M']. b: bf16 [K, N']. Both of this rank alone.
        rows: how many of the M rows each rank gets, in order; any may be 0. None deals them evenly.
        out: bf16 [rows[rank], width] to fill; None allocates it.
        c: bf16 or float32 [M', N'] to fill, or to add to with `accumulate`; None allocates bf16.
        policy: "one_way" (who finds no more work of its own kind takes the other kind) or "fixed" (it leaves).
        movers, max_movers: WGs that begin as movers, and how many may be; None asks plan.bulk.
        split: into how many parts the contraction is cut, each added in FP32 in order; None asks plan.bulk.
    Returns: (this rank's rows of the sum of X, C).
    Raises: as ag_gemm.
    """
    x = as_matrix(comm, OP, "x", x)
    a, b = factors(comm, OP, a, b, 0, 0)
    every = tuple(split_rows(x.shape[0], comm.ranks)) if rows is None else dealt_rows(comm, OP, "x", x.shape[0], rows)
    out = result(comm, OP, out, (every[comm.rank], x.shape[1]), x.dtype, {"x": x, "a": a, "b": b})
    c = _product(comm, every, x, a, b, out, c, accumulate, policy, movers, max_movers, split)
    return out, c


def gemm_wgrad(
    comm: Communicator, a: Any, b: Any, *, c: Any | None = None, accumulate: bool = False, split: int | None = None
) -> Any:
    """C = A.T @ B of this rank, with nothing beside it: the weight gradient of a row-parallel layer, whose dY is there
    already. All ranks call it together, though nothing is exchanged. Arguments as of bulk_rs.
    """
    a, b = factors(comm, OP, a, b, 0, 0)
    nothing = comm.device.xp.empty((0, 0), a.dtype)
    return _product(comm, (0,) * comm.ranks, nothing, a, b, nothing, c, accumulate, "one_way", None, None, split)


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
) -> Any:
    (k, m), n = a.shape, b.shape[1]
    if accumulate and c is None:
        raise ValueError(f"{OP}: accumulate=True adds to c; give the array c")
    c = result(comm, OP, c, (m, n), a.dtype, {"x": x, "a": a, "b": b, "out": out}, "c", float32=True)
    plan = plan_bulk_rs(
        every,
        x.shape[1],
        (m, n, k),
        grid_of(comm, OP),
        policy=policy,
        movers=movers,
        max_movers=max_movers,
        split=split,
    )
    _launch(comm, plan, x, a, b, out, c, accumulate)
    return c


def _launch(comm: Communicator, plan: BulkRsPlan, x: Any, a: Any, b: Any, out: Any, c: Any, accumulate: bool) -> None:
    params = np.zeros(1, BULK_RS)
    offset = symmetric_operand(comm, OP, x, plan.padded_width, plan.x_bytes)
    fill_addresses(comm, params["x_of"], offset)
    fill_geometry(params, plan)
    params["out"] = rows = result_address(comm, f"{OP}.out", out, plan.padded_width)
    params["a"] = local_operand(comm, f"{OP}.a", a, plan.padded_m)
    params["b"] = local_operand(comm, f"{OP}.b", b, plan.padded_n)
    params["c"], copy = _result(comm, plan, c, accumulate)
    params["split"]["parts"], params["split"]["step"] = plan.cut.parts, plan.cut.step
    params["split"]["sums"] = comm.local(f"{OP}.sums", plan.sums_bytes)
    params["width"], params["M"], params["N"], params["K"] = plan.padded_width, plan.gemm_m, plan.n, plan.k
    params["lda"], params["ldc"] = plan.padded_m, plan.padded_n
    params["max_movers"], params["slices"], params["halved"] = plan.crew.max_movers, plan.slices, plan.halved
    into = f"{'add' if accumulate else 'set'}_{'f32' if c.dtype == np.float32 else 'bf16'}"
    params["into"] = INTO.index(into)
    operands = [
        Matrix(int(params["a"][0]), plan.k, plan.padded_m, plan.padded_m),
        Matrix(int(params["b"][0]), plan.k, plan.padded_n, plan.padded_n),
    ]
    comm.launch(OP, params, (plan.rows, plan.width, offset), plan.counter_words, operands)
    hand_over(comm, rows, out, plan.padded_width)
    if copy is not None:
        _bits(c)[...] = copy[:, : plan.n]


def _bits(array: Any) -> Any:
    """BF16 as uint16, which every array library knows."""
    return array if array.dtype == np.float32 else array.view(np.uint16)


def _result(comm: Communicator, plan: BulkRsPlan, c: Any, accumulate: bool) -> tuple[int, Any | None]:
    """Where the kernel writes C, and that place as an array when it is not C itself."""
    if is_plain(comm, c, plan.padded_n):
        return comm.device.address_of(c), None
    bits = _bits(c)
    address = comm.local(f"{OP}.c", plan.gemm_m * plan.padded_n * bits.dtype.itemsize)
    copy = comm.device.array(address, (plan.gemm_m, plan.padded_n), bits.dtype, comm)
    if accumulate:
        copy[:, : plan.n] = bits
    return address, copy
