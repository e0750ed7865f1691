"""Conversion of the lines of a ``[data]`` section to examples, and of examples to tokens within the
limits.

The report (``data.report``) counts and lists every unusable line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tunesmith.config.schema import DataSection, Source
from tunesmith.errors import ConfigError, DataError, Problem
from tunesmith.learn.data.chat import ChatTemplate, Rendered
from tunesmith.learn.data.formats import Example, Format, Goal, convert, detect
from tunesmith.learn.data.images import blind
from tunesmith.learn.data.loader import Loader, Part, fingerprint_of
from tunesmith.learn.data.mapping import map_rows
from tunesmith.learn.data.prompts import PromptEncoder, choose_template, with_places, with_system
from tunesmith.learn.data.report import LoadReport, TooLong
from tunesmith.learn.data.sources import BadLine, SourceRow, read
from tunesmith.learn.data.tokens import (
    Encoded,
    decode,
    encode,
    encode_with_offsets,
    leading_ids,
    mask_spans,
    with_leading,
)
from tunesmith.models.embedding_rows import unused_note, without_row
from tunesmith.models.vision.processing import vocabulary_of
from tunesmith.models.vision.rows import FIRST_ROW, Image, rows_in, splits_image
from tunesmith.types import Message, Prompt, Sample, Tokenizer, Tools

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V", int, bool)
Sources = str | Source | tuple[str | Source, ...]

SPARSE = 32
"""Characters per token of the limit up to which a text is tokenized whole; ordinary text has three
to five."""
SHORTEST_START = 4096
"""Characters of the shortest start of a text that is tokenized by itself: longer than any token or
word."""
FAR = 4
"""Times the limit that a start's tokens must exceed. A cut changes a few tokens beside it, never
that many."""


@dataclass(frozen=True, slots=True)
class Prepared(Generic[T]):
    """Items for a run, ordered by source, and the report on loading them."""

    items: list[T]
    parts: tuple[Part, ...]
    report: LoadReport
    fingerprint: str
    """Identifies the data, because a saved position is valid only for the same data."""
    shares: tuple[float, ...] = (1.0,)
    """Each source's share of the draws."""

    def __len__(self) -> int:
        return len(self.items)

    def loader(
        self, batch_size: int = 1, *, shuffle: bool = True, seed: int = 0, draws: int | None = None
    ) -> Loader[T]:
        """A loader over the items, mixed by the sources' weights; ``draws`` as in ``Loader``."""
        return Loader(
            self.items,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            parts=self.parts,
            fingerprint=self.fingerprint,
            draws=draws,
        )


def as_sources(source: Sources) -> tuple[Source, ...]:
    """The sources of a section's ``train`` or ``eval``."""
    sources = source if isinstance(source, tuple) else (source,)
    return tuple(Source(path=one) if isinstance(one, str) else one for one in sources)


@dataclass(frozen=True, slots=True)
class Reading:
    """The usable lines of a section's sources, their tokenizer and template, and the report."""

    section: DataSection
    sources: tuple[Source, ...]
    tokenizer: Tokenizer
    examples: list[Example]
    report: LoadReport
    fingerprint: str
    template: ChatTemplate | None
    leading: list[int]
    images: Mapping[str, tuple[Image, ...]]
    """The images of the examples that have some, by the example's id."""

    @classmethod
    def of(cls, section: DataSection, source: Sources, tokenizer: Tokenizer, goal: Goal) -> Reading:
        """Read every line.

        Raises:
            DataError: nothing is usable, or a line that may not be skipped is bad.
            ConfigError: a setting does not apply to this data or tokenizer.
        """
        check_section(section, goal)
        limit = "max_prompt_tokens" if goal == "rl" else "max_tokens"
        if section.too_long != "error" and getattr(section, limit) is None:
            why = f"data.too_long = '{section.too_long}' needs a limit: set data.{limit}."
            raise ConfigError(why, keys=("data.too_long",))
        sources = as_sources(source)
        report = LoadReport(skip_bad=section.skip_bad, skip_too_long=section.too_long == "skip")
        examples: list[Example] = []
        taken = set[str]()
        for index, one in enumerate(sources):
            before = len(examples)
            seen = set[str]()
            for example in examples_of(section, one, goal, report):
                # Ids must be unique, even if a source repeats an id or two sources share it.
                unique = example.id if example.id not in seen else f"{example.id} ({example.where})"
                seen.add(example.id)
                if len(sources) > 1 and unique != example.where:
                    unique = f"{one.path}#{unique}"
                if unique in taken:  # in a source of the same path, such as another subset
                    unique = f"{unique} (source {index + 1})"
                taken.add(unique)
                examples.append(replace(example, id=unique, source=index))
            if len(examples) == before:
                raise report.nothing_left(one.path)
        lines: list[Any] = [[e.text, e.prompt, e.completion, e.tools, e.columns] for e in examples]
        lines += [section.chat_template_kwargs] if section.chat_template_kwargs else []
        template = choose_template(section, tokenizer, examples)
        report.note(unused_note(tokenizer))
        images = _opened(examples, tokenizer, goal, report)
        examples = [e for e in examples if e.id in images or not e.images]
        vocabulary = vocabulary_of(tokenizer)
        if vocabulary is not None and template is not None:
            mark = vocabulary.mark or decode(tokenizer, [vocabulary.placeholder])
            examples = list(_placed(examples, mark, report))
        lines += [[image.digest.hex() for image in some] for some in images.values()]
        return cls(
            section,
            sources,
            tokenizer,
            examples,
            report,
            fingerprint_of(lines),
            template,
            leading_ids(tokenizer),
            images,
        )

    def expanded(
        self, example: Example, ids: list[int], mask: Sequence[bool] = ()
    ) -> tuple[list[int], list[bool]]:
        """Tokens with the rows of the example's images in their places, and the mask of loss.

        Raises:
            DataError: there are more places than images, or fewer.
        """
        vocabulary = vocabulary_of(self.tokenizer)
        if vocabulary is None:
            return ids, list(mask)
        return vocabulary.expanded(ids, self.images.get(example.id, ()), mask)

    def each(self, make: Callable[[Example], U]) -> list[tuple[Example, U]]:
        """Every example with the result of ``make``; if ``make`` raises a DataError, the example is
        a bad line."""
        results: list[tuple[Example, U]] = []
        for example in self.examples:
            with self.report.line(example.where):
                results.append((example, make(example)))
        return results

    def check_length(self, text: str) -> None:
        """Refuse a text whose start alone is far too long, so that the rest of its megabytes is
        never tokenized.

        Only a text that exceeds the limit is refused here, and not every such text is.

        Raises:
            TooLong: the first characters alone have more than ``FAR`` times the tokens of the
                limit.
        """
        key = "max_tokens" if self.section.max_tokens is not None else "max_prompt_tokens"
        limit = getattr(self.section, key)
        if limit is None or self.section.too_long not in ("error", "skip"):
            return
        start = max(SHORTEST_START, SPARSE * limit)
        while start < len(text):
            count = len(encode(self.tokenizer, [text[:start]])[0])
            if count > FAR * limit:
                size = f"the first {start} of its {len(text)} characters alone have {count} tokens"
                raise TooLong(f"{size}, the limit is {limit} (data.{key})")
            start *= 2

    def tokenize(
        self, rendered: Sequence[tuple[Example, Sequence[Rendered]]]
    ) -> Iterator[tuple[Example, list[tuple[Rendered, Encoded]]]]:
        """Every example's texts with their tokens; the texts of all examples are tokenized
        together."""
        flat = [text.text for _, texts in rendered for text in texts]
        tokens = encode_with_offsets(self.tokenizer, flat)
        for example, texts in rendered:
            yield example, [(text, next(tokens)) for text in texts]

    def sample(
        self, example: Example, text: Rendered, joint: Encoded, *, ended: bool = False
    ) -> Sample:
        """Tokens and mask of a whole text; DataError if nothing in it is learned.

        Plain text gets the tokenizer's BOS and EOS. With ``ended`` the sample ends at the last
        learned token.
        """
        ids, mask = mask_spans(self.tokenizer, text.text, joint, text.spans)
        ids, mask = self.expanded(example, ids, mask)
        if self.template is None or example.text is not None:
            whole = with_leading(self.leading, ids)
            mask = [False] * (len(whole) - len(ids)) + mask
            eos = self.tokenizer.eos_token_id
            ids = [*whole, eos] if eos is not None and whole[-1:] != [eos] else whole
            mask = mask + [True] * (len(ids) - len(whole))
        mask = [False, *mask[1:]]  # nothing predicts the first token
        if not any(mask):
            raise DataError("nothing to learn: no token is predicted in the loss")
        stop = len(mask) - mask[::-1].index(True) if ended else len(ids)
        return Sample(ids[:stop], mask[:stop])

    def fit_sample(self, sample: Sample, longest: int = 0) -> Sample:
        """The sample cut to ``data.max_tokens``.

        Args:
            longest: tokens of the longest answer to the same prompt. A cut on the left takes as
                much of the prompt of each.

        Raises:
            DataError: it may not be cut, nothing is left to learn, or a token has no row in the
                model's embedding.
        """
        limit = self.section.max_tokens
        ids = sample.token_ids
        self._check_rows(ids)
        if limit is None:
            return sample
        left = self.section.too_long == "truncate_left"
        head = min(self._head(ids), limit)
        over = len(ids) - limit
        if left and longest > len(ids):
            over = max(over, min(longest - limit, sample.loss_mask.index(True) - head))
        if over <= 0:
            return sample
        reason = f"{max(len(ids), longest)} tokens, the limit is {limit} (data.max_tokens)"
        self._check_may_cut(reason)
        room = len(ids) - over
        if splits_image(ids, over + head if left else room):
            raise TooLong(f"{reason}, where it is in the middle of an image")
        mask = [False, *self._cut(sample.loss_mask, ids, room)[1:]]
        if not any(mask):
            raise DataError(f"{reason}, and truncated to it nothing is left to learn")
        self.report.truncated += 1
        return Sample(self._cut(ids, ids, room), mask)

    def fit_prompt(
        self, encoder: PromptEncoder, example: Example, ids: list[int]
    ) -> tuple[Prompt, list[int]]:
        """The policy's prompt within ``data.max_prompt_tokens``.

        Plain text is cut by tokens and decoded again. In a conversation the last user message is
        shortened, so that the template around it stays complete.

        Raises:
            DataError: it has no token, may not be cut, stays too long, or has a token without a
                row in the model's embedding.
        """
        if not ids:
            raise DataError("the tokenizer makes no token of the prompt; it knows none of its text")
        self._check_rows(ids)
        assert example.prompt is not None
        limit = self.section.max_prompt_tokens
        prompt = with_system(self.section, example.prompt) if self.template else example.prompt
        if limit is None or len(ids) <= limit:
            return prompt, ids
        reason = f"the prompt has {len(ids)} tokens, the limit is {limit} (data.max_prompt_tokens)"
        self._check_may_cut(reason)
        if rows_in(ids):
            raise TooLong(f"{reason}, and a prompt with images is not cut")
        if isinstance(prompt, str):
            cut = self._cut(ids, ids, limit)
            fitted = decode(self.tokenizer, cut[self._head(ids) :]), cut
        else:
            left = self.section.too_long == "truncate_left"
            fitted = _fitting(encoder, prompt, example.tools, ids, limit, left)
        if fitted is None:
            raise DataError(f"{reason}, and shortening its last user message does not make it fit")
        self.report.truncated += 1
        return fitted

    def _check_rows(self, ids: list[int]) -> None:
        template = str(self.tokenizer.chat_template) if self.template else None
        origins = {"data.system_prompt": self.section.system_prompt, "the chat template": template}
        words = [token for token in ids if token < FIRST_ROW] if rows_in(ids) else ids
        problem = without_row(self.tokenizer, words, origins)
        if problem:
            raise DataError(problem)

    def _check_may_cut(self, reason: str) -> None:
        if self.section.too_long in ("error", "skip"):
            raise TooLong(reason)

    def _cut(self, values: list[V], ids: list[int], limit: int) -> list[V]:
        """At most ``limit`` of the values, one per token of ``ids``; a cut on the left keeps
        BOS."""
        if self.section.too_long == "truncate_right":
            return values[:limit]
        head = min(self._head(ids), limit)
        return values[:head] + values[len(values) - (limit - head) :]

    def _head(self, ids: list[int]) -> int:
        return len(self.leading) if ids[: len(self.leading)] == self.leading else 0

    def prepare(self, items: list[tuple[int, T]]) -> Prepared[T]:
        """Prepare items ``(index of the source, item)``: one part per source, or a single part
        without weights."""
        report = self.report
        counts = [sum(i == index for i, _ in items) for index in range(len(self.sources))]
        for source, count in zip(self.sources, counts, strict=True):
            if not count:
                raise report.nothing_left(source.path)
        report.kept = report.read - report.left_out - len({skip.where for skip in report.skipped})
        flat = [item for _, item in items]
        weights = weights_of(self.sources)
        draws = weights or counts
        shares = tuple(draw / sum(draws) for draw in draws)
        if weights is None:
            return Prepared(flat, (Part("data", 0, len(flat)),), report, self.fingerprint, shares)
        parts: list[Part] = []
        for index, source in enumerate(self.sources):
            start = parts[-1].stop if parts else 0
            repeated = any(part.name == source.path for part in parts)
            name = f"{source.path}#{index}" if repeated else source.path
            parts.append(Part(name, start, start + counts[index], weights[index]))
            report.note(f"{name}: {shares[index]:.0%} of the draws, {counts[index]} items")
        return Prepared(flat, tuple(parts), report, self.fingerprint, shares)


def _placed(examples: Sequence[Example], placeholder: str, report: LoadReport) -> Iterator[Example]:
    """The examples with places for their images."""
    for example in examples:
        with report.line(example.where):
            yield with_places(example, placeholder) if example.images else example


def _opened(
    examples: Sequence[Example], tokenizer: Tokenizer, goal: Goal, report: LoadReport
) -> dict[str, tuple[Image, ...]]:
    """The images of the examples, opened and checked, by the examples' ids.

    Raises:
        DataError: a line has images that cannot be used, and may not be skipped.
    """
    vocabulary = vocabulary_of(tokenizer)
    images: dict[str, tuple[Image, ...]] = {}
    for example in examples:
        if not example.images:
            continue
        with report.line(example.where):
            if vocabulary is None:
                raise blind()
            if goal == "steps":
                raise DataError("answers in steps are read without images; leave the images out")
            images[example.id] = tuple(vocabulary.add(i.name, i.source) for i in example.images)
    return images


UNUSED: dict[str, tuple[tuple[Goal, ...], str]] = {
    "max_prompt_tokens": (
        ("sft", "pairs", "judged", "steps"),
        "it is for prompts of RL; set data.max_tokens instead",
    ),
    "max_tokens": (("rl",), "it is for supervised training; set data.max_prompt_tokens instead"),
    "curriculum": (("sft", "pairs", "judged", "steps"), "it is for prompts of RL"),
    "completion": (("rl", "pairs", "steps"), "it is for supervised training and KTO"),
    "loss_on": (("rl", "pairs", "judged", "steps"), "it is for supervised training"),
}
"""``[data]`` keys that have no effect for some goals, and the reason."""


def check_section(section: DataSection, goal: Goal) -> None:
    """Raise ConfigError for settings that have no effect."""
    for key, (goals, reason) in UNUSED.items():
        if goal in goals and getattr(section, key) is not None:
            what = f"data.{key} has no effect here: {reason}. Leave it out."
            raise ConfigError(Problem((f"data.{key}",), what, "unread"))
    for source in as_sources(section.eval or ()):
        if source.weight is not None:
            what = f"data.eval weighs '{source.path}', which has no effect: leave the weight out."
            raise ConfigError(Problem(("data.eval",), what, "unread"))


def examples_of(
    section: DataSection, source: Source, goal: Goal, report: LoadReport
) -> Iterator[Example]:
    """The usable lines of one source; a file's first usable line determines its format."""
    formats: dict[str, Format] = {}
    left_out = 0
    for row in map_rows(read(source), section.map) if section.map else read(source):
        report.read += 1
        if row is None:
            left_out += 1
            continue
        with report.line(row.where):
            if isinstance(row, BadLine):
                raise row
            form = formats.get(row.file) or _detect(section, row, goal)
            example = convert(row, form, goal)
            if row.file not in formats:
                formats[row.file] = form
                report.formats.append(f"{row.file}: {form.describe(goal)}")
            yield example
    if left_out:
        report.left_out += left_out
        report.note(f"{source.path}: data.map leaves {left_out} rows out.")


def _detect(section: DataSection, row: SourceRow, goal: Goal) -> Format:
    form = detect(row, goal, section.prompt, section.completion)
    if form.kind in ("text", "tagged"):
        for key in ("chat", "system_prompt"):
            if getattr(section, key):
                what = f"data.{key} does not apply to the plain text of {row.file}; leave it out."
                raise ConfigError(what, keys=(f"data.{key}",))
        if section.loss_on not in (None, "all"):
            why = f"{row.file} is plain text without turns: data.loss_on can only be 'all'."
            raise ConfigError(why, keys=("data.loss_on",))
    return form


def weights_of(sources: tuple[Source, ...]) -> list[float] | None:
    """The sources' weights, or None if no source has one."""
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        without = next(source.path for source in sources if source.weight is None)
        why = f"data: '{without}' has no weight, but other sources have; give each one or none."
        raise ConfigError(why, keys=("data.train",))
    return weights or None


def _fitting(
    encoder: PromptEncoder,
    prompt: list[Message],
    tools: Tools,
    ids: list[int],
    limit: int,
    left: bool,
) -> tuple[list[Message], list[int]] | None:
    """Shorten the last user message until the prompt fits; None if that is impossible."""
    last = max((i for i, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        return None
    while len(ids) > limit:
        content = prompt[last]["content"]
        offsets = next(encode_with_offsets(encoder.tokenizer, [content])).offsets
        keep = len(offsets) - (len(ids) - limit)
        if keep <= 0:
            return None
        shorter = content[offsets[-keep][0] :] if left else content[: offsets[keep - 1][1]]
        if len(shorter) == len(content):  # the cut is inside a character of several tokens
            shorter = content[1:] if left else content[:-1]
        if not shorter.strip():
            return None
        prompt = [*prompt[:last], {**prompt[last], "content": shorter}, *prompt[last + 1 :]]
        ids = encoder.ids(prompt, tools)
    return prompt, ids
