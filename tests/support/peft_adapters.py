"""Adapters as peft writes them: a table of configurations, each saved for a tiny model with peft's
own logits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.tiny import save_model, tokenizer

TOKENS = [5, 9, 30, 77, 8, 20, 6, 77]


@dataclass(frozen=True, slots=True)
class Written:
    """A configuration of peft, and what Tunesmith does with it."""

    config: dict[str, Any]
    family: str = "llama"
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    trains: bool = False
    """Whether ``lora.path`` continues it; otherwise it is refused there, naming ``refused``."""
    refused: str = ""
    tokens: int = 0
    """Tokens that are added to the vocabulary before the adapter is made."""


Q: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"]}
BIASES = {"attention_bias": True, "mlp_bias": True}

WRITTEN: dict[str, Written] = {
    "two modules": Written(Q, trains=True),
    "every linear module": Written({"target_modules": "all-linear"}, trains=True),
    "a pattern of names": Written({"target_modules": r".*\.1\..*(k_proj|up_proj)"}, trains=True),
    "rslora": Written({**Q, "use_rslora": True}, trains=True),
    "rank_pattern": Written({**Q, "rank_pattern": {"down_proj": 2}}, trains=True),
    "alpha_pattern": Written({**Q, "alpha_pattern": {"layers.0.self_attn.q_proj": 3}}, trains=True),
    "rslora and patterns": Written(
        {**Q, "use_rslora": True, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"q_proj": 1}},
        trains=True,
    ),
    "layers_to_transform": Written({**Q, "layers_to_transform": [1]}, trains=True),
    "layers_pattern": Written(
        {**Q, "layers_to_transform": 0, "layers_pattern": "layers"}, trains=True
    ),
    "exclude_modules": Written(
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]}, trains=True
    ),
    "dropout": Written({**Q, "lora_dropout": 0.3}, trains=True),
    "gaussian": Written({**Q, "init_lora_weights": "gaussian"}, trains=True),
    "fan_in_fan_out": Written(
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
        "gpt2",
        {"bos_token_id": 1},
        trains=True,
    ),
    "a family with biases": Written({"target_modules": ["q_proj", "v_proj"]}, "qwen2", trains=True),
    "no task_type": Written({**Q, "task_type": None}, trains=True),
    "embedding": Written({"target_modules": ["q_proj", "embed_tokens"]}, refused="embed_tokens"),
    "head": Written({"target_modules": ["q_proj", "lm_head"]}, refused="lm_head"),
    "embedding and head": Written(
        {"target_modules": ["embed_tokens", "lm_head"]}, refused="embed_tokens"
    ),
    "embedding and head, tied": Written(
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        refused="ensure_weight_tying",
    ),
    "a new embedding": Written(
        {**Q, "modules_to_save": ["embed_tokens"]}, refused="modules_to_save"
    ),
    "a new head": Written({**Q, "modules_to_save": ["lm_head"]}, refused="modules_to_save"),
    "both new": Written(
        {**Q, "modules_to_save": ["embed_tokens", "lm_head"]}, refused="modules_to_save"
    ),
    "both new, tied": Written(
        {**Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        refused="modules_to_save",
    ),
    "a new norm": Written({**Q, "modules_to_save": ["norm"]}, refused="modules_to_save"),
    "new layers' parts": Written(
        {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, refused="modules_to_save"
    ),
    "dora": Written({**Q, "use_dora": True}, refused="use_dora"),
    "dora on the embedding": Written(
        {"target_modules": ["k_proj", "embed_tokens"], "use_dora": True}, refused="use_dora"
    ),
    "target_parameters": Written(
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
        refused="target_parameters",
    ),
    "experts": Written(
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        refused="target_parameters",
    ),
    "biases of adapted modules": Written({**Q, "bias": "lora_only"}, model=BIASES, refused="bias"),
    "all biases": Written({**Q, "bias": "all"}, model=BIASES, refused="bias"),
    "lora_bias": Written({**Q, "lora_bias": True}, model=BIASES, refused="lora_bias"),
    "tokens": Written({**Q, "trainable_token_indices": [5, 77]}, refused="trainable_token_indices"),
    "tokens, tied": Written(
        {**Q, "trainable_token_indices": [5, 77], "ensure_weight_tying": True},
        refused="trainable_token_indices",
    ),
    "tokens of both": Written(
        {**Q, "trainable_token_indices": {"embed_tokens": [5], "lm_head": [5]}},
        refused="trainable_token_indices",
    ),
    "pissa": Written({**Q, "init_lora_weights": "pissa"}, refused="init_lora_weights"),
    "olora": Written({**Q, "init_lora_weights": "olora"}, refused="init_lora_weights"),
    "repeated layers": Written(
        {**Q, "layer_replication": [(0, 2), (1, 2)]}, refused="layer_replication"
    ),
    "more tokens": Written({"target_modules": ["q_proj"]}, tokens=3, refused="embed_tokens"),
    "more tokens, saved": Written(
        {**Q, "modules_to_save": ["embed_tokens", "lm_head"]}, tokens=3, refused="modules_to_save"
    ),
}


def write(folder: Path, written: Written, *, tied: bool, name: str = "default") -> Tensor:
    """Save a base as ``folder/model`` and an adapter as ``folder/adapter``; return peft's logits
    ``[T, V]``."""
    base = save_model(folder / "model", written.family, tie_word_embeddings=tied, **written.model)
    module: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if written.tokens:
        torch.manual_seed(1)
        module.resize_token_embeddings(300 + written.tokens)
    config = LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, **written.config})
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = cast(PeftModel, get_peft_model(module, config, adapter_name=name)).eval()
        with torch.no_grad():
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            logits = cast(Any, peft)(torch.tensor([TOKENS])).logits[0]
        peft.save_pretrained(str(folder / "adapter"))
    tokenizer().save_pretrained(folder / "adapter")
    return logits


def logits_of(path: Path) -> Tensor:
    """The logits of a whole model by transformers alone."""
    module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return module.eval()(torch.tensor([TOKENS])).logits[0]
