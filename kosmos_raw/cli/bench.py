"""bench WHAT: measures. Nothing is timed that was not checked first."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bench import cpu_gemm, cuda_gemm, cuda_ops, plot, quantize
from ..bench.llama3 import COLUMN, LAYERS, ROW, Shape, layers, rows_moved, shape
from ..checks.operators import CHECKED
from ..ranks.launch import launch
from . import bench_moe, bench_policies
from .shared import print_json, table

CPU_SHAPES = "512,512,512 1024,1024,1024"
OP_SHAPES = {
    COLUMN: ("70B-FC1-MBS1", "70B-QKV-MBS1", "8B-FC1-MBS1", "8B-QKV-MBS1", "405B-QKV-MBS1", "70B-FC1-MBS4"),
    ROW: ("70B-Down-MBS1", "70B-OProj-MBS1", "8B-Down-MBS1", "8B-OProj-MBS1", "405B-OProj-MBS1"),
}
QUANTIZE_SHAPES = {"cpu": "2048,4096", "cuda": "8192,8192 16384,8192 8192,28672"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("gemm", *CHECKED, "all", *bench_moe.OPS, "quantize", "policies"),
        help="gemm: the tile alone, driven by the schedule on one rank; an operator, or all of them: on all ranks, "
        "beside NCCL + cuBLAS and asynchronous TP; moe_forward, moe_backward: layers of nine models beside others; "
        "quantize: to MXFP8, beside a copy of as many bytes; policies: an operator under every policy and queue order",
    )
    bench_policies.add_arguments(parser)
    bench_moe.add_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2, help="of operators and policies (default: 2)")
    parser.add_argument(
        "--variants", help="operators: what to measure besides the planned call, like 'movers=8 gemm_rs:transport=pull'"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "mxfp8"), default="bf16", help="operators: of our factors; peers' are BF16 (bf16)"
    )
    parser.add_argument("--repeats", type=int, default=100, help="operators: calls whose bits must agree (100)")
    parser.add_argument("--png", type=Path, help="operators and policies: draw what was measured")
    parser.add_argument(
        "--redraw", type=Path, metavar="CSV", help="operators and policies: measure nothing, show what is there"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "emulated"), default="cpu", help="emulated: policies alone")
    parser.add_argument(
        "--shapes",
        help=f"M,N,K separated by spaces, or llama3, or names of its layers (default: {CPU_SHAPES!r} on the CPU, "
        "llama3 on a GPU, of operators a few of them); quantize: rows,columns (default: "
        f"{QUANTIZE_SHAPES['cpu']!r}, {QUANTIZE_SHAPES['cuda']!r})",
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed samples of each candidate (default: 9)")
    parser.add_argument("--all-widths", action="store_true", help="cuda: time every tile width, not the planned alone")
    parser.add_argument("--csv", type=Path, help="cuda: write every sample there")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    if args.dtype != "bf16" and args.what not in (*CHECKED, "all"):
        raise ValueError(
            f"bench {args.what}: dtype is {args.dtype}, want bf16; mxfp8 is for {', '.join(CHECKED)}, or all"
        )
    if args.what == "policies":
        given = args.shapes or args.device == "cuda"
        return bench_policies.run(args, shapes_of(args.op, args.shapes) if given else None)
    if args.device == "emulated":
        raise ValueError(f"bench {args.what}: the emulator's time says nothing of a GPU; take --device cpu or cuda")
    if args.what in bench_moe.OPS:
        return bench_moe.run(args, _variants(args.variants, args.what))
    if args.what == "quantize":
        return _quantize(args)
    if args.what != "gemm":
        return _ops(args)
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


def _shapes(args: argparse.Namespace) -> list[Shape]:
    """M,N,K, or names of Llama 3's layers; all of those when nothing is said."""
    llama3 = {shape.name: shape for shape in layers("ag_gemm")}
    if args.shapes in (None, "llama3"):
        return list(llama3.values())
    named = [llama3[word] for word in args.shapes.split() if word in llama3]
    rest = " ".join(word for word in args.shapes.split() if word not in llama3)
    return named + [Shape(f"{m}x{n}x{k}", m, n, k) for m, n, k in _parsed(rest)]


def _cuda(args: argparse.Namespace) -> int:
    shapes = _shapes(args)
    options = {"rounds": args.rounds, "all_widths": args.all_widths, "progress": not args.json}
    ((rows, host),) = launch(_cuda_rank, shapes, options, ranks=1, device="cuda", mode="threads", arena_bytes=1 << 22)
    if args.csv:
        cuda_gemm.write_csv(rows, args.csv)
    if args.json:
        print_json({"rows": [row.as_dict() for row in rows], "host_us": host})
    else:
        print(gemm_table(rows))
        print(f"host time: {host['launch']:.1f} us a launch, {host['call']:.1f} us a call with the same arrays again")
    return 0


def _ops(args: argparse.Namespace) -> int:
    """Operators on GPUs, beside their peers."""
    if args.redraw:
        rows = cuda_ops.read_csv(args.redraw)
    elif args.device != "cuda":
        raise ValueError(f"bench {args.what}: needs --device cuda: on the CPU there is nothing to compare with")
    else:
        rows = _measured(args)
    if args.png:
        plot.draw(rows, args.png)
    print(ops_table(rows))
    return 0


def _measured(args: argparse.Namespace) -> list[cuda_ops.OpRow]:
    ops = list(CHECKED) if args.what == "all" else [args.what]
    todo = [(op, shape) for op in ops for shape in shapes_of(op, args.shapes)]
    variants = {op: _variants(args.variants, op) for op in ops}
    moved = max(rows * width * 2 for rows, width in (rows_moved(op, shape) for op, shape in todo))
    arena = 4 * moved + (64 << 20)  # both buffers of staging, the inbox, and what peers read
    results = launch(
        cuda_ops.run, todo, variants, cuda_ops.free_port(), args.rounds, args.repeats, 0, args.dtype, args.csv,
        ranks=args.ranks, device="cuda", mode="processes", arena_bytes=arena,
    )  # fmt: skip
    return list(results[0])


def shapes_of(op: str, given: str | None) -> list[Shape]:
    """Names of layers, of which an operator takes those that it belongs to, or M,N,K; llama3: all that it has; a few if
    nothing is said."""
    if given == "llama3":
        return layers(op)
    words = (given or " ".join(OP_SHAPES[LAYERS[op]])).split()
    named = [shape(op, word) for word in words if "-" in word and word.split("-")[1] in LAYERS[op]]
    return named + [Shape(f"{m}x{n}x{k}", m, n, k) for m, n, k in _parsed(" ".join(w for w in words if "-" not in w))]


def _variants(given: str | None, op: str) -> dict[str, dict[str, Any]]:
    """Variants like "movers=8,policy=fixed", by those words; "gemm_rs:transport=pull" is of one operator alone."""
    found: dict[str, dict[str, Any]] = {}
    for word in (given or "").split():
        only, colon, text = word.rpartition(":")
        if colon and only != op:
            continue
        pairs = (pair.split("=", 1) for pair in text.split(","))
        found[text] = {key: int(value) if value.isdigit() else value for key, value in pairs}
    return found


def ops_table(rows: Sequence[cuda_ops.OpRow]) -> str:
    """A line for each operator, shape, mode and variant of ours; then geometric means."""
    c = cuda_ops
    peers = [c.SERIAL, c.TWO_STREAMS, c.ASYNC_TP, c.COMM, c.GEMM]
    header = "operator,dtype,shape,M,N,K,ranks,MB a rank,of BF16,mode,ours,ms".split(",")
    header += [*peers, "over serial", "of the bound"]
    lines = []
    for mode in c.MODES:
        for row in rows:
            s = row.shape
            moved = [f"{row.link_bytes / 1e6:.2f}", f"{row.of_bf16:.3f}"] if row.link_bytes else ["-", "-"]
            fixed = [row.op, row.dtype, s.name, *map(str, (s.m, s.n, s.k, row.ranks)), *moved, mode]
            times = [f"{row.ms[peer, mode]:.4f}" if (peer, mode) in row.ms else "-" for peer in peers]
            for variant in row.variants:
                ratios = [f"{row.over(c.SERIAL, mode, variant):.2f}", f"{row.of_bound(mode, variant):.2f}"]
                lines.append([*fixed, variant, f"{row.ms[variant, mode]:.4f}", *times, *ratios])
    text = [table(header, lines), ""]
    for op in dict.fromkeys(row.op for row in rows):
        of_op = [row for row in rows if row.op == op]
        for mode in c.MODES:
            for variant in of_op[0].variants:
                text.append(f"{op} {mode} {variant}: {_means(of_op, mode, variant)}")
    return "\n".join(text)


def _means(rows: Sequence[cuda_ops.OpRow], mode: str, variant: str) -> str:
    c, mean = cuda_ops, cuda_gemm.geometric_mean
    words = []
    for peer in (c.SERIAL, c.TWO_STREAMS, c.ASYNC_TP):
        ratios = [row.over(peer, mode, variant) for row in rows]
        if None not in ratios:
            words.append(f"over {peer} {mean(r for r in ratios if r):.3f} (least {min(r for r in ratios if r):.2f})")
    bounds = [row.of_bound(mode, variant) for row in rows]
    return ", ".join([*words, f"of max(link, cuBLAS) {mean(bounds):.3f} (least {min(bounds):.2f})"])


def _cuda_rank(comm, shapes, options):  # type: ignore[no-untyped-def]
    return cuda_gemm.run(comm, shapes, **options), cuda_gemm.host_us(comm)


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
