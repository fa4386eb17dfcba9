"""gemm_rs: multiply, add over ranks and deal the rows out, in one launch a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.params import GEMM_RS
from ..device.base import Matrix
from ..plan.gemm_rs import GemmRsPlan, plan_gemm_rs
from ..plan.shapes import order_number, split_rows
from ..ranks.communicator import Communicator
from .arguments import dealt_rows, factors, fill_geometry, grid_of, hand_over, local_operand, result, result_address

OP = "gemm_rs"


def gemm_rs(
    comm: Communicator,
    a: Any,
    b: Any,
    *,
    rows: Sequence[int] | None = None,
    out: Any | None = None,
    policy: str = "one_way",
    order: str = "as_consumed",
    movers: int | None = None,
    max_movers: int | None = None,
) -> Any:
    """Multiplies by B transposed, adds over all ranks, and keeps this rank's rows: C = (sum of A @ B.T)[own rows].

    BF16 in and out. Each rank's product is accumulated in FP32 and rounded once; the ranks' products are added in FP32
    in rank order and rounded once more. All ranks call it together. The forward of a row-parallel linear layer under
    TP+SP (paper section 3.2.2, "GEMM+RS").

    Args:
        a: this rank's activations, bf16 [M, K]; M is the same on all ranks, K may differ.
        b: this rank's weight, bf16 [N, K]; N is the same on all ranks.
        rows: how many of the M rows each rank gets, in order; any may be 0. None deals them evenly.
        out: bf16 [rows[rank], N] to fill; None allocates it. Must not overlap a or b.
        policy: "one_way" (a builder that finds no tile joins the movers), "fixed" (it leaves), or "two_way" (movers
            build too, while their next band is not there).
        order: of the tiles: "as_consumed" (the first band of every rank's rows first), or for comparison "chunk_major"
            (each rank's rows completely before the next's) or "rank_order" (rows from the first to the last).
            Bits depend on none of these.
        movers: WGs that begin as movers; None asks plan.gemm_rs.
        max_movers: movers at which the links are saturated; None asks plan.gemm_rs.
    Returns: C, bf16 [rows[rank], N], of a's dtype. Queued on the device's stream; the CPU device has finished it.
    Raises:
        TypeError, ValueError: a wrong argument, before anything is launched; the communicator stays usable.
        ArenaFull: the arena has no room for the partial results of this shape, 4 * M * N bytes that it keeps.
        WaitError: a rank did not come, or came with another call (see Communicator.launch).
    """
    order_idx = order_number(OP, order)
    a, b = factors(comm, OP, a, b, 1, 1)
    every = tuple(split_rows(a.shape[0], comm.ranks)) if rows is None else dealt_rows(comm, OP, "a", a.shape[0], rows)
    n, k, grid = b.shape[0], a.shape[1], grid_of(comm, OP)
    plan = plan_gemm_rs(every, n, k, grid, policy=policy, movers=movers, max_movers=max_movers)
    out = result(comm, OP, out, (every[comm.rank], plan.n), a.dtype, {"a": a, "b": b})
    _launch(comm, plan, a, b, out, order_idx)
    return out


def _launch(comm: Communicator, plan: GemmRsPlan, a: Any, b: Any, out: Any, order: int) -> None:
    params = np.zeros(1, GEMM_RS)
    params["a"] = local_operand(comm, f"{OP}.a", a, plan.padded_k)
    params["b"] = local_operand(comm, f"{OP}.b", b, plan.padded_k, rows=plan.padded_n)
    params["c"] = c = result_address(comm, f"{OP}.c", out, plan.padded_n)
    turn = comm.fill_staging(params["staging"], plan.partial_bytes, OP)
    fill_geometry(params, plan)
    params["N"], params["K"], params["order"] = plan.padded_n, plan.padded_k, order
    params["max_movers"], params["band_tile_rows"], params["slices"] = (
        plan.crew.max_movers,
        plan.band_tile_rows,
        plan.slices,
    )
    width, tile = plan.padded_k, plan.tile
    operands = [
        Matrix(int(params["a"][0]), plan.m, width, width, tile.m),
        Matrix(int(params["b"][0]), plan.padded_n, width, width, tile.n),
    ]
    comm.launch(OP, params, (plan.rows, plan.n, turn), plan.counter_words, operands)
    hand_over(comm, c, out, plan.padded_n)
