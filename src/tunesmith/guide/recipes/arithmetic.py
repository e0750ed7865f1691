"""Two-digit addition, with an untrained tiny model and its tokenizer.

An example's answer is direct (``37+58=`` → ``:95``), which is hard for a tiny model, or worked
digit by digit (``;7+8+0=15;3+5+1=09;95``), which is easy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ALPHABET = "0123456789+=:;"
ANSWER = r"(\d+)$"
"""The pattern of the answer in a completion: the number at its end."""
DIGITS = 2


@dataclass(frozen=True, slots=True)
class SumProblem:
    prompt: str
    answer: str
    direct: str
    """The completion with the answer only."""
    worked: str
    """The completion with the working and the answer."""


def problem(a: int, b: int) -> SumProblem:
    """``a + b``, digit by digit from the right.

    Example:
        >>> problem(37, 58)
        SumProblem(prompt='37+58=', answer='95', direct=':95', worked=';7+8+0=15;3+5+1=09;95')
    """
    steps = ""
    carry = 0
    for place in range(DIGITS):
        x = a // 10**place % 10
        y = b // 10**place % 10
        steps += f";{x}+{y}+{carry}={x + y + carry:02}"
        carry = (x + y + carry) // 10
    return SumProblem(f"{a}+{b}=", str(a + b), f":{a + b}", f"{steps};{a + b}")


def problems(seed: int, train: int, held_out: int) -> tuple[list[SumProblem], list[SumProblem]]:
    """Random sums in two disjoint lists, for training and held out."""
    rng = random.Random(seed)
    numbers = range(10 ** (DIGITS - 1), 10**DIGITS)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < train + held_out:
        pairs[rng.choice(numbers), rng.choice(numbers)] = None
    every = [problem(a, b) for a, b in pairs]
    return every[held_out:], every[:held_out]


def write_tasks(path: Path, lines: Sequence[SumProblem]) -> Path:
    """Lines with ``prompt`` and ``answer``."""
    return write_lines(path, [{"prompt": p.prompt, "answer": p.answer} for p in lines])


def write_examples(path: Path, lines: Sequence[SumProblem], worked_share: float, seed: int) -> Path:
    """Lines with ``prompt`` and ``completion``; ``worked_share`` of the completions show the
    working."""
    rng = random.Random(seed)
    completions = [p.worked if rng.random() < worked_share else p.direct for p in lines]
    pairs = zip(lines, completions, strict=True)
    return write_lines(path, [{"prompt": p.prompt, "completion": text} for p, text in pairs])


def write_lines(path: Path, records: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def make_model(
    directory: Path,
    seed: int,
    hidden: int = 128,
    layers: int = 4,
    alphabet: str = ALPHABET,
    context: int = 64,
    head_dim: int | None = None,
    chat_template: str | None = None,
) -> Path:
    """An untrained Llama with a token per character of ``alphabet``; a million parameters by
    default."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    words = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *alphabet])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words["<eos>"],
        pad_token_id=words["<pad>"],
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
