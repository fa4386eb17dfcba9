"""MoEConfig from a published config.json. What a kind of model does always, its file does not say; that is here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .config import MoEConfig

Keys = Mapping[str, Any]


def read(source: Keys | str | Path, layer: int | None) -> MoEConfig:
    """See MoEConfig.from_hf."""
    name, keys = "the given mapping", source
    if isinstance(source, (str, Path)):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        name, keys = str(path), json.loads(path.read_text())
    if not isinstance(keys, Mapping):
        raise ValueError(f"MoEConfig.from_hf: {name} is a {type(keys).__name__}, want a mapping of keys")
    keys = keys.get("text_config", keys)  # models that also see keep the language model's keys there
    kind = str(keys.get("model_type", "")).removesuffix("_text")
    if kind not in _KINDS:
        raise ValueError(
            f"MoEConfig.from_hf: {name} has model_type {keys.get('model_type')!r}, want one of {', '.join(_KINDS)}; "
            "or make a MoEConfig from its sizes and rules"
        )
    if layer is not None and not 0 <= layer < keys.get("num_hidden_layers", layer + 1):
        raise ValueError(f"MoEConfig.from_hf: layer is {layer}, want 0 to {keys['num_hidden_layers'] - 1}")
    try:
        return _KINDS[kind](keys, layer)
    except KeyError as missing:
        raise ValueError(f"MoEConfig.from_hf: {name} ({kind}) has no key {missing}") from None


def _deepseek(keys: Keys, layer: int | None) -> MoEConfig:
    """DeepSeek-V3, and Kimi-K2 and GLM-5, which have its layer. Group scores are sums of two keys."""
    aux, coefficient = _aux(keys, "aux_loss_alpha")
    return MoEConfig(
        **_routed(keys, "n_routed_experts"),
        score=keys.get("scoring_func", "sigmoid"),
        normalise=keys["norm_topk_prob"],
        scaling=float(keys["routed_scaling_factor"]),
        expert_bias=keys.get("topk_method", "noaux_tc") == "noaux_tc",
        groups=keys.get("n_group") or 1,
        top_groups=keys.get("topk_group") or 1,
        shared_width=(keys.get("n_shared_experts") or 0) * keys["moe_intermediate_size"],
        aux_loss="sequence" if aux != "none" and keys.get("seq_aux", False) else aux,
        aux_loss_coeff=coefficient,
    )


def _deepseek_v4(keys: Keys, layer: int | None) -> MoEConfig:
    """The first layers take experts from a table of token ids. The limit is on routed experts alone."""
    kinds = keys.get("mlp_layer_types") or ["hash_moe"] * keys.get("num_hash_layers", 3)
    hashed = layer is not None and layer < len(kinds) and kinds[layer] == "hash_moe"
    aux, coefficient = ("none", 0.0) if hashed else _aux(keys, "router_aux_loss_coef")
    return MoEConfig(
        **_routed(keys, "n_routed_experts"),
        score=keys["scoring_func"],
        normalise=keys["norm_topk_prob"],
        scaling=float(keys["routed_scaling_factor"]),
        expert_bias=not hashed,
        hash_routing=hashed,
        shared_width=keys["n_shared_experts"] * keys["moe_intermediate_size"],
        swiglu_limit=keys["swiglu_limit"],
        aux_loss=aux,
        aux_loss_coeff=coefficient,
    )


def _qwen3(keys: Keys, layer: int | None) -> MoEConfig:
    aux, coefficient = _aux(keys, "router_aux_loss_coef")
    return MoEConfig(
        **_routed(keys, "num_experts"), normalise=keys["norm_topk_prob"], aux_loss=aux, aux_loss_coeff=coefficient
    )


def _qwen3_5(keys: Keys, layer: int | None) -> MoEConfig:
    """Weights are always normalised; the shared expert has a gate."""
    aux, coefficient = _aux(keys, "router_aux_loss_coef")
    return MoEConfig(
        **_routed(keys, "num_experts"),
        shared_width=keys["shared_expert_intermediate_size"],
        gated_shared=True,
        aux_loss=aux,
        aux_loss_coeff=coefficient,
    )


def _llama4(keys: Keys, layer: int | None) -> MoEConfig:
    """Sigmoid of the chosen logit, times the input; a shared expert as wide as a routed one."""
    aux, coefficient = _aux(keys, "router_aux_loss_coef")
    return MoEConfig(
        **_routed(keys, "num_local_experts", width="intermediate_size"),
        score="sigmoid",
        normalise=False,
        weight_on="input",
        shared_width=keys["intermediate_size"],
        aux_loss=aux,
        aux_loss_coeff=coefficient,
    )


def _routed(keys: Keys, experts: str, width: str = "moe_intermediate_size") -> dict[str, Any]:
    return {
        "hidden": keys["hidden_size"],
        "expert_width": keys[width],
        "experts": keys[experts],
        "top_k": keys["num_experts_per_tok"],
    }


def _aux(keys: Keys, name: str) -> tuple[str, float]:
    """Kind and coefficient. The file's coefficient is taken as it is, as recipes take it, though some libraries
    multiply it by a loss that is top_k times ours."""
    coefficient = float(keys.get(name) or 0.0)
    return ("batch" if coefficient else "none"), coefficient


_KINDS: dict[str, Callable[[Keys, int | None], MoEConfig]] = {
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm_moe_dsa": _deepseek,
    "deepseek_v4": _deepseek_v4,
    "qwen3_moe": _qwen3,
    "qwen3_5_moe": _qwen3_5,
    "llama4": _llama4,
}
