"""validate OP: is it right here?"""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..checks import validate as check
from ..ranks.launch import launch
from . import validate_moe
from .shared import (
    OPS,
    add_group_arguments,
    add_shape_arguments,
    case_of,
    is_first_process,
    launch_options,
    print_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", choices=(*OPS, *validate_moe.OPS))
    add_group_arguments(parser)
    add_shape_arguments(parser, m=2048, n=512, k=512)
    parser.add_argument("--iters", type=int, default=5, help="each with new data (default: 5)")
    parser.add_argument("--repeats", type=int, default=2, help="calls on the same data, of equal bits (default: 2)")
    parser.add_argument(
        "--delays", type=int, default=0, metavar="US", help="ranks, and on the CPU device WGs, come late by chance"
    )
    parser.add_argument("--arena", action="store_true", help="put the shards into the arena, where no copy is needed")
    parser.add_argument("--json", action="store_true")
    validate_moe.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.op in validate_moe.OPS:
        return validate_moe.run(args)
    changes = {"arena": args.arena, "iters": args.iters, "repeats": args.repeats, "delay_us": args.delays}
    case = replace(case_of(args), **changes)
    options = launch_options(args, check.arena_bytes([case]))
    outcome = check.merge(launch(check.run, case, not args.json, **options))
    if not is_first_process():
        return 0 if outcome.passed else 1
    report = check.report(case, args.device, outcome)
    if args.json:
        print_json(report)
    else:
        print(
            f"{args.op} of {case.dtype} on {args.device}, {args.ranks} ranks, M={case.m} N={case.n} K={case.k}, "
            f"{case.policy or 'default policy'}: {'passed' if outcome.passed else 'FAILED'}; "
            f"{case.iters} x {case.repeats} calls, "
            f"bits {'equal' if outcome.bitwise_repeat else 'DIFFER'}; relative error {outcome.rel_error:.2e}, "
            f"largest element at {outcome.over_bound:.2f} of its bound; {outcome.seconds * 1e3:.1f} ms a call"
        )
        for problem in outcome.problems:
            print(f"  {problem}")
    return 0 if outcome.passed else 1
