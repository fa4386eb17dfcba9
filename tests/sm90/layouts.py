"""The tile in all layouts on one H200: exactness, then speed beside cuBLAS. Needs a GPU; see `main` for the options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kosmos_raw.bench import cuda_gemm
from kosmos_raw.bench.cuda_gemm import Problem, Shape, to_float
from kosmos_raw.bench.llama3 import layers
from kosmos_raw.build import sm90
from kosmos_raw.build.params import AG_GEMM
from kosmos_raw.cli.bench import gemm_table
from kosmos_raw.device.cuda import CudaKernel
from kosmos_raw.device.cupy_kernel import Code
from kosmos_raw.ranks.communicator import POISON
from kosmos_raw.ranks.launch import launch

SOURCE = Path(__file__).parent / "layouts.hip"
KERNELS = {"tn": "TN", "nn": "NN", "nt": "NT", "fours": "TN"}  # of SOURCE, and their layouts

# One tile and many, tails in every direction, K below one step, at the number of stages and past it.
EXACT = [
    (128, 256, 64),
    (1, 1, 8),
    (24, 8, 8),
    (5, 130, 72),
    (64, 64, 256),
    (65, 65, 264),
    (300, 200, 0),
    (129, 257, 384),
    (1000, 1304, 520),
    (4352, 3584, 1024),
    (2048, 1280, 4096),
]


def add_kernels(comm):
    """Makes the kernels of layouts.hip operators of `comm`."""
    path = sm90.cubin("layouts", SOURCE).cubin
    for name in KERNELS:
        comm._kernels[name] = CudaKernel(comm.device, name, Code(path, "", (), AG_GEMM.itemsize))


def exact(comm, shapes: Sequence[tuple[int, int, int]] = EXACT) -> int:
    """Small integers, so that the result is exact in any order of additions: every bit is compared, poison around the
    result too. Returns how many products were compared."""
    add_kernels(comm)
    xp, done = comm.device.xp, 0
    with comm.device.stream:
        for op, layout in KERNELS.items():
            for m, n, k in shapes:
                problem = Problem(comm, Shape("exact", m, n, k), op, layout)
                size_a, size_b = _sizes(layout, m, k), _sizes(layout, n, k, b=True)
                for operand, (lines, elements) in ((problem.a, size_a), (problem.b, size_b)):
                    if not k:
                        continue
                    whole = xp.random.randint(-4, 5, (lines, elements)).astype(np.float32)
                    operand[:, :elements] = (whole.view(np.uint32) >> 16).astype(np.uint16)
                a = to_float(problem.a, np.float64)[:, : size_a[1]]
                b = to_float(problem.b, np.float64)[:, : size_b[1]]
                want = (a.T if layout == "NT" else a) @ (b.T if layout == "TN" else b)
                bits = want.astype(np.float32).view(np.uint32)
                want_bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
                want_bits[want == 0] = 0
                guarded = xp.empty((m + 8, problem.ldc), np.uint16)
                problem.c = guarded[4 : 4 + m]
                for tile in problem.tiles():
                    guarded[...] = POISON
                    for problem.halved in (0, 1 << 30, 3):  # none, all, and the last tiles in halves
                        problem.run(tile)
                    comm.synchronize()
                    got = problem.c[:, :n].copy()
                    got[got == 0x8000] = 0
                    wrong = int((got != want_bits).sum())
                    assert not wrong, f"{op} {m}x{n}x{k} {tile}: {wrong} elements are wrong"
                    assert bool((guarded[:4] == POISON).all() and (guarded[4 + m :] == POISON).all()), "wrote outside"
                    done += 1
    return done


def _sizes(layout: str, outer: int, k: int, b: bool = False) -> tuple[int, int]:
    by_k = layout != "TN" if b else layout == "NT"
    return (k, outer) if by_k else (outer, k)


def measure(comm, shapes, rounds, all_widths, names):
    add_kernels(comm)
    ops = {layout: name for name, layout in KERNELS.items() if name in names}
    return cuda_gemm.run(comm, shapes, ops, rounds=rounds, all_widths=all_widths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default="nn,nt", help="of tn, nn, nt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--all-widths", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    print(*launch(exact, ranks=1, device="cuda", mode="threads", arena_bytes=1 << 21), "products are exact", flush=True)
    shapes = [shape for shape in layers("ag_gemm") if args.only in shape.name]
    (rows,) = launch(
        measure,
        shapes,
        args.rounds,
        args.all_widths,
        args.layouts.split(","),
        ranks=1,
        device="cuda",
        mode="threads",
        arena_bytes=1 << 21,
    )
    if args.csv:
        cuda_gemm.write_csv(rows, args.csv)
    print(gemm_table(rows))


if __name__ == "__main__":
    main()
