"""ag_gemm: gather rows and multiply, in one launch a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.params import AG_GEMM, POLICIES
from ..device.base import Matrix
from ..plan.ag_gemm import AgGemmPlan, movers_for, plan_ag_gemm
from ..plan.shapes import order_number
from ..ranks.communicator import Communicator
from .arguments import (
    as_matrix,
    fill_chunks,
    hand_over,
    local_operand,
    pick_tile,
    result,
    result_address,
    shard_rows,
    symmetric_operand,
)

OP = "ag_gemm"


def ag_gemm(
    comm: Communicator,
    a: Any,
    b: Any,
    *,
    rows: Sequence[int] | None = None,
    out: Any | None = None,
    policy: str = "one_way",
    order: str = "as_consumed",
    movers: int | None = None,
) -> Any:
    """Gathers A's rows from every rank and multiplies by B transposed: C = concat(A of all ranks) @ B.T.

    BF16 in and out, FP32 accumulation, rounded once. All ranks call it together. The forward of a column-parallel
    linear layer under TP+SP (paper section 3.2.1, "AG+TN").

    Args:
        a: this rank's shard, bf16 [rows[rank], K]. In memory of `comm.empty` on every rank, or anywhere on every rank:
            then it is first copied there.
        b: this rank's weight, bf16 [N, K]; N may differ from rank to rank.
        rows: the rows of every rank's shard, when they are not all equal; any may be 0.
        out: bf16 [M, N] to fill, M the sum of the rows; None allocates it. Must not overlap a or b.
        policy: "one_way" (a mover whose share is moved becomes a builder), "fixed" (it leaves), or "two_way" (builders
            pull too, while their next tile is not there).
        order: of the tiles: "as_consumed" (own rows first, then peers' row by row as they come), or for comparison
            "chunk_major" (peer after peer) or "rank_order" (rank after rank). Bits depend on none of these.
        movers: WGs that begin as movers; None asks plan.ag_gemm.
    Returns: C, bf16 [M, N], of a's dtype. Queued on the device's stream; the CPU device has finished it.
    Raises:
        TypeError, ValueError: a wrong argument, before anything is launched; the communicator stays usable.
        WaitError: a rank did not come, or came with another call (see Communicator.launch).
    """
    order_idx = order_number(OP, order)
    a = as_matrix(comm, OP, "a", a)
    b = as_matrix(comm, OP, "b", b)
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{OP}: a is {tuple(a.shape)} and b is {tuple(b.shape)}; want the same K in their second dimension "
            "(b is [N, K], as a linear layer keeps its weight)"
        )
    every = shard_rows(comm, OP, a.shape[0], rows)
    n, k = b.shape[0], a.shape[1]
    movers = movers_for(n, comm.ranks, comm.workgroups) if movers is None else movers
    tile = pick_tile(comm, OP, every, n, k, movers)
    plan = plan_ag_gemm(every, n, k, tile, comm.workgroups, policy=policy, movers=movers)
    out = result(comm, OP, out, (plan.m, plan.n), a.dtype, {"a": a, "b": b})
    _launch(comm, plan, a, b, out, order_idx)
    return out


def _launch(comm: Communicator, plan: AgGemmPlan, a: Any, b: Any, out: Any, order: int) -> None:
    params = np.zeros(1, AG_GEMM)
    offset = symmetric_operand(comm, OP, a, plan.padded_k, plan.shard_bytes)
    params["shard_of"][0, : comm.ranks] = [comm.arena.address(q, offset) for q in range(comm.ranks)]
    params["gathered"] = comm.local(f"{OP}.gathered", plan.gathered_bytes)
    params["b"] = local_operand(comm, f"{OP}.b", b, plan.padded_k)
    params["c"] = c = result_address(comm, f"{OP}.c", out, plan.padded_n)
    fill_chunks(params["m"], plan)
    params["m"]["side_by_side"] = plan.side_by_side
    params["N"], params["K"], params["ldc"], params["tile_n"] = plan.n, plan.padded_k, plan.padded_n, plan.tile.n
    params["movers"], params["policy"] = plan.movers, POLICIES.index(plan.policy)
    params["order"] = order
    width, tile = plan.padded_k, plan.tile
    operands = [
        Matrix(comm.arena.address(comm.rank, offset), plan.rows[comm.rank], width, width, tile.m),
        Matrix(int(params["b"][0]), plan.n, width, width, tile.n),
    ]
    if comm.ranks > 1:
        operands.append(Matrix(int(params["gathered"][0]), plan.m, width, width, tile.m))
    comm.launch(OP, params, (plan.rows, plan.k, offset), plan.counter_words, operands)
    hand_over(comm, c, out, plan.padded_n)
