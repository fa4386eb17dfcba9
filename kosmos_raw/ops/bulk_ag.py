"""bulk_ag: gather rows beside a product that does not need them, in one launch a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.params import BULK_AG
from ..device.base import Matrix
from ..plan.bulk import BulkAgPlan, plan_bulk_ag
from ..ranks.communicator import Communicator
from .arguments import (
    as_matrix,
    factors,
    fill_addresses,
    fill_geometry,
    fill_pulls,
    grid_of,
    hand_over,
    keep_own_rows,
    local_operand,
    result,
    result_address,
    shard_rows,
    symmetric_operand,
)

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
        policy: "one_way" (a mover whose share is moved becomes a builder), "fixed" (it leaves), or on cuda "beside"
            (all WGs build, and a thread of each pulls meanwhile). None: "beside" where there is one, else "one_way".
        movers: WGs that begin as movers; None asks plan.bulk.
    Returns: (C, X of all ranks).
    Raises: as ag_gemm.
    """
    x = as_matrix(comm, OP, "x", x)
    a, b = factors(comm, OP, a, b, 1, 0)
    every = shard_rows(comm, OP, x.shape[0], rows, "x")
    (m, k), n = a.shape, b.shape[1]
    plan = plan_bulk_ag(every, x.shape[1], (m, n, k), grid_of(comm, OP), policy=policy, movers=movers)
    inputs = {"x": x, "a": a, "b": b}
    out = result(comm, OP, out, (m, n), a.dtype, inputs)
    gathered = result(comm, OP, gathered, (plan.m, plan.width), x.dtype, inputs, "gathered")
    _launch(comm, plan, x, a, b, out, gathered)
    return out, gathered


def _launch(comm: Communicator, plan: BulkAgPlan, x: Any, a: Any, b: Any, out: Any, gathered: Any) -> None:
    params = np.zeros(1, BULK_AG)
    offset = symmetric_operand(comm, OP, x, plan.padded_width, plan.shard_bytes)
    fill_addresses(comm, params["shard_of"], offset)
    fill_geometry(params, plan)
    params["gathered"] = rows = result_address(comm, f"{OP}.gathered", gathered, plan.padded_width)
    params["a"] = local_operand(comm, f"{OP}.a", a, plan.padded_k)
    params["b"] = local_operand(comm, f"{OP}.b", b, plan.padded_n, rows=plan.padded_k)
    params["c"] = c = result_address(comm, f"{OP}.c", out, plan.padded_n)
    params["width"], params["M"], params["N"], params["K"] = plan.padded_width, plan.gemm_m, plan.n, plan.padded_k
    params["ldc"], params["halved"] = plan.padded_n, plan.halved
    fill_pulls(params["pulls"], plan.pulls)
    operands = [
        Matrix(int(params["a"][0]), plan.gemm_m, plan.padded_k, plan.padded_k, plan.tile.m),
        Matrix(int(params["b"][0]), plan.padded_k, plan.padded_n, plan.padded_n),
    ]
    comm.launch(OP, params, (plan.rows, plan.width, offset), plan.counter_words, operands)
    hand_over(comm, c, out, plan.padded_n)
    hand_over(comm, rows, gathered, plan.padded_width)
    keep_own_rows(comm, plan, x, gathered)
