"""gemm_rs: multiply, add over ranks and deal the rows out, in one launch a rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..build.params import GEMM_RS, GEMM_RS_MXFP8, GEMM_RS_PUSH, GEMM_RS_PUSH_MXFP8
from ..device.base import Matrix
from ..plan.gemm_rs import TRANSPORTS, GemmRsPlan, GemmRsPushPlan, plan_gemm_rs, plan_gemm_rs_push
from ..plan.shapes import BF16_FORMAT, MXFP8_FORMAT, Format, Plan, order_number, split_rows
from ..ranks.communicator import Communicator
from .arguments import (
    call_again,
    dealt_rows,
    factors,
    fill_geometry,
    grid_of,
    hand_over,
    is_plain,
    local_operand,
    result,
    result_address,
)
from .mx_arguments import fill_factor, mx_factors, mx_is_plain
from .quantize import MxArray

OP, PUSH = "gemm_rs", "gemm_rs_push"
PUSH_ORDERS = ("as_consumed", "rank_order")


def gemm_rs(
    comm: Communicator,
    a: Any,
    b: Any,
    *,
    rows: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    out: Any | None = None,
    policy: str | None = None,
    order: str = "as_consumed",
    transport: str | None = None,
    movers: int | None = None,
    max_movers: int | None = None,
) -> Any:
    """Multiplies by B transposed, adds over all ranks, and keeps this rank's rows: C = (sum of A @ B.T)[own rows].

    BF16 in and out. Each rank's product is accumulated in FP32 and rounded once; the ranks' products are added in FP32
    in rank order and rounded once more. All ranks call it together. The forward of a row-parallel linear layer under
    TP+SP (paper section 3.2.2, "GEMM+RS").

    Args:
        a: this rank's activations, bf16 [M, K]; M is the same on all ranks.
        b: this rank's weight, bf16 [N, K]; N is the same on all ranks.
            Or both are MxArrays of these shapes along axis 1.
        rows: how many of the M rows each rank gets, in order; any may be 0. None deals them evenly.
        widths: K of every rank, when they are not all equal. The tile, which ranks must agree on, follows from them.
        out: bf16 [rows[rank], N] to fill; None allocates it. Must not overlap a or b.
        policy: "one_way" (a builder that finds no tile joins the movers), "fixed" (it leaves), or "two_way" (movers
            build too, while their next band is not there).
        order: of the tiles: "as_consumed" (the first band of every rank's rows first), or for comparison "chunk_major"
            (each rank's rows completely before the next's) or "rank_order" (rows from the first to the last).
            Bits depend on none of these.
        transport: "pull" (the paper's: partial results stay where they are made, and movers of the rows' owner add
            them) or "push" (who builds a tile sends it to its owner, who adds it when it builds its own; nobody moves,
            and policies do not matter). None takes push where links were measured, if the tiles are not too many and no
            crew is asked for. Bits depend on neither.
        movers, max_movers: of pull: WGs that begin as movers, and at how many links are saturated; None asks
            plan.gemm_rs.
    Returns: C, bf16 [rows[rank], N], of a's dtype. Queued on the device's stream; the CPU device has finished it.
    Raises:
        TypeError, ValueError: a wrong argument, before anything is launched; the communicator stays usable.
        ArenaFull: the arena has no room for the partial results of this shape, which it keeps: 4 * M * N bytes, about
            2 * M * N by push.
        WaitError: a rank did not come, or came with another call (see Communicator.launch).
    """
    order_idx = order_number(OP, order)
    options = (
        rows if rows is None else tuple(rows),
        widths if widths is None else tuple(widths),
        policy,
        order,
        transport,
        movers,
        max_movers,
    )
    key, again = call_again(comm, OP, (a, b, out), *options)
    if again:
        return out
    mx = isinstance(a, MxArray) or isinstance(b, MxArray)
    a, b = mx_factors(comm, OP, a, b, 1, 1) if mx else factors(comm, OP, a, b, 1, 1)
    form, dtype = (MXFP8_FORMAT, np.uint16) if mx else (BF16_FORMAT, a.dtype)
    inputs = {"a": a.elements, "b": b.elements} if mx else {"a": a, "b": b}
    every = tuple(split_rows(a.shape[0], comm.ranks)) if rows is None else dealt_rows(comm, OP, "a", a.shape[0], rows)
    n, k = b.shape[0], a.shape[1]
    widths = (k,) * comm.ranks if widths is None else tuple(int(width) for width in widths)
    if len(widths) != comm.ranks or widths[comm.rank] != k:
        raise ValueError(f"{OP}: widths is {list(widths)}, want the K of {comm.ranks} ranks; rank {comm.rank} has {k}")
    out = result(comm, OP, out, (every[comm.rank], n), dtype, inputs)
    if movers is None and max_movers is None and order in PUSH_ORDERS and transport != "pull":
        grid = grid_of(comm, _kernel(PUSH, form))
        push = plan_gemm_rs_push(every, n, k, grid, policy=policy, order=order, form=form, most_k=max(widths))
        if _pushes(comm, transport, push):
            _launch_push(comm, push, widths, a, b, out, order_idx, key)
            return out
    elif transport == "push":
        raise ValueError(
            f"{OP}: transport is 'push', where nobody moves: leave movers and max_movers away; of orders it has "
            f"{' and '.join(PUSH_ORDERS)}"
        )
    grid = grid_of(comm, _kernel(OP, form))
    plan = plan_gemm_rs(every, n, k, grid, policy=policy, movers=movers, max_movers=max_movers, form=form)
    _launch(comm, plan, a, b, out, order_idx)
    return out


def _kernel(kernel: str, form: Format) -> str:
    return kernel if form is BF16_FORMAT else f"{kernel}_{form.dtype}"


def _pushes(comm: Communicator, transport: str | None, push: GemmRsPushPlan) -> bool:
    if transport not in (None, *TRANSPORTS):
        raise ValueError(f"{OP}: transport is {transport!r}, want one of {', '.join(TRANSPORTS)}, or None")
    fits = push.chunk_tiles <= comm.tile_signals and (push.form is BF16_FORMAT or push.k > 0)
    if transport == "push" and not fits:
        raise ValueError(
            f"{OP}: transport is 'push', but a chunk of {max(push.rows)} x {push.n} has {push.chunk_tiles} tiles of "
            f"{push.tile.m} x {push.tile.n}, and there are signals for {comm.tile_signals}; use transport='pull'"
        )
    return transport == "push" or (fits and comm.device.link is not None)


def _launch(comm: Communicator, plan: GemmRsPlan, a: Any, b: Any, out: Any, order: int) -> None:
    params = np.zeros(1, GEMM_RS if plan.form is BF16_FORMAT else GEMM_RS_MXFP8)
    operands = _operands(comm, plan, params, a, b)
    params["c"] = c = result_address(comm, f"{OP}.c", out, plan.padded_n)
    turn = comm.fill_staging(params["staging"], plan.partial_bytes, OP)
    fill_geometry(params, plan)
    params["N"], params["K"], params["order"] = plan.padded_n, plan.padded_k, order
    params["max_movers"], params["band_tile_rows"], params["slices"] = (
        plan.crew.max_movers,
        plan.band_tile_rows,
        plan.slices,
    )
    call = (plan.form.dtype, plan.transport, plan.rows, plan.n, turn)
    comm.launch(OP, params, call, plan.counter_words, operands, kernel=plan.kernel)
    hand_over(comm, c, out, plan.padded_n)


def _launch_push(
    comm: Communicator,
    plan: GemmRsPushPlan,
    widths: tuple[int, ...],
    a: Any,
    b: Any,
    out: Any,
    order: int,
    key: Hashable | None,
) -> None:
    params = np.zeros(1, GEMM_RS_PUSH if plan.form is BF16_FORMAT else GEMM_RS_PUSH_MXFP8)
    operands = _operands(comm, plan, params, a, b)
    params["c"] = c = result_address(comm, f"{OP}.c", out, plan.padded_n)
    offset = comm.fill_inbox(params["inbox"], plan.inbox_bytes, OP)
    fill_geometry(params, plan)
    params["N"], params["K"], params["order"] = plan.padded_n, plan.padded_k, order
    params["band_tile_rows"], params["halved"], params["lead"] = plan.band_tile_rows, plan.halved, plan.lead
    call = (plan.form.dtype, plan.transport, plan.rows, plan.n, widths, plan.tile, order, offset)
    k = plan.padded_k
    plain = (mx_is_plain(comm, x) if plan.form is MXFP8_FORMAT else is_plain(comm, x, k) for x in (a, b))
    if plan.n != plan.padded_n or not (is_plain(comm, out, plan.padded_n) and all(plain)):
        key = None  # a launch made again would find no copies of what was staged
    comm.launch(OP, params, call, plan.counter_words, operands, kernel=plan.kernel, key=key)
    hand_over(comm, c, out, plan.padded_n)


def _operands(comm: Communicator, plan: Plan, params: np.ndarray, a: Any, b: Any) -> list[Matrix]:
    """Fills in both factors; b padded with rows of zeros. Returns: what tiles read."""
    width = plan.padded_k
    if plan.form is MXFP8_FORMAT:
        sides = (("a", a, 0), ("b", b, plan.padded_n))
        return [fill_factor(comm, params, side, f"{OP}.{side}", factor, lines) for side, factor, lines in sides]
    params["a"] = local_operand(comm, f"{OP}.a", a, width)
    params["b"] = local_operand(comm, f"{OP}.b", b, width, rows=plan.padded_n)
    return [
        Matrix(int(params["a"][0]), plan.m, width, width, by_rows=True),
        Matrix(int(params["b"][0]), plan.padded_n, width, width, by_rows=True),
    ]
