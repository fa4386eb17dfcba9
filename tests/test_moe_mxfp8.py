"""moe_forward in MXFP8 on the CPU device: whole layers against the oracle, what is quantised bit by bit, and bugs on
purpose; also where tiles know BF16 alone."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.checks import moe
from kosmos_raw.checks.validate import Outcome, merge
from kosmos_raw.device.base import Tile
from kosmos_raw.numerics.moe.layout import exchange
from kosmos_raw.numerics.mxfp8 import BLOCK, dequantize, quantize
from kosmos_raw.plan.moe.config import MoEConfig, models
from kosmos_raw.plan.shapes import round_up

BF16 = ml_dtypes.bfloat16
# Neither width is a multiple of a block, let alone of a K step; groups of fewer and of more rows than a block.
SMALL = MoEConfig(72, 40, 10, 3, shared_width=24, aux_loss="batch", aux_loss_coeff=0.01)
INPUTS = MoEConfig(200, 48, 7, 2, normalise=False, weight_on="input", score="sigmoid")
TOKENS = (70, 0, 41)


def options(case: moe.MoeCase) -> dict:
    room = moe.arena_bytes(case, Tile(96, 96))  # of this device
    return {"ranks": case.ranks, "mode": "threads", "device": "cpu", "arena_bytes": room}


def case_of(config: MoEConfig, tokens: tuple[int, ...] = TOKENS, routing: str = "balanced", **more) -> moe.MoeCase:
    return moe.MoeCase(config, tokens, routing, **{"dtype": "mxfp8", "iters": 1, **more})


def outcome_of(case: moe.MoeCase) -> Outcome:
    return merge(kr.launch(moe.run, case, **options(case)))


def check(case: moe.MoeCase) -> None:
    outcome = outcome_of(case)
    assert outcome.passed and outcome.bitwise_repeat, outcome.problems


# -- whole layers: their first iteration is of all magnitudes, a second one is noise

LAYERS = [*product(models(), (2, 4, 8), (False, True))]
# One of each model in the normal suite; over them, all ranks both balanced and not.
SAMPLE = {(model, (2, 4, 8)[i % 3], i % 2 == 0) for i, model in enumerate(models())}


@pytest.mark.parametrize(
    ("model", "ranks", "skewed"),
    [pytest.param(*layer, marks=() if layer in SAMPLE else pytest.mark.slow) for layer in LAYERS],
)
def test_the_layers_of_the_paper(model: str, ranks: int, skewed: bool) -> None:
    config = MoEConfig.named(model).scaled(64)
    uneven = "skewed" if 2 < ranks <= config.experts // 2 else "one_expert"  # too few for a skew that is a choice
    tokens = (40, 0, 33, 70, 1, 17, 5, 96)[-ranks:]
    check(case_of(config, tokens, uneven if skewed else "balanced", repeats=1))


@pytest.mark.parametrize("routing", ["one_expert", "one_rank", "empty_ranks"])
@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_the_smallest_rings_give_the_same_bits(routing: str, pull: bool) -> None:
    """One tile row each, however many arrive; against rings that hold all, and twice under random delays."""
    check(case_of(SMALL, (200, 0, 130), routing, rings="smallest", pull=pull, delay_us=300))


@pytest.mark.parametrize(
    "config",
    [
        INPUTS,
        MoEConfig(64, 16, 7, 2, shared_width=16, gated_shared=True, scaling=2.5),
        MoEConfig(136, 24, 8, 2, score="sqrtsoftplus", hash_routing=True, swiglu_limit=0.5),
        MoEConfig(8, 8, 4, 1),
    ],
    ids=["weighted inputs", "gated shared", "hash, clamped", "least widths"],
)
@pytest.mark.parametrize("float_router", [False, True], ids=["bf16", "fp32"])
def test_rules_of_layers(config: MoEConfig, float_router: bool) -> None:
    check(case_of(config, float_router=float_router, iters=2, repeats=1))


def test_choices_from_outside() -> None:
    check(case_of(SMALL, given_weights=True))


def test_groups_may_be_padded_to_a_whole_tile() -> None:
    check(case_of(INPUTS, pad=96, rings="smallest"))


@pytest.mark.parametrize("policy", ["dedicated", "fixed", "planned"])
def test_policies(policy: str) -> None:
    check(case_of(SMALL, routing="skewed", policy=policy, repeats=1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pad": 48}, "groups are padded to 48 rows, want a multiple of 32 in MXFP8: rows that share a scale"),
        ({"pad": 64}, "padded to 64 rows, want a divisor"),
        ({"dtype": "fp8"}, "moe_forward: dtype is 'fp8', want one of bf16, mxfp8"),
    ],
)
def test_layers_that_cannot_be_are_refused(wrong: dict, message: str) -> None:
    def work(comm: kr.Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            moe.make_layer(comm, case, case.inputs(0).weights)

    case = case_of(SMALL, **wrong)
    kr.launch(work, ranks=case.ranks, mode="threads", device="cpu")


# -- bits


def outputs(comm: kr.Communicator, case: moe.MoeCase) -> bytes:
    given = case.inputs(0)
    layer = moe.make_layer(comm, case, given.weights)
    return layer.forward(given.x[comm.rank].astype(BF16))[0].tobytes()


def bits(case: moe.MoeCase) -> list[bytes]:
    return kr.launch(outputs, case, **options(case))


def test_rows_that_are_pulled_give_the_same_bits() -> None:
    assert bits(case_of(SMALL)) == bits(case_of(SMALL, pull=True))


@pytest.mark.parametrize("config", [SMALL, INPUTS], ids=["small", "weighted inputs"])
def test_tiles_of_bf16_give_the_same_bits(config: MoEConfig, request) -> None:
    """BF16 holds what a block stands for exactly, and a tile of this device adds it in one order."""
    case = case_of(config)
    of_mxfp8 = bits(case)
    request.getfixturevalue("bf16_tiles")
    assert bits(case) == of_mxfp8


@pytest.mark.parametrize(
    "case",
    [
        case_of(SMALL, (200, 0, 130), "one_expert", rings="smallest"),
        case_of(SMALL, (70, 41), "skewed", pull=True),
        case_of(INPUTS, pad=96, float_router=True),
        case_of(MoEConfig.named("DeepSeek-V3").scaled(64), (40, 33), iters=2),
    ],
    ids=["smallest rings", "pull", "weighted inputs", "DeepSeek-V3"],
)
def test_layers_where_tiles_know_bf16_alone(case: moe.MoeCase, bf16_tiles) -> None:
    check(case)


# -- what is quantised


def copies(comm: kr.Communicator, case: moe.MoeCase) -> dict[str, np.ndarray]:
    """A forward's choices, and what it has put where experts' tiles read it. Rings hold all rows."""
    given = case.inputs(0)
    layer = moe.make_layer(comm, case, given.weights)
    comm.poison()
    layer.poison()
    _, saved = layer.forward(given.x[comm.rank].astype(BF16))
    p, plan = saved.params[0], layer.plan
    lines = {"x": plan.rings.x_slots * plan.tile.m, "h": plan.rings.h_slots * plan.tile.m}
    depths = {"x": plan.depth, "h": plan.width}
    arena = [comm.arena.address(comm.rank, int(at) * 16) for at in (p["x_at"], p["mx"]["x_scales_at"])]
    places = {"x": arena, "h": [int(p["mx"]["h"][name]) for name in ("elements", "scales")]}
    found = {"ids": saved.experts, "weights": saved.weights, "tile_m": np.array(plan.tile.m)}
    found["made h"] = comm.device.array(int(p["h"]), (lines["h"], plan.width), BF16, comm)
    for name, (elements, scales) in places.items():
        shape = lines[name], depths[name]
        if comm.device.multiplies_mxfp8:
            by_step = comm.device.array(scales, (shape[1] // 128, shape[0], 4), np.uint8, comm)
            of_line = by_step.transpose(1, 0, 2).reshape(shape[0], -1)
            found[name] = dequantize(comm.device.array(elements, shape, np.uint8, comm), of_line)
            found[f"{name} scales"] = of_line
        else:
            found[name] = comm.device.array(elements, shape, BF16, comm)
    return {name: np.array(array) for name, array in found.items()}


def wrong_copies(case: moe.MoeCase) -> set[str]:
    """Which of them are not what the oracle makes of the rows that were sent, and of h as it was stored: of all rows of
    all groups, padding included, and all elements of a line."""
    every, given = kr.launch(copies, case, **options(case)), case.inputs(0)
    ids, weights = ([rank[name] for rank in every] for name in ("ids", "weights"))
    tile_m, wrong = int(every[0]["tile_m"]), set()
    there = exchange(case.config, given.x, given.weights, ids, weights, tile_m, pad=case.pad or BLOCK)
    for rank, got in enumerate(every):
        rows = there.received[rank].astype(np.float32).astype(BF16)  # FP32 products, rounded
        sources = {"x": np.pad(rows, ((0, 0), (0, round_up(rows.shape[1], 128) - rows.shape[1])))}
        sources["h"] = got["made h"][: len(rows)]
        for e in case.config.experts_of(rank, case.ranks):
            at = there.layout.expert_rows(e)
            for name, source in sources.items():
                elements, scales = quantize(source[at])
                right = np.array_equal(got[name][at], dequantize(elements, scales))
                if f"{name} scales" in got:
                    right &= np.array_equal(got[f"{name} scales"][at], scales)
                wrong |= set() if right else {name}
    return wrong


COPIED = {
    "push": case_of(SMALL, rings="all"),
    "pull": case_of(SMALL, rings="all", pull=True, pad=96),
    "weighted inputs": case_of(INPUTS, rings="all", routing="skewed"),
}


@pytest.mark.parametrize("case", COPIED.values(), ids=COPIED)
def test_copies_are_bit_by_bit_those_of_the_oracle(case: moe.MoeCase) -> None:
    assert not wrong_copies(case)


def test_copies_are_of_the_same_values_where_tiles_know_bf16_alone(bf16_tiles) -> None:
    assert not wrong_copies(COPIED["weighted inputs"])


# -- bugs on purpose

PUT = "put_block(to, line + row, k + block * MX_BLOCK, x);"
OF_NEXT = """
    Vec16 next[4];
    get(row, (block + 1) % blocks, next);
    u32 y[MX_BLOCK], elements[MX_BLOCK / 4];
    for (u32 j = 0; j < MX_BLOCK; j++) y[j] = bf16_in(next[j / 8], j % 8) << 16;
    const u32 own = scale_byte(largest_magnitude(x), SCALE_UP), other = scale_byte(largest_magnitude(y), SCALE_UP);
    const u32 byte = BYTE;
    block_e4m3(x, inverse_scale(byte), elements);
    put_mxfp8(to, line + row, k + block * MX_BLOCK, elements, byte);"""
READ = "four[j] = word < rows.words ? from.weighted(from.read(word)) : Vec16{};"
WEIGHED_LATE = """
          four[j] = word < rows.words ? from.read(word) : Vec16{};
          if (j < 3 || !from.at) continue;
          u32 x[MX_BLOCK], elements[MX_BLOCK / 4];
          for (u32 i = 0; i < MX_BLOCK; i++) x[i] = bf16_in(four[i / 8], i % 8) << 16;
          const float scale = scale_value(quantize_block(x, SCALE_UP, elements));
          for (u32 i = 0; i < 4; i++) {
            float y[8];
            for (u32 c = 0; c < 8; c++) y[c] = scale * from_e4m3(elements[2 * i + c / 4] >> c % 4 * 8 & 255);
            four[i] = from.weighted(eight_bf16(y));
          }"""
QUANTIZE_H = "quantize_along(mx.h, first, column, p.layout.rows_in(w.row), columns / MX_BLOCK,"
H_OF_FP32 = """
    for (u32 r = 0; r < p.layout.rows_in(w.row); r++)
      for (u32 k = column; k < column + columns; k += MX_BLOCK) {
        u32 x[MX_BLOCK];
        for (u32 j = 0; j < MX_BLOCK; j++) {
          const u16* pre = (const u16*)p.pre + (first + r) * 2 * p.I + (k + j) / 16 * 32 + j % 16;
          x[j] = bits_of(swiglu(from_bf16(pre[0]), from_bf16(pre[16]), Limit{p.clamp}));
        }
        put_block(mx.h, first + r, k, x);
      }
    (void)("""
NOBODY_S = READ.replace(
    "from.weighted(from.read(word))", "from.at ? from.weighted(from.read(word)) : target::read(x + word)"
)
PAST_A_LINE = "four[j] = from.weighted(from.read(word % rows.words));"
RULE = "quantize_block(x, SCALE_UP, elements)"
ROWS, COPY = "work/moe_mxfp8.h", "work/mx_copy.h"
# What is replaced by what; which copies it makes wrong; whether results are out of their bounds.
BUGS = {
    "another rule": (COPY, RULE, RULE.replace("UP", "FLOOR"), "xh", True),
    "scale of the next block": (COPY, PUT, OF_NEXT.replace("BYTE", "own < other ? other : other"), "x", True),
    "blocks of 64": (COPY, PUT, OF_NEXT.replace("BYTE", "own < other ? other : own"), "x", True),
    "padding repeats a row": (ROWS, READ, NOBODY_S, "x", False),  # which gradients of weights alone would show
    "a line is not filled up": (ROWS, READ, PAST_A_LINE, "x", True),
    "weighted after quantising": (ROWS, READ, WEIGHED_LATE, "x", True),
    "h not rounded": (ROWS, QUANTIZE_H, H_OF_FP32, "h", True),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str, mutated) -> None:
    file, right, wrong, seen_in, in_results = BUGS[name]
    mutated(file, right, wrong)
    assert wrong_copies(COPIED["weighted inputs"]) == set(seen_in)
    outcome = outcome_of(case_of(INPUTS, (70, 41)))
    assert outcome.passed != in_results, outcome.problems
    assert outcome.bitwise_repeat
