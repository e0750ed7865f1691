"""Tiny models that llama.cpp reads, and tokenizers of the kinds that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tests.support import tiny
from tunesmith.models.gguf.splitting import SPLITTINGS

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma3_text": {
        "num_hidden_layers": 7,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEXT = (
    "Hello, WORLD! I've said: 'you'LL see' 3 33 3333 333333; naïve café Ünïcode Ελλάδα мир 你好世界 "
    "\n\n  indented\t\ttabs\r\n\r\n x=1+2==3?... \u00a0end 🙂🚀  \n"
)
_SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]


def byte_pairs(name: str = "gpt-2", size: int = 300) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that splits texts in one of llama.cpp's ways; BOS stands before texts
    where it is usual."""
    splitting = SPLITTINGS[name]
    core = Tokenizer(models.BPE(ignore_merges=splitting.ignore_merges))
    steps: list[Any] = []
    for kind, setting in splitting.steps:
        if kind == "Split":
            steps.append(pre_tokenizers.Split(Regex(setting), "isolated"))
        elif kind == "Digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(pre_tokenizers.ByteLevel(False, use_regex=bool(setting)))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=_SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator([TEXT] * 3, trainer)
    if splitting.adds_bos:
        core.post_processor = TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B:1", special_tokens=[("<bos>", 1)]
        )
    return _wrapped(core)


def pieces(*, prefix: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of pieces with bytes for what they lack, as SentencePiece makes them."""
    named = ["<unk>", *_SPECIAL, *(f"<0x{number:02X}>" for number in range(256))]
    words = ["▁t", "he", "▁the", "ll", "▁H", "llo", "el", "ello", "▁Hello", "33", "▁▁", "in"]
    letters = dict.fromkeys(letter for word in words for letter in word)
    vocab = {token: number for number, token in enumerate([*named, *words, *letters])}
    merges = [
        (word[:place], word[place:])
        for word in words
        for place in range(1, len(word))
        if word[:place] in vocab and word[place:] in vocab
    ]
    core = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return _wrapped(core)


def _wrapped(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = tiny.CHATML
    return made


def save(
    path: Path,
    family: str = "llama",
    tokenizer: PreTrainedTokenizerFast | None = None,
    **settings: Any,
) -> Path:
    """A model with weights so large that its tokens differ."""
    wanted = {"vocab_size": 320, "initializer_range": 0.3, **FAMILIES[family], **settings}
    tiny.save_model(path, family, **wanted)
    (tokenizer or byte_pairs()).save_pretrained(path)
    return path
