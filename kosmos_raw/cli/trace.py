"""trace OP: who did what when."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..checks import moe, tracing
from ..checks.operators import Case
from ..checks.validate import arena_bytes
from ..ranks.launch import launch
from ..trace import MOE_BACKWARD_PHASES, MOE_FORWARD_PHASES, Trace, decode, draw_timeline, summarise, write_perfetto
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

PHASES = {validate_moe.OP: MOE_FORWARD_PHASES, validate_moe.BACKWARD: MOE_BACKWARD_PHASES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", choices=(*OPS, *PHASES))
    add_group_arguments(parser)
    add_shape_arguments(parser, m=2048, n=512, k=512)
    parser.add_argument("-o", "--output", type=Path, metavar="JSON", help="Perfetto file, for ui.perfetto.dev")
    parser.add_argument("--png", type=Path, help="timeline picture")
    parser.add_argument("--events", type=int, default=1024, help="most marks of one WG (default: 1024)")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON")
    validate_moe.add_arguments(parser)


def record(case: Case | moe.MoeCase, options: dict, events: int, backward: bool = False) -> Trace:
    """The trace of one call of `case` on all ranks; `backward`: of an MoE layer's."""
    results = launch(tracing.run, case, events, backward, **options)
    _, tick_hz, rows_per_wg = results[0]
    return decode([raw for raw, _, _ in results], tick_hz, rows_per_wg=rows_per_wg)


def title(op: str, case: Case, device: str) -> str:
    shape = f"M={case.m} N={case.n} K={case.k}"
    return f"{op} on {device}: {len(case.rows)} ranks, {shape}, {case.policy or 'default policy'}"


def run(args: argparse.Namespace) -> int:
    case: Case | moe.MoeCase
    if args.op in PHASES:
        case = validate_moe.case_of(args)
        options = launch_options(args, moe.arena_bytes(case, validate_moe.LARGEST))
        heading = validate_moe.title(case, args)
    else:
        case = case_of(args)
        options = launch_options(args, arena_bytes([case]))
        heading = title(args.op, case, args.device)
    trace = record(case, options, args.events, args.op == validate_moe.BACKWARD)
    if not is_first_process():
        return 0
    summary = summarise(trace)
    if args.output:
        write_perfetto(trace, args.output)
    if args.png:
        draw_timeline(trace, args.png, title=heading, phases=PHASES.get(args.op))
    if args.json:
        print_json(summary.as_dict())
    else:
        print(summary.text())
        for path in filter(None, (args.output, args.png)):
            print(f"wrote {path}")
    return 0
