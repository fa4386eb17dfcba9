"""An MoE layer as it is done without one kernel for all: PyTorch's sort, all-to-all of the process group, grouped
products, weighted sum. What moe_forward is measured against, and compared with; moe_peer_backward.py goes back.

Takes PyTorch as an argument: nothing here needs it to be there. It runs on CPU tensors as well, and with whatever has
get_world_size and all_to_all_single for a process group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Routed(NamedTuple):
    """Float32 but for ids. The rest has a graph back to the logits if the forward keeps what a backward needs."""

    ids: Any  # [T, k]
    weights: Any  # [T, k]
    aux: Any | None  # the auxiliary loss
    gate: Any | None  # [T, 1]: weight of the shared expert
    logits: Any  # [T, E], and of the gate behind


class Hidden(NamedTuple):
    """Of rows through the first half of an expert; what autograd would keep too."""

    rows: Any  # [n, H]
    both: Any  # [n, 2 I]: before the activation
    gate: Any  # [n, I]: parts of that, within the limit
    up: Any
    silu: Any  # [n, I]: of gate
    h: Any  # [n, I]


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    x: Any
    routed: Routed
    sizes: Sizes
    order: Any  # [T * k]: sorts slots by expert
    by_expert: Any  # [n]: sorts received rows by expert
    ends: Any  # [own experts]: where their rows end, int32
    hidden: Hidden  # of received rows, by expert
    rows: Any  # [T * k, H]: experts' rows of this rank's tokens, as sent
    of_token: Any | None  # [T, k, H]: the same by token, where the fold gathers them
    shared: Hidden | None
    shared_y: Any | None  # [T, H], before the gate


class MoePeer:
    """One rank's layer.

    fold: how rows are added: one of FOLDS.
    exact: rounds only where the operators round, with FP32 in between: to compare with, not to time.
    """

    FOLDS = ("scatter_add", "gathered")

    def __init__(
        self,
        torch: Any,
        dist: Any,
        config: MoEConfig,
        weights: PeerWeights,
        fold: str = FOLDS[0],
        exact: bool = False,
    ):
        self.torch, self.dist, self.config, self.w = torch, dist, config, weights
        self.fold, self.exact = fold, exact
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

    def route(self, x: Any, ids: Any | None = None, keep: bool = False) -> Routed:
        """ids: choices from elsewhere. keep: with a graph."""
        c, torch = self.config, self.torch
        both = self.logits(x).requires_grad_(keep)
        logits, gate = both[:, : c.experts], both[:, c.experts :].sigmoid() if c.gated_shared else None
        scores = self._scores(logits)
        if ids is None:
            keys = logits if c.keys_are_logits else scores if self.w.bias is None else scores + self.w.bias
            if c.groups > 1:
                grouped = keys.view(len(x), c.groups, c.experts_per_group)
                best = grouped.topk(min(c.group_score, c.experts_per_group), dim=-1).values.sum(-1)
                top = best.topk(c.top_groups, dim=-1).indices
                allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, top, True)
                keys = grouped.masked_fill(~allowed[:, :, None], float("-inf")).view_as(keys)
            ids = keys.topk(c.top_k, dim=-1).indices
        return Routed(ids, self.weights_of(scores, ids), self._aux_loss(logits, scores, ids), gate, both)

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

    def hidden(self, rows: Any, both: Any, limit: float | None) -> Hidden:
        gate, up = both.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        silu = self.torch.nn.functional.silu(gate.float() if self.exact else gate)
        return Hidden(rows, both, gate, up, silu, (silu * up).to(both.dtype))

    def experts(self, rows: Any, ends: Any) -> tuple[Any, Hidden]:
        """Rows by expert."""
        torch, w = self.torch, self.w
        both = torch._grouped_mm(rows, w.gate_up.transpose(1, 2), offs=ends)
        hidden = self.hidden(rows, both, self.config.swiglu_limit)
        return torch._grouped_mm(hidden.h, w.down.transpose(1, 2), offs=ends), hidden

    def shared(self, x: Any) -> tuple[Any, Hidden]:
        """Before the gate."""
        assert self.w.shared_gate_up is not None and self.w.shared_down is not None
        hidden = self.hidden(x, x @ self.w.shared_gate_up.t(), None)
        return hidden.h @ self.w.shared_down.t(), hidden

    def __call__(self, x: Any, sizes: Sizes | None = None) -> Any:
        """The layer on x [T, H]."""
        return self.forward(x, sizes)[0]

    def forward(
        self, x: Any, sizes: Sizes | None = None, ids: Any | None = None, keep: bool = False
    ) -> tuple[Any, Kept]:
        """The layer on x [T, H]; float32 if exact.

        Args:
            sizes: of all-to-all, if they are known.
            ids: [T, k] choices from elsewhere.
            keep: `backward` will go back through it.
        """
        c, torch = self.config, self.torch
        routed = self.route(x, ids, keep)
        v, flat = routed.weights.detach(), routed.ids.flatten()
        order = flat.sort(stable=True).indices
        sizes = sizes or self.sizes(flat)
        sent = x[order // c.top_k]
        if c.weight_on == "input":
            sent = self.weighed(sent, v.flatten()[order])
        got = self.all_to_all(sent, sizes.sent, sizes.received)
        of_expert = torch.arange(self.own, device=x.device).repeat(self.ranks)
        by_expert = of_expert.repeat_interleave(sizes.counts.flatten(), output_size=len(got)).sort(stable=True).indices
        ends = sizes.counts.sum(0).cumsum(0).to(torch.int32)
        y, hidden = self.experts(got[by_expert], ends)
        rows = self.all_to_all(torch.empty_like(y).index_copy_(0, by_expert, y), sizes.received, sizes.sent)
        out, of_token = self.folded(rows, order, torch.ones_like(v) if c.weight_on == "input" else v)
        shared_y = shared = None
        if c.shared_width:
            shared_y, shared = self.shared(x)
            gate = routed.gate if routed.gate is None or self.exact else routed.gate.to(shared_y.dtype)
            out = out + (shared_y if gate is None else shared_y * gate.detach())
        return out, Kept(x, routed, sizes, order, by_expert, ends, hidden, rows, of_token, shared, shared_y)

    def weighed(self, rows: Any, v: Any) -> Any:
        """Each row times its weight."""
        return (rows.float() * v[:, None]).to(rows.dtype) if self.exact else rows * v[:, None].to(rows.dtype)

    def folded(self, rows: Any, order: Any, v: Any | None) -> tuple[Any, Any | None]:
        """(sums over each token's k rows, weighed by v [T, k]; rows by token if they were gathered)."""
        torch, k = self.torch, self.config.top_k
        T = len(order) // k
        if self.exact:  # in the operators' order
            places, out = self._inverse(order).view(T, k), rows.new_zeros((T, rows.shape[1]), dtype=torch.float32)
            for j in range(k):
                y = rows[places[:, j]].float()
                out += y if v is None else y * v[:, j, None]
            return out, None
        if self.fold == "scatter_add":
            weighed = rows if v is None else self.weighed(rows, v.flatten()[order])
            return rows.new_zeros((T, rows.shape[1])).index_add_(0, order // k, weighed), None
        of_token = rows[self._inverse(order)].view(T, k, -1)
        return of_token.sum(1) if v is None else torch.bmm(v[:, None].to(rows.dtype), of_token)[:, 0], of_token

    def _inverse(self, order: Any) -> Any:
        return self.torch.empty_like(order).scatter_(0, order, self.torch.arange(len(order), device=order.device))

    def alone(self, kept: Kept) -> Callable[[], None]:
        """A forward's products alone, and what is between them, on rows that are there."""

        def products() -> None:
            self.experts(kept.hidden.rows, kept.ends)
            if self.config.shared_width:
                self.shared(kept.x)

        return products
