"""How texts are split before byte pairs are merged: the names that llama.cpp has for it, and the
same in the package ``tokenizers``.

A name stands for steps that do the same in both. llama.cpp's own list has more names, of which
several stand for the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunesmith.plan.facts.layers import Written

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LAST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(letters: str, digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|"
        rf" ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*|{_LAST}"
    )


def _cased(contractions: str, digits: str) -> str:
    return (
        rf"{_UPPER}*{_LOWER}+{contractions}|{_UPPER}+{_LOWER}*{contractions}|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LAST}"
    )


Step = tuple[str, str]
"""A kind of step, and the pattern or the setting that makes the difference."""


@dataclass(frozen=True, slots=True)
class Splitting:
    steps: tuple[Step, ...]
    ignore_merges: bool = False
    """A word that is a token is not merged of its bytes."""
    adds_bos: bool = False
    """What llama.cpp does where a file does not say whether texts start with BOS."""


_GPT2 = ("ByteLevel", "words")
_BYTES = ("ByteLevel", "")
SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": Splitting((_GPT2,)),
    "smollm": Splitting((("Digits", "each"), _GPT2)),
    "llama-bpe": Splitting(
        (("Split", _words(r"\p{L}", r"\p{N}{1,3}")), _BYTES), ignore_merges=True, adds_bos=True
    ),
    "dbrx": Splitting((("Split", _words(r"\p{L}", r"\p{N}{1,3}")), _BYTES)),
    "qwen2": Splitting((("Split", _words(r"\p{L}", r"\p{N}")), _BYTES)),
    "qwen35": Splitting((("Split", _words(r"[\p{L}\p{M}]", r"\p{N}")), _BYTES)),
    "tekken": Splitting(
        (("Split", _cased("", r"\p{N}")), _BYTES), ignore_merges=True, adds_bos=True
    ),
    "gpt-4o": Splitting((("Split", _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")), _BYTES)),
}
ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe",
    "lfm2": "llama-bpe", "smaug-bpe": "dbrx", "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2",
    "llama4": "gpt-4o", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm",
    "mpt": "gpt-2", "olmo": "gpt-2", "phi-2": "gpt-2",
}  # fmt: skip
"""Other names in files, for the same steps."""


def steps_of(pre_tokenizer: Written | None) -> tuple[Step, ...] | None:
    """The steps of a pre-tokenizer as ``tokenizers`` describes it; None if there are others among
    them than llama.cpp has."""
    steps = tuple(_step(each) for each in _flat(pre_tokenizer or {}))
    known = [step for step in steps if step is not None]
    return tuple(known) if len(known) == len(steps) else None


def _flat(described: Written) -> Iterator[Written]:
    if described.get("type") == "Sequence":
        for inner in described["pretokenizers"]:
            yield from _flat(inner)
    elif described:
        yield described


def _step(described: Written) -> Step | None:
    match described:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": words}:
            return _GPT2 if words else _BYTES
        case {"type": "Digits", "individual_digits": True}:
            return "Digits", "each"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return None if described.get("invert") else ("Split", pattern)
        case _:
            return None
