"""What happens to a prompt or sample that is longer than its limit, as ``data.too_long`` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from tunesmith.config.schema import DataSection
from tunesmith.data.formats import Example
from tunesmith.data.report import Report
from tunesmith.data.sources import BadLine
from tunesmith.data.tokens import Tokenizer, encode_with_offsets
from tunesmith.errors import DataError
from tunesmith.types import Message, Prompt, Sample

V = TypeVar("V", int, bool)
Encode = Callable[[Example, Prompt], list[int]]
"""Token ids of a prompt as the policy sees it."""


def fit_sample(
    section: DataSection, example: Example, sample: Sample, leading: list[int], report: Report
) -> Sample | None:
    """The sample within ``data.max_tokens``, cut by tokens; None where it is skipped (and counted).

    Raises:
        DataError: it is too long, and that is an error.
    """
    limit, length = section.max_tokens, len(sample.token_ids)
    if limit is None or length <= limit:
        return sample
    reason = f"{length} tokens, the limit is {limit} (data.max_tokens)"
    if _skipped(section, example, reason, report):
        return None
    left = section.too_long == "truncate_left"
    head = len(leading) if sample.token_ids[: len(leading)] == leading else 0
    mask = [False, *_cut(sample.loss_mask, limit, left, head)[1:]]
    if not any(mask):
        report.bad(BadLine(example.where, f"{reason}, and truncated to it nothing is left to learn"))
        return None
    report.truncated += 1
    return Sample(_cut(sample.token_ids, limit, left, head), mask)


def fit_prompt(
    section: DataSection,
    example: Example,
    prompt: Prompt,
    ids: list[int],
    tokenizer: Tokenizer,
    encode_prompt: Encode,
    leading: list[int],
    report: Report,
) -> tuple[Prompt, list[int]] | None:
    """The prompt within ``data.max_prompt_tokens``; None where it is skipped (and counted).

    Plain text is cut by tokens, and its text is what the tokens left stand for. In a conversation the last
    user message is shortened, so that the template around it stays whole.

    Raises:
        DataError: it is too long, and that is an error.
    """
    limit = section.max_prompt_tokens
    if limit is None or len(ids) <= limit:
        return prompt, ids
    reason = f"the prompt has {len(ids)} tokens, the limit is {limit} (data.max_prompt_tokens)"
    if _skipped(section, example, reason, report):
        return None
    left = section.too_long == "truncate_left"
    if isinstance(prompt, str):
        head = len(leading) if ids[: len(leading)] == leading else 0
        ids = _cut(ids, limit, left, head)
        kept = tokenizer.decode(ids[head:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        report.truncated += 1
        return cast("str", kept), ids
    fitted = _shorten(prompt, ids, limit, left, tokenizer, lambda shorter: encode_prompt(example, shorter))
    if fitted is None:
        report.bad(BadLine(example.where, f"{reason}, and shortening its last user message does not make it fit"))
        return None
    report.truncated += 1
    return fitted


def _skipped(section: DataSection, example: Example, reason: str, report: Report) -> bool:
    if section.too_long == "error":
        raise DataError(
            f"{example.where}: {reason}. Raise the limit, or set data.too_long to skip, truncate_left or "
            "truncate_right."
        )
    if section.too_long == "skip":
        report.too_long(example.where, reason)
        return True
    return False


def _cut(values: list[V], limit: int, left: bool, head: int) -> list[V]:
    """At most ``limit`` values. Cutting on the left keeps the first ``head`` (BOS)."""
    if not left:
        return values[:limit]
    head = min(head, limit)
    tail = limit - head
    return values[:head] + (values[-tail:] if tail else [])


def _shorten(
    prompt: list[Message],
    ids: list[int],
    limit: int,
    left: bool,
    tokenizer: Tokenizer,
    encode_prompt: Callable[[list[Message]], list[int]],
) -> tuple[list[Message], list[int]] | None:
    """Take tokens off the last user message until the whole prompt fits; None when it never does."""
    last = max((i for i, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        return None
    while len(ids) > limit:
        content = cast("str", prompt[last]["content"])
        offsets = next(encode_with_offsets(tokenizer, [content])).offsets
        keep = len(offsets) - (len(ids) - limit)
        if keep <= 0:
            return None
        shorter = content[offsets[-keep][0] :] if left else content[: offsets[keep - 1][1]]
        if len(shorter) == len(content):  # the cut fell inside one character of several tokens
            shorter = content[1:] if left else content[:-1]
        if not shorter.strip():
            return None
        prompt = [*prompt[:last], {**prompt[last], "content": shorter}, *prompt[last + 1 :]]
        ids = encode_prompt(prompt)
    return prompt, ids
