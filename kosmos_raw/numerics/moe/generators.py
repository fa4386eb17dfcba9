"""Random layers and tokens whose routing is as asked: balanced, or skewed in one of the ways that break things.

A token's first element is 1, and the router's first column is what an expert has over others: that is the skew; the
rest of both is noise, which makes logits of about standard deviation 1. All values are BF16.

The paper calls routing by random logits balanced, and skewed what a model's own router does: up to 1.3 times the
balanced data for the largest peer in DeepSeek-V3, up to 4.2 times in Qwen3-235B (section 4.2.2). How its layer
benchmarks are skewed it does not say; their times (Table C.13) are about twice the balanced ones, which is `load` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...plan.moe.config import MoEConfig
from ..near import to_bf16
from ..spread import powers
from .layer import Weights
from .routing import keys_of, scores_of, select

ROUTINGS = ("balanced", "skewed", "one_expert", "one_rank", "empty_ranks")
FAR = 12.0  # more than noise makes up for, less than what saturates a sigmoid in FP32
SAMPLE = 512  # tokens that the skew is found with


@dataclass(frozen=True)
class Inputs:
    """Of one layer on all ranks, in float64."""

    x: list[np.ndarray]  # of each rank [T, H]
    dout: list[np.ndarray]  # of each rank [T, H]
    weights: Weights
    ids: list[np.ndarray] | None  # of each rank [T, k], where the config routes by a hash


def inputs(
    config: MoEConfig, tokens: Sequence[int], routing: str = "balanced", seed: int = 0, load: float = 2.0
) -> Inputs:
    """Fresh random inputs; `tokens` of each rank.

    Args:
        routing: one of ROUTINGS. "skewed": the busiest rank gets about `load` times its share of rows. "one_expert",
            "one_rank": every token goes there, with as many of its slots as there are experts for. "empty_ranks": the
            experts of every other rank get none, as far as rules allow.
    """
    rng = np.random.default_rng(seed)
    H, width, E = config.hidden, config.expert_width, config.experts
    bias = 0.1 * rng.standard_normal(E)
    over = offsets(config, len(tokens), routing, rng, load, bias)

    def normal(*shape: int) -> np.ndarray:
        return to_bf16(rng.standard_normal(shape) / shape[-1] ** 0.5)

    router = normal(E, H)
    router[:, 0] = to_bf16(over)
    x = [to_bf16(rng.standard_normal((n, H))) for n in tokens]
    for rank in x:
        rank[:, 0] = 1.0
    shared = config.shared_width
    bias += 2.0 * np.sign(over) * (np.abs(over) == FAR)  # or it would undo the skew
    weights = Weights(
        router,
        normal(E, 2 * width, H),
        normal(E, H, width),
        normal(2 * shared, H) if shared else None,
        normal(H, shared) if shared else None,
        normal(H) if config.gated_shared else None,
        to_bf16(bias) if config.expert_bias else None,
    )
    ids = [_choices(config, over, n, rng, bias) for n in tokens] if config.hash_routing else None
    return Inputs(x, [to_bf16(rng.standard_normal((n, H))) for n in tokens], weights, ids)


def spread(made: Inputs, seed: int = 0) -> Inputs:
    """The same, of all magnitudes, in balance in every product of an expert. Logits are as they were but for their
    noise."""
    rng, w = np.random.default_rng(seed), made.weights
    hidden, width = w.down.shape[1:]
    of_x, of_up, of_y = (powers(rng, n) for n in (hidden, width, hidden))
    of_pre = np.concatenate([np.ones(width), of_up])[:, None]
    of_rows = [powers(rng, len(x), 10)[:, None] for x in made.x]
    x = [v * of_x / np.where(np.arange(hidden) > 0, t, 1.0) for v, t in zip(made.x, of_rows, strict=True)]
    dout = [v * of_y * t**2 for v, t in zip(made.dout, of_rows, strict=True)]  # h falls with x twice
    weights = replace(
        w,
        router=w.router / of_x,
        gate_up=w.gate_up * of_pre / of_x,
        down=w.down / of_up / of_y[:, None],
        shared_gate_up=None if w.shared_gate_up is None else w.shared_gate_up / of_x,
        shared_down=None if w.shared_down is None else w.shared_down / of_y[:, None],
        shared_gate=None if w.shared_gate is None else w.shared_gate / of_x,
    )
    return replace(made, x=x, dout=dout, weights=weights)


def offsets(
    config: MoEConfig, ranks: int, routing: str, rng: np.random.Generator, load: float, bias: np.ndarray
) -> np.ndarray:
    """[E]: what each expert's logit has over noise."""
    E = config.experts
    owner = np.arange(E) // config.per_rank(ranks)
    if routing == "balanced":
        return np.zeros(E)
    if routing == "one_expert":
        return FAR * (np.arange(E) == rng.integers(E))
    if routing == "one_rank":
        return FAR * (owner == rng.integers(E // config.per_rank(ranks)))  # one that has as many experts as any
    if routing == "empty_ranks":
        return -FAR * (owner % 2 == rng.integers(2) if owner[-1] else np.zeros(E))
    if routing != "skewed":
        raise ValueError(f"routing is {routing!r}, want one of {', '.join(ROUTINGS)}")
    return _skewed(config, ranks, rng, load, bias)


def _skewed(config: MoEConfig, ranks: int, rng: np.random.Generator, load: float, bias: np.ndarray) -> np.ndarray:
    """Random offsets, by expert and by rank, so large that the busiest rank gets `load` times its share."""
    owner = np.arange(config.experts) // config.per_rank(ranks)
    of_rank = rng.standard_normal(ranks)
    of_rank[rng.integers(config.experts // config.per_rank(ranks))] = 3.0
    shape = rng.standard_normal(config.experts) / 2 + of_rank[owner]
    seed = int(rng.integers(1 << 32))
    low, high = 0.0, FAR

    def busiest(scale: float) -> float:
        ids = _choices(config, scale * shape, SAMPLE, np.random.default_rng(seed), bias)
        return float(np.bincount(owner[ids].ravel(), minlength=ranks).max() / (ids.size / ranks))

    if not busiest(low) <= load <= busiest(high):
        raise ValueError(
            f"load is {load}, want {busiest(low):.2f} to {busiest(high):.2f}: top {config.top_k} of {config.experts} "
            f"experts on {ranks} ranks cannot be skewed so in this draw"
        )
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if busiest(middle) < load else (low, middle)
    return high * shape


def _choices(
    config: MoEConfig, over: np.ndarray, tokens: int, rng: np.random.Generator, bias: np.ndarray
) -> np.ndarray:
    """[tokens, k] experts by logits of noise and offsets, without any model's tokens."""
    logits = rng.standard_normal((tokens, config.experts)) + over
    return select(config, np.asarray(keys_of(config, logits, scores_of(config, logits), bias)))
