"""moe_backward on the CPU device: gradients of whole layers against the float64 oracle, in any memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.build import sources, zig
from kosmos_raw.build.params import INTO
from kosmos_raw.checks import moe, moe_backward
from kosmos_raw.checks.validate import Outcome, merge
from kosmos_raw.cli.validate_moe import LARGEST
from kosmos_raw.device.base import Tile
from kosmos_raw.plan.moe.backward import plan_moe_backward
from kosmos_raw.plan.moe.config import MoEConfig, models
from kosmos_raw.plan.moe.forward import plan_moe_forward
from kosmos_raw.plan.moe.sizes import Rings
from kosmos_raw.ranks.communicator import POISON
from kosmos_raw.ranks.launch import launch

SMALL = MoEConfig(
    hidden=72, expert_width=40, experts=10, top_k=3, shared_width=24, aux_loss="batch", aux_loss_coeff=0.01
)


def judged(case: moe.MoeCase, **options) -> Outcome:
    given = {"mode": "threads", "device": "cpu", "arena_bytes": moe.arena_bytes(case, LARGEST), **options}
    return merge(launch(moe_backward.run, case, ranks=case.ranks, **given))


def check(case: moe.MoeCase, **options) -> None:
    outcome = judged(case, **options)
    assert outcome.passed, outcome.problems


@pytest.mark.parametrize(("number", "model"), list(enumerate(models())))
def test_the_layers_of_the_paper(number: int, model: str) -> None:
    """Balanced in rings of the default size, and all tokens to one rank in the smallest; 2, 4 or 8 ranks."""
    config, tokens = MoEConfig.named(model).scaled(64), (40, 9, 33, 0, 17, 52, 1, 30)[: (2, 4, 8)[number % 3]]
    check(moe.MoeCase(config, tokens, iters=1, repeats=1, into=INTO[number % 4], seed=number))
    check(moe.MoeCase(config, tokens, "one_rank", "smallest", iters=1, repeats=1, into=INTO[(number + 1) % 4]))


def test_ranks_as_processes() -> None:
    check(moe.MoeCase(SMALL, (30, 0, 100), routing="skewed", iters=1), mode="processes")


@pytest.mark.parametrize("routing", ["one_expert", "empty_ranks"])
def test_bits_under_delays(routing: str) -> None:
    """In rings of one tile row; against rings that hold all, recomputed ones, and a second backward."""
    check(moe.MoeCase(SMALL, (200, 0, 130), routing, "smallest", pad=8, iters=1, delay_us=300, into="add_f32"))


RULES = {
    "weighted inputs": MoEConfig(64, 16, 12, 2, score="sigmoid", weight_on="input", aux_loss="batch", aux_loss_coeff=1),
    "groups": MoEConfig(64, 16, 12, 4, score="sigmoid", expert_bias=True, groups=4, top_groups=2, scaling=2.5),
    "softmax after top-k": MoEConfig(
        64, 48, 9, 3, softmax_after_topk=True, aux_loss="batch", aux_loss_coeff=0.5, shared_width=40
    ),
    "hash, clamped": MoEConfig(64, 16, 8, 2, score="sqrtsoftplus", hash_routing=True, swiglu_limit=0.5),
    "gated shared": MoEConfig(64, 16, 7, 2, shared_width=16, gated_shared=True, scaling=2.5),
    "plain softmax": MoEConfig(64, 16, 4, 2, normalise=False, aux_loss="batch", aux_loss_coeff=0.5),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("float_router", [False, True], ids=["bf16", "fp32"])
def test_rules_of_routing(rule: str, float_router: bool) -> None:
    into = INTO[len(rule) % 4]
    check(moe.MoeCase(RULES[rule], (70, 41), float_router=float_router, iters=1, repeats=1, into=into))


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, aux_loss="none"),
        RULES["gated shared"],
        MoEConfig(88, 40, 5, 2, weight_on="input"),
        MoEConfig(64, 16, 8, 2, hash_routing=True),
    ],
    ids=["plain", "gated", "weighted inputs", "hash"],
)
@pytest.mark.parametrize("into", ["set_bf16", "add_f32"])
def test_choices_from_outside(config: MoEConfig, into: str) -> None:
    check(moe.MoeCase(config, (20, 41), given_weights=True, iters=1, repeats=1, into=into))


def layer_of(comm, config: MoEConfig = SMALL, tokens: int = 40, **options) -> tuple[kr.MoELayer, moe.MoeCase]:
    case = moe.MoeCase(config, (tokens,) * comm.ranks)
    weights = moe.own_weights(case, case.inputs(0).weights, comm.rank, np)
    return kr.MoELayer(comm, config, weights, tokens=tokens, **options), case


def inputs_of(case: moe.MoeCase, rank: int) -> tuple[np.ndarray, np.ndarray]:
    made = case.inputs(0)
    return made.x[rank].astype(ml_dtypes.bfloat16), made.dout[rank].astype(ml_dtypes.bfloat16)


def test_the_auxiliary_loss_alone() -> None:
    case = moe.MoeCase(replace(SMALL, aux_loss_coeff=1.0), (40, 33), zero_dy=True, aux_grad=0.5, iters=1, repeats=1)
    check(case)

    def work(comm):
        layer, case = layer_of(comm, replace(SMALL, aux_loss_coeff=1.0))
        x, dy = inputs_of(case, comm.rank)
        layer.forward(x)
        g, none = layer.backward(dy * 0, aux_grad=0.5), layer.backward(dy * 0, aux_grad=0.0)
        found = [np.abs(v.astype(np.float32)).max() for g in (g, none) for v in (g.x, g.weights.router)]
        return found, np.abs(g.weights.down.astype(np.float32)).max()

    for found, of_experts in launch(work, ranks=2, mode="threads", device="cpu"):
        assert min(found[:2]) > 1e-4 and max(found[2:]) == 0 and of_experts == 0


def test_gradients_are_slopes_of_the_kernel_itself() -> None:
    """Of the forward, along each gradient, with the choice of experts held.

    A step of a 32nd changes the loss by far more than its BF16 sums can be off: rounding of N outputs gives about
    2^-9 sqrt(N), a step of 2^-5 along the gradient 2^-5 N, of N = 2880. What is left is the third derivative.
    """
    config = MoEConfig(72, 32, 6, 2, score="sigmoid", shared_width=32, gated_shared=True)

    def work(comm):
        layer, case = layer_of(comm, config)
        made = case.inputs(0)
        x, dy = inputs_of(case, comm.rank)
        names = ("router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate")
        weights = {n: getattr(moe.own_weights(case, made.weights, comm.rank, np), n) for n in names}
        into = kr.MoEWeights(**{n: np.empty(w.shape, np.float32) for n, w in weights.items()})
        ids = layer.forward(x)[1].experts.copy()
        g = layer.backward(dy, into=into)

        def loss(**changed) -> float:
            layer.set_weights(kr.MoEWeights(**{**weights, **{n: w for n, w in changed.items() if n != "x"}}))
            y, _ = layer.forward(changed.get("x", x), experts=ids)
            mine = float((y.astype(np.float64) * dy.astype(np.float64)).sum())
            return sum(comm.allgather(mine))

        found = {}
        at = {n: w.view(ml_dtypes.bfloat16) for n, w in weights.items()} | {"x": x}
        for name, here in at.items():
            slope = (g.x if name == "x" else getattr(into, name)).astype(np.float64)
            step = slope * (np.sqrt((here.astype(np.float64) ** 2).mean()) / np.sqrt((slope**2).mean()) / 32)
            if comm.rank and name not in ("x", "gate_up", "down"):
                step = step * 0  # this rank's copy stays as it is
            up, down = ((here.astype(np.float64) + s * step).astype(ml_dtypes.bfloat16) for s in (1, -1))
            wanted = (slope * (up.astype(np.float64) - down.astype(np.float64))).sum()
            found[name] = loss(**{name: up}) - loss(**{name: down}), sum(comm.allgather(float(wanted)))
        return found

    for name, (got, wanted) in launch(work, ranks=2, mode="threads", device="cpu")[0].items():
        assert abs(got / wanted - 1) < 0.02, (name, got, wanted)


ROLES, SCALARS = "work/moe_backward.h", "work/scalar.h"
MISTAKES = [
    ("softmax after top-k", ROLES, "if (of_chosen_alone()) dv *= v;", "if (of_chosen_alone()) dv *= 1.01f * v;"),
    ("hash, clamped", ROLES, "target::fma(silu, 1.f - s, s)", "target::fma(0.98f * silu, 1.f - s, s)"),
    (
        "hash, clamped",
        SCALARS,
        "cuts_gate(float x) const { return x > at",
        "cuts_gate(float x) const { return x > 9 * at",
    ),
    ("hash, clamped", SCALARS, "return x > at || x < -at", "return x > at || x < -9 * at"),
    ("gated shared", ROLES, "copy % 2 ? low : high", "copy % 2 ? low & 0 : high"),
]


@pytest.mark.parametrize(("rule", "file", "right", "wrong"), MISTAKES)
def test_mistakes_in_the_kernel_are_found(rule: str, file: str, right: str, wrong: str, mutated) -> None:
    mutated(file, right, wrong)
    case = moe.MoeCase(RULES[rule], (40, 21), iters=1, repeats=1, into="set_f32")
    outcome = judged(case)
    assert not outcome.passed and outcome.bitwise_repeat and "gradient of" in outcome.problems[0]


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_follow_each_other(recompute: bool) -> None:
    """Forwards of two layers of different shapes, then their backwards: as each layer alone."""

    def work(comm):
        layers = [
            layer_of(comm, recompute=recompute),
            layer_of(comm, MoEConfig(32, 16, 24, 5), 90, rings=Rings.holding(1), recompute=recompute),
        ]
        alone = []
        for layer, case in layers:
            x, dy = inputs_of(case, comm.rank)
            layer.forward(x)
            alone.append(layer.backward(dy))
        for layer, case in layers:
            layer.forward(inputs_of(case, comm.rank)[0])
        kr.ag_gemm(comm, np.zeros((5, 72), np.uint16), np.zeros((9, 72), np.uint16))
        same = True
        for (layer, case), before in zip(reversed(layers), reversed(alone), strict=True):
            g = layer.backward(inputs_of(case, comm.rank)[1])
            names = ("router", "gate_up", "down", "shared_gate_up")
            pairs = [(getattr(g.weights, n), getattr(before.weights, n)) for n in names] + [(g.x, before.x)]
            same &= all(a is None or a.tobytes() == b.tobytes() for a, b in pairs)
        return same

    assert launch(work, ranks=3, mode="threads", device="cpu") == [True] * 3


def test_what_a_layer_cannot_go_back_through_is_refused() -> None:
    def work(comm):
        with pytest.raises(ValueError, match="backward wants a forward before it"):
            layer_of(comm)[0].backward(np.zeros((40, 72), ml_dtypes.bfloat16))
        for options, message in (
            ({"pull": True}, "make the layer with pull=False"),
            ({"policy": "dedicated"}, "make the layer with policy='two_way'"),
            ({"keep": False}, "make it with keep=True"),
            ({"rings": Rings(1, 0, 2, 1, 1)}, "rings hold 2 tile rows of x and 1 of h, want as many of both"),
            ({"rings": Rings(2, 0, 3, 3, 2)}, "want a multiple of the 2 tile rows of a step that divides the 3 slots"),
            ({"rings": Rings.holding(2), "round_rows": 3}, "round_rows is 3"),
        ):
            layer, case = layer_of(comm, tokens=200, **options)
            x, dy = inputs_of(case, comm.rank)
            layer.forward(x)
            with pytest.raises(ValueError, match=message):
                layer.backward(dy)
            layer.close()

    launch(work, ranks=2, mode="threads", device="cpu")


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"dtype": "mxfp8"}], ids=["bf16", "recompute", "mxfp8"])
def test_poison_is_wherever_peers_write(options: dict) -> None:
    """A second backward finds nothing of the first, nor of the forward but what that has left for it."""

    def work(comm):
        layer, case = layer_of(comm, **options)
        x, dy = inputs_of(case, comm.rank)
        layer.forward(x)
        first = layer.backward(dy)
        layer.poison(forwarded=False)
        regions = comm.arena.regions()
        del regions["moe.counts"]
        for offset, nbytes in regions.values():
            there = comm.device.array(comm.arena.address(comm.rank, offset), (nbytes // 2,), np.uint16, comm)
            assert (there == POISON).all()
        again = layer.backward(dy)
        layer.poison()
        with pytest.raises(ValueError, match="backward wants a forward before it"):
            layer.backward(dy)
        return len(regions), again.x.tobytes() == first.x.tobytes()

    regions = 2 + bool(options) + ("dtype" in options)  # dOut and dX; x where it is pushed again; its columns
    assert launch(work, ranks=2, mode="threads", device="cpu") == [(regions, True)] * 2


def test_wrong_calls_are_refused_before_anything_is_launched() -> None:
    def work(comm):
        layer, case = layer_of(comm)
        x, dy = inputs_of(case, comm.rank)
        layer.forward(x)
        good = layer.backward(dy)
        w = good.weights
        for call, error, message in (
            (lambda: layer.backward(dy[:7]), ValueError, r"dy has shape \(7, 72\), want \(40, 72\)"),
            (lambda: layer.backward(dy.astype(np.float32)), TypeError, "dy has dtype float32"),
            (lambda: layer.backward(dy, dx=x), ValueError, "dx overlaps x"),
            (lambda: layer.backward(dy, accumulate=True), ValueError, "give them as into="),
            (lambda: layer.backward(dy, into=replace(w, bias=w.router)), ValueError, "no gradient of it"),
            (lambda: layer.backward(dy, into=replace(w, down=None)), ValueError, "into.down is None"),
            (lambda: layer.backward(dy, into=replace(w, down=w.down[:, :, :8])), ValueError, "into.down has shape"),
            (lambda: layer.backward(dy, into=replace(w, router=x[:10])), ValueError, "into.router overlaps x"),
        ):
            with pytest.raises(error, match=message):
                call()
        plain = np.zeros((40, 80), ml_dtypes.bfloat16)[:, 4:76]  # filled by a copy
        again = layer.backward(dy, dx=plain)
        return again.x is plain and bool((plain == good.x).all() and (again.weights.down == w.down).all())

    assert launch(work, ranks=2, mode="threads", device="cpu") == [True] * 2


def test_the_plan_counts_the_words_that_the_headers_do(tmp_path) -> None:
    source = tmp_path / "words.cpp"
    source.write_text(
        f"""#include "{sources.folder()}/schedule/moe_backward_queue.h"
        extern "C" void words(unsigned* out, unsigned rows, unsigned tokens, unsigned tile_m, unsigned pieces) {{
          MoeBackwardParams p{{}};
          p.layout.tile_m = tile_m, p.tokens = tokens, p.layout.row_cap = rows, p.piece_cap = pieces;
          const MoeBackwardWords w(p);
          out[0] = w.quantised(rows) - w.head(0);
          out[1] = MoeBackwardQueue(p).words();
          out[2] = TEAM;
        }}"""
    )
    library = ctypes.CDLL(str(zig.shared_library(source)))
    for ranks, tokens, pad in ((1, 1, 1), (3, 1000, 8), (8, 5000, 32)):
        plan = plan_moe_backward(plan_moe_forward(SMALL, ranks, tokens, Tile(96, 96), 4, pad=pad))
        out = (ctypes.c_uint * 3)()
        library.words(out, plan.forward.tables.row_cap, tokens, 96, plan.piece_cap)
        assert list(out) == [plan.counter_words(tokens), plan.piece_words, 16]
