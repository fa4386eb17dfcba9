"""The MoE layers of nine models, scaled down, forward and backward, on every device without a GPU: make models. With
--devices cuda on GPUs, which ranks share where KOSMOS_SHARE_GPU=1 says so.

Each case is what `validate moe_forward` and `validate moe_backward` check: random layers against the float64 oracle,
element by element, and equal bits of repeated runs and of layers that keep more or less. Prints a line a device,
operator and model, the worst of its cases, and writes a line of CSV for each case as soon as it has ended.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kosmos_raw.checks import moe, moe_backward
from kosmos_raw.cli.shared import table
from kosmos_raw.cli.validate_moe import LARGEST
from kosmos_raw.numerics.moe.generators import ROUTINGS
from kosmos_raw.plan.heuristics import DTYPES
from kosmos_raw.plan.moe.config import MoEConfig, models

from .launched import launched

CHECKS = {"moe_forward": moe.run, "moe_backward": moe_backward.run}
RANKS = {"cpu": (2, 4, 8), "emulated": (2, 4), "cuda": (2, 4, 8)}
WITHOUT_GPU = ("cpu", "emulated")
DRAWS = 20
WORKGROUPS = 4  # of a rank, where they are threads: here and in the emulator


@dataclass(frozen=True)
class Row:
    """One case and what came of it."""

    device: str
    op: str
    dtype: str  # of experts' products
    model: str
    hidden: int
    expert_width: int
    shared_width: int
    experts: int
    top_k: int
    ranks: int
    tokens: str  # of every rank
    routing: str
    rings: str
    seed: int
    repeats: int
    bits_equal: bool
    rel_error: float
    over_bound: float  # the largest error, as a share of what is allowed there
    seconds: float  # of all of it, the oracle included
    problem: str  # the first one; nothing: passed


def case_of(model: str, scale: int, tokens: tuple[int, ...], routing: str, **options: Any) -> moe.MoeCase:
    """A layer scaled down, with an expert for each rank if the model has so many, and the first draw that can be as
    skewed as asked: few experts on few ranks often cannot."""
    whole = MoEConfig.named(model)
    small = whole.scaled(scale)
    config = replace(small, experts=max(small.experts, min(whole.experts, len(tokens))))
    for seed in range(DRAWS):
        case = moe.MoeCase(config, tokens, routing, iters=1, seed=seed, **options)
        try:
            case.inputs(0)
        except ValueError:
            continue
        return case
    raise ValueError(f"{model} / {scale} on {len(tokens)} ranks: none of {DRAWS} draws is {routing}")


def run(device: str, op: str, model: str, case: moe.MoeCase) -> Row:
    """One case on ranks that are threads."""
    start, c = time.perf_counter(), case.config
    given: dict[str, Any] = {"device": device}
    if device in WITHOUT_GPU:
        given |= {"workgroups": WORKGROUPS, "timeout_s": 300}
    outcome = launched(CHECKS[op], case, arena_bytes=moe.arena_bytes(case, LARGEST), **given)
    problem = "" if outcome.passed else str((outcome.problems or ["failed"])[0])
    found = outcome.bitwise_repeat, outcome.rel_error, outcome.over_bound
    sizes = (c.hidden, c.expert_width, c.shared_width, c.experts, c.top_k)
    tokens = " ".join(map(str, case.tokens))
    how = (case.ranks, tokens, case.routing, case.rings, case.seed, case.repeats)
    return Row(device, op, case.dtype, model, *sizes, *how, *found, round(time.perf_counter() - start, 1), problem)


def summary(rows: Iterable[Row]) -> str:
    """A line a device, operator and model."""
    header = ["device", "operator", "dtype", "model", "H", "I", "shared", "E", "k", "ranks", "routing", "cases"]
    header += ["relative error", "of the bound", "bits", "result"]

    def words(values: Iterable[Any]) -> str:
        return " ".join(map(str, dict.fromkeys(values)))

    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.device, row.op, row.dtype, row.model), []).append(row)
    lines = []
    for key, every in groups.items():
        one, bad = every[0], [row for row in every if row.problem]
        sizes = (one.hidden, one.expert_width, one.shared_width, one.experts, one.top_k)
        tried = [words(row.ranks for row in every), words(row.routing for row in every), str(len(every))]
        worst = [f"{max(row.rel_error for row in every):.1e}", f"{max(row.over_bound for row in every):.2f}"]
        bits = "equal" if all(row.bits_equal for row in every) else "DIFFER"
        result = f"{len(bad)} FAILED: {bad[0].problem}" if bad else "passed"
        lines.append([*key, *map(str, sizes), *tried, *worst, bits, result])
    return table(header, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", choices=RANKS, default=WITHOUT_GPU)
    parser.add_argument("--ops", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of experts' products (default: bf16)")
    parser.add_argument("--models", nargs="+", choices=models(), default=list(models()), metavar="MODEL")
    parser.add_argument("--ranks", nargs="+", type=int, help="(default: 2 4 8; in the emulator 2 4)")
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=["balanced", "skewed"])
    parser.add_argument("--rings", choices=moe.RINGS, default="smallest", help="as of validate (default: smallest)")
    parser.add_argument("--scale", type=int, default=32, help="divides the models' sizes (default: 32)")
    parser.add_argument("--tokens", type=int, default=48, help="of rank 0; each next rank has one fewer (default: 48)")
    parser.add_argument("--repeats", type=int, default=2, help="of each case, of equal bits (default: 2)")
    parser.add_argument("--csv", type=Path, default=Path("out/models.csv"), help="(default: out/models.csv)")
    a = parser.parse_args()
    todo = [
        (device, op, model, ranks, routing)
        for device in a.devices
        for op in a.ops
        for ranks in a.ranks or RANKS[device]
        for model in a.models
        for routing in a.routings
    ]
    rows = []
    a.csv.parent.mkdir(parents=True, exist_ok=True)
    with a.csv.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([f.name for f in fields(Row)])
        for device, op, model, ranks, routing in (bar := tqdm(todo, disable=None)):
            bar.set_description(f"{device} {op} {model} {ranks} ranks {routing}")
            tokens = tuple(max(0, a.tokens - q) for q in range(ranks))
            options = {"rings": a.rings, "repeats": a.repeats, "dtype": a.dtype}
            case = case_of(model, a.scale, tokens, routing, **options)
            rows.append(run(device, op, model, case))
            out.writerow([getattr(rows[-1], f.name) for f in fields(Row)])
            file.flush()
    print(summary(rows))
    bad = sum(bool(row.problem) for row in rows)
    print(f"{bad} of {len(rows)} cases failed" if bad else f"all {len(rows)} cases passed")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
