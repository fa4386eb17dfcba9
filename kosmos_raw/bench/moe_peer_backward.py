"""The gradients of moe_peer's layer, as PyTorch makes them without one kernel for all: all-to-all of weighted rows of
dOut, four grouped products, all-to-all of rows of dX, their sum; the shared expert and the router. What moe_backward is
measured against, and compared with.

By hand but for the router's scores, which autograd goes back through: as autograd would do it, nothing is made twice
that the forward has had, and what autograd would add (gradients that nobody reads, sums of one term) is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .moe_peer import Hidden, Kept, MoePeer


@dataclass(frozen=True)
class PeerGradients:
    """Tensors of one rank, shapes as in PeerWeights. `x` and `router` are float32 if the peer is exact, else bf16."""

    x: Any  # [T, H]
    router: Any  # [E, H], and of the shared expert's gate behind
    gate_up: Any  # of this rank's experts over all ranks' tokens
    down: Any
    shared_gate_up: Any | None
    shared_down: Any | None
    slot_weights: Any  # [T, k] float32
    logits: Any  # [T, E] float32, and of the gate behind


def backward(peer: MoePeer, kept: Kept, dout: Any, aux_grad: float = 1.0) -> PeerGradients:
    """From dL/dOut [T, H], and aux_grad = dL/d(auxiliary loss). Once for each forward, which was told to keep."""
    c, w, v, sizes = peer.config, peer.w, kept.routed.weights.detach(), kept.sizes
    on_input, token = c.weight_on == "input", kept.order // c.top_k
    given = dout[token]
    sent = given if on_input else peer.weighed(given, v.flatten()[kept.order])
    dy = peer.all_to_all(sent, sizes.sent, sizes.received)[kept.by_expert]
    rows, gate_up, down = _of_experts(peer, kept, dy)
    rows = rows.new_empty(rows.shape).index_copy_(0, kept.by_expert, rows)
    rows = peer.all_to_all(rows, sizes.received, sizes.sent)
    dx, _ = peer.folded(rows, kept.order, v if on_input else None)
    if on_input:
        dv = _by_slot(peer, kept, rows, kept.x[token])
    elif kept.of_token is not None:
        dv = (kept.of_token @ dout[:, :, None])[:, :, 0].float()
    else:
        dv = _by_slot(peer, kept, kept.rows, given)
    shared_gate_up = shared_down = dgate = None
    if c.shared_width:
        dpre, shared_gate_up, shared_down, dgate = _of_shared(peer, kept, dout)
        dx = _with_product(peer, dx, dpre, w.shared_gate_up)
    logits = _of_logits(peer, kept, dv, dgate, aux_grad)
    few = logits if peer.exact else logits.to(dout.dtype)
    router = few.t() @ (kept.x.float() if peer.exact else kept.x)
    dx = _with_product(peer, dx, few, w.router)
    return PeerGradients(dx, router, gate_up, down, shared_gate_up, shared_down, dv, logits)


def _of_experts(peer: MoePeer, kept: Kept, dy: Any) -> tuple[Any, Any, Any]:
    """(dX of their rows, gradients of gate_up and of down), from dL/d(their outputs)."""
    product, w, hidden, ends = peer.torch._grouped_mm, peer.w, kept.hidden, kept.ends
    if peer.exact:  # products in float32 one by one, for grouped ones are rounded
        of_expert = zip(dy.split(kept.sizes.counts.sum(0).tolist()), w.down, strict=True)
        dh = peer.torch.cat([rows.float() @ down.float() for rows, down in of_expert])
    else:
        dh = product(dy, w.down, offs=ends)
    dpre = _before_swiglu(peer, hidden, dh, peer.config.swiglu_limit)
    down = product(dy.t(), hidden.h, offs=ends)
    return product(dpre, w.gate_up, offs=ends), product(dpre.t(), hidden.rows, offs=ends), down


def _before_swiglu(peer: MoePeer, hidden: Hidden, dh: Any, limit: float | None) -> Any:
    """dL/d(pre-activations), [n, 2 I]. At the limit itself gradients pass."""
    torch, out = peer.torch, peer.torch.empty_like(hidden.both)
    dgate, dup = out.chunk(2, dim=-1)
    if peer.exact:
        g, dh = hidden.gate.float(), dh.float()
        s = g.sigmoid()
        dgate.copy_(dh * hidden.up * s * (1 + g * (1 - s)))
        dup.copy_(dh * g * s)
    else:
        torch.ops.aten.silu_backward.grad_input(dh * hidden.up, hidden.gate, grad_input=dgate)
        torch.mul(dh, hidden.silu, out=dup)
    if limit is not None:
        gate, up = hidden.both.chunk(2, dim=-1)
        dgate.masked_fill_(gate > limit, 0)
        dup.masked_fill_(up.abs() > limit, 0)
    return out


def _by_slot(peer: MoePeer, kept: Kept, one: Any, other: Any) -> Any:
    """[T, k] float32: products of rows as they were sent."""
    dots = (one.float() * other.float()).sum(-1) if peer.exact else (one * other).sum(-1, dtype=peer.torch.float32)
    return dots.new_empty(dots.shape).index_copy_(0, kept.order, dots).view(kept.routed.ids.shape)


def _of_shared(peer: MoePeer, kept: Kept, dout: Any) -> tuple[Any, Any, Any, Any | None]:
    """(dL/d(pre-activations), gradients of gate_up and down, dL/d(the gate) [T, 1])."""
    w, hidden, gate, y = peer.w, kept.shared, kept.routed.gate, kept.shared_y
    assert hidden is not None and w.shared_down is not None and y is not None
    dgate, dy, h = None, dout, hidden.h
    if gate is not None:
        gate = gate.detach()
        dgate = (y.float() * dout.float() if peer.exact else y * dout).sum(-1, keepdim=True, dtype=peer.torch.float32)
        if not peer.exact:
            dy = peer.weighed(dout, gate[:, 0])
    if peer.exact:
        dh = dy.float() @ w.shared_down.float()
        if gate is not None:  # moe_backward weighs these two, not dOut
            dh, h = dh * gate, peer.weighed(h, gate[:, 0])
    else:
        dh = dy @ w.shared_down
    dpre = _before_swiglu(peer, hidden, dh, None)
    return dpre, dpre.t() @ hidden.rows, dy.t() @ h, dgate


def _of_logits(peer: MoePeer, kept: Kept, dv: Any, dgate: Any | None, aux_grad: float) -> Any:
    routed = kept.routed
    pairs = [(routed.weights, dv)]
    if routed.aux is not None:
        pairs.append((routed.aux, peer.torch.full_like(routed.aux, aux_grad)))
    if routed.gate is not None:
        pairs.append((routed.gate, dgate))
    made, grads = zip(*pairs, strict=True)
    return peer.torch.autograd.grad(made, [routed.logits], grads)[0]


def _with_product(peer: MoePeer, dx: Any, one: Any, other: Any) -> Any:
    """dx + one @ other."""
    return dx + one.float() @ other.float() if peer.exact else dx.addmm_(one, other)


def alone(peer: MoePeer, kept: Kept, dout: Any) -> Callable[[], None]:
    """A backward's products alone, on rows that are there; of the router none, as in the forward's."""
    product, w, hidden, ends, shared = peer.torch._grouped_mm, peer.w, kept.hidden, kept.ends, kept.shared
    dy, dpre = (like.new_empty(like.shape).normal_() for like in (hidden.rows, hidden.both))
    of_shared = None if shared is None else shared.both.new_empty(shared.both.shape).normal_()

    def products() -> None:
        product(dy, w.down, offs=ends)
        product(dy.t(), hidden.h, offs=ends)
        product(dpre, w.gate_up, offs=ends)
        product(dpre.t(), hidden.rows, offs=ends)
        if shared is not None and of_shared is not None:
            dout @ w.shared_down
            dout.t() @ shared.h
            of_shared @ w.shared_gate_up
            of_shared.t() @ shared.rows

    return products
