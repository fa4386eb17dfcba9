"""Routing by numbers worked by hand, what a kernel may choose, where rows lie on ranks, and random routings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kosmos_raw.numerics import near
from kosmos_raw.numerics.moe import aux_loss as aux
from kosmos_raw.numerics.moe import generators, layer, layout, routing
from kosmos_raw.numerics.near import Near
from kosmos_raw.plan.moe.config import MoEConfig, models

SMALL = MoEConfig(hidden=12, expert_width=8, experts=8, top_k=3)
SIGMOID = replace(SMALL, score="sigmoid", expert_bias=True, scaling=2.5)
LAYERS = {
    "softmax": SMALL,
    "groups": replace(SIGMOID, groups=4, top_groups=2),
    "input side": replace(SMALL, score="sigmoid", top_k=1, normalise=False, weight_on="input"),
    "hash routing": replace(SMALL, score="sqrtsoftplus", hash_routing=True),
}


def test_numbers_worked_by_hand():
    config = MoEConfig(hidden=8, expert_width=8, experts=4, top_k=2, score="sigmoid", expert_bias=True, scaling=2.5)
    z, bias = np.array([[0.0, 1.0, -1.0, 2.0]]), np.array([0.0, 0.0, 0.5, 0.0])
    r = routing.route(config, z, bias)
    assert r.ids.tolist() == [[3, 2]] and np.allclose(r.weights, [[1.915212, 0.584788]], atol=1e-6)
    dz = routing.logits_gradient(config, r, np.array([[1.0, 0.0]]), None)
    assert np.allclose(dz, [[0, 0, -0.327512, 0.053403]], atol=1e-6)
    loss, _ = aux.aux_loss(replace(config, aux_loss="batch", aux_loss_coeff=1.0), r)
    assert np.isclose(loss, 1.354047) and aux.counted(config, r).tolist() == [[3, 1]]  # without the bias


def test_softmax_before_and_after_the_choice():
    config = MoEConfig(hidden=8, expert_width=8, experts=4, top_k=2, normalise=False)
    z = np.array([[1.0, 2.0, 0.5, -1.0]])
    before = routing.route(config, z)
    assert np.allclose(before.weights, [[0.60946, 0.22421]], atol=1e-5)
    after = routing.route(replace(config, softmax_after_topk=True), z)
    assert np.allclose(after.weights, [[0.73106, 0.26894]], atol=1e-5)
    same = routing.route(replace(config, normalise=True), z)
    assert np.allclose(same.weights, after.weights, atol=1e-15)
    down = np.array([[1.0, 0.0]])
    for one, other in ((same, after),):
        dz = [
            routing.logits_gradient(replace(config, **extra), r, down, None)
            for extra, r in (({"normalise": True}, one), ({"softmax_after_topk": True}, other))
        ]
        assert np.allclose(*dz, atol=1e-15)


def test_one_expert_is_not_normalised():
    config = MoEConfig(hidden=8, expert_width=8, experts=3, top_k=1, normalise=True)
    r = routing.route(config, np.array([[1.0, 2.0, 0.5]]))
    assert np.isclose(r.weights[0, 0], 0.62853, atol=1e-5)
    dz = routing.logits_gradient(config, r, np.ones((1, 1)), None)
    assert np.isclose(dz[0, 1], 0.23348, atol=1e-5)


def test_balance_of_even_routing_is_the_coefficient():
    config = MoEConfig(hidden=8, expert_width=8, experts=4, top_k=2, aux_loss="batch", aux_loss_coeff=1.0)
    r = routing.route(config, np.zeros((4, 4)))
    assert r.ids.tolist() == [[0, 1]] * 4  # ties to the lowest
    loss, dscores = aux.aux_loss(config, r)
    assert np.isclose(loss, 1.0)
    dz = routing.logits_gradient(config, r, np.zeros((4, 2)), dscores)
    assert np.allclose(dz, [[0.0625, 0.0625, -0.0625, -0.0625]] * 4)
    with pytest.raises(ValueError, match=r"of 4 tokens: sequences is \[3\]"):
        aux.aux_loss(replace(config, aux_loss="sequence"), r, [3])


def test_experts_of_groups_that_are_not_kept_never_win():
    config = replace(SIGMOID, experts=8, top_k=2, groups=4, top_groups=2, scaling=1.0)
    z, bias = np.array([[2, 1, 1.5, 0.5, -3, -3, -3, -3]]), np.full(8, -2.0)
    r = routing.route(config, z, bias)
    assert r.ids.tolist() == [[0, 2]] and np.allclose(r.weights, [[0.5186, 0.4814]], atol=1e-4)
    for worst in (-np.inf, np.nan):  # all allowed keys as bad as can be: allowed experts all the same
        keys = np.full((1, 8), worst)
        keys[0, [6, 7]] = -1e300
        assert routing.select(config, keys).tolist() == [[6, 7]]
    assert routing.select(config, np.full((1, 8), np.nan)).tolist() == [[0, 1]]
    singles = replace(config, groups=8, top_groups=4)
    assert routing.group_scores(singles, z).tolist() == z.tolist()


def test_keys_below_every_start_value_and_nan():
    z = np.random.default_rng(0).standard_normal((5, 8))
    r = routing.route(SIGMOID, z, np.full(8, -5.0))
    assert np.array_equal(r.ids, np.argsort(-z, axis=1)[:, :3])
    z[2] = np.nan
    z[3, 4] = np.nan
    ids = routing.route(SMALL, z).ids
    assert ids[2].tolist() == [0, 1, 2] and 4 not in ids[3] and np.all((ids >= 0) & (ids < 8))


def test_weights_of_scores_that_underflow():
    """The sum is not 0 and eps shows: the documented rule is v / (sum + eps)."""
    config = replace(SIGMOID, top_k=8, experts=16, scaling=1.0, expert_bias=False)
    z = np.full((2, 16), -300.0)
    z[:, :8] = [[-120.0], [-50.0]]
    w = routing.route(config, z).weights
    assert np.allclose(w[0], np.exp(-120) / 1e-20) and np.isclose(w[1].sum(), 0.1337, atol=1e-4)


# -- whether a kernel's choice of experts can be right


def keys_near_ties(rng, config, n=400):
    keys = rng.integers(0, 6, (n, config.experts)) / 4 + rng.uniform(-1e-3, 1e-3, (n, config.experts))
    return Near(keys, np.full(keys.shape, 1e-3))


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (4, 3), (8, 4), (2, 1)])
def test_choices_within_the_error_are_legal_and_no_others(groups):
    config = replace(SIGMOID, groups=groups[0], top_groups=groups[1])
    rng = np.random.default_rng(5)
    keys = keys_near_ties(rng, config)
    for _ in range(5):
        moved = keys.value + keys.error * rng.uniform(-1, 1, keys.shape)
        assert routing.legal(config, keys, routing.select(config, moved)).all()
    exact = Near(rng.standard_normal(keys.shape))
    right = routing.select(config, exact.value)
    other = np.array([rng.permutation(config.experts)[: config.top_k] for _ in right])
    differs = (other != right).any(1)
    assert routing.legal(config, exact, right).all() and not routing.legal(config, exact, other)[differs].any()
    swapped = right[:, [1, 0, 2]]
    assert not routing.legal(config, exact, swapped).any()  # the order of slots is part of the choice


def test_choices_that_are_none():
    keys = Near(np.zeros((4, 8)), np.ones((4, 8)))
    ids = np.array([[0, 1, 1], [0, 1, 8], [-1, 0, 1], [7, 0, 3]])
    assert routing.legal(SMALL, keys, ids).tolist() == [False, False, False, True]


# -- ranks


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("ranks", "pad"), [(1, 1), (3, 1), (5, 4), (8, 2)])
def test_ranks_that_exchange_rows_compute_the_same(name, ranks, pad):
    config = LAYERS[name]
    tokens = [7, 0, 19, 3, 1, 2, 5, 4][:ranks]
    kind = {1: "balanced", 3: "one_rank", 5: "empty_ranks", 8: "one_expert"}[ranks]
    made = generators.inputs(config, tokens, kind, seed=ranks)
    each = [layer.forward(config, x, made.weights, ids=made.ids[q] if made.ids else None) for q, x in enumerate(made.x)]
    ids = [f.routing.ids for f in each]
    got = layout.exchange(config, made.x, made.weights, ids, [f.routing.weights for f in each], 4, pad)
    lay = got.layout
    for q, f in enumerate(each):
        assert np.allclose(got.combine[q][layout.row_of_slot(ids[q])], f.y, rtol=1e-12, atol=1e-14)
    for rank, rows in enumerate(got.received):
        own = config.experts_of(rank, ranks)
        assert len(rows) == lay.tile_rows(rank) * 4
        source, place = lay.rows_at(rank)
        assert (source >= 0).sum() == sum((i >= own.start).sum() - (i >= own.stop).sum() for i in ids)
        real = source >= 0
        order = [(e, s, p) for e in own for s, p in zip(*(a[lay.expert_rows(e)] for a in (source, place)), strict=True)]
        order = [o for o in order if o[1] >= 0]
        assert order == sorted(order) and len(order) == real.sum()
        assert np.isnan(rows[~real]).any(1).sum() + (rows[~real] == 0).all(1).sum() == (~real).sum()


def test_a_layout_by_hand():
    config = MoEConfig(hidden=8, expert_width=8, experts=3, top_k=1)
    ids = [np.array([[2], [0], [0]]), np.array([[0], [1], [0], [0]])]
    lay = layout.Layout.of(config, ids, tile_m=4, pad=2)
    assert lay.counts.tolist() == [[2, 0, 1], [3, 1, 0]] and lay.padded.tolist() == [[2, 0, 2], [4, 2, 0]]
    assert lay.expert_tiles.tolist() == [2, 1, 1] and lay.tile_base.tolist() == [0, 2, 0]
    assert [a.tolist() for a in lay.rows_at(0)] == [
        [0, 0, 1, 1, 1, -1, -1, -1, 1, -1, -1, -1],
        [0, 1, 0, 1, 2, -1, -1, -1, 3, -1, -1, -1],
    ]
    assert layout.row_of_slot(ids[0]).ravel().tolist() == [2, 0, 1]


# -- generators


@pytest.mark.parametrize("model", sorted(models()))
def test_routings_are_as_asked(model):
    config = MoEConfig.named(model).scaled(64)
    ranks = 4 if config.experts >= 4 else 2
    tokens = [120] * ranks
    owner = np.arange(config.experts) // config.per_rank(ranks)
    for kind in generators.ROUTINGS:
        most = min(2.0, 0.8 * ranks * min(config.top_k, config.per_rank(ranks)) / config.top_k)
        made = generators.inputs(config, tokens, kind, seed=7, load=most)
        w = made.weights
        ids = np.concatenate([routing.route(config, x @ w.router.T, w.bias).ids for x in made.x])
        rows = np.bincount(owner[ids].ravel(), minlength=ranks)
        experts = np.bincount(ids.ravel(), minlength=config.experts)
        if kind == "balanced":
            assert rows.max() < 1.5 * rows.mean()
        if kind == "skewed":
            assert 0.85 * most < rows.max() / rows.mean() < 1.15 * most
        if kind == "one_expert":
            assert experts.max() == len(ids)
        if kind == "one_rank":
            assert rows.max() == len(ids) * min(config.top_k, config.per_rank(ranks))
        if kind == "empty_ranks" and config.top_k <= config.experts // 2:
            assert (rows == 0).sum() == ranks // 2


def test_inputs_are_fresh_and_bf16():
    config = replace(SMALL, hidden=64, shared_width=8, gated_shared=True)
    one, again, other = (generators.inputs(config, [20, 0, 3], "skewed", seed=s, load=1.5) for s in (1, 1, 2))
    assert [x.shape for x in one.x] == [(20, 64), (0, 64), (3, 64)]
    for name in ("router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate"):
        value = getattr(one.weights, name)
        assert np.array_equal(value, near.to_bf16(value)) and np.array_equal(value, getattr(again.weights, name))
        assert not np.array_equal(value, getattr(other.weights, name)), name
    with pytest.raises(ValueError, match=r"load is 4\.0, want 1\.\d+ to \d\.\d+: top 3 of 8 experts on 3 ranks"):
        generators.inputs(config, [1] * 3, "skewed", load=4.0)
    with pytest.raises(ValueError, match="routing is 'even'"):
        generators.inputs(config, [1], "even")
