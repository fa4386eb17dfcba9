"""bench policies OP: an operator under every policy and queue order."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from ..bench import policies
from ..bench.llama3 import Shape
from ..checks.operators import Case
from ..checks.validate import arena_bytes
from ..plan.shapes import split_rows
from ..ranks.launch import launch
from .shared import OPS, print_json, table

SHAPE = Shape("2048x512x512", 2048, 512, 512)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", choices=OPS, default="ag_gemm", help="policies: of which operator")
    parser.add_argument("--workgroups", type=int, help="policies: WGs of each rank (default: the device's own number)")


def run(args: argparse.Namespace, shapes: Sequence[Shape] | None) -> int:
    shapes, device = shapes or [SHAPE], args.device
    used: list[float | None]  # of the error bound
    if args.redraw:
        device, found = policies.read_csv(args.redraw)
        shapes = [Shape(f"{case.m}x{case.n}x{case.k}", case.m, case.n, case.k) for case, _ in found]
        used = [None] * len(found)
    else:
        cases = [Case(tuple(split_rows(shape.m, args.ranks)), shape.n, shape.k, args.op) for shape in shapes]
        options = {"ranks": args.ranks, "device": device, "workgroups": args.workgroups}
        results = launch(policies.run, cases, args.rounds, not args.json, arena_bytes=arena_bytes(cases), **options)
        found = [(case, rows) for case, (rows, _) in zip(cases, results[0], strict=True)]
        used = [of_bound for _, of_bound in results[0]]
        if args.csv:
            policies.write_csv(found, device, args.csv)
    title = f"{found[0][0].op} on {device}: {found[0][0].ranks} ranks"
    note = policies.WHAT_IT_SHOWS.get(device, "")
    if args.png:
        policies.draw(found, title, note, args.png)
    for shape, (_, rows), over in zip(shapes, found, used, strict=True):
        if args.json:
            print_json({"shape": asdict(shape), "over_bound": over, "rows": [row.as_dict() for row in rows]})
            continue
        checked = "" if over is None else f"; equal bits, at {over:.2f} of the error bound"
        print(f"{title}, M={shape.m} N={shape.n} K={shape.k}{checked}\n\n{table(*policies.table(rows))}\n")
    if note and not args.json:
        print(note)
    return 0
