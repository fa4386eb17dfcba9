"""ag_gemm_dgrad: gather rows and multiply by a weight as it lies, in one launch a rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ..device.base import Matrix
from ..plan.ag_gemm import AgGemmPlan, plan_ag_gemm_dgrad
from ..plan.shapes import order_number
from ..ranks.communicator import Communicator
from .ag_gemm import gather_params
from .arguments import (
    call_again,
    factors,
    grid_of,
    hand_over,
    in_arena,
    is_plain,
    keep_own_rows,
    local_operand,
    result,
    result_address,
    shard_rows,
)
from .quantize import MxArray

OP = "ag_gemm_dgrad"


def ag_gemm_dgrad(
    comm: Communicator,
    a: Any,
    b: Any,
    *,
    rows: Sequence[int] | None = None,
    out: Any | None = None,
    gathered: Any | None = None,
    policy: str | None = None,
    order: str = "as_consumed",
    movers: int | None = None,
    split: int | None = None,
) -> Any:
    """Gathers A's rows from every rank and multiplies by B: C = concat(A of all ranks) @ B.

    BF16 in and out, FP32 accumulation, rounded once. All ranks call it together. The data gradient of a row-parallel
    linear layer under TP+SP (paper section 3.2.1, "AG+NN"): A is dY, B the weight as the layer keeps it. In MXFP8 the
    weight gradient is made in the same launch: ag_gemm_grads.

    Args:
        a: this rank's shard, bf16 [rows[rank], K]; in memory of `comm.empty` on every rank it is used without a copy.
        b: this rank's weight, bf16 [K, N]; N may differ from rank to rank.
        rows: the rows of every rank's shard, when they are not all equal; any may be 0.
        out: bf16 [M, N] to fill; None allocates it.
        gathered: bf16 [M, K] to fill with A of all ranks, which the weight gradient needs; None: it is not kept.
        policy, order, movers: as for ag_gemm.
        split: into how many parts the contraction is cut, each added in FP32 in order; None asks plan.ag_gemm.
    Returns: C, bf16 [M, N], of a's dtype.
    Raises: as ag_gemm.
    """
    order_idx = order_number(OP, order)
    key = None  # with `gathered` a call is more than its launch
    if gathered is None:
        every = rows if rows is None else tuple(rows)
        key, again = call_again(comm, OP, (a, b, out), every, policy, order, movers, split)
        if again:
            return out
    if isinstance(a, MxArray) or isinstance(b, MxArray):
        raise TypeError(f"{OP}: a and b are MXFP8; both gradients are then made together: ag_gemm_grads")
    a, b = factors(comm, OP, a, b, 1, 0)
    every = shard_rows(comm, OP, a.shape[0], rows)
    comm.kernel(f"{OP}_split")  # loaded by all ranks, though not all may need it
    n, k, grid = b.shape[1], a.shape[1], grid_of(comm, OP)
    plan = plan_ag_gemm_dgrad(every, n, k, grid, policy=policy, movers=movers, split=split)
    out = result(comm, OP, out, (plan.m, plan.n), a.dtype, {"a": a, "b": b})
    if gathered is not None:
        gathered = result(comm, OP, gathered, (plan.m, plan.k), a.dtype, {"a": a, "b": b, "out": out}, "gathered")
    _launch(comm, plan, a, b, out, gathered, order_idx, key)
    return out


def _launch(
    comm: Communicator,
    plan: AgGemmPlan,
    a: Any,
    b: Any,
    out: Any,
    gathered: Any | None,
    order: int,
    key: Hashable | None,
) -> None:
    width, address = plan.padded_k, local_operand(comm, f"{OP}.b", b, plan.padded_n, rows=plan.padded_k)
    kept = comm.local(f"{OP}.gathered", plan.gathered_bytes) if gathered is None else None
    gathered_at = kept or result_address(comm, f"{OP}.gathered", gathered, width)
    params, call, shards = gather_params(comm, plan, a, address, gathered_at, out, order)
    params["split"]["sums"] = comm.local(f"{OP}.sums", plan.sums_bytes)
    operands = [*shards, Matrix(address, width, plan.padded_n, plan.padded_n)]
    placed = in_arena(comm, a, width) and is_plain(comm, b, plan.padded_n) and is_plain(comm, out, plan.padded_n)
    if not placed or b.shape[0] != width:
        key = None
    comm.launch(OP, params, call, plan.counter_words, operands, kernel=plan.kernel, key=key)
    hand_over(comm, int(params["c"][0]), out, plan.padded_n)
    if gathered is not None:
        hand_over(comm, gathered_at, gathered, width)
        keep_own_rows(comm, plan.rows, a, gathered)
