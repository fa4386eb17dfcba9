"""Which experts a token goes to, and with what weights: forward, backward, and whether a kernel's choice was right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...plan.moe.config import MoEConfig
from .. import near
from ..near import Array, Near


@dataclass(frozen=True)
class Routing:
    """Of T tokens to k of E experts."""

    logits: Array  # [T, E]
    scores: Array  # [T, E]
    ids: np.ndarray  # [T, k], the order of a token's slots: keys fall, equal ones by expert
    weights: Array  # [T, k]


def scores_of(config: MoEConfig, logits: Array) -> Array:
    """[T, E] -> [T, E]."""
    return {"softmax": near.softmax, "sigmoid": near.sigmoid, "sqrtsoftplus": near.sqrtsoftplus}[config.score](logits)


def keys_of(config: MoEConfig, logits: Array, scores: Array, bias: np.ndarray | None) -> Array:
    """What experts are chosen by, [T, E]."""
    if config.keys_are_logits:
        return logits
    return scores + _bias(config, bias) if config.expert_bias else scores


def _bias(config: MoEConfig, bias: np.ndarray | None) -> np.ndarray:
    if bias is None or bias.shape != (config.experts,):
        raise ValueError(
            f"bias is {None if bias is None else bias.shape}, want ({config.experts},): expert_bias is set"
        )
    return bias


def largest(keys: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest along the last axis, falling; equal ones by index, NaN as -inf."""
    return np.argsort(-_no_nan(keys), axis=-1, kind="stable")[..., :k]


def group_scores(config: MoEConfig, keys: np.ndarray) -> np.ndarray:
    """[T, E] -> [T, groups]: the sum of the best keys of each group."""
    grouped = _no_nan(keys).reshape(-1, config.groups, config.experts_per_group)
    return np.sort(grouped, axis=-1)[..., -min(config.group_score, config.experts_per_group) :].sum(-1)


def select(config: MoEConfig, keys: np.ndarray) -> np.ndarray:
    """[T, E] -> [T, k]. Experts of groups that are not kept can never be chosen, however small the keys that are."""
    if config.groups > 1:
        kept = largest(group_scores(config, keys), config.top_groups)
        allowed = np.zeros((keys.shape[0], config.groups), bool)
        np.put_along_axis(allowed, kept, True, axis=-1)
        allowed = np.repeat(allowed, config.experts_per_group, axis=-1)
        # By the group first, then by the key: even an allowed key of -inf comes before one that is not allowed.
        return np.lexsort((-_no_nan(keys), ~allowed), axis=-1)[:, : config.top_k]
    return largest(keys, config.top_k)


def _no_nan(keys: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(keys), -np.inf, keys)


def weights_of(config: MoEConfig, logits: Array, scores: Array, ids: np.ndarray) -> Array:
    """[T, k], of the experts chosen."""
    if config.softmax_after_topk:
        return near.softmax(near.take(logits, ids)) * config.scaling
    v = near.take(scores, ids)
    if config.normalises:
        v = v / (v.sum(-1) + config.norm_eps)[:, None]
    return v * config.scaling


def route(
    config: MoEConfig,
    logits: Array,
    bias: np.ndarray | None = None,
    ids: np.ndarray | None = None,
    weights: Array | None = None,
) -> Routing:
    """Routes by logits [T, E].

    Args:
        bias: [E], if the config has one.
        ids: [T, k] experts that are chosen already: by a table (hash routing), or by the kernel that is judged.
        weights: [T, k] of those, where scores do not say.
    """
    scores = scores_of(config, logits)
    if ids is None:
        if config.hash_routing:
            raise ValueError("route: hash_routing is set, want the experts of each token in ids")
        ids = select(config, near.value_of(keys_of(config, logits, scores, bias)))
    return Routing(logits, scores, ids, weights_of(config, logits, scores, ids) if weights is None else weights)


def legal(config: MoEConfig, keys: Near, ids: np.ndarray) -> np.ndarray:
    """[T]: whether ids [T, k] can be what a kernel chose whose keys are within their errors of these.

    Moves every key in favour of that choice as far as its error allows, and sees whether it then is the right one.
    """
    T, k = ids.shape
    rows = np.arange(T)[:, None]
    ok = np.array([len(set(row)) == k and min(row) >= 0 and max(row) < config.experts for row in ids.tolist()], bool)
    ids = np.where(ok[:, None], ids, np.arange(k))
    chosen = np.zeros(keys.shape, bool)
    chosen[rows, ids] = True
    error = np.where(np.isnan(keys.value), 0.0, keys.error)
    low, high = _no_nan(keys.value) - error, _no_nan(keys.value) + error
    ok &= (high[rows, ids][:, :-1] >= low[rows, ids][:, 1:]).all(-1)  # slots in falling order
    weakest = np.where(chosen, high, np.inf).min(-1, keepdims=True)
    better = ~chosen & (low > weakest)  # must be in a group that is not kept
    if config.groups == 1:
        return np.asarray(ok & ~better.any(-1))

    def of_groups(x: np.ndarray) -> np.ndarray:
        return np.asarray(x.reshape(T, config.groups, config.experts_per_group).any(-1))

    touched, bad = of_groups(chosen), of_groups(better)
    best = group_scores(config, np.where(chosen, high, np.minimum(high, weakest)))  # of a group that is to be kept
    least = group_scores(config, low)  # of one that is not
    threshold = np.where(bad, least, -np.inf).max(-1, keepdims=True)
    # Kept are those with a chosen expert, and as many others as are missing: whose scores cannot be lower come first.
    order = np.lexsort((-least, best < threshold, bad, ~touched), axis=-1)[:, : config.top_groups]
    kept = np.zeros_like(touched)
    np.put_along_axis(kept, order, True, axis=-1)
    enough = np.where(kept, best, np.inf).min(-1) >= np.where(kept, -np.inf, least).max(-1)
    return np.asarray(ok & enough & ~(touched & ~kept).any(-1) & ~(bad & kept).any(-1))


def logits_gradient(config: MoEConfig, r: Routing, dweights: Array, dscores: Array | None) -> Array:
    """dL/dlogits [T, E], from dL/dweights [T, k] and what else (an auxiliary loss) depends on the scores, [T, E].

    Choice, groups and bias carry no gradient.
    """
    rows = np.arange(r.ids.shape[0])[:, None]
    dweights = dweights * config.scaling
    direct: Array | None = None  # of logits, where weights are not made of scores
    chosen = near.zeros(r.scores.shape, r.scores)
    if config.softmax_after_topk:
        w = near.softmax(near.take(r.logits, r.ids))
        direct = near.zeros(r.scores.shape, r.scores)
        near.put(direct, (rows, r.ids), w * (dweights - (dweights * w).sum(-1)[:, None]))
    else:
        dv = dweights
        if config.normalises:
            v = near.take(r.scores, r.ids)
            total = (v.sum(-1) + config.norm_eps)[:, None]
            dv = (dweights - (dweights * (v / total)).sum(-1)[:, None]) / total
        near.put(chosen, (rows, r.ids), dv)
    ds = chosen if dscores is None else chosen + dscores
    dz = _score_gradient(config, r, ds)
    return dz if direct is None else dz + direct


def _score_gradient(config: MoEConfig, r: Routing, ds: Array) -> Array:
    s, z = r.scores, r.logits
    if config.score == "softmax":
        return s * (ds - (ds * s).sum(-1)[:, None])
    if config.score == "sigmoid":
        return ds * s * (1.0 - s)
    return ds * near.sigmoid(z) / (2.0 * s)  # of a z so small that its score is 0 in float64 there is no sense
