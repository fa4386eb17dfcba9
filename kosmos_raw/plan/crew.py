"""What a launch may use of its device, and how its WGs divide moving and building: here, for all operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..build.params import POLICIES
from ..device.base import Link, Tile
from .heuristics import crew, movers_per_peer
from .tiles import best_tile

KERNELS = {  # as table B.3 names them
    "ag_gemm": "ag_tn_col_fprop",
    "gemm_rs": "gemm_rs_row_fprop",
    "ag_gemm_dgrad": "ag_nn_row_dgrad",
    "bulk_ag": "bulk_ag_col_dgrad",
    "bulk_rs": "bulk_rs_col_wgrad",
}
REDUCING = ("gemm_rs", "bulk_rs")
NOT_BESIDE = ("gemm_rs",)  # what movers move there is what builders make


def policies_of(op: str, beside: bool) -> tuple[str, ...]:
    """Those that `op` has. `beside`: on a device whose WGs have threads that move while the others build."""
    return tuple(policy for policy in POLICIES if policy != "beside" or (beside and op not in NOT_BESIDE))


def whole_if_beside(op: str, policy: str, ranks: int, split: int | None) -> int | None:
    """`split` of a launch of `op`. Beside movers nobody is left who would tell of tiles' parts, so it is then 1.

    Raises:
        ValueError: another one was asked for.
    """
    if policy != "beside" or ranks == 1:
        return split
    if split not in (None, 1):
        raise ValueError(
            f"{op}: split is {split}, want 1 under policy 'beside', where nobody can tell of parts of tiles"
        )
    return 1


@dataclass(frozen=True)
class Grid:
    """The WGs of a launch, and the output tiles that its kernel offers.

    Fewer WGs than the device has leave compute units to a second stream of work (paper section 3.1.2).
    """

    tiles: tuple[Tile, ...]
    workgroups: int
    uncapped: int = 0  # WGs that the device would have for it without a cap; fewer than `workgroups` counts as no cap
    dies: int = 1  # parts of the device with an L2 of their own
    link: Link | None = None  # to the peers, where it was measured: plan.link then chooses crews
    beside: bool = False  # WGs have threads that can move while the others build

    def policy(self, asked: str | None, ranks: int, whole: bool = True) -> str:
        """Of an operator that may move beside: as asked for, or the fastest that there is. `whole`: its contraction is
        not cut."""
        if asked is not None:
            return asked
        return "beside" if self.beside and self.link and ranks > 1 and whole else "one_way"

    def tile(self, rows: Sequence[int], n: int, k: int, movers: int) -> Tile:
        """The tile that suits a product of sum(rows) x n, contracted over k; see plan.tiles."""
        return best_tile(self.tiles, rows, n, k, self.workgroups - movers)


@dataclass(frozen=True)
class Crew:
    """Who moves. With one rank nobody does: all build, and then all add what there is to add."""

    policy: str
    movers: int  # WGs that begin as movers
    max_movers: int  # of a reduce-scatter: at which the links are saturated; builders that find no tile join up to here

    @classmethod
    def choose(
        cls,
        op: str,
        shape: tuple[int, int, int],
        ranks: int,
        grid: Grid,
        policy: str | None,
        movers: int | None = None,
        max_movers: int | None = None,
        dtype: str = "bf16",
    ) -> Crew:
        """The crew of a launch of `op`, whose product is of `shape` (M, N, K): as asked for, or by the paper's rules.

        Under a cap an all-gather keeps its movers, who keep the links busy, and gives up builders; a reduce-scatter
        shrinks both in proportion.

        Raises:
            ValueError: no such launch can run; says why.
        """
        policy = policy or "one_way"
        there = policies_of(op, grid.beside) if ranks > 1 else POLICIES
        if policy not in there:
            raise ValueError(
                f"{op}: policy is {policy!r}, want one of {', '.join(there)} ('beside' is for BF16, all operators but "
                "gemm_rs, and a device whose WGs have threads to spare, cuda)"
            )
        wgs, beside = grid.workgroups, policy == "beside"
        if ranks == 1:
            policy, movers = "one_way", 0
        elif movers is None and beside:
            movers = min(wgs, max_movers or wgs)
        elif movers is None:
            per_peer = movers_per_peer(KERNELS[op], *shape, dtype, wgs)
            whole = wgs if op in REDUCING else max(wgs, grid.uncapped)
            movers = min(crew(per_peer, ranks, whole), max(1, wgs // 2))
        if ranks > 1 and not 1 <= movers < wgs + beside:
            raise ValueError(
                f"{op}: movers is {movers}, want 1 to {wgs - 1 + beside}: with {wgs} WGs somebody must move and "
                "somebody must build"
            )
        if max_movers is None:  # half again as many as begin: more ask links that are busy
            max_movers = wgs if ranks == 1 else min(wgs, movers + -(-movers // 2))
        if not max(1, movers) <= max_movers <= wgs:
            raise ValueError(
                f"{op}: max_movers is {max_movers}, want {max(1, movers)} to {wgs}: the movers, and the builders that "
                "join them"
            )
        return cls(policy, movers, max_movers)
