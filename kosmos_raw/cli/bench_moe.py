"""bench moe_forward, bench moe_backward: the layers of nine models beside an unfused one, on CUDA GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ..bench import cuda_gemm, cuda_moe, moe_rows
from ..bench.cuda_moe_backward import PROBLEMS
from ..bench.cuda_ops import MODES, PLANNED, Options, free_port
from ..bench.moe_rows import MoeRow
from ..device.base import Tile
from ..plan.moe.backward import OP as BACKWARD
from ..plan.moe.backward import plan_moe_backward
from ..plan.moe.config import MoEConfig, models
from ..plan.moe.forward import OP as FORWARD
from ..plan.moe.forward import plan_moe_forward
from ..ranks.launch import launch
from .shared import print_json, table

OPS = (FORWARD, BACKWARD)
TOKENS = 8192
TILE = Tile(128, 256)  # of sm_90a
UNFUSED = (moe_rows.UNFUSED, moe_rows.KNOWN)  # peers that make the same as ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    both = " and ".join(OPS)
    parser.add_argument("--models", default=" ".join(models()), help=f"{both}: names (default: all nine)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"{both}: of each rank (default: {TOKENS})")
    parser.add_argument("--scale", type=int, default=1, help=f"{both}: divides the models' widths (default: 1)")
    parser.add_argument("--step", action="store_true", help=f"{BACKWARD}: time each with the forward before it")


def run(args: argparse.Namespace, variants: Mapping[str, Options]) -> int:
    if args.step and args.what != BACKWARD:
        raise ValueError(f"bench {args.what}: --step is of {BACKWARD}, which then has its forward in its time")
    if args.redraw:
        rows = moe_rows.read_csv(args.redraw)
    elif args.device != "cuda":
        raise ValueError(f"bench {args.what}: needs --device cuda: on the CPU there is nothing to compare with")
    else:
        problem = PROBLEMS[moe_rows.STEP if args.step else args.what]
        todo = [(model, cuda_moe.config_for(model, args.ranks, args.scale)) for model in args.models.split()]
        room = arena_bytes(todo, args.tokens, args, variants)
        results = launch(
            cuda_moe.run, problem, todo, args.tokens, variants, free_port(), args.rounds, args.repeats, 0, args.csv,
            ranks=args.ranks, device="cuda", mode="processes", arena_bytes=room,
        )  # fmt: skip
        rows = results[0]
    if args.json:
        print_json([as_dict(row) for row in rows])
    else:
        print(moe_table(rows))
    return 0


def arena_bytes(
    todo: Sequence[tuple[str, MoEConfig]], tokens: int, args: argparse.Namespace, variants: Mapping[str, Options]
) -> int:
    """The most that the variants of one of the layers take together. Plans all, so what cannot run is refused here."""
    most = 0
    for _, config in todo:
        together = of_backwards = 0
        for options in ({}, *variants.values()):
            rings = cuda_moe.rings_of(options, config, args.ranks, tokens, TILE)
            given = cuda_moe.layer_options(options)
            round_rows = given.pop("round_rows", None)
            given.pop("recompute", None)
            plan = plan_moe_forward(config, args.ranks, tokens, TILE, 132, rings=rings, **given)
            together += plan.arena_bytes
            if args.what == BACKWARD:
                of_backwards = max(of_backwards, plan_moe_backward(plan, round_rows).arena_bytes)
        most = max(most, together + of_backwards)
    return 2 * most + (64 << 20)  # what operators keep may lie between the arrays of one layer and those of the next


def as_dict(row: MoeRow) -> dict[str, Any]:
    ms = {f"{variant}, {mode}": value for (variant, mode), value in row.ms.items()}
    return {name: getattr(row, name) for name in moe_rows.FIXED} | {"ms": ms}


def moe_table(rows: Sequence[MoeRow]) -> str:
    """A line for each model, mode and variant of ours; then geometric means."""
    m = moe_rows
    header = ["model", "op", "H", "I", "E a rank", "k", "ranks", "tokens", "mode", "ours", "ms", "TFLOP/s", *m.PEERS]
    header += [f"over {peer}" for peer in UNFUSED] + ["of the bound"]
    lines = []
    for mode in MODES:
        for row in rows:
            sizes = (row.hidden, row.expert_width, row.experts // row.ranks, row.top_k, row.ranks, row.tokens)
            for variant in row.variants:
                ours = [mode, variant, f"{row.ms[variant, mode]:.3f}", f"{row.tflops(variant, mode):.0f}"]
                peers = [f"{row.ms[peer, mode]:.3f}" if (peer, mode) in row.ms else "-" for peer in m.PEERS]
                ratios = [row.over(peer, mode, variant) for peer in UNFUSED]
                used = ["-" if r is None else f"{r:.2f}" for r in (*ratios, row.of_bound(mode, variant))]
                lines.append([row.model, row.op, *map(str, sizes), *ours, *peers, *used])
    text = [table(header, lines), ""]
    for op in dict.fromkeys(row.op for row in rows):
        of_op = [row for row in rows if row.op == op]
        text += [f"{op} {mode} {PLANNED}: {', '.join(_means(of_op, mode))}" for mode in MODES]
    return "\n".join(text)


def _means(rows: Sequence[MoeRow], mode: str) -> list[str]:
    means = []
    for peer in UNFUSED:
        if ratios := [ratio for row in rows if (ratio := row.over(peer, mode)) is not None]:
            means.append(f"over {peer} {cuda_gemm.geometric_mean(ratios):.3f} (least {min(ratios):.2f})")
    bound = [row.of_bound(mode) for row in rows]
    return [*means, f"of max(link, products) {cuda_gemm.geometric_mean(bound):.3f} (least {min(bound):.2f})"]
