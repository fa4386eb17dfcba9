"""The whole layer on one rank's tokens, forward and backward. Ranks only share experts: see layout.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ...plan.moe.config import MoEConfig
from .. import near
from ..near import Array, Near
from . import experts
from .aux_loss import aux_loss
from .routing import Routing, logits_gradient, route, scores_of


@dataclass(frozen=True)
class Weights:
    """Of a layer, all experts; gradients have the same form. None where the config has none."""

    router: Array  # [E, H], BF16, or FP32 that is multiplied as three BF16
    gate_up: Array  # [E, 2 I, H]: gate, then up
    down: Array  # [E, H, I]
    shared_gate_up: Array | None = None  # [2 Is, H]
    shared_down: Array | None = None  # [H, Is]
    shared_gate: Array | None = None  # [H]
    bias: np.ndarray | None = None  # [E], added to scores to choose experts; has no gradient


@dataclass(frozen=True)
class Forward:
    """The output, and what the backward needs of its way there."""

    out: Array  # [T, H], rounded
    x: Array  # [T, H]
    routing: Routing
    aux: Array  # the auxiliary loss
    dscores: Array  # [T, E], its gradient
    y: Array  # [T, k, H], rows from experts, rounded, not weighted
    rows: list[tuple[np.ndarray, np.ndarray]]  # (tokens, slots) of each expert's rows, tokens rising
    kept: list[experts.Hidden]  # of each expert
    shared: experts.Hidden | None = None
    shared_y: Array | None = None  # [T, H], rounded, before the gate
    shared_weight: Array | None = None  # [T], the gate's
    dtype: str = field(default="bf16", kw_only=True)  # of routed experts' products


def lift(x: np.ndarray, w: Weights) -> tuple[Near, Weights]:
    """Inputs as a kernel is given them, so that what follows carries bounds."""
    values = {f.name: getattr(w, f.name) for f in fields(w)}
    return Near.of(x), Weights(
        **{name: v if v is None or name == "bias" else Near.of(v) for name, v in values.items()}  # type: ignore[arg-type]
    )


def forward(
    config: MoEConfig,
    x: Array,
    w: Weights,
    *,
    ids: np.ndarray | None = None,
    weights: Array | None = None,
    sequences: Sequence[int] | None = None,
    choices: np.ndarray | None = None,
    dtype: str = "bf16",
) -> Forward:
    """Tokens x [T, H] through the layer.

    Args:
        ids, weights: [T, k] experts chosen already, and theirs, see routing.route.
        sequences: lengths of the token's sequences, for an auxiliary loss over each.
        choices: [T, k] as the judged kernel counted for the auxiliary loss.
        dtype: of routed experts' products, one of plan.moe.forward.DTYPES.
    """
    parts = 1 if near.is_bf16(w.router) else 3
    r = route(config, near.product(x, w.router.T, parts), w.bias, ids, weights)
    aux, dscores = aux_loss(config, r, sequences, choices)
    T, k = r.ids.shape
    y = near.zeros((T, k, config.hidden), x)
    rows, kept = _rows_of(config, r.ids), []
    for e, (tokens, slots) in enumerate(rows):
        given = x[tokens]
        if config.weight_on == "input":
            given = near.bf16(given * r.weights[tokens, slots][:, None])
        of_expert, hidden = experts.forward(given, w.gate_up[e], w.down[e], config.swiglu_limit, dtype)
        near.put(y, (tokens, slots), of_expert)
        kept.append(hidden)
    out = (y if config.weight_on == "input" else y * r.weights[:, :, None]).sum(1)
    shared: tuple[Any, ...] = ()
    if config.shared_width:
        out, *shared = _shared_forward(config, x, w, out)  # type: ignore[assignment]
    return Forward(near.bf16(out), x, r, aux, dscores, y, rows, kept, *shared, dtype=dtype)


def _rows_of(config: MoEConfig, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, slots) of each expert's rows."""
    found = [np.nonzero(ids == e) for e in range(config.experts)]
    return [(tokens, slots) for tokens, slots in found]


def _shared_forward(config: MoEConfig, x: Array, w: Weights, out: Array) -> tuple[Any, ...]:
    """The output with the shared expert's added, and the last fields of Forward."""
    assert w.shared_gate_up is not None and w.shared_down is not None
    y, hidden = experts.forward(x, w.shared_gate_up, w.shared_down, None)
    if not config.gated_shared:
        return out + y, hidden, y
    assert w.shared_gate is not None
    weight = near.sigmoid(x @ w.shared_gate)
    return out + y * weight[:, None], hidden, y, weight


@dataclass(frozen=True)
class Saved:
    """What a kernel's forward leaves for its backward, by token and slot; exactly as it is there."""

    ids: np.ndarray  # [T, k]
    logits: np.ndarray  # [T, E]
    weights: np.ndarray  # [T, k]
    g: np.ndarray | None  # [T, k, I]; None: not known here, and multiplied again
    u: np.ndarray | None  # [T, k, I]
    y: np.ndarray  # [T, k, H]
    shared_g: np.ndarray | None = None  # [T, Is]
    shared_u: np.ndarray | None = None  # [T, Is]
    shared_y: np.ndarray | None = None  # [T, H]
    dtype: str = field(default="bf16", kw_only=True)  # of routed experts' products, forward and backward


def resumed(
    config: MoEConfig,
    x: Near,
    w: Weights,
    saved: Saved,
    *,
    sequences: Sequence[int] | None = None,
    choices: np.ndarray | None = None,
) -> Forward:
    """The forward that a kernel has done, for a backward that is judged by itself: its bounds need not allow for how
    the forward may have rounded."""
    logits, weights = Near.of(saved.logits), Near.of(saved.weights)
    r = Routing(logits, scores_of(config, logits), saved.ids, weights)
    aux, dscores = aux_loss(config, r, sequences, choices)
    rows = _rows_of(config, saved.ids)
    kept = [expert_kept(config, x, w.gate_up[e], saved, at) for e, at in enumerate(rows)]
    y = Near.of(saved.y)
    parts: tuple[Any, ...] = ()
    if config.shared_width:
        gate = near.sigmoid(x @ w.shared_gate) if config.gated_shared else None
        hidden = experts.hidden(x, Near.of(saved.shared_g), Near.of(saved.shared_u), None)
        parts = hidden, Near.of(saved.shared_y), gate
    return Forward(near.zeros(x.shape, x), x, r, aux, dscores, y, rows, kept, *parts, dtype=saved.dtype)


def expert_kept(
    config: MoEConfig, x: Near, gate_up: Array, saved: Saved, at: tuple[np.ndarray, np.ndarray]
) -> experts.Hidden:
    """Of an expert's rows, (tokens, slots) of one rank."""
    given = x[at[0]] if config.weight_on == "output" else near.bf16(x[at[0]] * Near.of(saved.weights)[at][:, None])
    if saved.g is None or saved.u is None:
        return experts.kept_of(given, gate_up, config.swiglu_limit, saved.dtype)
    return experts.hidden(given, Near.of(saved.g[at]), Near.of(saved.u[at]), config.swiglu_limit)


def expert_dy(config: MoEConfig, dout: Array, weights: Array, at: tuple[np.ndarray, np.ndarray]) -> Array:
    """dL/d(rows of an expert's output), rounded."""
    return dout[at[0]] if config.weight_on == "input" else near.bf16(dout[at[0]] * weights[at][:, None])


@dataclass(frozen=True)
class Gradients:
    """Of all that the layer was given, and what the backward makes on the way."""

    x: Array  # [T, H], rounded
    weights: Weights
    slot_weights: Array  # [T, k]
    logits: Array  # [T, E]


def backward(config: MoEConfig, f: Forward, w: Weights, dout: Array, *, aux_scale: float = 1.0) -> Gradients:
    """From dL/dout [T, H], and aux_scale = dL/d(auxiliary loss)."""
    r = f.routing
    dx_rows = near.zeros(f.y.shape, f.y)
    gate_up, down = [], []
    for e, (tokens, slots) in enumerate(f.rows):
        dy = expert_dy(config, dout, r.weights, (tokens, slots))
        b = experts.backward(f.kept[e], dy, w.down[e], config.swiglu_limit, dtype=f.dtype)
        near.put(dx_rows, (tokens, slots), near.bf16(experts.input_gradient(b, w.gate_up[e], f.dtype)))
        gate_up.append(b.gate_up)
        down.append(b.down)
    if config.weight_on == "input":
        dweights = (dx_rows * f.x[:, None]).sum(-1)
        dx = (dx_rows * r.weights[:, :, None]).sum(1)
    else:
        dweights = (f.y * dout[:, None]).sum(-1)
        dx = dx_rows.sum(1)
    dz = logits_gradient(config, r, dweights, f.dscores * aux_scale)
    own = [(dz, w.router, 2 if near.is_bf16(w.router) else 5)]  # in one contraction, with the shared expert's
    shared: tuple[Array, ...] = ()
    if config.shared_width:
        more, *shared = _shared_backward(config, f, w, dout)  # type: ignore[assignment]
        own += more  # type: ignore[arg-type]
    router = near.product(dz.T, f.x, 2)
    weights = Weights(router, near.stack(gate_up), near.stack(down), *shared)  # type: ignore[arg-type]
    return Gradients(near.bf16(dx + near.products(*own)), weights, dweights, dz)


def _shared_backward(config: MoEConfig, f: Forward, w: Weights, dout: Array) -> tuple[Any, ...]:
    """Its part of dx, as products; gradients of gate_up, down and gate."""
    assert f.shared is not None and f.shared_y is not None and w.shared_gate_up is not None
    assert w.shared_down is not None
    if not config.gated_shared:
        b = experts.backward(f.shared, dout, w.shared_down, None)
        return [experts.input_factors(b, w.shared_gate_up)], b.gate_up, b.down
    assert f.shared_weight is not None and w.shared_gate is not None
    s = f.shared_weight
    b = experts.backward(f.shared, dout, w.shared_down, None, s)
    dlogit = (s * (1.0 - s) * (f.shared_y * dout).sum(-1))[:, None]
    of_gate = (dlogit, w.shared_gate[None], 2 if near.is_bf16(w.shared_gate) else 5)
    of_x = [experts.input_factors(b, w.shared_gate_up), of_gate]
    return of_x, b.gate_up, b.down, near.product(f.shared.x.T, dlogit, 2)[:, 0]
