"""A world to learn in: two-digit addition, with a tiny model and tokenizer made from nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ALPHABET = "0123456789+="


@dataclass(frozen=True, slots=True)
class Problem:
    """``prompt`` ends where the answer begins."""

    prompt: str
    answer: str


def problems(seed: int, held_out: int) -> tuple[list[Problem], list[Problem]]:
    """All sums of two two-digit numbers, in two disjoint lists: to train on and to hold out."""
    every = [Problem(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(every)
    return every[held_out:], every[:held_out]


def write_problems(path: Path, lines: Sequence[Problem]) -> Path:
    """Lines with ``prompt``, ``answer`` and, for supervised training, the same as ``completion``."""
    records = ({"prompt": p.prompt, "answer": p.answer, "completion": p.answer} for p in lines)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_model(directory: Path, seed: int, hidden: int = 128, layers: int = 4) -> Path:
    """An untrained Llama of about a million parameters and a tokenizer of one token per character."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
