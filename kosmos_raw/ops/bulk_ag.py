"""bulk_ag: gather rows beside a product that does not need them, in one launch a rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..build.params import BULK_AG, BULK_AG_MXFP8
from ..device.base import Matrix
from ..plan.bulk import BulkAgPlan, plan_bulk_ag
from ..plan.shapes import MXFP8_FORMAT
from ..ranks.communicator import Communicator
from .arguments import (
    as_matrix,
    call_again,
    factors,
    fill_addresses,
    fill_geometry,
    fill_pulls,
    grid_of,
    hand_over,
    in_arena,
    is_plain,
    keep_own_rows,
    local_operand,
    result,
    result_address,
    shard_rows,
    symmetric_operand,
)
from .mx_arguments import (
    checked,
    fill_columns,
    fill_factor,
    fill_lines,
    fill_sources,
    keep_own_columns,
    mx_factors,
    mx_grid,
    mx_in_arena,
    mx_is_plain,
    symmetric_copies,
)
from .quantize import MxArray

OP = "bulk_ag"


def bulk_ag(
    comm: Communicator,
    x: Any,
    a: Any,
    b: Any,
    *,
    rows: Sequence[int] | None = None,
    out: Any | None = None,
    gathered: Any | None = None,
    policy: str | None = None,
    movers: int | None = None,
) -> tuple[Any, Any]:
    """Gathers X's rows from every rank and, beside that, multiplies C = A @ B of this rank.

    BF16 in and out, FP32 accumulation. All ranks call it together. The data gradient of a column-parallel linear layer
    under TP+SP (paper section 3.2.3): A is dY, B the weight as the layer keeps it, and X is for the weight gradient.

    Args:
        x: this rank's rows of X, bf16 [rows[rank], width]; in memory of `comm.empty` on every rank it needs no copy.
        a: bf16 [M, K]. b: bf16 [K, N]. Both of this rank alone; M, N and K may differ from rank to rank.
        rows: the rows of every rank's shard of X, when they are not all equal; any may be 0.
        out: bf16 [M, N] to fill. gathered: bf16 [sum of rows, width] to fill. None allocates.
            In MXFP8 all are MxArrays, along the axes of their contractions: x and gathered along 0, one group a rank, a
            along 1, b along 0.
        policy: "one_way" (a mover whose share is moved becomes a builder), "fixed" (it leaves), or on cuda "beside"
            (all WGs build, and a thread of each pulls meanwhile). None: "beside" where there is one, else "one_way".
        movers: WGs that begin as movers; None asks plan.bulk.
    Returns: (C, X of all ranks).
    Raises: as ag_gemm.
    """
    key, again = call_again(comm, OP, (x, a, b, out, gathered), rows if rows is None else tuple(rows), policy, movers)
    if again:
        _keep_own(comm, shard_rows(comm, OP, x.shape[0], rows, "x"), x, gathered)
        return out, gathered
    if any(isinstance(given, MxArray) for given in (x, a, b)):
        return _mxfp8(comm, x, a, b, rows, out, gathered, policy, movers, key)
    x = as_matrix(comm, OP, "x", x)
    a, b = factors(comm, OP, a, b, 1, 0)
    every = shard_rows(comm, OP, x.shape[0], rows, "x")
    (m, k), n = a.shape, b.shape[1]
    plan = plan_bulk_ag(every, x.shape[1], (m, n, k), grid_of(comm, OP), policy=policy, movers=movers)
    inputs = {"x": x, "a": a, "b": b}
    out = result(comm, OP, out, (m, n), a.dtype, inputs)
    gathered = result(comm, OP, gathered, (plan.m, plan.width), x.dtype, inputs, "gathered")
    _launch(comm, plan, x, a, b, out, gathered, key)
    return out, gathered


def _keep_own(comm: Communicator, rows: Sequence[int], x: Any, gathered: Any) -> None:
    if isinstance(x, MxArray):
        keep_own_columns(comm, x, gathered)
    else:
        keep_own_rows(comm, rows, x, gathered)


def _mxfp8(
    comm: Communicator,
    x: Any,
    a: Any,
    b: Any,
    rows: Sequence[int] | None,
    out: Any | None,
    gathered: MxArray | None,
    policy: str | None,
    movers: int | None,
    key: Hashable | None,
) -> tuple[Any, MxArray]:
    x, (a, b) = checked(comm, OP, "x", x, 0), mx_factors(comm, OP, a, b, 1, 0)
    every, width = shard_rows(comm, OP, x.shape[0], rows, "x"), x.shape[1]
    if len([n for n in x.groups if n]) > 1:
        raise ValueError(f"{OP}: x is in groups of {x.groups}, want this rank's rows in one")
    (m, k), n = a.shape, b.shape[1]
    grid = mx_grid(comm, f"{OP}_mxfp8")
    plan = plan_bulk_ag(every, width, (m, n, k), grid, policy=policy, movers=movers, form=MXFP8_FORMAT)
    inputs = {"x": x.elements, "a": a.elements, "b": b.elements}
    out = result(comm, OP, out, (m, n), np.uint16, inputs)
    if gathered is None:
        gathered = MxArray.empty(comm, (sum(every), width), 0, groups=every)
    gathered = checked(comm, OP, "gathered", gathered, 0)
    if (gathered.shape, gathered.groups) != ((sum(every), width), every):
        raise ValueError(
            f"{OP}: gathered is {gathered.shape} in groups of {gathered.groups}, want {(sum(every), width)} in {every}"
        )
    params = np.zeros(1, BULK_AG_MXFP8)
    columns = params["x"]
    (offsets,) = symmetric_copies(comm, OP, [(x, (width, max(plan.depths)))])
    fill_sources(comm, columns["of"], columns["mx"]["scales_of"], offsets)
    fill_columns(comm, columns, gathered)
    fill_product(comm, params, plan, out)
    fill_lines(params["m"], plan, plan.rows)
    operands = [fill_factor(comm, params, side, f"{OP}.{side}", factor) for side, factor in (("a", a), ("b", b))]
    call = (plan.form.dtype, every, width, offsets)
    plain = mx_is_plain(comm, a) and mx_is_plain(comm, b) and is_plain(comm, out, plan.padded_n)
    if not (plain and mx_in_arena(comm, x)):
        key = None
    comm.launch(OP, params, call, plan.counter_words, operands, kernel=plan.kernel, key=key)
    hand_over(comm, int(params["c"][0]), out, plan.padded_n)
    _keep_own(comm, every, x, gathered)
    return out, gathered


def fill_product(comm: Communicator, params: np.ndarray, plan: BulkAgPlan, out: Any) -> None:
    """What params have of the product, but for its factors, and of who moves."""
    fill_geometry(params, plan)
    params["c"] = result_address(comm, f"{OP}.c", out, plan.padded_n)
    params["width"], params["M"], params["N"], params["K"] = plan.padded_width, plan.gemm_m, plan.n, plan.padded_k
    params["ldc"], params["halved"] = plan.padded_n, plan.halved
    fill_pulls(params["pulls"], plan.pulls)


def _launch(
    comm: Communicator, plan: BulkAgPlan, x: Any, a: Any, b: Any, out: Any, gathered: Any, key: Hashable | None
) -> None:
    params = np.zeros(1, BULK_AG)
    offset = symmetric_operand(comm, OP, x, plan.padded_width, plan.shard_bytes)
    fill_addresses(comm, params["shard_of"], offset)
    fill_product(comm, params, plan, out)
    params["gathered"] = rows = result_address(comm, f"{OP}.gathered", gathered, plan.padded_width)
    params["a"] = local_operand(comm, f"{OP}.a", a, plan.padded_k)
    params["b"] = local_operand(comm, f"{OP}.b", b, plan.padded_n, rows=plan.padded_k)
    operands = [
        Matrix(int(params["a"][0]), plan.gemm_m, plan.padded_k, plan.padded_k, by_rows=True),
        Matrix(int(params["b"][0]), plan.padded_k, plan.padded_n, plan.padded_n),
    ]
    factors_and_results = ((a, plan.padded_k), (b, plan.padded_n), (out, plan.padded_n), (gathered, plan.padded_width))
    plain = b.shape[0] == plan.padded_k and all(is_plain(comm, *one) for one in factors_and_results)
    if not (plain and in_arena(comm, x, plan.padded_width)):
        key = None
    comm.launch(OP, params, (plan.rows, plan.width, offset), plan.counter_words, operands, key=key)
    hand_over(comm, int(params["c"][0]), out, plan.padded_n)
    hand_over(comm, rows, gathered, plan.padded_width)
    _keep_own(comm, plan.rows, x, gathered)
