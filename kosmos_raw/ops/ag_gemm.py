"""ag_gemm: gather rows and multiply, in one launch a rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..build.params import AG_GEMM, AG_GEMM_MXFP8
from ..device.base import Matrix
from ..plan.ag_gemm import AgGemmPlan, plan_ag_gemm
from ..plan.shapes import MXFP8_FORMAT, order_number
from ..ranks.communicator import Communicator
from .arguments import (
    call_again,
    factors,
    fill_addresses,
    fill_geometry,
    fill_pulls,
    grid_of,
    hand_over,
    in_arena,
    is_plain,
    local_operand,
    result,
    result_address,
    shard_rows,
    symmetric_operand,
)
from .mx_arguments import (
    fill_factor,
    fill_gathered_rows,
    fill_sources,
    mx_factors,
    mx_grid,
    mx_in_arena,
    mx_is_plain,
    symmetric_copies,
)
from .quantize import MxArray

OP = "ag_gemm"


def ag_gemm(
    comm: Communicator,
    a: Any,
    b: Any,
    *,
    rows: Sequence[int] | None = None,
    out: Any | None = None,
    policy: str | None = None,
    order: str = "as_consumed",
    movers: int | None = None,
) -> Any:
    """Gathers A's rows from every rank and multiplies by B transposed: C = concat(A of all ranks) @ B.T.

    BF16 or MXFP8 in, BF16 out, FP32 accumulation, rounded once. All ranks call it together. The forward of a
    column-parallel linear layer under TP+SP (paper section 3.2.1, "AG+TN").

    Args:
        a: this rank's shard, bf16 [rows[rank], K]. In memory of `comm.empty` on every rank, or anywhere on every rank:
            then it is first copied there. Or an MxArray of that shape along axis 1; elements and scales are gathered.
        b: this rank's weight, bf16 [N, K]; N may differ from rank to rank. As a, an MxArray along axis 1.
        rows: the rows of every rank's shard, when they are not all equal; any may be 0.
        out: bf16 [M, N] to fill, M the sum of the rows; None allocates it. Must not overlap a or b.
        policy: "one_way" (a mover whose share is moved becomes a builder), "fixed" (it leaves), or "two_way" (builders
            pull too, while their next tile is not there), or on cuda "beside" (all WGs build, and a thread of each
            pulls meanwhile). None: "beside" where there is such a thread, else "one_way".
        order: of the tiles: "as_consumed" (own rows first, then peers' row by row as they come), or for comparison
            "not_own_first" (own rows among them), "chunk_major" (own rows, then peer after peer) or "rank_order" (rank
            after rank). Bits depend on none of these.
        movers: WGs that begin as movers; None asks plan.ag_gemm.
    Returns: C, bf16 [M, N], of a's dtype (of MXFP8: its bits as uint16). Queued on the device's stream; the CPU device
        has finished it.
    Raises:
        TypeError, ValueError: a wrong argument, before anything is launched; the communicator stays usable.
        WaitError: a rank did not come, or came with another call (see Communicator.launch).
    """
    order_idx = order_number(OP, order)
    key, again = call_again(comm, OP, (a, b, out), rows if rows is None else tuple(rows), policy, order, movers)
    if again:
        return out
    if isinstance(a, MxArray) or isinstance(b, MxArray):
        return _mxfp8(comm, a, b, rows, out, policy, order_idx, movers, key)
    a, b = factors(comm, OP, a, b, 1, 1)
    every = shard_rows(comm, OP, a.shape[0], rows)
    plan = plan_ag_gemm(every, b.shape[0], a.shape[1], grid_of(comm, OP), policy=policy, movers=movers)
    out = result(comm, OP, out, (plan.m, plan.n), a.dtype, {"a": a, "b": b})
    _launch(comm, plan, a, b, out, order_idx, key)
    return out


def _launch(comm: Communicator, plan: AgGemmPlan, a: Any, b: Any, out: Any, order: int, key: Hashable | None) -> None:
    width, address = plan.padded_k, local_operand(comm, f"{OP}.b", b, plan.padded_k)
    rows = comm.local(f"{OP}.gathered", plan.gathered_bytes)
    params, call, shards = gather_params(comm, plan, a, address, rows, out, order)
    operands = [*shards, Matrix(address, plan.n, width, width, by_rows=True)]
    if not (in_arena(comm, a, width) and is_plain(comm, b, width) and is_plain(comm, out, plan.padded_n)):
        key = None
    comm.launch(OP, params, call, plan.counter_words, operands, key=key)
    hand_over(comm, int(params["c"][0]), out, plan.padded_n)


def _mxfp8(
    comm: Communicator,
    a: Any,
    b: Any,
    rows: Sequence[int] | None,
    out: Any | None,
    policy: str | None,
    order: int,
    movers: int | None,
    key: Hashable | None,
) -> Any:
    a, b = mx_factors(comm, OP, a, b, 1, 1)
    every = shard_rows(comm, OP, a.shape[0], rows)
    grid = mx_grid(comm, f"{OP}_mxfp8")
    plan = plan_ag_gemm(every, b.shape[0], a.shape[1], grid, policy=policy, movers=movers, form=MXFP8_FORMAT)
    inputs = {"a": a.elements, "b": b.elements}
    out = result(comm, OP, out, (plan.m, plan.n), np.uint16, inputs)
    params = np.zeros(1, AG_GEMM_MXFP8)
    (offsets,) = symmetric_copies(comm, OP, [(a, (max(every), plan.padded_k))])
    fill_sources(comm, params["shard_of"], params["mx"]["scales_of"], offsets)
    operands = fill_gathered_rows(comm, params, plan, a)
    weight = fill_factor(comm, params, "b", f"{OP}.b", b)
    fill_gather(comm, params, plan, out, order)
    operands.append(weight)
    call = (plan.form.dtype, plan.rows, plan.k, offsets)
    as_they_lie = mx_in_arena(comm, a) and mx_is_plain(comm, b) and is_plain(comm, out, plan.padded_n)
    if not (as_they_lie and comm.device.multiplies_mxfp8):  # own rows are made BF16 where tiles need it
        key = None
    comm.launch(OP, params, call, plan.counter_words, operands, kernel=plan.kernel, key=key)
    hand_over(comm, int(params["c"][0]), out, plan.padded_n)
    return out


def fill_gather(comm: Communicator, params: np.ndarray, plan: AgGemmPlan, out: Any, order: int) -> None:
    """What params of all kinds of ag_gemm have, but for operands."""
    fill_geometry(params, plan)
    params["c"] = result_address(comm, f"{plan.op}.c", out, plan.padded_n)
    params["N"], params["K"], params["ldc"], params["order"] = plan.n, plan.padded_k, plan.padded_n, order
    params["queues"], params["together"], params["halved"] = plan.queues, plan.together, plan.halved
    params["split"]["parts"], params["split"]["step"] = plan.cut.parts, plan.cut.step
    fill_pulls(params["pulls"], plan.pulls)


def gather_params(
    comm: Communicator, plan: AgGemmPlan, a: Any, b: int, rows: int, out: Any, order: int
) -> tuple[np.ndarray, tuple[Any, ...], list[Matrix]]:
    """The params struct of ag_gemm and ag_gemm_dgrad, what all ranks must call alike, and A as tiles read it.

    Args: b: where the weight is. rows: where the peers' rows will be. out: the product.
    """
    params, width = np.zeros(1, AG_GEMM), plan.padded_k
    offset = symmetric_operand(comm, plan.op, a, width, plan.shard_bytes)
    fill_addresses(comm, params["shard_of"], offset)
    params["gathered"], params["b"] = rows, b
    fill_gather(comm, params, plan, out, order)
    shards = [Matrix(comm.arena.address(comm.rank, offset), plan.rows[comm.rank], width, width, by_rows=True)]
    if comm.ranks > 1:
        shards.append(Matrix(rows, plan.m, width, width, by_rows=True))
    return params, (plan.rows, plan.k, offset), shards
