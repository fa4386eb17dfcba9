"""The language model on one rank: TP and SP in attention, EP in its MoE layers, over the same ranks.

Between layers each rank has rows of the residual, float32: a piece of every sequence. The column-parallel linear
gathers sequences for the rank's heads, the row-parallel one gives them back. MoE layers, norms, embedding and head work
on the rank's own rows; gradients of what all ranks have alike are added on the host, in rank order, so that copies stay
equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import kosmos_raw as kr
from kosmos_raw.numerics.bf16 import narrow, widen

from . import maths
from .data import VOCABULARY
from .parameters import AXIS, LMConfig, kind, own_part


def on_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


class Block:
    """A layer of the model on this rank. Making one, `forward` and `backward` are collective."""

    def __init__(
        self, comm: kr.Communicator, config: LMConfig, rows: list[int], params: dict[str, Any], dtype: str = "bf16"
    ):
        self.comm, self.config, self.rows, self.params = comm, config, rows, params
        xp = self.xp = comm.device.xp
        self.grads = {name: xp.zeros_like(p) for name, p in params.items()}
        qkv, out = (narrow(params[name]) for name in ("qkv", "out"))
        self.qkv = kr.ColumnParallelLinear(comm, qkv, weight_grad=self.grads["qkv"], dtype=dtype)
        self.out = kr.RowParallelLinear(comm, out, weight_grad=self.grads["out"], dtype=dtype)
        self.moe = kr.MoELayer(comm, config.moe, self._moe_weights(), tokens=max(rows), dtype=dtype)

    def _moe_weights(self) -> kr.MoEWeights:
        p = self.params
        return kr.MoEWeights(router=p["router"], gate_up=narrow(p["gate_up"]), down=narrow(p["down"]))

    def take_parameters(self) -> None:
        """After they have changed: layers have copies of them, in BF16."""
        for layer, name in ((self.qkv, "qkv"), (self.out, "out")):
            layer.weight.view(np.uint16)[...] = narrow(self.params[name])
            layer.weight_changed()
        self.moe.set_weights(self._moe_weights())

    def forward(self, x: Any) -> Any:
        xp, p = self.xp, self.params
        normed, self._norm1 = maths.rms_norm(xp, x, p["norm1"])
        qkv = widen(self.qkv.forward(narrow(normed), rows=self.rows))
        heads = self.config.heads // self.comm.ranks
        mixed, self._attention = maths.attention(xp, qkv, self.config.length, heads)
        x = x + widen(self.out.forward(narrow(mixed), rows=self.rows))
        normed, self._norm2 = maths.rms_norm(xp, x, p["norm2"])
        y, _ = self.moe.forward(narrow(normed))
        return x + widen(y)

    def backward(self, dx: Any) -> Any:
        """dL/d(what forward was given); gradients of parameters are in `grads` until the next one."""
        xp, grads = self.xp, self.grads
        for name in ("qkv", "out"):  # to which layers add
            grads[name].fill(0)
        into = kr.MoEWeights(router=grads["router"], gate_up=grads["gate_up"], down=grads["down"])
        of_moe = self.moe.backward(narrow(dx), into=into).x
        d, grads["norm2"] = maths.rms_norm_backward(widen(of_moe), self._norm2)
        dx = dx + d
        dmixed = widen(self.out.backward(narrow(dx)))
        dqkv = maths.attention_backward(xp, dmixed, self._attention)
        d, grads["norm1"] = maths.rms_norm_backward(widen(self.qkv.backward(narrow(dqkv))), self._norm1)
        return dx + d


class RankModel:
    """All of it. `whole`: parameters as parameters.initial makes them, of which this rank takes its part."""

    def __init__(self, comm: kr.Communicator, config: LMConfig, whole: dict[str, np.ndarray], dtype: str = "bf16"):
        if config.heads % comm.ranks:
            raise ValueError(f"RankModel: {config.heads} heads on {comm.ranks} ranks, want a multiple of the ranks")
        self.comm, self.config, xp = comm, config, comm.device.xp
        self.params = {
            name: xp.array(p[own_part(config, name, comm.rank, comm.ranks)], order="C") for name, p in whole.items()
        }
        self.rows = kr.split_rows(config.tokens, comm.ranks)
        first = sum(self.rows[: comm.rank])
        self.own = slice(first, first + self.rows[comm.rank])
        self.blocks = []
        for layer in range(config.layers):
            names = [name for name in self.params if name.startswith(f"{layer}.")]
            of_block = {kind(name): self.params[name] for name in names}
            self.blocks.append(Block(comm, config, self.rows, of_block, dtype))

    def gradients(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, dict[str, Any]]:
        """The batch's mean loss, equal on all ranks, and gradients of this rank's parameters. Every rank is given the
        whole batch."""
        xp, p, config = self.comm.device.xp, self.params, self.config
        tokens, targets = xp.asarray(tokens[self.own]), xp.asarray(targets[self.own])
        places = xp.arange(self.own.start, self.own.stop) // config.sequences
        x = p["embedding"][tokens] + p["position"][places]
        for block in self.blocks:
            x = block.forward(x)
        last, norm = maths.rms_norm(xp, x, p["norm"])
        loss, dlogits = maths.cross_entropy(xp, last @ p["head"].T, targets, config.tokens)
        grads = {"head": dlogits.T @ last}
        dx, grads["norm"] = maths.rms_norm_backward(dlogits @ p["head"], norm)
        for layer, block in reversed(list(enumerate(self.blocks))):
            dx = block.backward(dx)
            grads |= {f"{layer}.{name}": grad for name, grad in block.grads.items()}
        grads["embedding"] = maths.one_hot(xp, tokens, dx, VOCABULARY).T @ dx
        grads["position"] = maths.one_hot(xp, places, dx, config.length).T @ dx
        return self._sum_over_ranks(float(loss), grads), grads

    def _sum_over_ranks(self, loss: float, grads: dict[str, Any]) -> float:
        names = [name for name in grads if kind(name) not in AXIS]
        every = self.comm.allgather((loss, [on_host(grads[name]) for name in names]))
        for i, name in enumerate(names):
            total = every[0][1][i].copy()
            for _, others in every[1:]:
                total += others[i]
            grads[name] = self.comm.device.xp.asarray(total)
        return sum(part for part, _ in every)

    def take_parameters(self) -> None:
        for block in self.blocks:
            block.take_parameters()
