"""The loss that balances experts: E * sum over experts of f * P, times its coefficient; the coefficient where balanced.

f is the share of choices that went to an expert, P the mean over tokens of its share of the scores. Only P carries a
gradient. Choices are counted again from the scores, without bias and groups, so that the loss does not see what the
bias has already mended (as DeepSeek-V3's report and training libraries have it). Over sequences it is the mean of each
sequence's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...plan.moe.config import MoEConfig
from .. import near
from ..near import Array, Near
from .routing import Routing, largest


def shares(config: MoEConfig, scores: Array) -> Array:
    """[T, E]: what P is the mean of; they sum to 1 over experts."""
    return scores if config.score == "softmax" else scores / (scores.sum(-1) + config.norm_eps)[:, None]


def counted(config: MoEConfig, r: Routing) -> np.ndarray:
    """[T, k] choices that the loss counts. Where neither bias nor groups choose, they are those of the routing."""
    if config.keys_are_logits and not config.hash_routing:
        return r.ids
    return largest(near.value_of(r.scores), config.top_k)


def unsure(scores: Near, choices: np.ndarray) -> np.ndarray:
    """[T, E]: experts that might be chosen, or might not, for all that the errors of the scores tell."""
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, choices, True, axis=-1)
    low, high = scores.value - scores.error, scores.value + scores.error
    best_left = np.where(chosen, -np.inf, high).max(-1, keepdims=True)
    worst_taken = np.where(chosen, low, np.inf).min(-1, keepdims=True)
    return np.where(chosen, low <= best_left, high >= worst_taken)


def pieces(config: MoEConfig, tokens: int, sequences: Sequence[int] | None) -> list[slice]:
    """Rows over which the loss is taken each by itself. `sequences` are their lengths."""
    if config.aux_loss == "batch":
        return [slice(0, tokens)] if tokens else []
    if sequences is None or sum(sequences) != tokens or min(sequences, default=1) < 0:
        raise ValueError(
            f"aux_loss 'sequence' of {tokens} tokens: sequences is {sequences}, want lengths that sum to it"
        )
    ends = np.cumsum([0, *sequences])
    return [slice(int(a), int(b)) for a, b in pairwise(ends) if b > a]


def aux_loss(
    config: MoEConfig, r: Routing, sequences: Sequence[int] | None = None, choices: np.ndarray | None = None
) -> tuple[Array, Array]:
    """The loss (a number), and its gradient by the scores [T, E]. `choices` [T, k]: as the judged kernel counted."""
    doubtful = np.zeros(r.scores.shape, bool)
    if choices is None:
        choices = counted(config, r)
        if isinstance(r.scores, Near) and choices is not r.ids:
            doubtful = unsure(r.scores, choices)
    q = shares(config, r.scores)
    T = r.ids.shape[0]
    gradient = near.zeros(r.scores.shape, r.scores)
    loss = near.zeros((), r.scores)
    if config.aux_loss == "none" or T == 0:
        return loss, gradient
    parts = pieces(config, T, sequences)
    for rows in parts:
        n = rows.stop - rows.start
        f = np.bincount(choices[rows].ravel(), minlength=config.experts) / (n * config.top_k)
        share: Array = f if not doubtful[rows].any() else Near(f, doubtful[rows].sum(0) / (n * config.top_k))
        share = share * (config.aux_loss_coeff * config.experts / len(parts) / n)
        loss = loss + (q[rows].sum(0) * share).sum(0)
        near.put(gradient, rows, near.zeros((n, config.experts), r.scores) + share)
    return loss, _through_shares(config, r.scores, gradient)


def _through_shares(config: MoEConfig, scores: Array, dq: Array) -> Array:
    if config.score == "softmax":
        return dq
    total = (scores.sum(-1) + config.norm_eps)[:, None]
    return (dq - (dq * scores).sum(-1)[:, None] / total) / total
