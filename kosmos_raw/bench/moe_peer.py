"""An MoE layer as it is done without one kernel for all: PyTorch's sort, all-to-all of the process group, grouped
products, weighted sum. What moe_forward is measured against, and compared with.

Takes PyTorch as an argument: nothing here needs it to be there. On CPU tensors and gloo it runs as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..plan.moe.config import MoEConfig


@dataclass(frozen=True)
class PeerWeights:
    """Tensors of one rank, bf16, as in ops/moe_weights.py; the bias is float32."""

    router: Any  # [E, H], and behind it the shared expert's gate if it has one
    gate_up: Any
    down: Any
    shared_gate_up: Any | None = None
    shared_down: Any | None = None
    bias: Any | None = None


@dataclass(frozen=True)
class Sizes:
    """How many rows go where: lists on the host, which all-to-all wants, and counts on the device."""

    sent: list[int]  # to each rank
    received: list[int]  # from each rank
    counts: Any  # [ranks, own experts] received


class MoePeer:
    """One rank's layer. `fold` is how rows are added: one of FOLDS."""

    FOLDS = ("scatter_add", "gathered")

    def __init__(self, torch: Any, dist: Any, config: MoEConfig, weights: PeerWeights, fold: str = FOLDS[0]):
        self.torch, self.dist, self.config, self.w, self.fold = torch, dist, config, weights, fold
        self.ranks, self.own = dist.get_world_size(), weights.gate_up.shape[0]
        if config.experts != self.own * self.ranks or config.hash_routing:
            raise ValueError(
                f"MoePeer: {config.experts} experts on {self.ranks} ranks, of which this one has {self.own}"
                f"{', hash routing' * config.hash_routing}; want as many on each, and a learned router"
            )

    # -- routing

    def logits(self, x: Any) -> Any:
        """Float32, of products that are not rounded in between."""
        if x.is_cuda:
            return self.torch.mm(x, self.w.router.t(), out_dtype=self.torch.float32)
        return x.float() @ self.w.router.float().t()

    def route(self, x: Any) -> tuple[Any, Any, Any, Any | None]:
        """(experts [T, k], their weights, auxiliary loss, weight of the shared expert)."""
        c, torch = self.config, self.torch
        both = self.logits(x)
        logits, gate = both[:, : c.experts], both[:, c.experts :].sigmoid() if c.gated_shared else None
        scores = self._scores(logits)
        keys = logits if c.keys_are_logits else scores if self.w.bias is None else scores + self.w.bias
        if c.groups > 1:
            grouped = keys.view(len(x), c.groups, c.experts_per_group)
            best = grouped.topk(min(c.group_score, c.experts_per_group), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(c.top_groups, dim=-1).indices, True)
            keys = grouped.masked_fill(~kept[:, :, None], float("-inf")).view_as(keys)
        ids = keys.topk(c.top_k, dim=-1).indices
        return ids, self.weights_of(scores, ids), self._aux_loss(logits, scores, ids), gate

    def _scores(self, logits: Any) -> Any:
        if self.config.score == "softmax":
            return logits.softmax(-1)
        if self.config.score == "sigmoid":
            return logits.sigmoid()
        return self.torch.nn.functional.softplus(logits).sqrt()

    def weights_of(self, scores: Any, ids: Any) -> Any:
        c, w = self.config, scores.gather(1, ids)
        if c.normalises or c.softmax_after_topk:
            w = w / (w.sum(-1, keepdim=True) + (0 if c.softmax_after_topk else c.norm_eps))
        return w * c.scaling

    def _aux_loss(self, logits: Any, scores: Any, ids: Any) -> Any | None:
        c = self.config
        if c.aux_loss == "none" or not len(ids):
            return None
        plain = ids if c.keys_are_logits else logits.topk(c.top_k, dim=-1).indices
        share = scores if c.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + c.norm_eps)
        factor = c.aux_loss_coeff * c.experts / (c.top_k * len(ids) ** 2)
        return factor * (self._counts(plain.flatten()).float() * share.sum(0)).sum()

    def _counts(self, flat: Any) -> Any:  # bincount would wait for the device
        torch = self.torch
        counts = torch.zeros(self.config.experts, dtype=torch.int64, device=flat.device)
        return counts.scatter_add_(0, flat, torch.ones_like(flat))

    # -- the way to the experts and back

    def sizes(self, flat: Any) -> Sizes:
        """Of experts [T * k]. Waits for the device: the host must know what it sends."""
        torch, counts = self.torch, self._counts(flat)
        received = torch.empty_like(counts)
        self.dist.all_to_all_single(received, counts)
        received = received.view(self.ranks, self.own)
        sums = torch.stack([counts.view(self.ranks, self.own).sum(1), received.sum(1)]).tolist()
        return Sizes(sums[0], sums[1], received)

    def all_to_all(self, rows: Any, to: list[int], of: list[int]) -> Any:
        out = rows.new_empty((sum(of), rows.shape[1]))
        self.dist.all_to_all_single(out, rows.contiguous(), of, to)
        return out

    def experts(self, rows: Any, counts: Any, *, exact: bool = False) -> Any:
        """Rows by expert."""
        torch, w = self.torch, self.w
        ends = counts.sum(0).cumsum(0).to(torch.int32)
        both = torch._grouped_mm(rows, w.gate_up.transpose(1, 2), offs=ends)
        return torch._grouped_mm(self.swiglu(both, self.config.swiglu_limit, exact), w.down.transpose(1, 2), offs=ends)

    def swiglu(self, both: Any, limit: float | None, exact: bool) -> Any:
        gate, up = both.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        silu = self.torch.nn.functional.silu
        return (silu(gate.float()) * up.float()).to(both.dtype) if exact else silu(gate) * up

    def shared(self, x: Any, gate: Any | None, *, exact: bool = False) -> Any:
        assert self.w.shared_gate_up is not None and self.w.shared_down is not None
        y = self.swiglu(x @ self.w.shared_gate_up.t(), None, exact) @ self.w.shared_down.t()
        return y if gate is None else y.float() * gate if exact else y * gate.to(y.dtype)

    def __call__(self, x: Any, sizes: Sizes | None = None) -> Any:
        """The layer on x [T, H]."""
        ids, weights, _, gate = self.route(x)
        rows, order = self.through_experts(x, ids, weights, sizes)
        k, T = self.config.top_k, len(x)
        v = self.torch.ones_like(weights) if self.config.weight_on == "input" else weights
        if self.fold == "scatter_add":
            weighed = rows * v.flatten()[order][:, None].to(rows.dtype)
            out = self.torch.zeros_like(x).index_add_(0, order // k, weighed)
        else:
            of_token = rows[self._inverse(order)].view(T, k, -1)
            out = self.torch.bmm(v[:, None].to(rows.dtype), of_token)[:, 0]
        return out + self.shared(x, gate) if self.config.shared_width else out

    def through_experts(
        self, x: Any, ids: Any, weights: Any, sizes: Sizes | None, exact: bool = False
    ) -> tuple[Any, Any]:
        """(experts' rows of this rank's tokens, sorted by expert; the order that sorts slots)."""
        c, torch = self.config, self.torch
        flat = ids.flatten()
        order = flat.sort(stable=True).indices
        sizes = sizes or self.sizes(flat)
        sent = x[order // c.top_k]
        if c.weight_on == "input":
            v = weights.flatten()[order][:, None]
            sent = (sent.float() * v).to(x.dtype) if exact else sent * v.to(x.dtype)
        got = self.all_to_all(sent, sizes.sent, sizes.received)
        of_expert = torch.arange(self.own, device=x.device).repeat(self.ranks)
        by_expert = of_expert.repeat_interleave(sizes.counts.flatten(), output_size=len(got)).sort(stable=True).indices
        y = self.experts(got[by_expert], sizes.counts, exact=exact)
        back = torch.empty_like(y).index_copy_(0, by_expert, y)
        return self.all_to_all(back, sizes.received, sizes.sent), order

    def _inverse(self, order: Any) -> Any:
        return self.torch.empty_like(order).scatter_(0, order, self.torch.arange(len(order), device=order.device))

    def careful(self, x: Any, ids: Any, weights: Any) -> Any:
        """The layer with choices from elsewhere, as float32: rounded only where moe_forward rounds too."""
        c = self.config
        rows, order = self.through_experts(x, ids, weights, None, exact=True)
        places, out = self._inverse(order).view(ids.shape), self.torch.zeros(x.shape, device=x.device)
        for j in range(c.top_k):
            y = rows[places[:, j]].float()
            out += y if c.weight_on == "input" else y * weights[:, j, None]
        if not c.shared_width:
            return out
        gate = self.logits(x)[:, c.experts :].sigmoid() if c.gated_shared else None
        return out + self.shared(x, gate, exact=True).float()

    def alone(self, x: Any) -> Callable[[], None]:
        """The layer's products alone, on rows that are there."""
        ids, _, _, gate = self.route(x)
        sizes = self.sizes(ids.flatten())
        rows = x.new_empty((sum(sizes.received), x.shape[1])).normal_()

        def products() -> None:
            self.experts(rows, sizes.counts)
            if self.config.shared_width:
                self.shared(x, gate)

        return products
