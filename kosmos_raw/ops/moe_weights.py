"""Weights of an MoE layer, as callers have them and as the kernel wants them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from ..plan.moe.config import MoEConfig
from ..plan.moe.forward import GATED, OP, MoeForwardPlan
from ..plan.shapes import round_up
from ..ranks.communicator import Communicator
from .arguments import BF16, as_matrix
from .quantize import MxArray, quantize_mxfp8


@dataclass(frozen=True)
class MoEWeights:
    """Of one rank: what all ranks have alike, and its own experts. None where the config has none."""

    router: Any  # [experts, hidden] bf16, or float32, which is multiplied as three bf16
    gate_up: Any  # [own experts, 2 width, hidden] bf16: gate, then up
    down: Any  # [own experts, hidden, width] bf16
    shared_gate_up: Any | None = None  # [2 shared width, hidden] bf16
    shared_down: Any | None = None  # [hidden, shared width] bf16
    shared_gate: Any | None = None  # [hidden], of the router's dtype
    bias: Any | None = None  # [experts] float32


def interleaved(xp: Any, gate_up: Any, padded: int) -> Any:
    """[..., 2 width, hidden] with gate and up in alternating blocks of 16 rows, each filled up with zeros to `padded`.

    One output tile so has both, and its epilogue makes h of them. Sixteen, for then one thread has both sums with the
    matrix instructions of all targets.
    """
    *lead, rows, hidden = gate_up.shape
    out = xp.zeros((*lead, padded // GATED, 2, GATED, hidden), np.uint16)
    parts = gate_up.view(np.uint16).reshape(*lead, 2, rows // 2, hidden)
    for part in range(2):
        filled = xp.zeros((*lead, padded, hidden), np.uint16)
        filled[..., : rows // 2, :] = parts[..., part, :, :]
        out[..., part, :, :] = filled.reshape(*lead, padded // GATED, GATED, hidden)
    return out.reshape(*lead, 2 * padded, hidden)


def separated(xp: Any, mixed: Any, width: int) -> tuple[Any, Any]:
    """(gate, up), [..., width] each, of the last axis of what `interleaved` weights have made."""
    *lead, both = mixed.shape
    blocks = mixed.reshape(*lead, both // (2 * GATED), 2, GATED)
    return tuple(blocks[..., part, :].reshape(*lead, both // 2)[..., :width] for part in range(2))  # type: ignore[return-value]


def bf16_parts(w: np.ndarray) -> list[np.ndarray]:
    """A matrix as one bf16, or float32 as three, of which each holds what those before it have rounded off."""
    if w.dtype != np.float32:
        return [w.view(BF16)]
    parts = []
    for _ in range(3):
        parts.append(w.astype(BF16))
        w = w - parts[-1].astype(np.float32)
    return parts


class Prepared:
    """What the kernel reads, on the device. `router` has logits of experts and of the shared gate; where the caller
    gives choices and weights, `gate_alone` is all that is left of it.

    In MXFP8 experts' weights are MxArrays of all experts: along the forward's contractions, and where a backward may
    come along its own."""

    gate_up: Any  # [own experts, 2 width, hidden]
    down: Any  # [own experts, hidden, width]; in MXFP8 as many lines as rows have elements
    gate_up_columns: MxArray | None = None  # [own experts * 2 width, hidden] along axis 0
    down_columns: MxArray | None = None

    def __init__(self, comm: Communicator, plan: MoeForwardPlan, weights: MoEWeights):
        xp, c = comm.device.xp, plan.config
        own = len(c.experts_of(comm.rank, comm.ranks))
        self.gate_up = interleaved(
            xp, _checked(comm, "gate_up", weights.gate_up, (own, 2 * c.expert_width, c.hidden)), plan.width
        )
        down = _checked(comm, "down", weights.down, (own, c.hidden, c.expert_width))
        self.down = _widened(xp, down, plan.depth, plan.width)
        if plan.is_mxfp8:
            self.gate_up, self.gate_up_columns = _quantized(comm, self.gate_up, plan.keep)
            self.down, self.down_columns = _quantized(comm, self.down, plan.keep)
        self.shared_gate_up = self.shared_down = None
        if c.shared_width:
            shared = _checked(comm, "shared_gate_up", weights.shared_gate_up, (2 * c.shared_width, c.hidden))
            self.shared_gate_up = interleaved(xp, shared, plan.shared_width)
            shared = _checked(comm, "shared_down", weights.shared_down, (c.hidden, c.shared_width))
            self.shared_down = _widened(xp, shared, c.hidden, plan.shared_width)
        rows = [_on_host(_router_rows(comm, "router", weights.router, (c.experts, c.hidden)))]
        if c.gated_shared:
            rows.append(_on_host(_router_rows(comm, "shared_gate", weights.shared_gate, (c.hidden,)))[None])
        if len({r.dtype == np.float32 for r in rows}) > 1:
            raise TypeError(f"{OP}: shared_gate has dtype {rows[1].dtype} and router {rows[0].dtype}, want the same")
        self.router = _stacked(xp, np.concatenate(rows), plan.router_rows(False))
        self.gate_alone = _stacked(xp, rows[-1], plan.router_rows(True)) if c.gated_shared else self.router
        self.bias = _bias(comm, c, weights.bias)


def parts_of(weights: MoEWeights) -> int:
    return 3 if weights.router.dtype == np.float32 else 1


def refuse_extra(config: MoEConfig, weights: MoEWeights) -> None:
    """Raises ValueError where weights are there that the config does not use, or the other way round."""
    used = {
        "shared_gate_up": bool(config.shared_width),
        "shared_down": bool(config.shared_width),
        "shared_gate": config.gated_shared,
        "bias": config.expert_bias,
    }
    for f in fields(weights):
        there = getattr(weights, f.name) is not None
        if there != used.get(f.name, True):
            raise ValueError(
                f"{OP}: weights.{f.name} is {'given' if there else 'None'}, but the config has "
                f"{'none' if there else 'one'} (shared_width={config.shared_width}, "
                f"gated_shared={config.gated_shared}, expert_bias={config.expert_bias})"
            )


def _checked(comm: Communicator, name: str, value: Any, shape: tuple[int, ...]) -> Any:
    flat = value.reshape(-1, value.shape[-1]) if getattr(value, "ndim", 0) == 3 else value
    as_matrix(comm, OP, f"weights.{name}", flat)
    if tuple(value.shape) != shape:
        raise ValueError(f"{OP}: weights.{name} has shape {tuple(value.shape)}, want {shape} on rank {comm.rank}")
    return value


def _router_rows(comm: Communicator, name: str, value: Any, shape: tuple[int, ...]) -> Any:
    as_matrix(comm, OP, f"weights.{name}", value.reshape(-1, value.shape[-1]), float32=True)
    if tuple(value.shape) != shape:
        raise ValueError(f"{OP}: weights.{name} has shape {tuple(value.shape)}, want {shape} on rank {comm.rank}")
    return value


def _on_host(array: Any) -> np.ndarray:
    array = array.get() if hasattr(array, "get") else np.asarray(array)
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


def _stacked(xp: Any, rows: np.ndarray, padded: int) -> Any:
    """[parts * padded, hidden]: each part filled up with zeros."""
    parts = bf16_parts(rows)
    out = np.zeros((len(parts), padded, rows.shape[1]), np.uint16)
    for i, part in enumerate(parts):
        out[i, : len(part)] = part.view(np.uint16)
    return xp.asarray(out.reshape(-1, rows.shape[1]))


def _widened(xp: Any, down: Any, rows: int, width: int) -> Any:
    *lead, own_rows, own_width = down.shape
    out = xp.zeros((*lead, rows, width), np.uint16)
    out[..., :own_rows, :own_width] = down.view(np.uint16)
    return out


def _quantized(comm: Communicator, experts: Any, both: bool) -> tuple[MxArray, MxArray | None]:
    """Of all experts, one behind the other: along rows, and along columns too. An expert's rows are a multiple of a
    block."""
    flat = experts.reshape(-1, experts.shape[-1])
    along, *across = quantize_mxfp8(comm, flat, (1, 0) if both else (1,), reused=True)
    return along, across[0] if both else None


def fill_copy(comm: Communicator, to: Any, x: MxArray) -> None:
    """Fills in an MxCopy with what tiles read of `x`."""
    to["elements"] = comm.device.address_of(x.elements if x.values is None else x.values)
    to["scales"] = comm.device.address_of(x.scales)
    to["depth"], to["ld_scales"] = x.depth, x.scales.shape[1]


def _bias(comm: Communicator, config: MoEConfig, bias: Any | None) -> Any | None:
    if bias is None:
        return None
    if tuple(bias.shape) != (config.experts,) or bias.dtype != np.float32:
        raise ValueError(
            f"{OP}: weights.bias is {bias.dtype} {tuple(bias.shape)}, want float32 ({config.experts},) "
            f"on rank {comm.rank}"
        )
    out = comm.device.xp.zeros(round_up(config.experts, 2), np.float32)
    out[: config.experts] = bias
    return out
