"""An expert: a SwiGLU of its rows, forward and backward. Routed and shared experts are the same but for the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import near
from ..near import Array


@dataclass(frozen=True)
class Hidden:
    """What an expert's forward keeps of its rows."""

    x: Array  # [n, H]
    g: Array  # [n, I], before the activation: gate
    u: Array  # [n, I]: up
    h: Array  # [n, I]


def activation(g: Array, u: Array, limit: float | None) -> Array:
    """silu(g) * u; with a limit, of g at most that, and of u between it and its negative."""
    if limit is not None:
        g, u = near.clip(g, -math.inf, limit), near.clip(u, -limit, limit)
    return g * near.sigmoid(g) * u


def activation_gradient(g: Array, u: Array, dh: Array, limit: float | None) -> tuple[Array, Array]:
    """dL/dg and dL/du. At the limit itself gradients pass."""
    if limit is None:
        sg = near.sigmoid(g)
        return dh * u * sg * (1.0 + g * (1.0 - sg)), dh * g * sg
    inside_g, inside_u = near.within(g, -math.inf, limit), near.within(u, -limit, limit)
    dg, du = activation_gradient(near.clip(g, -math.inf, limit), near.clip(u, -limit, limit), dh, None)
    return dg * inside_g, du * inside_u


def hidden(x: Array, g: Array, u: Array, limit: float | None) -> Hidden:
    """From rounded g and u."""
    return Hidden(x, g, u, near.bf16(activation(g, u, limit)))


def kept_of(x: Array, gate_up: Array, limit: float | None) -> Hidden:
    """Rows x [n, H] through gate_up [2 I, H]."""
    width = gate_up.shape[0] // 2
    return hidden(x, near.bf16(x @ gate_up[:width].T), near.bf16(x @ gate_up[width:].T), limit)


def forward(x: Array, gate_up: Array, down: Array, limit: float | None) -> tuple[Array, Hidden]:
    """Then through down [H, I]; the result is rounded, [n, H]."""
    kept = kept_of(x, gate_up, limit)
    return near.bf16(kept.h @ down.T), kept


@dataclass(frozen=True)
class Backward:
    """Gradients of an expert."""

    dg: Array  # [n, I]; dx is dg @ gate + du @ up
    du: Array
    gate_up: Array  # [2 I, H]
    down: Array  # [H, I]


def backward(kept: Hidden, dy: Array, down: Array, limit: float | None, weight: Array | None = None) -> Backward:
    """From dL/dy, [n, H], rounded; of rows that are weighted, [n], from dL/d(weight * y)."""
    dh, h = dy @ down, kept.h
    if weight is not None:  # not dy: that would have to be stored once more, and rounded
        dh, h = dh * weight[:, None], near.bf16(h * weight[:, None])
    dg, du = (near.bf16(d) for d in activation_gradient(kept.g, kept.u, dh, limit))
    return Backward(dg, du, near.concatenate([dg.T @ kept.x, du.T @ kept.x]), dy.T @ h)


def input_factors(b: Backward, gate_up: Array) -> tuple[Array, Array, int]:
    """dL/dx, [n, H], as a product for near.products."""
    return near.concatenate([b.dg, b.du], axis=1), gate_up, 1


def input_gradient(b: Backward, gate_up: Array) -> Array:
    """The same, not rounded."""
    return near.products(input_factors(b, gate_up))
