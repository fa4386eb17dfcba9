"""ag_gemm on one GPU that is its own peer, with the link held to 330 GB/s: what two GPUs would take, as far as one can
say. Needs a GPU; see `main` for the options.

The rank holds both shards. Its peer's signals are its own, one word on: whatever it tells rank 1 of rank 0 lies where
it waits for rank 1.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kosmos_raw.bench.cuda_gemm import Problem, alternate_calls, geometric_mean
from kosmos_raw.bench.llama3 import shape
from kosmos_raw.build import sm90
from kosmos_raw.build.params import AG_GEMM, POLICIES
from kosmos_raw.device.base import Matrix, Tile
from kosmos_raw.device.cuda import CudaKernel
from kosmos_raw.device.cupy_kernel import Code
from kosmos_raw.plan.ag_gemm import plan_ag_gemm
from kosmos_raw.plan.crew import Grid
from kosmos_raw.ranks.launch import launch

SOURCE = Path(__file__).parent / "paced.hip"
GB_PER_S = 330
SHAPES = "70B-FC1-MBS1 70B-QKV-MBS1 8B-FC1-MBS1 8B-QKV-MBS1 405B-QKV-MBS1 70B-FC1-MBS4"


class OwnPeer(Problem):
    """The product, of which the second half of the rows is pulled from this rank itself."""

    def __init__(self, comm: Any, s: Any, seed: int = 0):
        super().__init__(comm, s, seed=seed)
        self.gathered = comm.device.xp.empty((s.m, s.k), np.uint16)

    def planned(self) -> Tile:
        return self._plan().tile

    def _plan(self) -> Any:
        s, device = self.shape, self.comm.device
        rows = (s.m // 2, s.m - s.m // 2)
        return plan_ag_gemm(
            rows, s.n, s.k, Grid(tuple(self.tiles()), self.comm.workgroups, link=device.link, beside=True)
        )

    def _prepare(self, tile: Tile) -> tuple[np.ndarray, Any, list[Matrix]]:
        s, plan = self.shape, self._plan()
        params = np.zeros(1, AG_GEMM)
        params["shard_of"][0, :2] = self.a.data.ptr, self.a.data.ptr + plan.rows[0] * s.k * 2
        params["gathered"], params["b"], params["c"] = self.gathered.data.ptr, self.b.data.ptr, self.c.data.ptr
        params["m"]["first"][0] = plan.first
        params["m"]["tile_m"], params["m"]["tile_rows_max"] = plan.tile.m, plan.tile_rows_max
        params["m"]["side_by_side"], params["tile_n"] = plan.side_by_side, plan.tile.n
        params["movers"], params["policy"] = plan.crew.movers, POLICIES.index(plan.crew.policy)
        params["queues"], params["together"], params["halved"] = plan.queues, plan.together, plan.halved
        params["N"], params["K"], params["ldc"] = s.n, s.k, self.ldc
        self.halved = plan.halved
        for name in ("slices", "slabs", "slab_words", "band"):
            params["pulls"][name] = getattr(plan.pulls, name)
        operands = [
            Matrix(self.a.data.ptr, plan.rows[0], s.k, s.k, by_rows=True),
            Matrix(self.gathered.data.ptr, s.m, s.k, s.k, by_rows=True),
            Matrix(self.b.data.ptr, s.n, s.k, s.k, by_rows=True),
        ]
        return params, plan, operands


def measure(comm: Any, names: Sequence[str], rounds: int) -> list[tuple[str, float, float, dict[str, list[float]]]]:
    """(shape, link ms, part of an error bound, samples of the fused call and of cuBLAS) for each shape."""
    comm._kernels["ag_gemm"] = CudaKernel(
        comm.device, "ag_gemm", Code(sm90.cubin("ag_gemm_paced", SOURCE).cubin, "", (), AG_GEMM.itemsize)
    )
    group = comm._group
    group["ranks"] = 2
    group["signals_of"][0, 1] = group["signals_of"][0, 0] + 4
    found = []
    with comm.device.stream:
        for name in names:
            problem = OwnPeer(comm, shape("ag_gemm", name))
            problem.gathered[...] = 0x7FA5
            worst = problem.check(problem.planned())
            calls = {"fused": partial(problem.run, problem.planned()), "cublas": problem.peer()}
            samples = alternate_calls(comm, calls, rounds=rounds)
            moved = problem.shape.m // 2 * problem.shape.k * 2
            found.append((name, moved / GB_PER_S / 1e6, worst, samples))
            del problem, calls
            comm.device.xp.get_default_memory_pool().free_all_blocks()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    options = {"ranks": 1, "device": "cuda", "mode": "threads", "arena_bytes": 1 << 21}
    (found,) = launch(measure, args.shapes.split(), args.rounds, **options)
    ratios = []
    for name, link, worst, samples in found:
        fused, cublas = median(samples["fused"]), median(samples["cublas"])
        ratios.append(max(link, cublas) / fused)
        print(
            f"{name:15} fused {fused:.4f} ms, cuBLAS {cublas:.4f}, link {link:.4f}: {ratios[-1]:.3f} "
            f"({worst:.2f} of the error bound)"
        )
    print(f"max(link, cuBLAS) / fused: {geometric_mean(ratios):.3f} as geometric mean")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["name", "link_ms", "over_bound", "variant", "round", "ms"])
            for name, link, worst, samples in found:
                for variant, times in samples.items():
                    out.writerows(
                        [name, f"{link:.5f}", f"{worst:.4f}", variant, i, f"{t:.5f}"] for i, t in enumerate(times)
                    )


if __name__ == "__main__":
    main()
