"""Kernels' results beside the oracle: how far each is off, in units of what FP32 and BF16 allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ...plan.moe.config import MoEConfig
from .. import near
from ..near import Near
from ..tolerance import Comparison, compare
from . import experts, layer
from .routing import keys_of, legal, route


def judge_routing(config: MoEConfig, logits: Near, bias: np.ndarray | None, ids: np.ndarray) -> Comparison:
    """Of ids [T, k], as a kernel chose. A token whose choice no rounding explains is infinitely wrong; `got` and
    `wanted` then are the first expert in which it differs from the oracle's."""
    r = route(config, logits, bias, ids if config.hash_routing else None)
    if config.hash_routing:
        right = np.ones(ids.shape[0], bool)
    else:
        keys = keys_of(config, logits, r.scores, bias)
        assert isinstance(keys, Near)
        right = legal(config, keys, ids)
    if right.all():
        return Comparison(0.0, 0.0, 0.0, (), 0.0, 0.0)
    token = int(np.argmin(right))
    slot = int(np.argmax(ids[token] != r.ids[token]))
    wrong = float((~right).sum())
    return Comparison(wrong, wrong / right.size, np.inf, (token, slot), ids[token, slot], r.ids[token, slot])


def judge_forward(
    config: MoEConfig,
    x: np.ndarray,
    w: layer.Weights,
    got: Mapping[str, np.ndarray],
    *,
    sequences: Sequence[int] | None = None,
    dtype: str = "bf16",
) -> dict[str, Comparison]:
    """Of one rank's tokens x [T, H], in products of `dtype`.

    Args: got: "ids" [T, k], which the rest is judged by, and any of "out" [T, H], "logits" [T, E], "weights" [T, k],
        "aux" (a number).
    """
    near_x, near_w = layer.lift(x, w)
    f = layer.forward(config, near_x, near_w, ids=got["ids"], sequences=sequences, dtype=dtype)
    wanted = {"out": f.out, "logits": f.routing.logits, "weights": f.routing.weights, "aux": f.aux}
    logits = f.routing.logits
    assert isinstance(logits, Near)
    rest = {name: value for name, value in got.items() if name != "ids"}
    return {"ids": judge_routing(config, logits, w.bias, got["ids"])} | compared(rest, wanted)


@dataclass(frozen=True)
class Given:
    """To a rank's backward."""

    x: np.ndarray  # [T, H]
    saved: layer.Saved
    dout: np.ndarray  # [T, H]
    sequences: Sequence[int] | None = None
    choices: np.ndarray | None = None  # [T, k] as the kernel counted for the auxiliary loss


def backward_of(config: MoEConfig, given: Given, w: layer.Weights, *, aux_scale: float = 1.0) -> layer.Gradients:
    """Of one rank's tokens, with bounds. What it says of experts' weights is these tokens' part alone."""
    x, near_w = layer.lift(given.x, w)
    f = layer.resumed(config, x, near_w, given.saved, sequences=given.sequences, choices=given.choices)
    return layer.backward(config, f, near_w, Near.of(given.dout), aux_scale=aux_scale)


def expert_gradients(config: MoEConfig, ranks: Sequence[Given], w: layer.Weights, e: int) -> tuple[Near, Near]:
    """Of one expert's gate_up and down, over its rows of all ranks, in one contraction."""
    _, near_w = layer.lift(np.zeros((0, config.hidden)), w)
    kept, dy = [], []
    for rank in ranks:
        at = np.nonzero(rank.saved.ids == e)
        kept.append(layer.expert_kept(config, Near.of(rank.x), near_w.gate_up[e], rank.saved, (at[0], at[1])))
        weights = Near.of(rank.saved.weights)
        dy.append(layer.expert_dy(config, Near.of(rank.dout), weights, (at[0], at[1])))
    of_all = experts.Hidden(*(near.concatenate([getattr(k, f.name) for k in kept]) for f in fields(experts.Hidden)))
    dtype, groups = ranks[0].saved.dtype, [rows.shape[0] for rows in dy]
    b = experts.backward(of_all, near.concatenate(dy), near_w.down[e], config.swiglu_limit, dtype=dtype, groups=groups)
    return Near.of(b.gate_up), Near.of(b.down)


def judge_backward(
    config: MoEConfig,
    ranks: Sequence[Given],
    w: layer.Weights,
    got: Sequence[Mapping[str, np.ndarray]],
    of_experts: Mapping[str, np.ndarray],
    *,
    aux_scale: float = 1.0,
) -> tuple[list[dict[str, Comparison]], dict[str, Comparison]]:
    """Of all ranks, from what their forward has saved.

    Args:
        got: of each rank any of "x" [T, H], "slot_weights" [T, k], "logits" [T, E] and what a rank has of its own in
            Weights (router, shared_gate_up, shared_down, shared_gate): gradients, those of weights before they are
            rounded to BF16.
        of_experts: "gate_up" and "down" of all experts.
    """
    own = [
        compared(mine, gradients_by_name(backward_of(config, rank, w, aux_scale=aux_scale)))
        for mine, rank in zip(got, ranks, strict=True)
    ]
    wanted = [expert_gradients(config, ranks, w, e) for e in range(config.experts)]
    stacked = {name: near.stack([pair[i] for pair in wanted]) for i, name in enumerate(("gate_up", "down"))}
    return own, compared(of_experts, stacked)


def gradients_by_name(g: layer.Gradients) -> dict[str, object]:
    of_weights = {f.name: getattr(g.weights, f.name) for f in fields(g.weights)}
    return {"x": g.x, "slot_weights": g.slot_weights, "logits": g.logits} | of_weights


def compared(got: Mapping[str, np.ndarray], wanted: Mapping[str, object]) -> dict[str, Comparison]:
    """Each of `got` with what is wanted of that name."""
    results = {}
    for name, value in got.items():
        want = wanted[name]
        assert isinstance(want, Near), name
        results[name] = compare(np.atleast_1d(value), np.atleast_1d(want.value), np.atleast_1d(want.error))
    return results
