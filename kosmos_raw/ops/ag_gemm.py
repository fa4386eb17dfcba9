"""ag_gemm: gather rows and multiply, in one launch a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.params import AG_GEMM, POLICIES
from ..plan.ag_gemm import AgGemmPlan, plan_ag_gemm
from ..ranks.communicator import Communicator
from .arguments import as_matrix, is_plain, overlaps, padded_copy, shard_rows

OP = "ag_gemm"


def ag_gemm(
    comm: Communicator,
    a: Any,
    b: Any,
    *,
    rows: Sequence[int] | None = None,
    out: Any | None = None,
    policy: str = "one_way",
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
        policy: "one_way" (a mover whose share is moved becomes a builder) or "fixed" (it leaves).
        movers: WGs that begin as movers; None asks plan.ag_gemm.
    Returns: C, bf16 [M, N], of a's dtype. Queued on the device's stream; the CPU device has finished it.
    Raises:
        TypeError, ValueError: a wrong argument, before anything is launched; the communicator stays usable.
        WaitError: a rank did not come, or came with another call (see Communicator.launch).
    """
    a = as_matrix(comm, OP, "a", a)
    b = as_matrix(comm, OP, "b", b)
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{OP}: a is {tuple(a.shape)} and b is {tuple(b.shape)}; want the same K in their second dimension "
            "(b is [N, K], as a linear layer keeps its weight)"
        )
    every = shard_rows(comm, OP, a.shape[0], rows)
    kernel = comm.kernel(OP)
    plan = plan_ag_gemm(every, b.shape[0], a.shape[1], kernel.tile, comm.workgroups, policy=policy, movers=movers)
    if out is None:
        out = comm.device.xp.empty((plan.m, plan.n), a.dtype)
    else:
        out = as_matrix(comm, OP, "out", out)
        _check_out(comm, plan, a, b, out)
    _launch(comm, plan, a, b, out)
    return out


def _check_out(comm: Communicator, plan: AgGemmPlan, a: Any, b: Any, out: Any) -> None:
    if tuple(out.shape) != (plan.m, plan.n):
        raise ValueError(f"{OP}: out has shape {tuple(out.shape)}, want ({plan.m}, {plan.n}) on rank {comm.rank}")
    for name, other in (("a", a), ("b", b)):
        if overlaps(comm, out, other):
            raise ValueError(f"{OP}: out overlaps {name}, which is still read while out is written; give another array")


def _launch(comm: Communicator, plan: AgGemmPlan, a: Any, b: Any, out: Any) -> None:
    device, arena = comm.device, comm.arena
    params = np.zeros(1, AG_GEMM)

    offset = arena.offset_of(device.address_of(a), a.nbytes) if is_plain(comm, a, plan.padded_k) else None
    if offset is None:
        offset = arena.workspace(plan.shard_bytes, OP)
        padded_copy(comm, a, arena.address(comm.rank, offset), plan.padded_k, arena.owner)
    params["shard_of"][0, : comm.ranks] = [arena.address(q, offset) for q in range(comm.ranks)]
    params["gathered"] = comm.local(f"{OP}.gathered", plan.gathered_bytes)

    if is_plain(comm, b, plan.padded_k):
        params["b"] = device.address_of(b)
    else:
        params["b"] = comm.local(f"{OP}.b", plan.n * plan.padded_k * 2)
        padded_copy(comm, b, int(params["b"][0]), plan.padded_k, comm)

    direct = is_plain(comm, out, plan.ldc)
    c = device.address_of(out) if direct else comm.local(f"{OP}.c", plan.m * plan.ldc * 2)
    params["c"] = c

    chunks = params["m"]
    chunks["first"][0] = plan.first
    chunks["tile_m"], chunks["tile_rows_max"] = plan.tile.m, plan.tile_rows_max
    params["N"], params["K"], params["ldc"], params["tile_n"] = plan.n, plan.padded_k, plan.ldc, plan.tile.n
    params["movers"], params["policy"] = plan.movers, POLICIES.index(plan.policy)

    comm.launch(OP, params, (plan.rows, plan.k, offset), plan.counter_words)
    if not direct:
        out.view(np.uint16)[...] = device.array(c, (plan.m, plan.ldc), np.uint16, comm)[:, : plan.n]
