"""Parameters and sizes by the published configurations of mixtures and of latent attention."""

from __future__ import annotations

from typing import Any

import pytest

from tunesmith.plan.facts.model import facts_of

LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "vocab_size": 102400,
    **LATENT,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    **LATENT,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "billions", "head_dim"),
    [(DEEPSEEK_V2_LITE, 15.706, 192), (DEEPSEEK_V3, 671.03, 192), (GPT_OSS_20B, 20.91, 64)],
    ids=["deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b"],
)
def test_parameters_and_keys(config: dict[str, Any], billions: float, head_dim: int) -> None:
    facts = facts_of(config)
    assert facts is not None
    assert facts.head_dim == head_dim
    assert facts.estimated / 1e9 == pytest.approx(billions, rel=0.005)
