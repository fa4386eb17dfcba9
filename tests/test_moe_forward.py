"""moe_forward on the CPU device: whole layers against the float64 oracle, in any memory, under any policy."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.build import sources, zig
from kosmos_raw.checks import moe
from kosmos_raw.checks.validate import merge
from kosmos_raw.cli.validate_moe import LARGEST
from kosmos_raw.device.base import Tile
from kosmos_raw.numerics import near
from kosmos_raw.numerics.moe.layer import forward, lift
from kosmos_raw.numerics.moe.layout import exchange, row_of_slot, send_list
from kosmos_raw.numerics.tolerance import compare
from kosmos_raw.ops.moe_weights import bf16_parts, interleaved, separated
from kosmos_raw.plan.moe.config import MoEConfig, models
from kosmos_raw.plan.moe.forward import POLICIES, Crews, plan_moe_forward
from kosmos_raw.plan.moe.sizes import Rings
from kosmos_raw.ranks.launch import launch

SMALL = MoEConfig(
    hidden=72, expert_width=40, experts=10, top_k=3, shared_width=24, aux_loss="batch", aux_loss_coeff=0.01
)


def check(case: moe.MoeCase, **options) -> None:
    given = {"mode": "threads", "device": "cpu", "arena_bytes": moe.arena_bytes(case, LARGEST), **options}
    outcome = merge(launch(moe.run, case, ranks=case.ranks, **given))
    assert outcome.passed, outcome.problems


@pytest.mark.parametrize("model", models())
def test_the_layers_of_the_paper(model: str) -> None:
    check(moe.MoeCase(MoEConfig.named(model).scaled(64), (40, 0, 33), iters=1, repeats=1, seed=3))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_number_of_ranks(ranks: int) -> None:
    """Also more ranks than some have experts, and tokens that end inside a tile."""
    check(moe.MoeCase(SMALL, tuple(17 * (q % 3) + (q == 1) * 90 for q in range(1, ranks + 1)), iters=1, seed=ranks))


def test_ranks_as_processes() -> None:
    check(moe.MoeCase(SMALL, (30, 0, 100), routing="skewed", iters=1), mode="processes")


@pytest.mark.parametrize("routing", ["one_expert", "one_rank", "empty_ranks"])
@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_the_smallest_rings_give_the_same_bits(routing: str, pull: bool) -> None:
    """One tile row each, however many arrive; against rings that hold all, and twice under random delays."""
    case = moe.MoeCase(SMALL, (200, 0, 130), routing, "smallest", pull=pull, pad=8, iters=1, delay_us=300)
    check(case)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: str) -> None:
    check(moe.MoeCase(SMALL, (100, 50), "skewed", policy=policy, iters=1))


@pytest.mark.parametrize(
    "config",
    [
        MoEConfig(hidden=64, expert_width=16, experts=12, top_k=1, normalise=False, weight_on="input", score="sigmoid"),
        MoEConfig(64, 16, 12, 4, score="sigmoid", expert_bias=True, groups=4, top_groups=2, aux_loss="batch"),
        MoEConfig(64, 48, 9, 9, softmax_after_topk=True),
        MoEConfig(64, 16, 8, 2, score="sqrtsoftplus", hash_routing=True, swiglu_limit=0.5),
        MoEConfig(64, 16, 7, 2, shared_width=16, gated_shared=True, scaling=2.5),
    ],
    ids=["weighted inputs", "groups", "all experts", "hash, clamped", "gated shared"],
)
@pytest.mark.parametrize("float_router", [False, True], ids=["bf16", "fp32"])
def test_rules_of_routing(config: MoEConfig, float_router: bool) -> None:
    check(moe.MoeCase(config, (70, 41), float_router=float_router, iters=1))


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        MoEConfig(64, 16, 7, 2, shared_width=16, gated_shared=True),
        MoEConfig(88, 40, 5, 2, weight_on="input"),
        MoEConfig(64, 16, 8, 2, hash_routing=True),
    ],
    ids=["plain", "gated", "weighted inputs", "hash"],
)
def test_choices_from_outside(config: MoEConfig) -> None:
    check(moe.MoeCase(config, (70, 41), given_weights=True))


def test_ties_go_to_the_lowest_expert() -> None:
    def work(comm):
        config = MoEConfig(hidden=16, expert_width=16, experts=6, top_k=3)
        same = np.ones((6, 16), ml_dtypes.bfloat16)  # so all logits of a token are equal
        w = kr.MoEWeights(same, np.ones((6, 32, 16), ml_dtypes.bfloat16), np.ones((6, 16, 16), ml_dtypes.bfloat16))
        layer = kr.MoELayer(comm, config, w, tokens=5)
        _, saved = layer.forward(np.ones((5, 16), ml_dtypes.bfloat16))
        return saved.experts.copy(), saved.weights.copy()

    ((experts, weights),) = launch(work, ranks=1, mode="threads", device="cpu")
    assert (experts == [0, 1, 2]).all() and np.allclose(weights, 1 / 3, rtol=1e-6)


def layer_of(comm, tokens: int = 40, config: MoEConfig = SMALL, **options) -> tuple[kr.MoELayer, moe.MoeCase]:
    case = moe.MoeCase(config, (tokens,) * comm.ranks)
    weights = moe.own_weights(case, case.inputs(0).weights, comm.rank, np)
    return kr.MoELayer(comm, config, weights, tokens=tokens, **options), case


def test_one_launch_a_call() -> None:
    def work(comm):
        layer, case = layer_of(comm)
        kernel, launches = comm.kernel("moe_forward"), []
        prepare = kernel.prepare

        def counted(*given):
            start = prepare(*given)
            return lambda *a: (launches.append(1), start(*a))

        kernel.prepare = counted
        for n in (40, 0, 7):
            layer.forward(case.inputs(0).x[comm.rank][:n].astype(ml_dtypes.bfloat16))
        return len(launches)

    assert launch(work, ranks=3, mode="threads", device="cpu") == [3] * 3


def test_two_layers_and_other_operators_share_a_communicator() -> None:
    """Signals and counts of a launch lie where another one's did, with another shape."""

    def work(comm):
        one, case = layer_of(comm)
        other, case2 = layer_of(comm, 90, MoEConfig(32, 16, 24, 5), rings=Rings.holding(1))
        x = case.inputs(0).x[comm.rank].astype(ml_dtypes.bfloat16)
        x2 = case2.inputs(0).x[comm.rank].astype(ml_dtypes.bfloat16)
        first = [one.forward(x)[0].tobytes(), other.forward(x2)[0].tobytes()]
        for _ in range(3):
            kr.ag_gemm(comm, x[:5], x[:9])
            again = [one.forward(x)[0].tobytes(), other.forward(x2)[0].tobytes()]
            other.forward(x2)
            if again != first:
                return False
        return True

    assert launch(work, ranks=3, mode="threads", device="cpu") == [True] * 3


def test_ranks_that_differ_are_reported() -> None:
    def work(comm):
        layer, case = layer_of(comm, strided=comm.rank == 0)
        with pytest.raises(kr.WaitError, match="different call"):
            layer.forward(case.inputs(0).x[comm.rank].astype(ml_dtypes.bfloat16))

    launch(work, ranks=2, mode="threads", device="cpu", timeout_s=20)


def test_rows_that_are_pulled_lie_at_one_place_on_all_ranks() -> None:
    def work(comm):
        layer, case = layer_of(comm, pull=True)
        x = case.inputs(0).x[comm.rank].astype(ml_dtypes.bfloat16)
        inside = comm.empty(x.shape, x.dtype)  # used where it lies
        inside[...] = x
        ours = layer.forward(inside)[0]
        assert (ours == layer.forward(x)[0]).all()
        with pytest.raises(kr.WaitError, match="different call"):
            layer.forward(x if comm.rank else inside)

    launch(work, ranks=2, mode="threads", device="cpu", timeout_s=20)


def saved_of(comm, config: MoEConfig) -> dict[str, np.ndarray | None]:
    case = moe.MoeCase(config, (70, 0, 41))
    weights = moe.own_weights(case, case.inputs(0).weights, comm.rank, np)
    rings = case.rings_for(comm.kernel("moe_forward").tile)
    layer = kr.MoELayer(comm, config, weights, tokens=70, rings=rings, pad=8, strided=False)
    x = case.inputs(0).x[comm.rank].astype(ml_dtypes.bfloat16)
    _, saved = layer.forward(x)
    names = (
        "logits scores experts weights counts group_start send_base tile_base tile_rows expert_of_row sources_of_row"
    )
    names += " send_list row_of_slot received pre combine shared_pre shared_y shared_gate"
    found = {name: getattr(saved, name) for name in names.split()}
    found = {name: None if a is None else np.array(a) for name, a in found.items()}
    layer.forward(x)
    with pytest.raises(kr.KosmosError, match="forward 1 of the layer had saved was overwritten by forward 2"):
        _ = saved.pre
    return found | {"tile_m": np.array(layer.plan.tile.m)}


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        MoEConfig(64, 16, 7, 2, score="sigmoid", expert_bias=True, shared_width=16, gated_shared=True),
        MoEConfig(64, 16, 6, 1, normalise=False, weight_on="input", score="sigmoid"),
    ],
    ids=["small", "gated shared", "weighted inputs"],
)
def test_what_is_saved_for_the_backward(config: MoEConfig) -> None:
    """Places exactly, rows within their bounds, by the oracle's own layout."""
    every = launch(saved_of, config, ranks=3, mode="threads", device="cpu")
    given = moe.MoeCase(config, (70, 0, 41)).inputs(0)
    tile_m = int(every[0]["tile_m"])
    ids, weights = ([saved[name] for saved in every] for name in ("experts", "weights"))
    there = exchange(config, given.x, given.weights, ids, weights, tile_m, pad=8)
    layout = there.layout
    for rank, saved in enumerate(every):
        assert (saved["counts"] == layout.counts).all() and (saved["send_base"] == layout.send_base).all()
        assert (saved["group_start"] == np.concatenate([layout.group_start, [layout.padded.sum(0)]])).all()
        assert (saved["tile_base"] == layout.tile_base).all() and saved["tile_rows"] == layout.tile_rows(rank)
        assert (saved["row_of_slot"] == row_of_slot(ids[rank])).all()
        token, slot = send_list(ids[rank])
        assert (saved["send_list"] == token * config.top_k + slot).all()
        rows, source = int(saved["tile_rows"]), layout.rows_at(rank)[0].reshape(-1, tile_m)
        assert (saved["sources_of_row"][:rows] == [sum(1 << q for q in set(s) - {-1}) for s in source]).all()
        # rows: of x exactly; what is made of them, within the oracle's bounds
        f = forward(config, *lift(given.x[rank], given.weights), ids=ids[rank])
        for name in ("logits", "scores"):
            assert compare(saved[name], getattr(f.routing, name).value, getattr(f.routing, name).error).passed, name
        combine = saved["combine"].view(ml_dtypes.bfloat16).astype(float)[saved["row_of_slot"].astype(int)]
        assert compare(combine, f.y.value, f.y.error).passed
        received = saved["received"].view(ml_dtypes.bfloat16).astype(float)
        pre = separated(np, saved["pre"].view(ml_dtypes.bfloat16).astype(float), config.expert_width)
        for e in config.experts_of(rank, 3):
            at = layout.expert_rows(e)
            assert (saved["expert_of_row"][at.start // tile_m : -(-at.stop // tile_m)] == e).all()
            rounds = 2.0**-8 if config.weight_on == "input" else 0.0
            assert (abs(received[at] - there.received[rank][at]) <= rounds * abs(received[at])).all()
            got = near.Near.of(received[at])
            for half, mine in enumerate(pre):
                w = given.weights.gate_up[e][half * config.expert_width :][: config.expert_width]
                want = near.bf16(got @ near.Near.of(w).T)
                assert compare(mine[at], want.value, want.error).passed
        assert (saved["shared_y"] is not None) == bool(config.shared_width)
        if config.shared_width:
            assert compare(
                saved["shared_y"].view(ml_dtypes.bfloat16).astype(float), f.shared_y.value, f.shared_y.error
            ).passed
            shared = separated(np, saved["shared_pre"].view(ml_dtypes.bfloat16).astype(float), config.shared_width)
            for mine, want in zip(shared, (f.shared.g, f.shared.u), strict=True):
                assert compare(mine, want.value, want.error).passed
        if config.gated_shared:
            sigmoid = 1 / (1 + np.exp(-saved["shared_gate"].astype(float)))
            assert np.allclose(sigmoid, f.shared_weight.value, rtol=1e-4)


REFUSED = [
    ({"rings": (2, 1, 2, 3, 2)}, "h_slots is 3, want 4 or more"),
    ({"rings": (2, 0, 1, 2, 2)}, "x_slots is 1, want 2"),
    ({"pad": 7}, "padded to 7 rows, want a divisor"),
    ({"policy": "one_way"}, "policy is 'one_way', want one of two_way"),
    ({"crews": Crews(1, 1, 4)}, "crew of 4 WGs does not build"),
    ({"tokens": -1}, "tokens is -1"),
    ({"config": MoEConfig(hidden=12, expert_width=8, experts=4, top_k=1)}, "hidden is 12, want a multiple of 8"),
    ({"config": MoEConfig(16, 16, 4, 1, weight_on="input"), "pull": True}, "pull with weights on the input"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_plans_that_cannot_run_are_refused(wrong: dict, message: str) -> None:
    given = {"config": SMALL, "tokens": 100, **wrong}
    with pytest.raises(ValueError, match=message):
        if "rings" in given:
            given["rings"] = Rings(*given["rings"])
        config, tokens = given.pop("config"), given.pop("tokens")
        plan_moe_forward(config, 2, tokens, Tile(96, 96), 4, **given)


def test_wrong_calls_are_refused_before_anything_is_launched() -> None:
    def work(comm):
        layer, case = layer_of(comm)
        x = case.inputs(0).x[comm.rank].astype(ml_dtypes.bfloat16)
        ids = np.zeros((40, 3), np.int32)
        for call, error, message in (
            (lambda: layer.forward(x[:, :64]), ValueError, "want at most 40 tokens of 72"),
            (lambda: layer.forward(np.concatenate([x, x])), ValueError, "make the layer with tokens=80"),
            (lambda: layer.forward(x.astype(np.float32)), TypeError, "want bfloat16"),
            (lambda: layer.forward(x, out=x), ValueError, "out overlaps x"),
            (lambda: layer.forward(x, experts=ids[:3]), ValueError, "experts has shape"),
            (lambda: layer.forward(x, experts=ids + 10), ValueError, "experts has 10, want 0 to 9"),
            (lambda: layer.forward(x, weights=ids), ValueError, "give experts"),
            (lambda: layer.forward(x, experts=ids, weights=ids), TypeError, "want float32"),
        ):
            with pytest.raises(error, match=message):
                call()
        out = np.zeros((40, 80), ml_dtypes.bfloat16)[:, 4:76]  # not plain: filled by a copy
        return bool((layer.forward(x, out=out)[0] == layer.forward(x)[0]).all())

    assert launch(work, ranks=2, mode="threads", device="cpu") == [True] * 2


def test_weights_that_do_not_fit_the_config_are_refused() -> None:
    def work(comm):
        case = moe.MoeCase(SMALL, (4,) * comm.ranks)
        w = moe.own_weights(case, case.inputs(0).weights, comm.rank, np)
        for wrong, message in (
            ({"bias": np.zeros(10, np.float32)}, "weights.bias is given, but the config has none"),
            ({"shared_down": None}, "weights.shared_down is None, but the config has one"),
            ({"down": w.down[:, :8]}, r"weights.down has shape .* want \(5, 72, 40\)"),
        ):
            with pytest.raises(ValueError, match=message):
                kr.MoELayer(comm, SMALL, kr.MoEWeights(**{**vars(w), **wrong}), tokens=4)

    launch(work, ranks=2, mode="threads", device="cpu")


def test_the_plan_counts_the_words_that_the_headers_do(tmp_path) -> None:
    source = tmp_path / "words.cpp"
    source.write_text(
        f"""#include "{sources.folder()}/schedule/moe_params.h"
        extern "C" void words(unsigned* out, unsigned ranks, unsigned experts, unsigned rows, unsigned moves,
                              unsigned sends, unsigned tokens, unsigned tile_m) {{
          static MoeSignals signals;
          MoeParams p{{}};
          p.layout.ranks = ranks, p.layout.experts = experts, p.layout.tile_m = tile_m, p.tokens = tokens;
          p.layout.row_cap = rows, p.layout.move_cap = moves, p.layout.send_cap = sends;
          p.g.signals_of[0] = &signals.common;
          const MoeWords w(p);
          out[0] = p.layout.words();
          out[1] = w.pulled(rows) - w.head(0);
          out[2] = (char*)(w.freed(0, MAX_RANKS - 1, rows - 1) + 1) - (char*)&signals;
          out[3] = target::GATED + TOKEN_WORDS * 100 + MAX_GROUPS * 10000;
          const MoeLayout& l = p.layout;
          const unsigned at[] = {{0, l.counts_at(), l.starts_at(), l.bases_at(), l.tile_bases_at(), l.strides_at(),
                                 l.experts_at(), l.sources_of_at(), l.moves_end_at(), l.sends_end_at(),
                                 l.moves_at(), l.sends_at()}};
          for (unsigned i = 0; i < 12; i++) out[4 + i] = at[i];
        }}"""
    )
    library = ctypes.CDLL(str(zig.shared_library(source)))
    for ranks, tokens, pad in ((1, 1, 1), (3, 1000, 8), (8, 5000, 32)):
        plan = plan_moe_forward(SMALL, ranks, tokens, Tile(96, 96), 4, pad=pad)
        t, out = plan.tables, (ctypes.c_uint * 16)()
        library.words(out, ranks, SMALL.experts, t.row_cap, t.move_cap, t.send_cap, tokens, 96)
        assert list(out[:4]) == [
            plan.table_words,
            plan.counter_words(tokens),
            plan.signal_bytes,
            16 + 34 * 100 + 32 * 10000,
        ]
        assert out[4:] == [first for first, _ in plan.table_arrays.values()]


def test_gate_and_up_alternate() -> None:
    w = np.arange(2 * 40 * 3, dtype=np.uint16).reshape(1, 80, 3)
    mixed = interleaved(np, w, 48)
    assert (mixed[0, :16] == w[0, :16]).all() and (mixed[0, 16:32] == w[0, 40:56]).all()
    gate, up = separated(np, mixed[0].T, 40)
    assert (gate == w[0, :40].T).all() and (up == w[0, 40:].T).all()


def test_three_bf16_hold_a_float32() -> None:
    w = np.random.default_rng(0).standard_normal((50, 20)).astype(np.float32)
    assert (sum(part.astype(np.float64) for part in bf16_parts(w)) == w).all()
