"""Tokenizers of the three common kinds, made from nothing, and chat templates of the public
families."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tunesmith.learn.data.chat import HERMES

TEMPLATES = Path(__file__).parent / "templates"

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_sep|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|User|>",
    "<|Assistant|>",
]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Added tokens that are not special, as in Qwen3."""

WORDS = (
    "assistant user system model What is the sum of two? The answer is 42.\n\n  \n\n\n"
    "Hello there, world!  "
)
PRETOKENS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def template(name: str) -> str:
    """A public chat format's template, or the one that the package ships."""
    file = HERMES if name == "hermes" else TEMPLATES / f"{name}.jinja"
    return file.read_text().rstrip("\n")


def _finish(core: Tokenizer, chat_template: str | None) -> PreTrainedTokenizerFast:
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = chat_template
    return made


@cache
def _byte_level(trim: bool) -> str:
    """BPE on bytes with line breaks that merge, as in GPT-2, Llama 3 and Qwen."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([WORDS] * 20, trainer)
    if trim:
        from tokenizers import processors

        core.post_processor = processors.ByteLevel(trim_offsets=True)
    return core.to_str()


@cache
def _metaspace() -> str:
    """BPE with byte fallback with blanks as visible marks, as in Llama 2, Mistral and Gemma."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator([w + " " for w in WORDS.split(" ")] * 20, trainer)
    return core.to_str()


def byte_level(chat_template: str | None = None, trim: bool = False) -> PreTrainedTokenizerFast:
    return _finish(Tokenizer.from_str(_byte_level(trim)), chat_template)


def metaspace(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    return _finish(Tokenizer.from_str(_metaspace()), chat_template)


KINDS = {
    "byte_level": byte_level,
    "byte_level_trimmed": lambda chat_template=None: byte_level(chat_template, trim=True),
    "metaspace": metaspace,
}
