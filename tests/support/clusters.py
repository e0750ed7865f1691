"""The commands in the comments of examples/clusters, and the configurations of their models."""

from __future__ import annotations

import re
from typing import Any

from tests.support.documents import ROOT

FILES = sorted((ROOT / "examples" / "clusters").glob("*.toml"))
COMMAND = re.compile(r"#   tunesmith plan (.*)")
EXPECTED = re.compile(r"#     (.*)")
LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SIZES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "Skywork/Skywork-Reward-Llama-3.1-8B": LLAMA_8B,
    "meta-llama/Llama-3.1-70B-Instruct": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "meta-llama/Llama-2-13b-hf": LLAMA
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "Qwen/Qwen2.5-7B-Instruct": LLAMA
    | {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
}


def cases() -> list[tuple[str, list[str]]]:
    """Each command in the comments, with the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for file in FILES:
        for line in file.read_text().splitlines():
            command = COMMAND.fullmatch(line)
            if command:
                found.append((command[1], []))
            elif expected := EXPECTED.fullmatch(line):
                found[-1][1].append(expected[1])
    return found
