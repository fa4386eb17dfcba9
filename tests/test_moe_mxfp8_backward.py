"""moe_backward in MXFP8 on the CPU device: gradients of whole layers against the oracle, what is quantised byte for
byte, what they are beside BF16, and bugs on purpose; also where tiles know BF16 alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.build.params import INTO
from kosmos_raw.checks import moe, moe_backward
from kosmos_raw.checks.validate import Outcome, merge
from kosmos_raw.numerics.moe.generators import Inputs
from kosmos_raw.numerics.moe.layout import Exchange, exchange
from kosmos_raw.numerics.mxfp8 import BLOCK, dequantize, quantize, quantize_columns
from kosmos_raw.ops.moe_gradients import shapes
from kosmos_raw.plan.moe.backward import OP, MoeBackwardPlan, plan_moe_backward
from kosmos_raw.plan.moe.config import MoEConfig, models
from kosmos_raw.plan.shapes import round_up

from .test_moe_mxfp8 import INPUTS, SMALL, TOKENS, case_of, options

BF16 = ml_dtypes.bfloat16
GATED = MoEConfig(64, 16, 7, 2, shared_width=16, gated_shared=True, scaling=2.5)


def outcome_of(case: moe.MoeCase) -> Outcome:
    return merge(kr.launch(moe_backward.run, case, **options(case)))


def check(case: moe.MoeCase) -> None:
    outcome = outcome_of(case)
    assert outcome.passed and outcome.bitwise_repeat, outcome.problems


# -- whole layers: their first iteration is of all magnitudes, a second one is noise

LAYERS = [*product(enumerate(models()), (2, 4, 8), (False, True))]
# Four models are in the normal suite: over them, all ranks, balanced and not.
SAMPLE = {((i, model), (2, 4, 8)[i % 3], i % 2 == 0) for i, model in enumerate(models()) if i < 4}


@pytest.mark.parametrize(
    ("model", "ranks", "skewed"),
    [pytest.param(*layer, marks=() if layer in SAMPLE else pytest.mark.slow) for layer in LAYERS],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_the_layers_of_the_paper(model: tuple[int, str], ranks: int, skewed: bool) -> None:
    """Balanced in rings of the default size, and skewed in the smallest."""
    number, name = model
    config, tokens = MoEConfig.named(name).scaled(64), (40, 0, 33, 70, 1, 17, 5, 96)[-ranks:]
    uneven = "skewed" if 2 < ranks <= config.experts // 2 else "one_expert"  # too few for a skew that is a choice
    how = {"routing": uneven, "rings": "smallest"} if skewed else {}
    check(case_of(config, tokens, repeats=1, into=INTO[(number + ranks) % 4], **how))


@pytest.mark.parametrize("routing", ["one_expert", "one_rank", "empty_ranks"])
def test_the_smallest_rings_give_the_same_bits(routing: str) -> None:
    """One tile row each, however many arrive, and under random delays: against rings that hold all, recomputed ones,
    and a second backward."""
    check(case_of(SMALL, (200, 0, 130), routing, rings="smallest", delay_us=300, repeats=1))


@pytest.mark.parametrize("into", INTO)
def test_where_gradients_go(into: str) -> None:
    check(case_of(INPUTS, TOKENS, "skewed", into=into, recompute=into.endswith("f32"), rings="smallest", repeats=1))


@pytest.mark.parametrize(
    ("config", "float_router"),
    [
        (INPUTS, True),
        (GATED, True),
        (MoEConfig(136, 24, 8, 2, score="sqrtsoftplus", hash_routing=True, swiglu_limit=0.5), False),
    ],
    ids=["weighted inputs, fp32", "gated shared, fp32", "hash, clamped"],
)
def test_rules_of_layers(config: MoEConfig, float_router: bool) -> None:
    check(case_of(config, float_router=float_router, iters=2, repeats=1))


@pytest.mark.parametrize("config", [replace(SMALL, aux_loss="none"), GATED], ids=["plain", "gated"])
def test_choices_from_outside(config: MoEConfig) -> None:
    check(case_of(config, given_weights=True, repeats=1, into="add_bf16"))


def test_the_auxiliary_loss_alone() -> None:
    check(case_of(replace(SMALL, aux_loss_coeff=1.0), zero_dy=True, aux_grad=0.5, repeats=1))


def test_widths_of_two_parts_and_groups_of_a_whole_tile() -> None:
    """dY is quantised by more than one WG, and an expert has several tile rows."""
    config = MoEConfig(1096, 24, 4, 2)
    check(case_of(config, (150, 60), pad=96, repeats=1))


def test_experts_without_rows_have_no_gradient() -> None:
    """Set to zeros whatever was there; where it is added to, not a bit changes."""
    case = case_of(replace(SMALL, top_k=1), routing="one_expert")

    def work(comm: kr.Communicator) -> list[int]:
        made, rank = case.inputs(0), comm.rank
        layer = moe.make_layer(comm, case, made.weights)
        x, dy = (of[rank].astype(BF16) for of in (made.x, made.dout))
        wanted, rng = shapes(plan_moe_backward(layer.plan), rank), np.random.default_rng(rank)
        empty = []
        for accumulate, dtype in product((False, True), (BF16, np.float32)):
            before = {n: rng.standard_normal(shape).astype(dtype) for n, shape in wanted.items()}
            into = kr.MoEWeights(**{n: array.copy() for n, array in before.items()})
            _, saved = layer.forward(x)
            layer.backward(dy, into=into, accumulate=accumulate)
            rows = saved.counts.sum(0)
            for i, e in enumerate(case.config.experts_of(rank, case.ranks)):
                for name in ("gate_up", "down"):
                    now, was = (np.asarray(of)[i] for of in (getattr(into, name), before[name]))
                    if not rows[e]:
                        assert now.tobytes() == (was if accumulate else np.zeros_like(was)).tobytes()
                        empty.append(int(e))
                    else:
                        assert (now != was).any()
        return empty

    assert set().union(*kr.launch(work, **options(case)))


@pytest.mark.parametrize(
    "case",
    [
        case_of(SMALL, (200, 0, 130), "one_expert", rings="smallest", into="add_bf16"),
        case_of(INPUTS, (70, 41), "skewed", pad=96, float_router=True, repeats=1),
        case_of(MoEConfig.named("DeepSeek-V3").scaled(64), (40, 33), iters=2, repeats=1, recompute=True),
    ],
    ids=["smallest rings", "weighted inputs", "DeepSeek-V3"],
)
def test_layers_where_tiles_know_bf16_alone(case: moe.MoeCase, bf16_tiles) -> None:
    check(case)


# -- bits


def gradients(comm: kr.Communicator, case: moe.MoeCase) -> dict[str, np.ndarray]:
    given = case.inputs(case.iters)  # noise where that is even
    layer = moe.make_layer(comm, case, given.weights)
    layer.forward(given.x[comm.rank].astype(BF16))
    g = layer.backward(given.dout[comm.rank].astype(BF16))
    made = {"x": g.x} | {name: getattr(g.weights, name) for name in shapes(plan_moe_backward(layer.plan), comm.rank)}
    return {name: array.astype(np.float64) for name, array in made.items()}


def of_all_ranks(case: moe.MoeCase) -> dict[str, np.ndarray]:
    every = kr.launch(gradients, case, **options(case))
    return {name: np.concatenate([rank[name] for rank in every]) for name in every[0]}


def test_tiles_of_bf16_give_the_same_bits(request) -> None:
    """BF16 holds what a block stands for exactly, and a tile of this device adds it in one order."""
    case = case_of(INPUTS)
    of_mxfp8 = of_all_ranks(case)
    request.getfixturevalue("bf16_tiles")
    for name, array in of_all_ranks(case).items():
        assert np.array_equal(array, of_mxfp8[name]), name


def copies(comm: kr.Communicator, case: moe.MoeCase) -> dict[str, np.ndarray]:
    """A forward's choices, and what a backward has put where experts' tiles read it. Rings hold all rows."""
    given, rank = case.inputs(0), comm.rank
    layer = moe.make_layer(comm, case, given.weights)
    x, dy = (of[rank].astype(BF16) for of in (given.x, given.dout))
    for _ in range(2):  # once all memory is there, it is poisoned
        comm.poison()
        layer.poison()
        _, saved = layer.forward(x)
        layer.backward(dy)
    plan = plan_moe_backward(layer.plan)
    f, device = plan.forward, comm.device
    assert (saved.strides == 1).all()  # tiles of an expert lie in their order
    places = {name: (comm.local(f"{OP}.{name}_copy", 16), *shape) for name, shape in plan.copies.items()}
    at = comm.arena.regions()[f"{OP}.x_columns_at"][0]
    places["x_columns"] = comm.arena.address(rank, at), *plan.x_columns_shape
    found = {"ids": saved.experts, "weights": saved.weights}
    for name, width, room in (("h", f.width, "moe.h"), ("dpre", 2 * f.width, f"{OP}.dpre")):
        found[f"made {name}"] = device.array(comm.local(room, 16), (plan.ring_rows, width), BF16, comm)
    for name, (address, lines, depth) in places.items():
        if device.multiplies_mxfp8:
            scales = address + f.elements_bytes(lines, depth)
            by_step = device.array(scales, (depth // 128, lines, 4), np.uint8, comm)
            found[name] = device.array(address, (lines, depth), np.uint8, comm)
            found[f"{name} scales"] = by_step.transpose(1, 0, 2).reshape(lines, -1)
        else:
            found[name] = device.array(address, (lines, depth), np.uint16, comm)
    return {name: np.array(array) for name, array in found.items()}


def planned(case: moe.MoeCase) -> MoeBackwardPlan:
    def work(comm: kr.Communicator) -> MoeBackwardPlan:
        return plan_moe_backward(moe.make_layer(comm, case, case.inputs(0).weights).plan)

    return kr.launch(work, **options(case))[0]


def travelled(case: moe.MoeCase, given: Inputs, every: list[dict], what: str, tile_m: int) -> Exchange:
    """Where the rows of x, or of dOut, lie at their owners; weighted by whoever weights them."""
    c = case.config
    if what == "dy":
        c = replace(c, weight_on={"input": "output", "output": "input"}[c.weight_on])
    ids, weights = ([rank[name] for rank in every] for name in ("ids", "weights"))
    rows = given.x if what == "x" else given.dout
    return exchange(c, rows, given.weights, ids, weights, tile_m, pad=case.pad or BLOCK)


def expected(
    case: moe.MoeCase, plan: MoeBackwardPlan, rank: int, got: dict, there: dict[str, Exchange]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, tuple, tuple]]:
    """Of all rows of all groups, padding included: (copy, elements, scales, where the elements lie, where the scales
    do). Columns have zeros behind the last row of each tile row, up to a K step."""
    layout, tile_m, f = there["x"].layout, plan.forward.tile.m, plan.forward
    source, _ = layout.rows_at(rank)
    rows = {name: of.received[rank].astype(np.float32).astype(BF16) for name, of in there.items()}  # FP32 products
    rows |= {name: got[f"made {name}"][: len(source)] for name in ("h", "dpre")}
    for e in case.config.experts_of(rank, case.ranks):
        of_expert = layout.expert_rows(e)
        padding = source[of_expert] < 0
        for name in ("dy", "h", "dpre"):
            assert not rows[name][of_expert][padding].astype(np.float32).any(), (name, "padding")
        for name, depth in (("dy", f.depth), ("dpre", 2 * f.width)):
            whole = np.pad(rows[name][of_expert], ((0, 0), (0, depth - rows[name].shape[1])))
            yield name, *quantize(whole), (of_expert, slice(None)), (of_expert, slice(None))
        for first in range(of_expert.start, of_expert.stop, tile_m):
            tile = slice(first, min(first + tile_m, of_expert.stop))
            k = first // tile_m * plan.tile_k
            for block in source[tile].reshape(-1, BLOCK):
                assert len({q for q in block if q >= 0}) < 2
            for name in ("x", "dy", "h", "dpre"):
                elements, scales = quantize_columns(rows[name][tile])
                tail = round_up(elements.shape[1], 128) - elements.shape[1]
                elements, scales = (np.pad(a, ((0, 0), (0, n))) for a, n in ((elements, tail), (scales, tail // BLOCK)))
                ks = slice(k, k + elements.shape[1])
                yield (
                    f"{name}_columns",
                    elements,
                    scales,
                    (slice(None), ks),
                    (slice(None), slice(ks.start // BLOCK, ks.stop // BLOCK)),
                )


def wrong_copies(case: moe.MoeCase) -> set[str]:
    """Which of them are not, byte for byte, what the oracle makes of the rows that were sent, and of h and dpre as they
    were stored."""
    every, given, plan = kr.launch(copies, case, **options(case)), case.inputs(0), planned(case)
    there = {what: travelled(case, given, every, what, plan.forward.tile.m) for what in ("x", "dy")}
    wrong = set()
    for rank, got in enumerate(every):
        for name, elements, scales, at, scales_at in expected(case, plan, rank, got, there):
            if f"{name} scales" in got:
                right = np.array_equal(got[name][at], elements)
                right &= np.array_equal(got[f"{name} scales"][scales_at], scales)
            else:
                right = np.array_equal(got[name][at], dequantize(elements, scales).astype(BF16).view(np.uint16))
            wrong |= set() if right else {name}
    return wrong


COPIED = {
    "an expert of three tile rows": case_of(SMALL, (150, 0, 130), "one_expert", rings="all"),
    "weighted inputs, whole tiles": case_of(INPUTS, rings="all", routing="skewed", pad=96),
    "weighted inputs": case_of(INPUTS, rings="all", routing="skewed"),
}


@pytest.mark.parametrize("case", COPIED.values(), ids=COPIED)
def test_copies_are_byte_for_byte_those_of_the_oracle(case: moe.MoeCase) -> None:
    assert not wrong_copies(case)


def test_copies_are_of_the_same_values_where_tiles_know_bf16_alone(bf16_tiles) -> None:
    assert not wrong_copies(COPIED["an expert of three tile rows"])


# -- beside BF16


def test_gradients_are_near_those_in_bf16() -> None:
    """Of noise a product of quantised factors is off by 3.8 % (docs/mxfp8.md). Each gradient of experts has three such
    products behind it whose errors add as squares: GEMM1, DGRAD2 and the one that makes it (down: GEMM1's two halves,
    gate and up, through h). The router's comes from Y, which has as many."""
    case = case_of(MoEConfig(256, 128, 8, 2), (150, 130))
    assert not case.is_spread(case.iters)
    in_mxfp8, in_bf16 = of_all_ranks(case), of_all_ranks(replace(case, dtype="bf16"))
    for name, exact in in_bf16.items():
        error = np.linalg.norm(in_mxfp8[name] - exact) / np.linalg.norm(exact)
        assert 0.9 < error / (0.038 * 3**0.5) < 1.1, (name, error)


def losses(comm: kr.Communicator, case: moe.MoeCase, rate: float, steps: int) -> list[float]:
    """Before each step of gradient descent, as shares of the first: squared distance of Y from random numbers."""
    made, rank = case.inputs(case.iters), comm.rank
    x, target = made.x[rank].astype(BF16), made.dout[rank]
    layer = moe.make_layer(comm, case, made.weights)
    own = moe.own_weights(case, made.weights, rank, np)
    weights = {name: getattr(own, name).view(BF16).astype(np.float32) for name in ("router", "gate_up", "down")}
    found = []
    for _ in range(steps):
        layer.set_weights(kr.MoEWeights(**{name: w.astype(BF16) for name, w in weights.items()}))
        off = layer.forward(x)[0].astype(np.float64) - target
        found.append(sum(comm.allgather(float((off**2).sum()))))
        into = {name: np.empty_like(w) for name, w in weights.items()}
        layer.backward(off.astype(BF16), into=kr.MoEWeights(**into))
        into["router"] = sum(comm.allgather(into["router"]))
        for name, w in weights.items():
            w -= np.float32(rate) * into[name]
    return [loss / found[0] for loss in found]


def test_gradient_descent_lowers_a_loss_as_in_bf16() -> None:
    case = case_of(MoEConfig(64, 96, 4, 2), (60, 50))
    in_mxfp8, in_bf16 = (
        kr.launch(losses, replace(case, dtype=dtype), 0.002, 12, **options(case))[0] for dtype in ("mxfp8", "bf16")
    )
    assert in_bf16[-1] < 0.25
    for ours, theirs in zip(in_mxfp8, in_bf16, strict=True):
        assert abs(ours - theirs) < 0.03, (in_mxfp8, in_bf16)


# -- bugs on purpose

ROWS, ROLES = "work/moe_backward_mxfp8.h", "kernels/moe_backward.h"
PUSH = "quantize_across(x_columns(w.chunk), 0, slot_k(w.row) + first"
NOBODY = "return from.at ? from.weighted(Vec16{target::read((const u64*)from.at + four), 0}).lo : 0;"
FIRST = "SourceRow{p.x, float_in(target::read(p.choices)), p.routing.weigh_inputs != 0}"  # of the first choice
ALONG = "four[j] = target::read(dpre + (u64)row * (p.I / 4) + block * 4 + j);"
# What is replaced by what; which copies it makes wrong; whether results are out of their bounds.
BUGS = {
    "columns of padding repeat a row": (
        ROWS,
        NOBODY,
        NOBODY.replace(" : 0;", f" : {FIRST}.weighted(Vec16{{target::read((const u64*)p.x + four), 0}}).lo;"),
        {"x_columns"},
        False,  # but where such a row is larger than those of its block
    ),
    "columns of x end with the last row": (ROWS, "(all - n) / MX_BLOCK", "0", {"x_columns"}, True),
    "columns of h and dpre end with the last row": (
        ROWS,
        "blocks = padded_to_step(n) / MX_BLOCK",
        "blocks = n / MX_BLOCK",
        {"h_columns", "dpre_columns"},
        True,
    ),
    "down of the expert before": (
        ROLES,
        "local * (second ? p.mx.depth : I2)",
        "(second && local ? local - 1 : local) * (second ? p.mx.depth : I2)",
        set(),
        True,
    ),
    "gate and up apart": (  # the gates of two blocks in one, their ups in the next
        ROWS,
        ALONG,
        ALONG.replace("block * 4 + j", "(block / 2 * 2 + j / 2) * 4 + block % 2 * 2 + j % 2"),
        {"dpre"},
        True,
    ),
    "dpre of another slot": (
        ROLES,
        "const u64 row = g.g.slot_row(w.row);",
        "const u64 row = g.g.slot_row(w.row + (w.kind == DGRAD1));",
        set(),
        True,
    ),
    "columns of x only where replayed": (
        ROWS,
        "g.rows.place_rows(me,",
        "if (replays) g.rows.place_rows(me,",
        {"x_columns"},
        True,
    ),
    "scales of the next line": (
        ROWS,
        PUSH,
        "const MxCopy to = x_columns(w.chunk);\n      "
        + PUSH.replace("x_columns(w.chunk)", "MxCopy{to.elements, to.scales + 1, to.depth, to.ld_scales}"),
        {"x_columns"},
        True,
    ),
}


# Each is a kernel to be compiled. The normal suite has one that shows in copies across rows, one along, one in neither.
QUICK = ("columns of x end with the last row", "gate and up apart", "dpre of another slot")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BUGS])
def test_a_bug_is_found(name: str, mutated) -> None:
    file, right, wrong, seen_in, in_results = BUGS[name]
    mutated(file, right, wrong)
    assert wrong_copies(COPIED["weighted inputs"]) == seen_in
    outcome = outcome_of(case_of(INPUTS, (70, 41), repeats=1))
    assert outcome.passed != in_results, outcome.problems
