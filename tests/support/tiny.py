"""Tiny models and tokenizers, made from nothing in Hugging Face format."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tokenizer_with_pairs(*letters: str) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and all neighbours among these letters as one token."""
    return tokenizer(pairs=[(one, other) for one in letters for other in letters])


def tokenizer(
    chat_template: str | None = CHATML, pairs: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """Bytes as tokens, after the special ones. Args: pairs: of bytes that are one token."""
    special = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    vocab |= {one + other: len(vocab) + i for i, (one, other) in enumerate(pairs)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[*pairs]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = chat_template
    return made


def save_model(path: Path, model_type: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A randomly initialised model of a family, with its tokenizer, in ``path``.

    Each is made once in a process and copied from then on, with the state in which it leaves
    PyTorch's generator.
    """
    files, state = _made(model_type, seed, pickle.dumps(overrides))
    path.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    torch.set_rng_state(state)
    return path


@lru_cache(100)
def _made(model_type: str, seed: int, overrides: bytes) -> tuple[dict[str, bytes], torch.Tensor]:
    torch.default_generator.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SMALL, **pickle.loads(overrides)})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        return {
            file.name: file.read_bytes() for file in Path(folder).iterdir()
        }, torch.get_rng_state()
