"""bench WHAT: measures. Nothing is timed that was not checked first."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..bench import cpu_gemm, cuda_ag_gemm, cuda_gemm, quantize
from ..ranks.launch import launch
from . import bench_policies
from .shared import print_json, table

CPU_SHAPES = "512,512,512 1024,1024,1024"
QUANTIZE_SHAPES = {"cpu": "2048,4096", "cuda": "8192,8192 16384,8192 8192,28672"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("gemm", "ag_gemm", "quantize", "policies"),
        help="gemm: the tile alone, driven by the schedule on one rank; ag_gemm: on all ranks, beside NCCL + cuBLAS; "
        "quantize: to MXFP8, beside a copy of as many bytes; policies: an operator under every policy and queue order",
    )
    bench_policies.add_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2, help="of ag_gemm and policies (default: 2)")
    parser.add_argument("--movers", help="ag_gemm: crews to try, like 4,8,12 (default: the planned one)")
    parser.add_argument("--device", choices=("cpu", "cuda", "emulated"), default="cpu", help="emulated: policies alone")
    parser.add_argument(
        "--shapes",
        help=f"M,N,K separated by spaces, or llama3 (default: {CPU_SHAPES!r} on the CPU, llama3 on a GPU); "
        f"quantize: rows,columns (default: {QUANTIZE_SHAPES['cpu']!r}, {QUANTIZE_SHAPES['cuda']!r})",
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed samples of each candidate (default: 9)")
    parser.add_argument("--all-widths", action="store_true", help="cuda: time every tile width, not the planned alone")
    parser.add_argument("--csv", type=Path, help="cuda: write every sample there")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    if args.what == "policies":
        return bench_policies.run(args, _shapes(args) if args.shapes or args.device == "cuda" else None)
    if args.device == "emulated":
        raise ValueError(f"bench {args.what}: the emulator's time says nothing of a GPU; take --device cpu or cuda")
    if args.what == "ag_gemm":
        return _ag_gemm(args)
    if args.what == "quantize":
        return _quantize(args)
    return _cuda(args) if args.device == "cuda" else _cpu(args)


def _parsed(shapes: str, names: str = "M,N,K") -> list[tuple[int, ...]]:
    parsed = [tuple(int(x) for x in shape.split(",")) for shape in shapes.split()]
    if any(len(shape) != len(names.split(",")) for shape in parsed):
        raise ValueError(f"--shapes is {shapes!r}, want {names} for each")
    return parsed


def _cpu(args: argparse.Namespace) -> int:
    os.environ.update(cpu_gemm.ONE_THREAD)
    shapes = _parsed(args.shapes or CPU_SHAPES)
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


def _quantize(args: argparse.Namespace) -> int:
    shapes = _parsed(args.shapes or QUANTIZE_SHAPES[args.device], "rows,columns")
    workgroups = 1 if args.device == "cpu" else None
    (results,) = launch(
        quantize.run, shapes, ranks=1, device=args.device, workgroups=workgroups, mode="processes", arena_bytes=1 << 21
    )
    if args.json:
        print_json([asdict(result) for result in results])
    else:
        lines = [
            [str(r.rows), str(r.columns), r.copies, f"{r.ms:.4f}", f"{r.gbytes_per_s:.1f}", f"{r.ratio:.2f}"]
            for r in results
        ]
        print(table(["rows", "columns", "copies", "ms", "GB/s", "of a copy's rate"], lines))
    return 0


def _shapes(args: argparse.Namespace) -> list[cuda_gemm.Shape]:
    """M,N,K, or names of Llama 3's layers; all of those when nothing is said."""
    llama3 = {shape.name: shape for shape in cuda_gemm.llama3_shapes()}
    if args.shapes in (None, "llama3"):
        return list(llama3.values())
    named = [llama3[word] for word in args.shapes.split() if word in llama3]
    rest = " ".join(word for word in args.shapes.split() if word not in llama3)
    return named + [cuda_gemm.Shape(f"{m}x{n}x{k}", m, n, k) for m, n, k in _parsed(rest)]


def _cuda(args: argparse.Namespace) -> int:
    shapes = _shapes(args)
    options = {"rounds": args.rounds, "all_widths": args.all_widths, "progress": not args.json}
    (rows,) = launch(_cuda_rank, shapes, options, ranks=1, device="cuda", mode="threads", arena_bytes=1 << 21)
    if args.csv:
        cuda_gemm.write_csv(rows, args.csv)
    if args.json:
        print_json([row.as_dict() for row in rows])
    else:
        print(gemm_table(rows))
    return 0


def _ag_gemm(args: argparse.Namespace) -> int:
    if args.device != "cuda":
        raise ValueError("bench ag_gemm: needs --device cuda: on the CPU there is nothing to compare with")
    shapes = _shapes(args)
    crews = [int(crew) for crew in args.movers.split(",")] if args.movers else [None]
    arena = max(2 * s.m * s.k for s in shapes) // args.ranks + (4 << 20)
    results = launch(
        cuda_ag_gemm.run, shapes, crews, cuda_ag_gemm.free_port(), args.rounds, ranks=args.ranks, device="cuda",
        mode="processes", arena_bytes=arena,
    )  # fmt: skip
    rows = results[0]
    if args.csv:
        cuda_ag_gemm.write_csv(rows, args.csv)
    print(ag_gemm_table(rows))
    return 0


def ag_gemm_table(rows: Sequence[cuda_ag_gemm.AgGemmRow]) -> str:
    """A line a shape and mode: milliseconds, and the geometric means."""
    c = cuda_ag_gemm
    peers = [c.SERIAL, c.ASYNC_TP, c.GATHER, c.GEMM]
    header = ["shape", "M", "N", "K", "mode", "fused ms", "crew", *peers, "over serial", "bound / fused"]
    lines, text = [], []
    for mode in c.MODES:
        for row in rows:
            s, (crew, ours) = row.shape, row.best(mode)
            bound = max(row.ms[c.GATHER, mode], row.ms[c.GEMM, mode])
            times = [f"{row.ms[name, mode]:.4f}" for name in peers]
            ratios = [f"{row.ms[c.SERIAL, mode] / ours:.2f}", f"{bound / ours:.2f}"]
            lines.append([s.name, str(s.m), str(s.n), str(s.k), mode, f"{ours:.4f}", crew, *times, *ratios])
        means = ", ".join(f"{name} {value:.3f}" for name, value in c.geometric_means(rows, mode).items())
        text.append(f"{mode}: geometric means: {means}")
    return "\n".join([table(header, lines), "", *text])


def _cuda_rank(comm, shapes, options):  # type: ignore[no-untyped-def]
    return cuda_gemm.run(comm, shapes, **options)


def gemm_table(rows: Sequence[cuda_gemm.GemmRow]) -> str:
    """A line a shape, and the geometric mean of each layout."""
    peers = [name for name in cuda_gemm.PEERS if any(name in row.ms for row in rows)]
    others = sorted({name for row in rows for name in row.ms} - {"planned", *peers})
    header = ["", "shape", "M", "N", "K", "tile", "ms", "TFLOP/s", *peers, *others, "of the faster peer"]
    lines = []
    for row in rows:
        s, ms = row.shape, row.ms
        rates = [f"{row.tflops(ms[name]):.0f}" if name in ms else "" for name in (*peers, *others)]
        ours = [f"{ms['planned']:.4f}", f"{row.tflops(ms['planned']):.0f}"]
        size = [str(s.m), str(s.n), str(s.k), f"128x{row.tile_n}"]
        lines.append([row.layout, s.name, *size, *ours, *rates, f"{row.ratio:.1%}"])
    text = [table(header, lines), ""]
    for layout in dict.fromkeys(row.layout for row in rows):
        ratios = [row.ratio for row in rows if row.layout == layout]
        mean = cuda_gemm.geometric_mean(ratios)
        text.append(
            f"{layout}: {mean:.1%} of cuBLAS as geometric mean, {min(ratios):.1%} at least, {len(ratios)} shapes"
        )
    return "\n".join(text)
