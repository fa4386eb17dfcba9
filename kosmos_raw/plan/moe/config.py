"""What an MoE layer is: sizes and rules of routing, as models publish them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
WEIGHT_ON = ("output", "input")
AUX_LOSSES = ("none", "batch", "sequence")
MULTIPLE = 8  # elements that sizes stay multiples of when a model is scaled down: 16 bytes of BF16


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and routing rules of one MoE layer; equal on all ranks. Refuses what has no meaning when it is made.

    Logits z = x @ router.T. Scores s: softmax over all experts, 1 / (1 + exp(-z)), or sqrt(log(1 + exp(z))). Chosen are
    the top_k largest keys, ties to the lowest expert; a key is s, plus the expert's bias if there is one. A NaN counts
    as -inf. Weights are the chosen scores (never the bias), normalised and scaled in that order.

    Raises: ValueError: a rule is broken; says which, and what would be right.
    """

    hidden: int  # H: elements of a token
    expert_width: int  # I: of an expert's SwiGLU
    experts: int  # E: routed ones, of all ranks together
    top_k: int  # experts of a token
    score: str = "softmax"
    softmax_after_topk: bool = False  # softmax over the chosen logits alone: equal to softmax, chosen and normalised
    normalise: bool = True  # divide a token's weights by their sum + norm_eps; never where top_k is 1
    norm_eps: float = 1e-20
    scaling: float = 1.0  # of the weights, after they are normalised
    expert_bias: bool = False  # added to scores where experts are chosen
    groups: int = 1  # of experts, contiguous; chosen from the top_groups best alone
    top_groups: int = 1
    group_score: int = 2  # how many of a group's largest keys are added for its score (at most all)
    hash_routing: bool = False  # the caller gives the experts of each token; weights are their scores
    weight_on: str = "output"  # or "input": experts get weight * x, and their outputs are added as they are
    shared_width: int = 0  # of all shared experts together; 0: none
    gated_shared: bool = False  # the shared output times sigmoid(x . gate)
    swiglu_limit: float | None = None  # routed experts: gate at most this, up between -this and this
    aux_loss: str = "none"  # load balance over this rank's tokens, or the mean of that over its sequences
    aux_loss_coeff: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hidden", "expert_width", "experts", "top_k", "groups", "top_groups", "group_score"):
            if getattr(self, name) < 1:
                raise ValueError(f"MoEConfig: {name} is {getattr(self, name)}, want 1 or more")
        self._one_of("score", SCORES)
        self._one_of("weight_on", WEIGHT_ON)
        self._one_of("aux_loss", AUX_LOSSES)
        self._check_selection()
        if self.shared_width < 0 or (self.gated_shared and not self.shared_width):
            raise ValueError(
                f"MoEConfig: shared_width is {self.shared_width} and gated_shared {self.gated_shared}, want a width of "
                "0 or more, and a gate only where there is a shared expert"
            )
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise ValueError(f"MoEConfig: swiglu_limit is {self.swiglu_limit}, want a number above 0, or None")
        if self.aux_loss_coeff < 0 or self.norm_eps < 0:
            raise ValueError(
                f"MoEConfig: aux_loss_coeff is {self.aux_loss_coeff} and norm_eps {self.norm_eps}, want 0 or more"
            )

    def _check_selection(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"MoEConfig: top_k is {self.top_k} of {self.experts} experts, want at most all of them")
        if self.experts % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"MoEConfig: {self.top_groups} of {self.groups} groups of {self.experts} experts; want groups of equal "
                "size, and no more kept than there are"
            )
        if self.top_k > self.top_groups * self.experts_per_group:
            raise ValueError(
                f"MoEConfig: top_k is {self.top_k}, but {self.top_groups} groups of {self.experts_per_group} experts "
                f"hold {self.top_groups * self.experts_per_group}"
            )
        if self.expert_bias and self.score == "softmax":
            raise ValueError("MoEConfig: expert_bias with score 'softmax'; want 'sigmoid' or 'sqrtsoftplus'")
        if self.hash_routing and (self.expert_bias or self.groups > 1):
            raise ValueError("MoEConfig: hash_routing chooses experts itself; want no expert_bias and one group")
        if self.softmax_after_topk and (self.score != "softmax" or self.groups > 1 or self.top_k == 1):
            raise ValueError(
                "MoEConfig: softmax_after_topk wants score 'softmax', one group and top_k above 1 (over one logit it "
                f"is 1 whatever the logit, so the router would not learn); got {self.score!r}, {self.groups}, "
                f"{self.top_k}"
            )

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        if getattr(self, name) not in known:
            raise ValueError(f"MoEConfig: {name} is {getattr(self, name)!r}, want one of {', '.join(known)}")

    @property
    def experts_per_group(self) -> int:
        return self.experts // self.groups

    @property
    def normalises(self) -> bool:
        """Whether weights are divided by their sum. Of one weight that would be 1, with no gradient for the router."""
        return self.normalise and self.top_k > 1 and not self.softmax_after_topk

    @property
    def keys_are_logits(self) -> bool:
        """Whether experts are chosen by their logits: the same order as by scores, without a score's saturation."""
        return not self.expert_bias and self.groups == 1

    def per_rank(self, ranks: int) -> int:
        """Experts of a rank; the last ranks may have fewer, or none."""
        return -(-self.experts // ranks)

    def experts_of(self, rank: int, ranks: int) -> range:
        per_rank = self.per_rank(ranks)
        return range(min(self.experts, rank * per_rank), min(self.experts, (rank + 1) * per_rank))

    def scaled(self, divisor: int) -> MoEConfig:
        """A small layer with the same rules: sizes divided, multiples of 8; top_k and groups as they are.

        There stay as many experts as the rules need, and twice top_k if there were, so that routing still chooses.
        """
        if divisor < 1:
            raise ValueError(f"MoEConfig.scaled: divisor is {divisor}, want 1 or more")
        least = -(-self.top_k // self.top_groups) * self.groups
        if self.experts >= 2 * self.top_k:
            least = max(least, 2 * self.top_k)
        experts = min(self.experts, max(least, self.experts // divisor))
        return replace(
            self,
            hidden=_divided(self.hidden, divisor),
            expert_width=_divided(self.expert_width, divisor),
            shared_width=_divided(self.shared_width, divisor),
            experts=-(-experts // self.groups) * self.groups,
        )

    @classmethod
    def named(cls, model: str) -> MoEConfig:
        """The layer of one of `models()`: DeepSeek-V3, Qwen3-30B, and so on."""
        if model not in models():
            raise ValueError(f"MoEConfig.named: no model {model!r}; known are {', '.join(models())}")
        return models()[model]

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, *, layer: int | None = None) -> MoEConfig:
        """The MoE layer of a model published with a config.json in Hugging Face's style.

        Args:
            source: that file, its folder, or its contents.
            layer: index of the layer, for models in which layers differ (DeepSeek-V4's first ones route by a hash);
                None is any layer with a learned router.
        Raises: ValueError: not a kind of model that is known here, or a key that it should have is not there.
        """
        from .hf import read

        return read(source, layer)


def _divided(size: int, divisor: int) -> int:
    return 0 if size == 0 else min(size, max(MULTIPLE, size // divisor // MULTIPLE * MULTIPLE))


@cache
def models() -> dict[str, MoEConfig]:
    """The nine layers that the paper measures, by name."""
    text = json.loads((Path(__file__).parent / "models.json").read_text())
    known = {f.name for f in fields(MoEConfig)}
    return {
        name: MoEConfig(**{key: value for key, value in entry.items() if key in known})
        for name, entry in text["models"].items()
    }
