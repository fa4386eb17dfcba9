"""Kernels' results beside the oracle: how far each is off, in units of what FP32 and BF16 allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ...plan.moe.config import MoEConfig
from ..near import Near
from ..tolerance import Comparison, compare
from . import layer
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
) -> dict[str, Comparison]:
    """Of one rank's tokens x [T, H].

    Args: got: "ids" [T, k], which the rest is judged by, and any of "out" [T, H], "logits" [T, E], "weights" [T, k],
        "aux" (a number).
    """
    near_x, near_w = layer.lift(x, w)
    f = layer.forward(config, near_x, near_w, ids=got["ids"], sequences=sequences)
    wanted = {"out": f.out, "logits": f.routing.logits, "weights": f.routing.weights, "aux": f.aux}
    logits = f.routing.logits
    assert isinstance(logits, Near)
    rest = {name: value for name, value in got.items() if name != "ids"}
    return {"ids": judge_routing(config, logits, w.bias, got["ids"])} | _compared(rest, wanted)


@dataclass(frozen=True)
class Given:
    """To a rank's backward."""

    x: np.ndarray  # [T, H]
    saved: layer.Saved
    dout: np.ndarray  # [T, H]
    sequences: Sequence[int] | None = None
    choices: np.ndarray | None = None  # [T, k] as the kernel counted for the auxiliary loss


def judge_backward(
    config: MoEConfig,
    ranks: Sequence[Given],
    w: layer.Weights,
    got: Sequence[Mapping[str, np.ndarray]],
    experts: Mapping[str, np.ndarray],
    *,
    aux_scale: float = 1.0,
) -> tuple[list[dict[str, Comparison]], dict[str, Comparison]]:
    """Of all ranks, from what their forward has saved.

    Args:
        got: of each rank any of "x" [T, H], "slot_weights" [T, k], "logits" [T, E] and what a rank has of its own in
            Weights (router, shared_gate_up, shared_down, shared_gate): gradients, those of weights before they are
            rounded to BF16.
        experts: "gate_up" and "down" of all experts, summed over the ranks.
    """
    near_w = layer.lift(np.zeros((0, config.hidden)), w)[1]
    each = []
    for rank in ranks:
        f = layer.resumed(config, Near.of(rank.x), near_w, rank.saved, sequences=rank.sequences, choices=rank.choices)
        each.append(layer.backward(config, f, near_w, Near.of(rank.dout), aux_scale=aux_scale))
    own = [_compared(mine, gradients_by_name(g)) for mine, g in zip(got, each, strict=True)]
    sums: dict[str, object] = {}
    for name in ("gate_up", "down"):
        first, *rest = (getattr(g.weights, name) for g in each)
        sums[name] = sum(rest, first)
    return own, _compared(experts, sums)


def gradients_by_name(g: layer.Gradients) -> dict[str, object]:
    of_weights = {f.name: getattr(g.weights, f.name) for f in fields(g.weights)}
    return {"x": g.x, "slot_weights": g.slot_weights, "logits": g.logits} | of_weights


def _compared(got: Mapping[str, np.ndarray], wanted: Mapping[str, object]) -> dict[str, Comparison]:
    results = {}
    for name, value in got.items():
        want = wanted[name]
        assert isinstance(want, Near), name
        results[name] = compare(np.atleast_1d(value), np.atleast_1d(want.value), np.atleast_1d(want.error))
    return results
