"""Models of every family, with gradients to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support import tiny
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Forest
from tunesmith.models.kernels.layers import KINDS
from tunesmith.plan.facts.families import check_family, family
from tunesmith.types import Sample

WINDOW = 6  # shorter than the prompt, so that completions look back past their parent
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 8,
    },
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 7,
    },
    "vaultgemma": {"head_dim": 8, "sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {"num_hidden_layers": 5},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {
        "logit_scale": 0.3,
        "sliding_window": WINDOW,
        "num_hidden_layers": 5,
        "head_dim": 8,
    },
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "granitemoe": {"logits_scaling": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "olmo3": {"sliding_window": WINDOW, "num_hidden_layers": 5},
    "exaone4": {"sliding_window": WINDOW, "num_hidden_layers": 5},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 8,
    },
    "cohere2_moe": {
        "logit_scale": 0.3,
        "sliding_window": WINDOW,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
    },
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
    "exaone_moe": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "afmoe": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "mup_enabled": True,
    },
    "laguna": {
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_attention_heads_per_layer": [4, 8],
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "jais2": {"head_dim": 8},
    "mellum": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "solar_open": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 8,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "ministral": {"sliding_window": WINDOW, "head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "arcee": {"head_dim": 8},
    "cwm": {"head_dim": 8, "sliding_window": WINDOW},
    "gpt2": {"n_inner": 64},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "qwen3_next": {**DELTA_NET, **EXPERTS},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS},
    "olmo_hybrid": {
        **{name: value for name, value in DELTA_NET.items() if name != "head_dim"},
        "linear_allow_neg_eigval": True,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 1.3]},
    "granitemoehybrid": {
        **MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "logits_scaling": 3.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        "num_hidden_layers": 5,
        "layers_block_type": [
            "linear_attention",
            "full_attention",
            "mlp",
            "linear_attention",
            "moe",
        ],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "head_dim": 8,
    },
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {**_VISION, "image_size": 112}, "mm_tokens_per_image": 16},
    "mistral3": {"vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8}},
    "qwen2_5_vl": {"vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        "vision_config": {
            **_QWEN_VISION,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }
    },
    "internvl": {
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "llava": {"vision_config": {**_VISION, "model_type": "clip_vision_model"}},
    "llava_next": {"vision_config": {**_VISION, "model_type": "clip_vision_model"}},
    "llava_onevision": {"vision_config": {**_VISION, "model_type": "siglip_vision_model"}},
    "lfm2_vl": {"vision_config": {**_VISION, "model_type": "siglip2_vision_model"}},
    "idefics3": {"vision_config": _VISION, "scale_factor": 2},
    "smolvlm": {"vision_config": _VISION, "scale_factor": 2},
    "exaone4_5": {"vision_config": _QWEN_VISION},
    "glm4v": {"vision_config": {**_QWEN_VISION, "image_size": 28}},
    "glm_ocr": {"vision_config": {**_QWEN_VISION, "image_size": 28}},
    "lighton_ocr": {"vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8}},
    "minicpmv4_6": {"vision_config": {**_VISION, "num_hidden_layers": 2}, "insert_layer_id": 0},
    "glm4v_moe": {"vision_config": {**_QWEN_VISION, "image_size": 28}},
    "glm46v": {"vision_config": {**_QWEN_VISION, "model_type": "glm4v_vision", "image_size": 28}},
    "qwen2_vl": {
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "mlp_ratio": 2,
            "num_heads": 2,
            "hidden_size": 32,
            "patch_size": 14,
        }
    },
    "qwen3_vl_moe": {
        "vision_config": {
            **_QWEN_VISION,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }
    },
    "qwen3_5": {"vision_config": {**_QWEN_VISION, "num_position_embeddings": 16}},
    "qwen3_5_moe": {"vision_config": {**_QWEN_VISION, "num_position_embeddings": 16}},
    "llama4": {
        "vision_config": {
            **_VISION,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        }
    },
    "gemma4": {
        "vision_config": {
            **_VISION,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
        },
        "audio_config": None,
    },
    "gemma4_unified": {
        "vision_config": {
            "patch_size": 14,
            "mm_embed_dim": 16,
            "mm_posemb_size": 16,
            "output_proj_dims": 16,
        },
        "audio_config": None,
    },
}
"""The towers of tiny multimodal models."""
_THREE_ROWS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Keys and values made of one narrow latent, and experts beside a shared one."""
for _name in ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
    SPECIAL[_name] = LATENT
for _name in ("minicpm3", "youtu"):
    SPECIAL[_name] = {name: LATENT[name] for name in [*LATENT][:6]}
SPECIAL["minicpm3"]["dim_model_base"] = 32
SPECIAL["glm4_moe_lite"] = LATENT | {"mlp_layer_types": ["dense", "sparse"]}
SPECIAL["gpt_oss"] = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
SPECIAL["jamba"] = {
    "num_hidden_layers": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 8,
}
SPECIAL["hyperclovax"] = SPECIAL["granite"] | {"use_post_norm": True}
SPECIAL["granite_swa"] = {"sliding_window": WINDOW, "num_hidden_layers": 5}
SPECIAL["granitemoe_swa"] = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SPECIAL["gemma3"] = SPECIAL["gemma3_text"]
SPECIAL["mistral3"] = {**SPECIAL["ministral"], "model_type": "ministral3"}
SPECIAL["qwen2_5_vl"] = {"rope_parameters": _THREE_ROWS}
SPECIAL["qwen2_vl"] = {"rope_parameters": _THREE_ROWS}
SPECIAL["qwen3_vl"] = {"rope_parameters": _THREE_ROWS}
SPECIAL["qwen3_vl_moe"] = {
    "rope_parameters": _THREE_ROWS,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_HALF_ROTATED = {
    "head_dim": 16,
    "rope_parameters": {**_THREE_ROWS, "partial_rotary_factor": 0.5},
}
SPECIAL["glm4v"] = _HALF_ROTATED
SPECIAL["glm46v"] = _HALF_ROTATED | {"model_type": "glm4v_text"}
SPECIAL["glm_ocr"] = _HALF_ROTATED
SPECIAL["glm4v_moe"] = SPECIAL["glm4_moe"] | _HALF_ROTATED
for _name in ("internvl", "llava_onevision"):
    SPECIAL[_name] = {"model_type": "qwen2"}
for _name in ("llava", "llava_next", "idefics3", "smolvlm"):
    SPECIAL[_name] = {"model_type": "llama"}
SPECIAL["minicpmv4_6"] = SPECIAL["qwen3_5_text"] | {"model_type": "qwen3_5_text"}
SPECIAL["lighton_ocr"] = SPECIAL["qwen3"] | {"model_type": "qwen3"}
SPECIAL["mimo_v2_flash"] = {
    "head_dim": 12,
    "v_head_dim": 8,
    "num_key_value_heads": 1,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SPECIAL["lfm2_vl"] = SPECIAL["lfm2"] | {"model_type": "lfm2"}
SPECIAL["exaone4_5"] = SPECIAL["exaone4"] | {"model_type": "exaone4"}
SPECIAL["qwen3_5"] = SPECIAL["qwen3_5_text"]
SPECIAL["qwen3_5_moe"] = SPECIAL["qwen3_5_moe_text"]
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention", "full_attention"] * 3, "full_attention"],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 4,
    "final_logit_softcapping": 3.0,
}
SPECIAL["gemma4"] = SPECIAL["gemma4_text"] = _GEMMA4
SPECIAL["gemma4_unified"] = SPECIAL["gemma4_unified_text"] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
}
SPECIAL["kimi_linear"] = {
    name: value for name, value in LATENT.items() if name != "q_lora_rank"
} | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_local_experts": 4,
}
SPECIAL["llama4"] = SPECIAL["llama4_text"] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": WINDOW,
    "floor_scale": 3,
}
DECODERS: dict[str, dict[str, Any]] = {
    "mistral3": {**LATENT, "first_k_dense_replace": 0, "model_type": "mistral4"}
}
"""Other decoders that are published with the same towers."""


def samples() -> list[Sample]:
    """Two prompts of 9 and 5 tokens, with three and two completions, and one that stands alone."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(5, 300, (count,), generator=generator).tolist()

    made: list[Sample] = []
    for prompt_length, lengths in ((9, (4, 11, 1)), (5, (3, 8)), (1, (7,))):
        prompt = draw(prompt_length)
        for length in lengths:
            mask = [False] * prompt_length + [True] * length
            made.append(Sample(prompt + draw(length), mask))
    return made


def build(model_type: str, /, dtype: torch.dtype = torch.float32, **overrides: Any) -> CausalLM:
    module = module_of(model_type, dtype, **overrides)
    check_family(module.config, [name for kind in KINDS.rooms for name in kind.layer_types])
    return CausalLM(module, tiny.tokenizer())


def module_of(model_type: str, /, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A Hugging Face model, always the same, sharper than the usual start so that a mistake
    shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings_of(model_type, **overrides))
    module = (
        auto_class(model_type).from_config(config, dtype=dtype, attn_implementation="eager").eval()
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.15) if parameter.dim() > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.1
            )
    return module


def auto_class(model_type: str) -> Any:
    multimodal = family(model_type).multimodal
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def settings_of(model_type: str, /, **overrides: Any) -> dict[str, Any]:
    """The settings of a tiny model; those of the text decoder, if it is multimodal."""
    own = SPECIAL.get(model_type, {})
    towers = MULTIMODAL.get(model_type)
    if towers is None:
        return {**tiny.SMALL, **own, **overrides}
    return {"text_config": {**tiny.SMALL, "head_dim": 8, **own, **overrides}, **towers}


def save_multimodal(path: Path, model_type: str, **overrides: Any) -> Path:
    """A tiny multimodal checkpoint in bfloat16, as published, with the files of its processor."""
    module_of(model_type, torch.bfloat16, **overrides).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"size": 28}', encoding="utf-8")
    return path


def one_at_a_time(module: Any, batch: list[Sample], temperature: float) -> Tensor:
    """The log-probabilities that Hugging Face's own model gives."""
    logprobs: list[Tensor] = []
    for sample in batch:
        tokens = torch.tensor(sample.token_ids)
        logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1] / temperature
        chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        logprobs.append(chosen[torch.tensor(sample.loss_mask[1:])])
    return torch.cat(logprobs)


def logprobs(model: CausalLM, forest: Forest, **options: Any) -> tuple[Tensor, Tensor | None]:
    found = model.predict(forest, **options)
    assert found.logprobs is not None
    return found.logprobs, found.entropy


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    """Args: model: ours, or a Hugging Face module."""
    module = model.module if isinstance(model, CausalLM) else model
    module.zero_grad()
    (logprobs * torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)).sum().backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float
) -> None:
    assert got.keys() == want.keys()
    scale = max(float(g.norm()) for g in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= tolerance * max(
            float(gradient.norm()), 1e-2 * scale
        ), name
