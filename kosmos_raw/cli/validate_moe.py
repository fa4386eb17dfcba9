"""validate moe_forward, validate moe_backward: is the whole layer right here?"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ..build.params import INTO
from ..checks import moe, moe_backward
from ..checks.validate import Outcome, merge
from ..device.base import Tile
from ..numerics.moe.generators import ROUTINGS
from ..plan.moe.backward import OP as BACKWARD
from ..plan.moe.config import MoEConfig, models
from ..plan.moe.forward import OP
from ..ranks.launch import launch
from ..ranks.mpi import started_by_mpi, world_size
from .shared import is_first_process, launch_options, print_json

OPS = (OP, BACKWARD)
LARGEST = Tile(256, 256)  # of all devices: an arena for it suits all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(" and ".join(OPS))
    group.add_argument("--model", choices=tuple(models()), default="DeepSeek-V3", help="(default: DeepSeek-V3)")
    group.add_argument("--scale", type=int, default=32, help="divides the model's sizes (default: 32)")
    group.add_argument("--tokens", default="64", help="of every rank, one number or like 3,0,5 (default: 64)")
    group.add_argument("--routing", choices=ROUTINGS, default="balanced")
    group.add_argument(
        "--rings", choices=moe.RINGS, default="default", help="how many received rows lie in memory at a time"
    )
    group.add_argument("--pull", action="store_true", help="owners pull rows, instead of sources pushing them")
    group.add_argument("--pad", type=int, help="rows to whose multiples groups are filled up (default: 1, of mxfp8 32)")
    group.add_argument("--float-router", action="store_true", help="a router of float32")
    group.add_argument("--given-weights", action="store_true", help="choices and weights from outside")
    group = parser.add_argument_group(BACKWARD)
    group.add_argument("--into", choices=INTO, default="set_bf16", help="where gradients of weights go")
    group.add_argument("--recompute", action="store_true", help="the forward keeps neither rows nor pre-activations")
    group.add_argument("--aux-grad", type=float, default=1.0, help="dL / d(auxiliary loss) (default: 1)")
    group.add_argument("--zero-dy", action="store_true", help="no gradient but that of the auxiliary loss")


def case_of(args: argparse.Namespace) -> moe.MoeCase:
    tokens = tuple(int(n) for n in args.tokens.split(","))
    if len(tokens) == 1:
        tokens *= args.ranks or (world_size() if started_by_mpi() else 8)
    elif args.ranks not in (None, len(tokens)):
        raise ValueError(f"--tokens names {len(tokens)} ranks, --ranks says {args.ranks}")
    args.ranks = len(tokens)
    return moe.MoeCase(
        MoEConfig.named(args.model).scaled(args.scale),
        tokens,
        routing=args.routing,
        rings=args.rings,
        policy=args.policy or "two_way",
        pull=args.pull,
        dtype=args.dtype,
        pad=args.pad,
        float_router=args.float_router,
        given_weights=args.given_weights,
        seed=args.seed,
        into=args.into,
        recompute=args.recompute,
        aux_grad=args.aux_grad,
        zero_dy=args.zero_dy,
    )


def title(case: moe.MoeCase, args: argparse.Namespace) -> str:
    """The case in few words."""
    layer = f"{args.model} / {args.scale}, {max(case.tokens)} tokens, {case.routing}, {case.policy}"
    return f"{args.op} of {case.dtype} on {args.device}: {case.ranks} ranks, {layer}"


def run(args: argparse.Namespace) -> int:
    case = replace(case_of(args), iters=args.iters, repeats=args.repeats, delay_us=args.delays)
    options = launch_options(args, moe.arena_bytes(case, LARGEST))
    check = moe_backward.run if args.op == BACKWARD else moe.run
    outcome = merge(launch(check, case, not args.json, **options))
    if is_first_process():
        _print(args, case, outcome)
    return 0 if outcome.passed else 1


def report(args: argparse.Namespace, case: moe.MoeCase, outcome: Outcome) -> dict[str, Any]:
    """The fields of --json."""
    c = case.config
    return {
        "op": args.op,
        "dtype": case.dtype,
        "device": args.device,
        "ranks": case.ranks,
        "model": args.model,
        "shape": {
            "tokens": list(case.tokens),
            "hidden": c.hidden,
            "expert_width": c.expert_width,
            "experts": c.experts,
            "top_k": c.top_k,
        },
        "routing": case.routing,
        "rings": case.rings,
        "policy": case.policy,
        **({"into": case.into, "recompute": case.recompute} if args.op == BACKWARD else {}),
        "iters": case.iters,
        "repeats": case.repeats,
        "rel_error": outcome.rel_error,
        "max_abs_error": outcome.max_abs_error,
        "over_bound": outcome.over_bound,
        **({"format_error": outcome.format_error} if outcome.format_error else {}),
        "tolerance": "choices that rounding explains; all else within bounds that follow from the arithmetic, element "
        "by element (over_bound <= 1)",
        "bitwise_repeat": outcome.bitwise_repeat,
        "passed": outcome.passed,
        "seconds": outcome.seconds,
        "problems": outcome.problems,
    }


def _print(args: argparse.Namespace, case: moe.MoeCase, outcome: Outcome) -> None:
    if args.json:
        return print_json(report(args, case, outcome))
    c = case.config
    of_format = f" ({outcome.format_error:.2e} beside a layer that rounds nowhere)" if outcome.format_error else ""
    print(
        f"{title(case, args)} (H={c.hidden} I={c.expert_width} E={c.experts} k={c.top_k}), rings {case.rings}: "
        f"{'passed' if outcome.passed else 'FAILED'}; {case.iters} x {case.repeats} calls, "
        f"bits {'equal' if outcome.bitwise_repeat else 'DIFFER'}; relative error {outcome.rel_error:.2e}{of_format}, "
        f"largest element at {outcome.over_bound:.2f} of its bound; {outcome.seconds * 1e3:.1f} ms a call"
    )
    for problem in outcome.problems:
        print(f"  {problem}")
