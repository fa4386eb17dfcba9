"""The MoE oracle in MXFP8: against the same layer written out row by row, and mistakes of kernels that it must see."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from kosmos_raw.numerics.moe import experts, generators, judge, layer, routing
from kosmos_raw.numerics.mxfp8 import rounded
from kosmos_raw.numerics.near import Near, to_bf16
from kosmos_raw.plan.moe.config import MoEConfig
from kosmos_raw.plan.moe.forward import DTYPES

# Widths that end within a block of 32, of pre-activations within 16; groups of fewer and of more rows than a block.
OUTPUT = MoEConfig(hidden=72, expert_width=40, experts=4, top_k=2)
CONFIGS = {
    "output": OUTPUT,
    "limit": replace(OUTPUT, swiglu_limit=0.5),
    "input": replace(OUTPUT, score="sigmoid", top_k=1, normalise=False, weight_on="input"),
}
TOKENS = [75, 0, 30]


def inputs(config: MoEConfig, seed: int = 0) -> generators.Inputs:
    return generators.spread(generators.inputs(config, TOKENS, seed=seed), seed)


class Layer:
    """All ranks' forward and backward, in float64 or as kernels do in FP32, with one mistake if asked."""

    def __init__(self, config: MoEConfig, made: generators.Inputs, kind: type, mistake: str = ""):
        self.config, self.made, self.kind, self.mistake, self.w = config, made, kind, mistake, made.weights
        self.routing = [routing.route(config, x @ self.w.router.T) for x in made.x]
        self.weights = [r.weights.astype(kind) for r in self.routing]

    def bf16(self, x: np.ndarray, unless: str = "") -> np.ndarray:
        return x if unless and unless == self.mistake else to_bf16(x).astype(self.kind)

    def quantised(self, x: np.ndarray, axis: int) -> np.ndarray:
        rule = "floor" if self.mistake == "another rule" else "up"
        exact = np.array_equal(x, to_bf16(x))
        return rounded(x.astype(ml_dtypes.bfloat16 if exact else np.float32), axis, rule=rule).astype(self.kind)

    def of(self, e: int, q: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, slots) of a rank's rows."""
        tokens, slots = np.nonzero(self.routing[q].ids == e)
        return tokens, slots

    def rows(self, e: int, q: int) -> np.ndarray:
        tokens, slots = self.of(e, q)
        x = self.made.x[q][tokens].astype(self.kind)
        if self.config.weight_on == "output":
            return x
        weights = self.weights[q][tokens, slots][:, None]
        return self.bf16(x * weights, "x not rounded once it is weighted")

    def expert(self, e: int, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """g, u, h and y of some rows."""
        gate_up, down = self.w.gate_up[e], self.w.down[e]
        pre = self.quantised(x, int(self.mistake != "x along rows")) @ self.quantised(gate_up, 1).T
        if self.mistake == "x not quantised":
            pre = x @ self.quantised(gate_up, 1).T
        g, u = self.bf16(pre[:, : self.config.expert_width]), self.bf16(pre[:, self.config.expert_width :])
        h = self.bf16(self.activation(g, u), "h quantised of FP32")
        y = self.quantised(h, 1) @ self.quantised(down, int(self.mistake != "down along rows")).T
        return g, u, h, self.bf16(y)

    def activation(self, g: np.ndarray, u: np.ndarray) -> np.ndarray:
        limit = self.config.swiglu_limit or np.inf
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        return g / (1 + np.exp(-g)) * u

    def forward(self, q: int) -> tuple[np.ndarray, layer.Saved]:
        """The output of a rank's tokens, and what is kept of them."""
        ids, weights = self.routing[q].ids, self.weights[q]
        g, u = (np.zeros((*ids.shape, self.config.expert_width)) for _ in range(2))
        y = np.zeros((*ids.shape, self.config.hidden), self.kind)
        for e in range(self.config.experts):
            at = self.of(e, q)
            g[at], u[at], _, y[at] = self.expert(e, self.rows(e, q))
        out = self.bf16((y if self.config.weight_on == "input" else y * weights[:, :, None]).sum(1))
        logits = self.routing[q].logits.astype(np.float32).astype(np.float64)
        return out, layer.Saved(ids, logits, weights.astype(np.float64), g, u, y.astype(np.float64), dtype="mxfp8")

    def dy(self, e: int, q: int) -> np.ndarray:
        tokens, slots = self.of(e, q)
        dy = self.made.dout[q][tokens].astype(self.kind)
        return dy if self.config.weight_on == "input" else self.bf16(dy * self.weights[q][tokens, slots][:, None])

    def dpre(self, e: int, q: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dg, du, and h of a rank's rows."""
        g, u, _, _ = self.expert(e, self.rows(e, q))
        along = 1 if self.mistake == "the forward's copy of down" else 0
        dh = self.quantised(self.dy(e, q), 1) @ self.quantised(self.w.down[e], along)
        limit = self.config.swiglu_limit or np.inf
        gc, uc = np.minimum(g, limit), np.clip(u, -limit, limit)
        s = 1 / (1 + np.exp(-gc))
        dg, du = dh * uc * s * (1 + gc * (1 - s)) * (g <= limit), dh * gc * s * (np.abs(u) <= limit)
        return *(self.bf16(d, "dpre quantised of FP32") for d in (dg, du)), self.bf16(gc * s * uc)

    def in_turn(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """Columns of both, 16 and 16, filled up with zeros."""
        if self.mistake == "gate, then up":
            return np.concatenate([gate, up], 1)
        block = 32 if self.mistake == "32 of gate, 32 of up" else 16
        width = gate.shape[1]
        mixed = np.zeros((len(gate), -(-width // block) * 2 * block), gate.dtype)
        for i in range(width):
            mixed[:, i // block * 2 * block + i % block] = gate[:, i]
            mixed[:, i // block * 2 * block + block + i % block] = up[:, i]
        return mixed

    def dx(self, e: int, q: int) -> np.ndarray:
        dg, du, _ = self.dpre(e, q)
        gate, up = np.split(self.w.gate_up[e], 2)
        return self.bf16(self.quantised(self.in_turn(dg, du), 1) @ self.quantised(self.in_turn(gate.T, up.T).T, 0))

    def grouped(self, parts: list[np.ndarray]) -> np.ndarray:
        """Ranks' rows in a ring, quantised along rows."""
        pad = {"no padding": 1, "padded to 16": 16}.get(self.mistake, 32)
        if self.mistake == "rows in another order":
            parts = [part[::-1] for part in parts]
        if self.mistake == "quantised along columns first":
            parts = [self.quantised(part, 1) for part in parts]
        return self.quantised(np.concatenate([np.pad(p, ((0, -len(p) % pad), (0, 0))) for p in parts]), 0)

    def expert_gradients(self, e: int) -> tuple[np.ndarray, np.ndarray]:
        """Of gate_up and down, over all ranks' rows."""
        ranks = range(len(TOKENS))
        dg, du, h = (self.grouped(list(parts)) for parts in zip(*(self.dpre(e, q) for q in ranks), strict=True))
        x, dy = self.grouped([self.rows(e, q) for q in ranks]), self.grouped([self.dy(e, q) for q in ranks])
        return np.concatenate([dg.T @ x, du.T @ x]), dy.T @ h

    def input_gradient(self, q: int, y: np.ndarray) -> np.ndarray:
        config, r, x, dout = self.config, self.routing[q], self.made.x[q], self.made.dout[q]
        rows = np.zeros((*r.ids.shape, config.hidden), self.kind)
        for e in range(config.experts):
            rows[self.of(e, q)] = self.dx(e, q)
        on_input = config.weight_on == "input"
        dweights = (rows * x[:, None]).sum(-1) if on_input else (y * dout[:, None]).sum(-1)
        dz = routing.logits_gradient(config, replace(r, weights=self.weights[q]), dweights, None)
        return self.bf16((rows * self.weights[q][:, :, None] if on_input else rows).sum(1) + dz @ self.w.router)


def judged(name: str, mistake: str = "", seed: int = 1) -> dict[str, float]:
    """How far a layer in FP32 is off, in bounds: the worst over ranks."""
    config, made = CONFIGS[name], inputs(CONFIGS[name], seed)
    kernel = Layer(config, made, np.float32, mistake)
    forwards = [kernel.forward(q) for q in range(len(TOKENS))]
    over: dict[str, float] = {}
    for q, (out, saved) in enumerate(forwards):
        got = {"ids": saved.ids, "out": out}
        found = judge.judge_forward(config, made.x[q], made.weights, got, dtype="mxfp8")
        over |= {n: max(over.get(n, 0.0), c.over_bound) for n, c in found.items()}
    given = [judge.Given(made.x[q], s, made.dout[q]) for q, (_, s) in enumerate(forwards)]
    dx = [{"x": kernel.input_gradient(q, s.y)} for q, (_, s) in enumerate(forwards)]
    gate_up, down = zip(*(kernel.expert_gradients(e) for e in range(config.experts)), strict=True)
    of_experts = {"gate_up": np.stack(gate_up), "down": np.stack(down)}
    own, experts_ = judge.judge_backward(config, given, made.weights, dx, of_experts)
    return over | {"x": max(c["x"].over_bound for c in own)} | {n: c.over_bound for n, c in experts_.items()}


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max(initial=0.0)))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_oracle_is_the_layer_written_out(name):
    """In float64, where nothing but what is rounded on purpose tells them apart."""
    config, made = CONFIGS[name], inputs(CONFIGS[name])
    direct = Layer(config, made, np.float64)
    given = []
    for q, x in enumerate(made.x):
        out, saved = direct.forward(q)
        f = layer.forward(config, *layer.lift(x, made.weights), ids=saved.ids, dtype="mxfp8")
        assert close(saved.y, f.y.value) and close(out, f.out.value)
        given.append(judge.Given(x, saved, made.dout[q]))
        assert close(direct.input_gradient(q, saved.y), judge.backward_of(config, given[q], made.weights).x.value)
        again = replace(given[q], saved=replace(saved, g=None, u=None))  # multiplied once more
        assert close(direct.input_gradient(q, saved.y), judge.backward_of(config, again, made.weights).x.value)
    for e in range(config.experts):
        for mine, oracle in zip(
            direct.expert_gradients(e), judge.expert_gradients(config, given, made.weights, e), strict=True
        ):
            assert close(mine, oracle.value)


def test_mathematics_does_not_quantise():
    """Of arrays, the layer is the same in both types: what an error of the whole recipe is measured from."""
    made = inputs(OUTPUT)
    plain, mx = (layer.forward(OUTPUT, made.x[0], made.weights, dtype=d) for d in DTYPES)
    assert np.array_equal(plain.out, mx.out)
    with pytest.raises(ValueError, match="dtype is 'fp8', want one of bf16, mxfp8"):
        layer.forward(OUTPUT, made.x[0], made.weights, dtype="fp8")


def test_pre_activations_are_in_the_kernels_order():
    order = experts.pre_order(40)
    assert order[:32].tolist() == [*range(16), *range(40, 56)] and order[64:].tolist() == [
        *range(32, 40),
        *range(72, 80),
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_right_layer_is_within_the_bound(name):
    over = judged(name)
    assert max(over.values()) <= 1.0, over


@pytest.mark.parametrize("known", [True, False])
def test_bounds_are_far_below_what_quantising_costs(known):
    """Else they would allow for any of it: a median below a tenth of the error that the recipe makes."""
    config, made = OUTPUT, inputs(OUTPUT)
    direct = Layer(config, made, np.float64)
    saved = [direct.forward(q)[1] for q in range(len(TOKENS))]
    if not known:
        saved = [replace(s, g=None, u=None) for s in saved]
    given = [judge.Given(x, s, d) for x, s, d in zip(made.x, saved, made.dout, strict=True)]
    plain = [replace(g, saved=replace(g.saved, dtype="bf16")) for g in given]
    pairs = [(judge.expert_gradients(config, g, made.weights, 1)) for g in (given, plain)]
    pairs = [*zip(*pairs, strict=True), tuple(judge.backward_of(config, g[0], made.weights).x for g in (given, plain))]
    for mx, bf16 in pairs:
        assert isinstance(mx, Near)
        assert np.median(mx.error) < 0.1 * np.median(np.abs(mx.value - bf16.value))


@pytest.mark.parametrize(
    ("name", "mistake", "seen_in"),
    [
        ("output", "x along rows", "out"),
        ("output", "x not quantised", "out"),
        ("output", "h quantised of FP32", "out"),
        ("output", "down along rows", "out"),
        ("output", "another rule", "out"),
        ("input", "x not rounded once it is weighted", "out"),
        ("output", "the forward's copy of down", "x"),
        ("output", "gate, then up", "x"),
        ("limit", "32 of gate, 32 of up", "x"),
        ("output", "dpre quantised of FP32", "x"),
        ("output", "dpre quantised of FP32", "gate_up"),
        ("output", "no padding", "down"),
        ("output", "no padding", "gate_up"),
        ("input", "padded to 16", "gate_up"),
        ("output", "rows in another order", "down"),
        ("output", "quantised along columns first", "down"),
        ("output", "quantised along columns first", "gate_up"),
    ],
)
def test_mistakes_are_out_of_the_bound(name, mistake, seen_in):
    assert judged(name, mistake)[seen_in] > 1.0


def test_spread_numbers_are_bf16_and_count():
    """Small ones are out of E4M3's range beside the largest of their block, and yet in balance with what they meet."""
    config = replace(OUTPUT, shared_width=16, gated_shared=True)
    made = generators.inputs(config, TOKENS)
    there = generators.spread(made)
    values = [*there.x, *there.dout, *(v for v in vars(there.weights).values() if v is not None)]
    assert all(np.array_equal(v, to_bf16(v)) for v in values)
    x, w = there.x[0], there.weights
    for a, b, axis in ((x, w.gate_up[0], 0), (there.dout[0], w.down[0].T, 0)):
        of_a, of_b = np.abs(a).mean(axis), np.abs(b).mean(axis)
        assert of_a.max() > 2.0**12 * of_a.min() and of_b.max() > 2.0**12 * of_b.min()
        assert (of_a * of_b).max() < 32 * (of_a * of_b).min()
    assert np.array_equal(x[:, 0] * w.router[:, :1], made.x[0][:, 0] * made.weights.router[:, :1])  # the skew


def test_errors_of_the_recipe():
    """Of noise, beside the layer that rounds nowhere: about sqrt(3) times the 3.8 % of a product, and no more."""
    config = MoEConfig(hidden=256, expert_width=96, experts=4, top_k=2)
    made = generators.inputs(config, [150])
    x, w = layer.lift(made.x[0], made.weights)
    f = layer.forward(config, x, w, dtype="mxfp8")
    exact = layer.forward(config, made.x[0], made.weights, ids=f.routing.ids, dtype="mxfp8")
    got, want = (
        layer.backward(config, f, w, Near.of(made.dout[0])),
        layer.backward(config, exact, made.weights, made.dout[0]),
    )
    pairs = [(f.out, exact.out), (got.x, want.x)]
    pairs += [(getattr(got.weights, name), getattr(want.weights, name)) for name in ("gate_up", "down")]
    for mine, right in pairs:
        assert 0.055 < np.linalg.norm(mine.value - right) / np.linalg.norm(right) < 0.075
