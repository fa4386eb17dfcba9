"""An expert: a SwiGLU of its rows, forward and backward.

Routed and shared experts are the same but for the limit, and for `dtype`, what is multiplied: "bf16", or "mxfp8", where
both factors of each product are quantised of their BF16, along what the product contracts over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...plan.moe.forward import DTYPES, GATED
from .. import near
from ..near import Array


def factor(x: Array, axis: int, dtype: str, groups: Sequence[int] | None = None) -> Array:
    """A matrix as it is multiplied in a product that contracts over `axis`; groups: see near.mxfp8."""
    if dtype not in DTYPES:
        raise ValueError(f"experts: dtype is {dtype!r}, want one of {', '.join(DTYPES)}")
    return near.mxfp8(x, axis, groups) if dtype == "mxfp8" else x


def pre_order(width: int) -> np.ndarray:
    """[2 width]: where gate and up, one after the other, are as kernels have them: in turn, 16 of each."""
    column = np.arange(2 * width)
    return np.argsort(column % width // GATED, kind="stable")


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


def kept_of(x: Array, gate_up: Array, limit: float | None, dtype: str = "bf16") -> Hidden:
    """Rows x [n, H] through gate_up [2 I, H]."""
    width = gate_up.shape[0] // 2
    rows, columns = factor(x, 1, dtype), factor(gate_up, 1, dtype).T
    return hidden(x, near.bf16(rows @ columns[:, :width]), near.bf16(rows @ columns[:, width:]), limit)


def forward(x: Array, gate_up: Array, down: Array, limit: float | None, dtype: str = "bf16") -> tuple[Array, Hidden]:
    """Then through down [H, I]; the result is rounded, [n, H]."""
    kept = kept_of(x, gate_up, limit, dtype)
    return near.bf16(factor(kept.h, 1, dtype) @ factor(down, 1, dtype).T), kept


@dataclass(frozen=True)
class Backward:
    """Gradients of an expert."""

    dg: Array  # [n, I]; dx is dg @ gate + du @ up
    du: Array
    gate_up: Array  # [2 I, H]
    down: Array  # [H, I]


def backward(
    kept: Hidden,
    dy: Array,
    down: Array,
    limit: float | None,
    weight: Array | None = None,
    dtype: str = "bf16",
    groups: Sequence[int] | None = None,
) -> Backward:
    """From dL/dy, [n, H], rounded; of rows that are weighted, [n], from dL/d(weight * y). groups: how many of the rows
    each rank has, one rank's after another's (None: all are of one)."""
    dh, h = factor(dy, 1, dtype) @ factor(down, 0, dtype), kept.h
    if weight is not None:  # not dy: that would have to be stored once more, and rounded
        dh, h = dh * weight[:, None], near.bf16(h * weight[:, None])
    dg, du = (near.bf16(d) for d in activation_gradient(kept.g, kept.u, dh, limit))
    of_rows = [factor(v, 0, dtype, groups) for v in (dg, du, kept.x, dy, h)]
    dg_rows, du_rows, x_rows, dy_rows, h_rows = of_rows
    return Backward(dg, du, near.concatenate([dg_rows.T @ x_rows, du_rows.T @ x_rows]), dy_rows.T @ h_rows)


def input_factors(b: Backward, gate_up: Array, dtype: str = "bf16") -> tuple[Array, Array, int]:
    """dL/dx, [n, H], as a product for near.products."""
    order = pre_order(gate_up.shape[0] // 2)
    dpre = near.concatenate([b.dg, b.du], axis=1)
    return factor(dpre[:, order], 1, dtype), factor(gate_up[order], 0, dtype), 1


def input_gradient(b: Backward, gate_up: Array, dtype: str = "bf16") -> Array:
    """The same, not rounded."""
    return near.products(input_factors(b, gate_up, dtype))
