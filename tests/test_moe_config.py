"""MoEConfig: what it refuses, the nine models, and what it reads from published files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kosmos_raw.plan.moe.config import MoEConfig, models

SMALL = {"hidden": 64, "expert_width": 32, "experts": 8, "top_k": 2}
DEEPSEEK = {
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 61,
}
QWEN = {"num_experts_per_tok": 8, "num_experts": 128, "router_aux_loss_coef": 0.001, "intermediate_size": 12288}
LLAMA = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "router_aux_loss_coef": 0.001,
}
NOAUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
PUBLISHED = {
    "DeepSeek-V3": DEEPSEEK
    | NOAUX
    | {"model_type": "deepseek_v3", "n_routed_experts": 256, "n_group": 8, "topk_group": 4}
    | {"routed_scaling_factor": 2.5, "aux_loss_alpha": 0.0001, "seq_aux": True},
    "DeepSeek-V4-Pro": DEEPSEEK
    | {"model_type": "deepseek_v4", "moe_intermediate_size": 3072, "n_routed_experts": 384, "num_experts_per_tok": 6}
    | {"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "swiglu_limit": 10.0}
    | {"num_hash_layers": 3, "router_aux_loss_coef": 0.001},
    "Kimi-K2.7-Code": {
        "model_type": "kimi_k25",
        "vision_config": {"hidden_size": 1152},
        "text_config": DEEPSEEK
        | NOAUX
        | {"model_type": "kimi_k2", "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 2.827, "aux_loss_alpha": 0.001},
    },
    "GLM-5.2": DEEPSEEK
    | {"model_type": "glm_moe_dsa", "hidden_size": 6144, "n_routed_experts": 256, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 2.5, "aux_loss_alpha": 0.001, "num_hidden_layers": 78},
    "Qwen3-235B": QWEN
    | {"model_type": "qwen3_moe", "hidden_size": 4096, "moe_intermediate_size": 1536, "norm_topk_prob": True},
    "Qwen3-30B": QWEN
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "norm_topk_prob": True},
    "Qwen3.5-397B": {
        "model_type": "qwen3_5_moe",
        "text_config": QWEN
        | {"model_type": "qwen3_5_moe_text", "hidden_size": 4096, "num_experts": 512, "num_experts_per_tok": 10}
        | {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024},
    },
    "Llama-4-Scout": {"model_type": "llama4", "text_config": LLAMA | {"num_local_experts": 16}},
    "Llama-4-Maverick": LLAMA | {"num_local_experts": 128},
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_files_give_the_named_models(model, tmp_path):
    config = MoEConfig.from_hf(PUBLISHED[model])
    assert config == MoEConfig.named(model)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model]))
    assert MoEConfig.from_hf(tmp_path) == MoEConfig.from_hf(str(tmp_path / "config.json")) == config


def test_the_nine_models():
    assert sorted(models()) == sorted(PUBLISHED)
    sizes = {name: (c.experts, c.top_k, c.shared_width) for name, c in models().items()}
    assert sizes["Qwen3.5-397B"] == (512, 10, 1024) and sizes["DeepSeek-V4-Pro"] == (384, 6, 3072)
    assert [name for name, c in models().items() if c.groups > 1] == ["DeepSeek-V3"]
    assert [name for name, c in models().items() if c.gated_shared] == ["Qwen3.5-397B"]
    assert [name for name, c in models().items() if c.swiglu_limit] == ["DeepSeek-V4-Pro"]
    assert [name for name, c in models().items() if c.weight_on == "input"] == ["Llama-4-Scout", "Llama-4-Maverick"]
    with pytest.raises(ValueError, match="no model 'GPT'; known are DeepSeek-V3, "):
        MoEConfig.named("GPT")


def test_layers_that_route_by_a_hash():
    keys = PUBLISHED["DeepSeek-V4-Pro"]
    first, fourth = MoEConfig.from_hf(keys, layer=2), MoEConfig.from_hf(keys, layer=3)
    assert first.hash_routing and not first.expert_bias and first.aux_loss == "none"
    assert fourth == MoEConfig.named("DeepSeek-V4-Pro")
    newer = {k: v for k, v in keys.items() if k != "num_hash_layers"} | {"mlp_layer_types": ["hash_moe", "moe"]}
    assert MoEConfig.from_hf(newer, layer=0).hash_routing and not MoEConfig.from_hf(newer, layer=1).hash_routing
    with pytest.raises(ValueError, match="layer is 61, want 0 to 60"):
        MoEConfig.from_hf(keys, layer=61)


def test_what_from_hf_refuses():
    with pytest.raises(ValueError, match=r"model_type 'mixtral', want one of deepseek_v3, .*or make a MoEConfig"):
        MoEConfig.from_hf({"model_type": "mixtral"})
    with pytest.raises(ValueError, match=r"the given mapping \(qwen3_moe\) has no key 'num_experts'"):
        MoEConfig.from_hf({k: v for k, v in PUBLISHED["Qwen3-30B"].items() if k != "num_experts"})
    with pytest.raises(ValueError, match="is a list, want a mapping"):
        MoEConfig.from_hf([1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": 0}, "top_k is 0, want 1 or more"),
        ({"top_k": 9}, "top_k is 9 of 8 experts"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k is 3, but 1 groups of 2 experts hold 2"),
        ({"groups": 2, "top_groups": 3}, "3 of 2 groups of 8 experts"),
        ({"groups": 3}, "1 of 3 groups of 8 experts"),
        ({"score": "tanh"}, "score is 'tanh', want one of softmax, sigmoid, sqrtsoftplus"),
        ({"weight_on": "both"}, "weight_on is 'both'"),
        ({"expert_bias": True}, "expert_bias with score 'softmax'"),
        ({"score": "sigmoid", "expert_bias": True, "hash_routing": True}, "hash_routing chooses experts itself"),
        ({"softmax_after_topk": True, "top_k": 1}, "softmax_after_topk wants"),
        ({"gated_shared": True}, ".*a gate only where there is a shared expert"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit is nan"),
        ({"aux_loss": "global"}, "aux_loss is 'global'"),
        ({"aux_loss_coeff": -1.0}, "aux_loss_coeff is -1.0"),
    ],
)
def test_what_it_refuses(wrong, message):
    with pytest.raises(ValueError, match=f"MoEConfig: {message}"):
        MoEConfig(**(SMALL | wrong))


def test_groups_that_are_legal():
    one_group = {"hidden": 64, "expert_width": 32, "experts": 256, "top_k": 8, "score": "sigmoid"}
    assert MoEConfig(**one_group, groups=1, top_groups=1).experts_per_group == 256
    MoEConfig(**(one_group | {"experts": 8, "top_k": 2}), groups=8, top_groups=4)  # one expert a group


@given(st.sampled_from(sorted(models())), st.integers(1, 3000))
def test_scaled_models_keep_their_rules(model, divisor):
    full = MoEConfig.named(model)
    small = full.scaled(divisor)  # would raise if a rule were broken
    sizes = ("hidden", "expert_width", "shared_width", "experts")
    assert replace(small, **{name: getattr(full, name) for name in sizes}) == full
    assert all(getattr(small, name) <= getattr(full, name) for name in sizes)
    assert all(getattr(small, name) % 8 == 0 for name in sizes[:3])
    assert small.experts >= min(full.experts, 2 * full.top_k) and (small.shared_width > 0) == (full.shared_width > 0)
    if divisor == 1:
        assert small == full


def test_scaled_deepseek():
    small = MoEConfig.named("DeepSeek-V3").scaled(64)
    assert (small.hidden, small.expert_width, small.experts, small.top_k, small.groups) == (112, 32, 16, 8, 8)
    with pytest.raises(ValueError, match="divisor is 0"):
        small.scaled(0)


@given(st.integers(1, 40), st.integers(1, 8))
def test_every_expert_has_one_owner(experts, ranks):
    config = MoEConfig(hidden=8, expert_width=8, experts=experts, top_k=1)
    owned = [config.experts_of(rank, ranks) for rank in range(ranks)]
    assert [e for r in owned for e in r] == list(range(experts))
    assert all(e // config.per_rank(ranks) == rank for rank, r in enumerate(owned) for e in r)
