"""Table B.3 of the paper: how many WGs move, and how a GEMM is cut, as functions of the shape alone.

M, N, K are those of tables C.3 to C.12: M x N is the output of the GEMM, K its contraction. Kernels are named as there:

    ag_tn_col_fprop     ag_gemm        X gathered, then X W^T
    gemm_rs_row_fprop   gemm_rs        X W^T, then reduced and scattered
    ag_nn_row_dgrad     ag_gemm_dgrad  dY gathered, then dY W
    bulk_ag_col_dgrad   bulk_ag        dY W, X gathered beside it
    bulk_rs_col_wgrad   bulk_rs        dY^T X, dX reduced and scattered beside it

The rules were fitted at 8 ranks on 256 compute units. Where the table's words leave a choice, the note says which one.
"""

from __future__ import annotations

from ..device.base import Tile

BLOCK = 256  # rows and columns of an output tile that the rules count in
FITTED_PEERS = 7
FITTED_WORKGROUPS = 256
WORKSPACE_BYTES = 64 << 20  # for the partial sums of a split contraction

DTYPES = ("bf16", "mxfp8")

# (least input, value) in falling order; the last one is "else".
Ladder = tuple[tuple[int, int], ...]
_MOVERS: dict[tuple[str, str], Ladder] = {
    # The input "gathered width N" is taken as the GEMM's N, the width of the local output.
    ("ag_tn_col_fprop", "bf16"): ((3584, 6), (0, 8)),
    ("ag_tn_col_fprop", "mxfp8"): ((0, 8),),
    ("ag_nn_row_dgrad", "bf16"): ((4608, 6), (0, 8)),
    ("ag_nn_row_dgrad", "mxfp8"): ((0, 8),),
    ("bulk_ag_col_dgrad", "bf16"): ((7168, 2), (3584, 4), (2304, 6), (0, 8)),
    ("bulk_ag_col_dgrad", "mxfp8"): ((3584, 2), (1792, 4), (0, 8)),
    # "Output width n" is taken as the local output features, M of the table of this kernel.
    ("bulk_rs_col_wgrad", "bf16"): ((8192, 2), (3584, 4), (0, 8)),
    ("bulk_rs_col_wgrad", "mxfp8"): ((8192, 4), (5120, 8), (0, 4)),
}


def blocks(m: int, n: int) -> int:
    """Output tiles of 256 x 256."""
    return -(-m // BLOCK) * -(-n // BLOCK)


def movers_per_peer(
    kernel: str, m: int, n: int, k: int, dtype: str = "bf16", workgroups: int = FITTED_WORKGROUPS
) -> int:
    """WGs that move for each remote peer, at 256 of them: movers of an all-gather, reducers of a reduce-scatter."""
    if kernel == "gemm_rs_row_fprop":
        return _reducers(k, blocks(m, n) / workgroups, dtype)
    given = {"bulk_ag_col_dgrad": k, "bulk_rs_col_wgrad": m}.get(kernel, n)
    return next(value for least, value in _MOVERS[kernel, dtype] if given >= least)


def _reducers(k: int, waves: float, dtype: str) -> int:
    """Reducers of GEMM+RS. K is the local contraction width; waves are tiles for each WG."""
    if k >= 4096:
        return 4 if dtype == "bf16" else 5
    if k >= 3072:
        return 6 if dtype == "bf16" else (8 if waves >= 16 else 7)
    if k <= 768:
        return 14 if waves >= 16 else 10 if waves >= 8 else 8
    return 10 if dtype == "mxfp8" and waves >= 16 else 8


def split_k(kernel: str, m: int, n: int, dtype: str = "bf16") -> int:
    """Into how many parts the contraction of each tile is cut; the parts' FP32 sums must fit in 64 MiB."""
    if dtype != "bf16" or kernel in ("ag_tn_col_fprop", "gemm_rs_row_fprop"):
        return 1
    one = blocks(m, n) * BLOCK * BLOCK * 4
    if kernel == "bulk_rs_col_wgrad":
        return 4 if blocks(m, n) <= 64 and 4 * one <= WORKSPACE_BYTES else 1
    return next((parts for parts in (4, 2) if parts * one <= WORKSPACE_BYTES), 1)


def parts_that_fit(kernel: str, m: int, n: int, tile: Tile, workgroups: int, dtype: str = "bf16") -> int:
    """split_k for a device with other tiles or fewer WGs: only as long as every part still has a WG of its own, which
    is what the rule amounts to at 256."""
    parts = split_k(kernel, m, n, dtype)
    return parts if parts * -(-m // tile.m) * -(-n // tile.n) <= workgroups else 1


def xcd_bucketing(m: int, n: int, rows: int) -> bool:
    """Whether each die of a GPU has a queue of tiles of its own (AG+GEMM). `rows`: those whose tile rows count, all of
    M or a rank's chunk; the table does not say which, and a fitted threshold of 5 speaks for the chunk."""
    return blocks(m, n) <= 1024 and -(-rows // BLOCK) >= 5


def crew(per_peer: int, ranks: int, workgroups: int) -> int:
    """Movers of a launch: `per_peer` for each peer at 256 WGs, in proportion at others; a builder beside each.

    At least one where there are peers.
    """
    if ranks == 1:
        return 0
    return max(1, min(round(per_peer * (ranks - 1) * workgroups / FITTED_WORKGROUPS), workgroups // 2))


# -- mixture of experts; crews are WGs of a GPU


def round_to_8(x: float) -> int:
    return int((x + 4) // 8) * 8


def moe_dispatch_crew(width: int, dtype: str = "bf16", *, with_columns: bool = False) -> int:
    """Movers of the forward dispatch, by the experts' width. `with_columns`: column-wise X travels too (MXFP8)."""
    if dtype == "bf16":
        return 32 if width < 1024 else 24 if width < 3072 else 16
    return min(48, max(16, round_to_8(24576 / width))) * (2 if with_columns else 1)


def moe_combine_crew(workgroups: int) -> int:
    """WGs that may push in the forward combine."""
    return min(128, workgroups) // 8 * 8


def moe_backward_dispatch_crew(push_s: float, gemm_s: float) -> int:
    """Movers of the backward dispatch, from the times that pushes and GEMMs would take alone."""
    return min(64, max(32, -(-int(256 * push_s / (push_s + gemm_s)) // 8) * 8))


def moe_backward_combine_crew(push_s: float, gemm_s: float, dtype: str = "bf16") -> int:
    """WGs that may push in the backward combine, from the same times."""
    return min(128, max(24 if dtype == "bf16" else 32, -(-int(256 * push_s / gemm_s) // 8) * 8))


def push_burst_depth(hidden: int) -> int | None:
    """Loads that a lane has in flight when it pushes a row: the first of 8, 7, 6, 4 that divides the row's pieces of
    512; None where the rule of the paper gives nothing (5120)."""
    pieces = hidden // 512
    return next((depth for depth in (8, 7, 6, 4) if hidden % 512 == 0 and pieces % depth == 0), None)
