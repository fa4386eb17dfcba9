"""ag_gemm_grads: both gradients of a row-parallel layer in MXFP8, in one launch a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..build.params import AG_GEMM_GRADS
from ..device.base import Matrix
from ..plan.ag_gemm import plan_ag_gemm_grads
from ..plan.shapes import VECTOR, order_number, round_up
from ..ranks.communicator import Communicator
from .ag_gemm import fill_gather
from .arguments import fill_pulls, hand_over, result, shard_rows
from .bulk_rs import bits, into_number, result_or_copy
from .mx_arguments import (
    checked,
    fill_columns,
    fill_factor,
    fill_gathered_rows,
    fill_lines,
    fill_sources,
    keep_own_columns,
    mx_grid,
    same_contraction,
    symmetric_copies,
)
from .quantize import STEP, MxArray, dequantize, group_starts

OP, KERNEL = "ag_gemm_dgrad", "ag_gemm_grads"


def ag_gemm_grads(
    comm: Communicator,
    a: MxArray,
    a_columns: MxArray,
    b: MxArray,
    x: MxArray,
    *,
    rows: Sequence[int] | None = None,
    out: Any | None = None,
    c: Any | None = None,
    accumulate: bool = False,
    policy: str | None = None,
    order: str = "as_consumed",
    movers: int | None = None,
) -> tuple[Any, Any]:
    """Gathers A from every rank, by rows and by columns, and multiplies both: out = A of all ranks @ B, and
    C = (A of all ranks).T @ X.

    MXFP8 in, FP32 accumulation. All ranks call it together. Both gradients of a row-parallel linear layer under TP+SP
    (paper section 3.2.1, "AG+NN+NT"): A is dY, B the weight, X the layer's input.

    Args:
        a: this rank's shard of A, [rows[rank], K], along axis 1. a_columns: the same along axis 0. In the arena
            (`MxArray.empty(symmetric=True)`) on every rank they are used without a copy.
        b: this rank's weight, [K, N] along axis 0. x: [M, N'] of this rank along axis 0, in groups as `rows`.
        rows: the rows of every rank's shard, when they are not all equal; any may be 0.
        out: bf16 [M, N] to fill; None allocates it.
        c: bf16 or float32 [K, N'] to fill, or to add to with `accumulate`; None allocates bf16.
        policy, order, movers: as for ag_gemm.
    Returns: (out, C).
    Raises: as ag_gemm.
    """
    order_idx = order_number(OP, order)
    a, a_columns = checked(comm, OP, "a", a, 1), checked(comm, OP, "a_columns", a_columns, 0)
    b, x = checked(comm, OP, "b", b, 0), checked(comm, OP, "x", x, 0)
    every = shard_rows(comm, OP, a.shape[0], rows)
    if a_columns.shape != a.shape or len([n for n in a_columns.groups if n]) > 1:
        raise ValueError(
            f"{OP}: a_columns is {a_columns.shape} in groups of {a_columns.groups}, want a's {a.shape} in one group"
        )
    same_contraction(OP, "a", a, "b", b)
    (m, k), n, gradient_n = (sum(every), a.shape[1]), b.shape[1], x.shape[1]
    gathered_like = MxArray(None, None, 0, (m, k), every)
    same_contraction(OP, "a of all ranks", gathered_like, "x", x)
    plan = plan_ag_gemm_grads(every, n, k, gradient_n, mx_grid(comm, KERNEL), policy=policy, movers=movers)
    if accumulate and c is None:
        raise ValueError(f"{OP}: accumulate=True adds to c; give the array c")
    inputs = {"a": a.elements, "a_columns": a_columns.elements, "b": b.elements, "x": x.elements}
    out = result(comm, OP, out, (m, n), np.uint16, inputs)
    c = result(comm, OP, c, (k, gradient_n), np.uint16, {**inputs, "out": out}, "c", float32=True)

    params = np.zeros(1, AG_GEMM_GRADS)
    sizes = [(a, (max(every), plan.padded_k)), (a_columns, (k, max(plan.depths)))]
    offsets = symmetric_copies(comm, OP, sizes)
    columns = params["columns"]
    fill_sources(comm, params["shard_of"], params["mx"]["scales_of"], offsets[0])
    fill_sources(comm, columns["of"], columns["mx"]["scales_of"], offsets[1])
    operands = fill_gathered_rows(comm, params, plan, a)
    gathered = _room(comm, gathered_like)
    keep_own_columns(comm, a_columns, gathered)
    fill_columns(comm, columns, gathered)
    if not comm.device.multiplies_mxfp8:
        depth = gathered.depth
        columns["mx"]["values"] = values = comm.local(f"{OP}.columns.values", k * depth * 2)
        dequantize(comm, a_columns, values + group_starts(every)[comm.rank] * 2, depth)
        operands.append(Matrix(values, k, depth, depth, by_rows=True))
    for name, factor in (("b", b), ("x", x)):
        operands.append(fill_factor(comm, params, name, f"{OP}.{name}", factor))
    fill_gather(comm, params, plan, out, order_idx)
    fill_lines(params["column_m"], plan, plan.column_rows)
    fill_pulls(params["column_pulls"], replace(plan.pulls, slices=plan.column_slices))
    ld = round_up(gradient_n, VECTOR)
    params["gradient"], copy = result_or_copy(comm, f"{OP}.gradient", c, ld, accumulate)
    params["features"], params["gradient_N"], params["gradient_ld"] = k, gradient_n, ld
    params["into"] = into_number(c, accumulate)
    call = (KERNEL, plan.rows, plan.k, *offsets)
    comm.launch(OP, params, call, plan.counter_words, operands, kernel=plan.kernel)
    hand_over(comm, int(params["c"][0]), out, plan.padded_n)
    if copy is not None:
        bits(c)[...] = copy[:, :gradient_n]
    return out, c


def _room(comm: Communicator, like: MxArray) -> MxArray:
    """Local memory for the columns of all ranks."""
    lines, depth = like.lines, like.depth
    shape = (depth // STEP, round_up(lines, 4), 4)
    elements = comm.device.array(comm.local(f"{OP}.columns", lines * depth), (lines, depth), np.uint8, comm)
    scales = comm.device.array(comm.local(f"{OP}.column_scales", int(np.prod(shape))), shape, np.uint8, comm)
    return replace(like, elements=elements, scales=scales)
