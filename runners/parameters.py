"""The language model's sizes, its parameters, how ranks divide them, and AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kosmos_raw import MoEConfig

from .data import VOCABULARY

AXIS = {"qkv": 0, "out": 1, "gate_up": 0, "down": 0}  # along which a parameter is dealt; the rest all ranks have alike


@dataclass(frozen=True)
class LMConfig:
    """A decoder: RMSNorm, causal attention, RMSNorm, MoE; so many layers of it."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    expert_width: int = 64
    length: int = 64  # of a sequence
    sequences: int = 8  # of a batch

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"LMConfig: hidden is {self.hidden}, want a multiple of the {self.heads} heads")

    @property
    def tokens(self) -> int:
        return self.length * self.sequences

    @property
    def moe(self) -> MoEConfig:
        return MoEConfig(self.hidden, self.expert_width, self.experts, self.top_k)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        h, i, e = self.hidden, self.expert_width, self.experts
        found: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, h), "position": (self.length, h)}
        for layer in range(self.layers):
            of_layer = {"norm1": (h,), "qkv": (3 * h, h), "out": (h, h), "norm2": (h,), "router": (e, h)}
            of_layer |= {"gate_up": (e, 2 * i, h), "down": (e, h, i)}
            found |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
        return found | {"norm": (h,), "head": (VOCABULARY, h)}


def kind(name: str) -> str:
    return name.rpartition(".")[2]


def initial(config: LMConfig, seed: int) -> dict[str, np.ndarray]:
    """All parameters, whole, float32. Of `qkv`, rows are a head's q, k and v, head after head."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            made[name] = np.ones(shape, np.float32)
            continue
        scale = 0.5 if name in ("embedding", "position") else shape[-1] ** -0.5
        if kind(name) in ("out", "down"):  # what is added to the residual
            scale /= math.sqrt(2 * config.layers)
        made[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    return made


def own_part(config: LMConfig, name: str, rank: int, ranks: int) -> tuple[slice, ...]:
    """What of a parameter a rank has."""
    axis = AXIS.get(kind(name))
    if axis is None:
        return (slice(None),)
    if kind(name) in ("gate_up", "down"):
        experts = config.moe.experts_of(rank, ranks)
        return (slice(experts.start, experts.stop),)
    size = config.shapes()[name][axis] // ranks
    return (slice(None),) * axis + (slice(rank * size, (rank + 1) * size),)


def joined(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """A whole parameter of what all ranks have of it."""
    axis = AXIS.get(kind(name))
    return parts[0] if axis is None else np.concatenate(parts, axis)


@dataclass(frozen=True)
class Schedule:
    """The learning rate: rises, then falls along a cosine to a tenth."""

    peak: float = 3e-3
    warmup: int = 20
    steps: int = 200

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.peak * (0.55 + 0.45 * math.cos(math.pi * done))


class AdamW:
    """Of float32 arrays, element by element: a part of a parameter gets the bits that it would get in the whole."""

    def __init__(self, xp: Any, params: dict[str, Any], decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)):
        self.xp, self.params, self.decay, self.betas = xp, params, decay, betas
        self.first = {name: xp.zeros_like(p) for name, p in params.items()}
        self.second = {name: xp.zeros_like(p) for name, p in params.items()}

    def update(self, grads: dict[str, Any], step: int, rate: float) -> None:
        """In place; `step` counts from 0."""
        b1, b2 = self.betas
        of_first, of_second = 1 - b1 ** (step + 1), 1 - b2 ** (step + 1)
        for name, p in self.params.items():
            g, m, v = grads[name], self.first[name], self.second[name]
            m += (g - m) * (1 - b1)
            v += (g * g - v) * (1 - b2)
            if p.ndim > 1:
                p *= 1 - rate * self.decay
            p -= (m / of_first) / (self.xp.sqrt(v / of_second) + 1e-8) * rate
