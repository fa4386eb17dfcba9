"""Operators and MoE layers drawn at random, checked as `validate` checks them: make drawn.

Shapes, rows, policies, routing rules, rings and formats are by chance, so that what nobody thought of is tried. A case
that fails is printed as it can be made again; --seed and --first repeat it. With --devices cuda ranks may share a GPU
(KOSMOS_SHARE_GPU=1).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from kosmos_raw.build.params import INTO
from kosmos_raw.checks import moe, moe_backward, validate
from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.cli.validate_moe import LARGEST
from kosmos_raw.numerics.moe.generators import ROUTINGS
from kosmos_raw.plan.crew import policies_of
from kosmos_raw.plan.moe.config import AUX_LOSSES, SCORES, WEIGHT_ON, MoEConfig
from kosmos_raw.plan.moe.forward import POLICIES
from kosmos_raw.plan.shapes import ORDERS_OF

from .launched import launched

# Of each device: most rows of a rank, the largest other size, most ranks, WGs of a rank (None: the device's number).
DEVICES = {"cpu": (150, 300, 8, 4), "emulated": (16, 72, 3, 2), "cuda": (900, 900, 8, None)}
CUT = (("ag_gemm_dgrad", "bf16"), ("bulk_rs", "bf16"), ("bulk_rs", "mxfp8"))  # whose contraction a caller may cut
Drawn = Case | moe.MoeCase
TRIES = 1000


def size(dice: random.Random, most: int) -> int:
    """1 to most: small ones as often as large ones."""
    return max(1, min(most, round(most ** dice.random())))


def rows_of_ranks(dice: random.Random, ranks: int, most: int) -> tuple[int, ...]:
    """Every fifth rank has none."""
    return tuple(size(dice, most) * (dice.random() > 0.2) for _ in range(ranks))


def operator(dice: random.Random, device: str) -> Case:
    """One call of one operator."""
    most, width, most_ranks, workgroups = DEVICES[device]
    op, rows = dice.choice(tuple(CHECKED)), rows_of_ranks(dice, dice.randint(1, most_ranks), most)
    dtype = dice.choice(("bf16", "bf16", "mxfp8"))
    policy = dice.choice((None, *policies_of(op, beside=(device, dtype) == ("cuda", "bf16"))))
    order, transport = dice.choice(ORDERS_OF[op]), None
    if op == "gemm_rs":
        transport = dice.choice((None, "pull", "push"))
    if transport == "push":  # nobody moves
        policy, order = None, "as_consumed"
    chosen = policy and len(rows) > 1 and dice.random() < 0.5
    cut = (op, dtype) in CUT and policy not in (None, "beside") and dice.random() < 0.3
    return Case(
        rows,
        size(dice, width),
        size(dice, width),
        op,
        policy,
        order,
        dice.randint(1, (workgroups or 8) - 1) if chosen else None,
        arena=dice.random() < 0.5,
        transport=transport,
        split=dice.randint(1, 4) if cut else None,
        dtype=dtype,
        delay_us=dice.choice((0, 300)),
        seed=dice.randrange(1 << 16),
    )


def config(dice: random.Random, most: int) -> MoEConfig:
    """The sizes and rules of a layer."""
    groups = dice.choice((1, 1, 2, 4))
    experts = groups * size(dice, 40 // groups)
    shared = 8 * size(dice, most // 8) * dice.randint(0, 1)
    aux = dice.choice(AUX_LOSSES)
    return MoEConfig(
        8 * size(dice, most // 8),
        8 * size(dice, most // 8),
        experts,
        dice.randint(1, min(10, experts)),
        score=dice.choice(SCORES),
        softmax_after_topk=dice.random() < 0.2,
        normalise=dice.random() < 0.7,
        scaling=dice.choice((1.0, 2.5)),
        expert_bias=dice.random() < 0.3,
        groups=groups,
        top_groups=dice.randint(1, groups),
        hash_routing=dice.random() < 0.1,
        weight_on=dice.choice(WEIGHT_ON),
        shared_width=shared,
        gated_shared=bool(shared) and dice.random() < 0.5,
        swiglu_limit=dice.choice((None, None, 0.5, 7.0)),
        aux_loss=aux,
        aux_loss_coeff=0.01 if aux != "none" else 0.0,
    )


def layer(dice: random.Random, device: str, backward: bool = False) -> moe.MoeCase:
    """One layer. Raises ValueError where rules do not go together, or no such skew can be had."""
    most, width, most_ranks, _ = DEVICES[device]
    dtype = dice.choice(("bf16", "bf16", "mxfp8"))
    case = moe.MoeCase(
        config(dice, width),
        rows_of_ranks(dice, dice.randint(1, most_ranks), most),
        dice.choice(ROUTINGS),
        dice.choice(moe.RINGS),
        "two_way" if backward else dice.choice(POLICIES),
        pull=not backward and dice.random() < 0.2,
        dtype=dtype,
        pad=dice.choice((None, 32) if dtype == "mxfp8" else (None, None, 2, 16)),
        float_router=dice.random() < 0.3,
        given_weights=dice.random() < 0.1,
        iters=1,
        delay_us=dice.choice((0, 300)),
        seed=dice.randrange(1 << 16),
        into=dice.choice(INTO),
        recompute=dice.random() < 0.3,
        zero_dy=dice.random() < 0.1,
    )
    case.inputs(0)
    case.plan(LARGEST)
    return case


def both_ways(dice: random.Random, device: str) -> moe.MoeCase:
    """A layer that has a backward."""
    return layer(dice, device, backward=True)


KINDS: dict[str, tuple[Callable[[random.Random, str], Drawn], Callable[..., validate.Outcome]]] = {
    "operator": (operator, validate.run),
    "moe_forward": (layer, moe.run),
    "moe_backward": (both_ways, moe_backward.run),
}


def draw(kind: str, device: str, seed: int, number: int) -> Drawn:
    """Case `number` of a seed: the first draw that has a meaning."""
    dice = random.Random(f"{kind} {device} {seed} {number}")
    for _ in range(TRIES):
        try:
            return KINDS[kind][0](dice, device)
        except ValueError:
            continue
    raise AssertionError(f"none of {TRIES} draws of {kind} has a meaning")


def check(kind: str, device: str, case: Drawn) -> str:
    """What is wrong with it; nothing if it passed."""
    workgroups = DEVICES[device][3]
    arena = validate.arena_bytes([case]) if isinstance(case, Case) else moe.arena_bytes(case, LARGEST)
    outcome = launched(KINDS[kind][1], case, device=device, arena_bytes=arena, workgroups=workgroups)
    return "" if outcome.passed and outcome.bitwise_repeat else "; ".join(outcome.problems) or "bits differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=["cpu"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--count", type=int, default=100, help="cases of each kind (default: 100)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    a = parser.parse_args()
    start, tried, bad = time.monotonic(), 0, 0
    todo = [(d, k, n) for n in range(a.first, a.first + a.count) for d in a.devices for k in a.kinds]
    for device, kind, number in (bar := tqdm(todo, disable=None)):
        if time.monotonic() - start > a.seconds:
            break
        bar.set_description(f"{device} {kind} {number}")
        case = draw(kind, device, a.seed, number)
        tried += 1
        if problem := check(kind, device, case):
            bad += 1
            tqdm.write(f"--seed {a.seed} --first {number}: {kind} on {device} of {case}\n  {problem}", file=sys.stdout)
    print(f"{bad} of {tried} cases failed" if bad else f"all {tried} cases passed")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
