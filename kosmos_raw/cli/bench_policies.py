"""bench policies OP: an operator under every policy and queue order."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

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
    shapes = shapes or [SHAPE]
    if args.redraw:
        found, used = policies.read_csv(args.redraw), None
    else:
        cases = [Case(tuple(split_rows(shape.m, args.ranks)), shape.n, shape.k, args.op) for shape in shapes]
        options = {"ranks": args.ranks, "device": args.device, "workgroups": args.workgroups}
        results = launch(policies.run, cases, args.rounds, not args.json, arena_bytes=arena_bytes(cases), **options)
        found = [(case, rows) for case, (rows, _) in zip(cases, results[0], strict=True)]
        used = max(of_bound for _, of_bound in results[0])
    title = f"{found[0][0].op} on {args.device}: {found[0][0].ranks} ranks"
    note = policies.WHAT_IT_SHOWS.get(args.device, "")
    if args.csv and not args.redraw:
        policies.write_csv(found, args.device, args.csv)
    if args.png:
        policies.draw(found, title, note, args.png)
    for case, rows in found:
        if args.json:
            sizes = {"m": case.m, "n": case.n, "k": case.k}
            print_json({"shape": sizes, "over_bound": used, "rows": [row.as_dict() for row in rows]})
        else:
            print(f"{title}, M={case.m} N={case.n} K={case.k}\n\n{table(*policies.table(rows))}\n")
    if not args.json:
        print("\n".join(filter(None, [used and f"equal bits, at most {used:.2f} of the error bound", note])))
    return 0
