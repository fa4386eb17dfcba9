"""bench moe_forward: the layers of nine models beside an unfused one, on CUDA GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ..bench import cuda_gemm, cuda_moe
from ..bench.cuda_moe import MoeRow
from ..bench.cuda_ops import MODES, PLANNED, Options, free_port
from ..device.base import Tile
from ..plan.moe.config import MoEConfig, models
from ..plan.moe.forward import OP, plan_moe_forward
from ..ranks.launch import launch
from .shared import print_json, table

TOKENS = 8192
TILE = Tile(128, 256)  # of sm_90a


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=" ".join(models()), help=f"{OP}: names (default: all nine)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"{OP}: of each rank (default: {TOKENS})")
    parser.add_argument("--scale", type=int, default=1, help=f"{OP}: divides the models' widths (default: 1)")


def run(args: argparse.Namespace, variants: Mapping[str, Options]) -> int:
    if args.redraw:
        rows = cuda_moe.read_csv(args.redraw)
    elif args.device != "cuda":
        raise ValueError(f"bench {OP}: needs --device cuda: on the CPU there is nothing to compare with")
    else:
        todo = [(model, cuda_moe.config_for(model, args.ranks, args.scale)) for model in args.models.split()]
        room = arena_bytes(todo, args.tokens, args, variants)
        results = launch(
            cuda_moe.run, todo, args.tokens, variants, free_port(), args.rounds, args.repeats, 0, args.csv,
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
    """The most that the variants of one of the layers take together."""
    most = 0
    for _, config in todo:
        together = 0
        for options in ({}, *variants.values()):
            rings = cuda_moe.rings_of(options, config, args.ranks, tokens, TILE)
            given = cuda_moe.layer_options(options)
            together += plan_moe_forward(config, args.ranks, tokens, TILE, 132, rings=rings, **given).arena_bytes
        most = max(most, together)
    return 2 * most + (64 << 20)  # what operators keep may lie between the arrays of one layer and those of the next


def as_dict(row: MoeRow) -> dict[str, Any]:
    ms = {f"{variant}, {mode}": value for (variant, mode), value in row.ms.items()}
    return {name: getattr(row, name) for name in cuda_moe.FIXED} | {"ms": ms}


def moe_table(rows: Sequence[MoeRow]) -> str:
    """A line for each model, mode and variant of ours; then geometric means."""
    c = cuda_moe
    header = ["model", "H", "I", "E a rank", "k", "ranks", "tokens", "mode", "ours", "ms", "TFLOP/s", *c.PEERS]
    header += ["over unfused", "over sizes known", "of the bound"]
    lines = []
    for mode in MODES:
        for row in rows:
            sizes = (row.hidden, row.expert_width, row.experts // row.ranks, row.top_k, row.ranks, row.tokens)
            for variant in row.variants:
                ours = [mode, variant, f"{row.ms[variant, mode]:.3f}", f"{row.tflops(variant, mode):.0f}"]
                peers = [f"{row.ms[peer, mode]:.3f}" for peer in c.PEERS]
                ratios = [row.over(peer, mode, variant) for peer in (c.UNFUSED, c.KNOWN)]
                used = [*ratios, row.of_bound(mode, variant)]
                lines.append([row.model, *map(str, sizes), *ours, *peers, *(f"{ratio:.2f}" for ratio in used)])
    text = [table(header, lines), ""]
    for mode in MODES:
        means = []
        for peer in (c.UNFUSED, c.KNOWN):
            ratios = [row.over(peer, mode) for row in rows]
            means.append(f"over {peer} {cuda_gemm.geometric_mean(ratios):.3f} (least {min(ratios):.2f})")
        bound = [row.of_bound(mode) for row in rows]
        means.append(f"of max(link, products) {cuda_gemm.geometric_mean(bound):.3f} (least {min(bound):.2f})")
        text.append(f"{OP} {mode} {PLANNED}: {', '.join(means)}")
    return "\n".join(text)
