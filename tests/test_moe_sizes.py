"""Sizes of tables and rings: no routing needs more, and some need all of it."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kosmos_raw as kr
from kosmos_raw.device.base import Tile
from kosmos_raw.numerics.moe import generators
from kosmos_raw.numerics.moe.layout import Layout
from kosmos_raw.numerics.moe.routing import route
from kosmos_raw.ops.moe_forward import MoELayer
from kosmos_raw.ops.moe_weights import MoEWeights
from kosmos_raw.plan.moe.backward import plan_moe_backward
from kosmos_raw.plan.moe.config import MoEConfig, models
from kosmos_raw.plan.moe.forward import DTYPES, plan_moe_forward
from kosmos_raw.plan.moe.sizes import Rings, combine_bytes, default_rings, rings_that_fit, tables


def needed(layout: Layout) -> tuple[int, int, int]:
    """(tile rows, units that a source pushes, units that an owner sends), each the most of any rank."""
    first = layout.group_start // layout.tile_m
    last = (layout.group_start + layout.padded - 1) // layout.tile_m
    units = np.where(layout.counts > 0, last - first + 1, 0)
    owned = [layout.experts_of(rank) for rank in range(layout.ranks)]
    return (
        max(layout.tile_rows(rank) for rank in range(layout.ranks)),
        int(units.sum(1).max()),
        max(int(units[:, own].sum()) for own in owned),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_routing_needs_more(data):
    """Random layers, ranks and routings of all kinds, also with experts' rows one beyond a multiple of the tile."""
    ranks, experts = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 12))
    k = data.draw(st.integers(1, experts))
    config = MoEConfig(hidden=8, expert_width=8, experts=experts, top_k=k)
    pad = data.draw(st.sampled_from([1, 2, 4]))
    tile_m = pad * data.draw(st.sampled_from([1, 2, 4]))
    tokens = data.draw(st.integers(0, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    over = rng.choice([0.0, 3.0, 30.0]) * rng.standard_normal(experts)
    ids = [
        route(
            config, rng.standard_normal((tokens if rng.random() < 0.7 else rng.integers(tokens + 1), experts)) + over
        ).ids
        for _ in range(ranks)
    ]
    rows, pushes, sends = needed(Layout.of(config, ids, tile_m, pad))
    push = tables(config, ranks, tokens, tile_m, pad=pad)
    pull = tables(config, ranks, tokens, tile_m, pad=pad, pull=True)
    assert rows <= push.row_cap and pushes <= push.move_cap and sends <= push.send_cap == pull.send_cap
    assert sends <= pull.move_cap and push.balanced_row_cap <= push.row_cap


@pytest.mark.parametrize(
    ("ranks", "experts", "k", "tokens", "tile_m", "pad"),
    [
        (1, 2, 1, 6, 2, 1),
        (2, 2, 1, 4, 2, 1),
        (2, 4, 2, 2, 4, 2),
        (2, 3, 1, 3, 2, 2),
        (3, 3, 2, 2, 2, 1),
        (2, 2, 2, 3, 4, 1),
    ],
)
def test_some_routings_need_all_of_it(ranks, experts, k, tokens, tile_m, pad):
    """All routings of a tiny layer, one by one: counts that can be, up to the order of tokens."""
    config = MoEConfig(hidden=8, expert_width=8, experts=experts, top_k=k)
    choices = list(combinations(range(experts), k))
    of_rank = {
        tuple(np.bincount(np.array(picks).ravel(), minlength=experts)) for picks in product(choices, repeat=tokens)
    }
    most = np.zeros(3, int)
    for counts in product(of_rank, repeat=ranks):
        most = np.maximum(most, needed(Layout(config, np.array(counts), tile_m, pad)))
    t = tables(config, ranks, tokens, tile_m, pad=pad)
    caps = np.array([t.row_cap, t.move_cap, t.send_cap])
    assert (most <= caps).all() and (caps - most <= [1, 2, 3]).all(), (most, caps)


def test_deepseek_v3_on_eight_ranks():
    config = MoEConfig.named("DeepSeek-V3")
    t = tables(config, 8, 8192, 256)
    assert (t.rows, t.row_cap, t.balanced_row_cap) == (8 * 8192 * 8, 2079, 256)
    assert t.move_cap == (8192 * 8 + 256 * 510) // 256 and t.send_cap == (8 * 8192 * 8 + 256 * 510) // 256
    size = partial(Rings.bytes, config=config, tile_m=256)
    assert size(Rings.holding(1), keep=False) == 256 * (7168 * 2 + 2048 * 2 + 7168 * 2) == 8 << 20
    assert size(Rings.holding(1)) == (8 << 20) + 256 * 2048 * 4
    assert default_rings(t) == Rings(48, 7, 384, 384, 96)
    assert combine_bytes(config, 8192) == 8192 * 8 * 7168 * 2
    with_columns = tables(config, 8, 8192, 256, pad=32)
    assert with_columns.row_cap == (8 * (8192 * 8 + 32 * 31) + 32 * 224) // 256


def test_rings_of_mxfp8():
    config = MoEConfig(hidden=64, expert_width=40, experts=4, top_k=1)
    rings = Rings(1, 0, 2, 3, 1)
    assert rings.bytes(config, 128, dtype="mxfp8") == 128 * (2 * 132 + 3 * (256 + 132 + 512) + 128)


@pytest.mark.parametrize(("dtype", "keep"), list(product(DTYPES, (False, True))))
def test_rings_take_what_a_layer_takes(dtype, keep):
    config = MoEConfig(hidden=72, expert_width=40, experts=4, top_k=1)
    rings = Rings(1, 0, 2, 3, 1)
    layer = kr.launch(_ring_bytes, config, rings, dtype, keep, ranks=1, mode="threads", device="cpu")
    assert layer == [rings.bytes(config, 96, dtype=dtype, keep=keep)]


def _ring_bytes(comm, config, rings, dtype, keep):
    rng, bits = np.random.default_rng(0), np.uint16
    shapes = {"router": (4, 72), "gate_up": (4, 80, 72), "down": (4, 72, 40)}
    weights = MoEWeights(**{name: rng.integers(0, 1 << 14, shape).astype(bits) for name, shape in shapes.items()})
    layer = MoELayer(comm, config, weights, tokens=50, rings=rings, dtype=dtype, keep=keep)
    sizes = layer._sizes()
    return layer.plan.x_bytes + sum(sizes.get(name, 0) for name in ("h", "h_copy", "y", "pre"))


@given(st.integers(1, 5000))
def test_rings_that_hold_all_give_the_papers_order(tile_rows):
    rings = Rings.holding(tile_rows)  # refuses what could deadlock
    steps = -(-tile_rows // rings.step_rows)
    assert rings.x_slots >= tile_rows and rings.lag >= steps - 1  # GEMM2 of step 0 comes behind GEMM1 of the last
    assert rings.x_slots <= tile_rows + 8 and rings.y_slots <= rings.x_slots


@pytest.mark.parametrize("model", sorted(models()))
def test_rings_that_fit(model):
    config = MoEConfig.named(model)
    t = tables(config, 8, 8192, 256)
    size = partial(Rings.bytes, config=config, tile_m=256)
    least = size(Rings.holding(1))
    assert rings_that_fit(t, least, size) == Rings(1, 0, 1, 1, 1)
    with pytest.raises(ValueError, match=f"one tile row each take {least} bytes, but there are {least - 1}"):
        rings_that_fit(t, least - 1, size)
    for room in (3 * least, 100 * least, 10**15):
        rings = rings_that_fit(t, room, size)
        assert size(rings) <= room
        if rings.x_slots < t.row_cap:
            assert size(Rings.holding(rings.x_slots + 1)) > room
    assert rings_that_fit(t, 10**15, size) == Rings.holding(t.row_cap)
    assert default_rings(t, 1e9) == Rings.holding(t.row_cap) and default_rings(t, 1e-9) == Rings(1, 0, 1, 1, 1)


def test_what_balanced_routing_needs():
    """Random routing fits the default rings; a rank with everything does not, and the tables know."""
    config, ranks, tokens = MoEConfig.named("Qwen3-30B").scaled(8), 4, 300
    t = tables(config, ranks, tokens, 32)
    need = {}
    for kind in ("balanced", "one_rank"):
        made = generators.inputs(config, [tokens] * ranks, kind, seed=1)
        ids = [route(config, x @ made.weights.router.T).ids for x in made.x]
        need[kind] = needed(Layout.of(config, ids, 32))[0]
    assert need["balanced"] <= default_rings(t).x_slots < need["one_rank"] <= t.row_cap


def test_what_is_refused():
    config = MoEConfig(hidden=64, expert_width=32, experts=8, top_k=2)
    with pytest.raises(ValueError, match="padded to 3 rows, want a divisor of the 32"):
        tables(config, 2, 100, 32, pad=3)
    with pytest.raises(ValueError, match="tile rows and 8 experts, want each below 16777216"):
        tables(config, 8, 1 << 27, 32)
    for wrong, name in (((2, 1, 1, 4, 2), "x_slots"), ((2, 1, 2, 3, 2), "h_slots"), ((2, 1, 2, 4, 1), "y_slots")):
        with pytest.raises(ValueError, match=f"{name} is .* a shorter ring deadlocks"):
            Rings(*wrong)
    with pytest.raises(ValueError, match="step_rows is 0"):
        Rings(0, 0, 1, 1, 1)
    with pytest.raises(ValueError, match=r"capacity is 0\.0"):
        default_rings(tables(config, 2, 100, 32), 0.0)


def test_weights_too_far_apart_for_a_tile_are_refused():
    plans = (plan_moe_forward(MoEConfig(16384, width, 8, 2), 2, 64, Tile(256, 256), 256) for width in (8192, 32768))
    assert plan_moe_backward(next(plans)).round_rows
    with pytest.raises(ValueError, match="moe_backward: an expert's width is 32768 and tokens have 16384 columns"):
        plan_moe_backward(next(plans))


def test_layers_without_tokens():
    t = tables(MoEConfig(hidden=64, expert_width=32, experts=8, top_k=2), 2, 0, 32)
    assert (t.rows, t.row_cap, t.move_cap, t.send_cap) == (0, 1, 1, 1) and default_rings(t) == Rings(1, 0, 1, 1, 1)
