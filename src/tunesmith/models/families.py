"""The Hugging Face architectures that work on a token forest, by their configuration.

A family is listed if its log-probabilities and gradients on a forest equal those of one sequence at a time
(``tests/test_families.py``). In an architecture that is not listed, packed sequences may silently see each other.
"""

from __future__ import annotations

from typing import Any

from tunesmith.errors import ModelError, nearest

# fmt: off
KNOWN = frozenset((
    "apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "granite",
    "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "llama", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "vaultgemma",
))
# fmt: on

_ENCODER = "it is not a decoder-only language model"
_REFUSED = {
    "it carries a recurrent state along the sequence, which would leak between packed sequences": (
        "mamba mamba2 falcon_mamba rwkv xlstm recurrent_gemma jamba bamba zamba zamba2 falcon_h1 nemotron_h "
        "granitemoehybrid qwen3_next qwen3_5_text qwen3_5_moe_text minimax kimi_linear olmo_hybrid"
    ),
    "its short convolutions mix neighbouring tokens, which would leak between packed sequences": "lfm2 lfm2_moe",
    "it adds position biases (ALiBi) to the attention scores, which the attention interface does not pass on": (
        "bloom mpt"
    ),
    _ENCODER: (
        "t5 mt5 umt5 bart mbart pegasus marian whisper blenderbot bert roberta electra xlm-roberta camembert "
        "modernbert-decoder"
    ),
    "its attention does not go through the Hugging Face attention interface": (
        "gptj gpt_neo codegen stablelm nemotron openai-gpt xlnet falcon"
    ),
    "its attention has sinks (a learned share of the softmax that no token gets), which forest attention lacks": (
        "gpt_oss granite_swa granitemoe_swa"
    ),
    "it attends in fixed chunks of the sequence, which forest attention lacks": "llama4 llama4_text",
    "it is multimodal; only text decoders are trained": "gemma3 gemma4 mllama qwen3_5 qwen3_5_moe phi4_multimodal fuyu",
}
REFUSED = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
"""Architecture → the reason why it is not supported."""


def check_family(config: Any) -> None:
    """Refuse a model by its configuration, before weights load.

    Raises:
        ModelError: with the architecture, the reason and families that work.
    """
    if reason := refusal(config):
        raise ModelError(
            f"architecture '{config.model_type}' cannot be trained here: {reason}. "
            "Choose a model of another family, such as Llama, Qwen, Mistral, Gemma, Phi or SmolLM"
        )


def refusal(config: Any) -> str | None:
    """The reason why a model is not supported; None if it is."""
    name = str(config.model_type)
    if name in REFUSED:
        return REFUSED[name]
    if getattr(config, "is_encoder_decoder", False):
        return _ENCODER
    if name not in KNOWN:
        return f"it has not been shown to give the same results on packed sequences.{nearest(name, KNOWN)}"
    if getattr(config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention lets tokens see later ones"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn bypasses the Hugging Face attention interface"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}; only full and sliding attention run on a forest"
    return None
