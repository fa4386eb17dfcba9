"""The same language model in one process, in NumPy: what the ranks' run is compared with.

Parameters and AdamW are float32. What lies between them is float64, rounded to BF16 where ranks round it: also what
each of them adds to a sum over ranks. Exact, nothing is rounded at all, and gradients are the loss's slopes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kosmos_raw.numerics import near
from kosmos_raw.numerics.moe import layer as moe

from . import maths
from .data import VOCABULARY
from .parameters import LMConfig


class ReferenceModel:
    """ranks: whose run it is compared with."""

    def __init__(self, config: LMConfig, params: dict[str, np.ndarray], ranks: int = 1, *, exact: bool = False):
        self.config, self.params, self.ranks, self.exact = config, params, ranks, exact

    def _bf16(self, x: np.ndarray) -> np.ndarray:
        return x if self.exact else near.to_bf16(x)

    def _over_ranks(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a @ b, of which each rank has a piece of what is summed over."""
        pieces = zip(np.split(a, self.ranks, 1), np.split(b, self.ranks), strict=True)
        return self._bf16(sum(self._bf16(left @ right) for left, right in pieces))  # type: ignore[arg-type]

    def gradients(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """The batch's mean loss, and gradients of all parameters, float64."""
        config = self.config
        p = {name: value.astype(np.float64) for name, value in self.params.items()}
        places = np.arange(config.tokens) // config.sequences
        x = p["embedding"][tokens] + p["position"][places]
        saved = []
        for layer in range(config.layers):
            x, kept = self._block(x, {name: p[f"{layer}.{name}"] for name in OF_LAYER})
            saved.append(kept)
        last, norm = maths.rms_norm(np, x, p["norm"])
        loss, dlogits = maths.cross_entropy(np, last @ p["head"].T, targets, config.tokens)
        grads = {"head": dlogits.T @ last}
        dx, grads["norm"] = maths.rms_norm_backward(dlogits @ p["head"], norm)
        for layer, kept in reversed(list(enumerate(saved))):
            dx, of_layer = self._block_backward(dx, kept)
            grads |= {f"{layer}.{name}": grad for name, grad in of_layer.items()}
        grads["embedding"] = maths.one_hot(np, tokens, dx, VOCABULARY).T @ dx
        grads["position"] = maths.one_hot(np, places, dx, config.length).T @ dx
        return float(loss), grads

    def _block(self, x: np.ndarray, p: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
        bf16, config = self._bf16, self.config
        kept: dict[str, Any] = {"qkv": bf16(p["qkv"]), "out": bf16(p["out"])}
        normed, kept["norm1"] = maths.rms_norm(np, x, p["norm1"])
        kept["normed"] = bf16(normed)
        qkv = bf16(kept["normed"] @ kept["qkv"].T)
        mixed, kept["attention"] = maths.attention(np, qkv, config.length, config.heads)
        kept["mixed"] = bf16(mixed)
        x = x + self._over_ranks(kept["mixed"], kept["out"].T)
        normed, kept["norm2"] = maths.rms_norm(np, x, p["norm2"])
        given, weights = bf16(normed), moe.Weights(p["router"], bf16(p["gate_up"]), bf16(p["down"]))
        if not self.exact:  # numbers that know how they are rounded
            given, weights = moe.lift(given, weights)  # type: ignore[assignment]
        kept["moe"] = moe.forward(config.moe, given, weights)
        kept["weights"] = weights
        return x + near.value_of(kept["moe"].out), kept

    def _block_backward(self, dx: np.ndarray, kept: dict[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        bf16 = self._bf16
        dout: Any = dx if self.exact else near.Near.of(bf16(dx))
        g = moe.backward(self.config.moe, kept["moe"], kept["weights"], dout)
        grads = {name: near.value_of(getattr(g.weights, name)) for name in ("router", "gate_up", "down")}
        d, grads["norm2"] = maths.rms_norm_backward(near.value_of(g.x), kept["norm2"])
        dx = dx + d
        dy = bf16(dx)
        grads["out"] = dy.T @ kept["mixed"]
        dqkv = bf16(maths.attention_backward(np, bf16(dy @ kept["out"]), kept["attention"]))
        grads["qkv"] = dqkv.T @ kept["normed"]
        d, grads["norm1"] = maths.rms_norm_backward(self._over_ranks(dqkv, kept["qkv"]), kept["norm1"])
        return dx + d, grads


OF_LAYER = ("norm1", "qkv", "out", "norm2", "router", "gate_up", "down")
