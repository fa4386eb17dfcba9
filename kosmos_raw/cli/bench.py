"""bench WHAT: measures. Nothing is timed that was not checked first."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from ..bench import cpu_gemm
from ..ranks.launch import launch
from .shared import print_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("gemm",), help="gemm: the tile alone, driven by the schedule")
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--shapes", default="512,512,512 1024,1024,1024", help="M,N,K separated by spaces")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    shapes = [tuple(int(x) for x in shape.split(",")) for shape in args.shapes.split()]
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"--shapes is {args.shapes!r}, want M,N,K for each")
    os.environ.update(cpu_gemm.ONE_THREAD)
    (results,) = launch(cpu_gemm.run, shapes, ranks=1, workgroups=1, mode="processes")
    if args.json:
        print_json([asdict(result) | {"ratio": result.ratio} for result in results])
    else:
        lines = [
            [str(r.m), str(r.n), str(r.k), f"{r.ours_gflops:.1f}", f"{r.numpy_gflops:.1f}", f"{r.ratio:.2f}"]
            for r in results
        ]
        print(table(["M", "N", "K", "ours GFLOP/s", "NumPy float32 GFLOP/s", "ratio"], lines))
    return 0
