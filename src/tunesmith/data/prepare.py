"""From a ``[data]`` section to tasks (reinforcement learning) and samples (supervised training).

``load_tasks`` and ``load_samples`` read, detect, convert, tokenize once and report what became of every line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from tunesmith.config.schema import DataSection, Source
from tunesmith.data.chat import Rendered
from tunesmith.data.fit import fit_prompt, fit_sample
from tunesmith.data.formats import Example, Format, Goal, convert, detect
from tunesmith.data.judgements import convert_judgement, detect_judgement
from tunesmith.data.learned import choose_template, learned_texts, note_turn_end, with_system
from tunesmith.data.loader import Loader, Part, fingerprint_of
from tunesmith.data.report import Report
from tunesmith.data.sources import BadLine, Row, read
from tunesmith.data.tokens import (
    Encoded,
    Tokenizer,
    encode,
    encode_with_offsets,
    leading_ids,
    mask_spans,
    with_leading,
)
from tunesmith.errors import ConfigError, DataError
from tunesmith.types import Prompt, Sample, Task

T = TypeVar("T")
U = TypeVar("U")
Sources = str | Source | tuple[str | Source, ...]


@dataclass(frozen=True, slots=True)
class Prepared(Generic[T]):
    """Items ready for a run, which source each came from, and the account of the loading."""

    items: list[T]
    parts: tuple[Part, ...]
    report: Report
    fingerprint: str
    """Of the data as read; a saved position is only good for the same data."""

    def __len__(self) -> int:
        return len(self.items)

    def loader(self, batch_size: int = 1, *, shuffle: bool = True, seed: int = 0) -> Loader[T]:
        """A loader over the items, mixed by the sources' weights."""
        return Loader(
            self.items,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            parts=self.parts,
            fingerprint=self.fingerprint,
        )


TaskSet = Prepared[Task]
SampleSet = Prepared[Sample]


def as_sources(source: Sources) -> tuple[Source, ...]:
    """What a section's ``train`` or ``eval`` names, as a tuple."""
    given = source if isinstance(source, tuple) else (source,)
    return tuple(Source(path=one) if isinstance(one, str) else one for one in given)


def peek(section: DataSection, source: Sources, goal: Goal) -> list[str]:
    """One sentence per source: its format. Reads no further than the first usable line; needs no tokenizer.

    Raises:
        DataError: a source is missing, empty or has no usable line.
        ConfigError: a setting does not apply.
    """
    check_section(section, goal)
    _weights(as_sources(source))
    sentences: list[str] = []
    for one in as_sources(source):
        report = Report(skip_bad=section.skip_bad)
        if next(_examples_of(section, one, goal, report), None) is None:
            raise _nothing_left(one.path, report)
        sentences += report.formats
    return sentences


def load_tasks(section: DataSection, source: Sources, tokenizer: Tokenizer) -> TaskSet:
    """Tasks for reinforcement learning, each prompt tokenized once.

    A prompt that is a conversation, or text where ``data.chat`` says so, goes through the chat template up
    to where the assistant begins; other text gets what the tokenizer puts before a text (BOS).

    Raises:
        DataError: nothing usable, or a bad or too long line that is not to be skipped.
        ConfigError: a setting does not apply to this data or tokenizer.
    """
    check_section(section, "rl")
    check_limit(section, "max_prompt_tokens")
    examples, report, fingerprint = read_examples(section, source, "rl")
    template = choose_template(section, tokenizer, [example for _, example in examples])
    leading = leading_ids(tokenizer)

    def prompt_of(example: Example) -> Prompt:
        assert example.prompt is not None
        return with_system(section, example.prompt) if template else example.prompt

    def text_of(example: Example, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        assert template is not None
        return template.whole(prompt, example.tools, prompt=True)

    def encode_prompt(example: Example, prompt: Prompt) -> list[int]:
        return encode(tokenizer, [text_of(example, prompt)])[0]

    rendered = each_example(examples, report, lambda example: (p := prompt_of(example), text_of(example, p)))
    encoded = encode(tokenizer, [text for _, _, (_, text) in rendered])
    tasks: list[tuple[int, Task]] = []
    for (index, example, (prompt, _)), bare in zip(rendered, encoded, strict=True):
        ids = with_leading(leading, bare) if isinstance(prompt, str) else bare
        fitted = fit_prompt(section, example, prompt, ids, tokenizer, encode_prompt, leading, report)
        if fitted is None:
            continue
        prompt, ids = fitted
        if isinstance(example.prompt, str) and isinstance(prompt, list):
            # Rewards see a prompt in the shape that it has in the data.
            prompt = cast("str", prompt[-1]["content"])
        tasks.append((index, Task(example.id, prompt, tuple(ids), example.columns)))
    return prepared(tasks, as_sources(source), report, fingerprint)


def load_samples(section: DataSection, source: Sources, tokenizer: Tokenizer) -> SampleSet:
    """Samples for supervised training: token ids, and which of them are learned.

    By format: all of a text and its EOS; a completion and its EOS or end-of-turn token; every assistant turn
    with its end-of-turn token. ``data.loss_on`` overrides. A conversation whose template rewrites earlier
    turns becomes several samples, each assistant turn learned once (see ``data.chat``).

    Raises:
        DataError: nothing usable, or a bad or too long line that is not to be skipped.
        ConfigError: a setting does not apply to this data or tokenizer.
    """
    check_section(section, "sft")
    check_limit(section, "max_tokens")
    examples, report, fingerprint = read_examples(section, source, "sft")
    template = choose_template(section, tokenizer, [example for _, example in examples])
    leading = leading_ids(tokenizer)
    if template is None and tokenizer.eos_token_id is None:
        report.note("The tokenizer has no EOS token: the model does not learn to stop.")
    made = each_example(examples, report, lambda example: learned_texts(section, example, template))
    split = sum(len(texts) > 1 for _, _, texts in made)
    if split:
        report.note(
            f"{split} conversations became several samples each: the chat template renders earlier turns "
            "differently once a conversation goes on. Every assistant turn is learned once, as it is sampled."
        )
    if template is not None:
        note_turn_end(template, (text for _, _, texts in made for text in texts), report)
    flat = [(index, example, text) for index, example, texts in made for text in texts]
    encoded = encode_with_offsets(tokenizer, [text.text for _, _, text in flat])
    samples: list[tuple[int, Sample]] = []
    for (index, example, text), joint in zip(flat, encoded, strict=True):
        plain = template is None or example.text is not None
        try:
            sample = sample_of(text, joint, tokenizer, leading, plain)
        except DataError as error:
            report.bad(BadLine(example.where, str(error)))
            continue
        fitted = fit_sample(section, example, sample, leading, report)
        if fitted is not None:
            samples.append((index, fitted))
    return prepared(samples, as_sources(source), report, fingerprint)


def check_section(section: DataSection, goal: Goal) -> None:
    """Refuse settings that would be ignored.

    Raises:
        ConfigError: naming the key and what to use.
    """
    if goal == "rl":
        for key in ("completion", "loss_on", "max_tokens"):
            if getattr(section, key) is not None:
                raise ConfigError(f"data.{key} is for supervised training; leave it out of tunesmith rl.")
        return
    if section.max_prompt_tokens is not None:
        raise ConfigError("data.max_prompt_tokens is for tunesmith rl; use data.max_tokens here.")
    if goal != "sft" and section.loss_on is not None:
        raise ConfigError("data.loss_on is for tunesmith sft; here it is always the answers that count. Leave it out.")
    if goal in ("pairs", "steps") and section.completion is not None:
        columns = "'chosen' and 'rejected'" if goal == "pairs" else "'completions' and 'labels'"
        raise ConfigError(f"data.completion has no effect here: the columns are {columns}. Leave it out.")


def check_limit(section: DataSection, key: str) -> None:
    if section.too_long != "error" and getattr(section, key) is None:
        raise ConfigError(f"data.too_long = '{section.too_long}' needs a limit: set data.{key}.")


def read_examples(section: DataSection, source: Sources, goal: Goal) -> tuple[list[tuple[int, Example]], Report, str]:
    """Every usable line with the index of its source; the report; the fingerprint of the data."""
    sources = as_sources(source)
    report = Report(skip_bad=section.skip_bad)
    found: list[tuple[int, Example]] = []
    for index, one in enumerate(sources):
        before, seen = len(found), set[str]()
        for example in _examples_of(section, one, goal, report):
            # An id that stands twice in the data, or in two sources, must still name one task.
            unique = example.id if example.id not in seen else f"{example.id} ({example.where})"
            seen.add(example.id)
            if len(sources) > 1 and unique != example.where:
                unique = f"{one.path}#{unique}"
            found.append((index, replace(example, id=unique)))
        if len(found) == before:
            raise _nothing_left(one.path, report)
    content = [[e.id, e.text, e.prompt, e.completion, e.tools, e.columns] for _, e in found]
    return found, report, fingerprint_of(content)


def _examples_of(section: DataSection, source: Source, goal: Goal, report: Report) -> Iterator[Example]:
    """Usable lines of one source. The first usable line of each file decides the file's format."""
    formats: dict[str, Format] = {}
    for row in read(source):
        report.read += 1
        if isinstance(row, BadLine):
            report.bad(row)
            continue
        try:
            form = formats.get(row.file) or _detected(section, row, goal)
            example = convert(row, form, goal) if goal in ("rl", "sft") else convert_judgement(row, form)
        except BadLine as line:
            report.bad(line)
            continue
        if row.file not in formats:
            formats[row.file] = form
            report.formats.append(f"{row.file}: {form.describe(goal)}")
        yield example


def _detected(section: DataSection, row: Row, goal: Goal) -> Format:
    find = detect if goal in ("rl", "sft") else detect_judgement
    form = find(row, goal, section.prompt, section.completion)
    if form.kind == "text":
        for key, value in (("chat", section.chat), ("system_prompt", section.system_prompt)):
            if value:
                raise ConfigError(f"data.{key} does not apply to the plain text of {row.file}; leave it out.")
        if section.loss_on not in (None, "all"):
            raise ConfigError(f"{row.file} is plain text without turns: data.loss_on can only be 'all'.")
    return form


def _nothing_left(path: str, report: Report) -> DataError:
    if not report.read:
        return DataError(f"{path}: empty, there is no line of data in it.")
    return DataError(f"{path}: no usable line.\n{report.summary()}")


def each_example(
    examples: list[tuple[int, Example]], report: Report, make: Callable[[Example], U]
) -> list[tuple[int, Example, U]]:
    """``make`` of every example; where it refuses one, that line is bad."""
    made: list[tuple[int, Example, U]] = []
    for index, example in examples:
        try:
            made.append((index, example, make(example)))
        except DataError as error:
            report.bad(BadLine(example.where, str(error)))
    return made


def prepared(items: list[tuple[int, T]], sources: tuple[Source, ...], report: Report, fingerprint: str) -> Prepared[T]:
    """Items of each source side by side. Without weights, sources are simply joined.

    Raises:
        DataError: nothing is left of a source.
    """
    for index, source in enumerate(sources):
        if not any(i == index for i, _ in items):
            raise _nothing_left(source.path, report)
    report.kept = report.read - len({skip.where for skip in report.skipped})
    flat = [item for _, item in items]
    weights = _weights(sources)
    if weights is None:
        return Prepared(flat, (Part("data", 0, len(flat)),), report, fingerprint)
    parts: list[Part] = []
    start = 0
    for index, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        stop = start + sum(i == index for i, _ in items)
        name = source.path if all(part.name != source.path for part in parts) else f"{source.path}#{index}"
        parts.append(Part(name, start, stop, weight))
        report.note(f"{name}: {weight / sum(weights):.0%} of the draws, {stop - start} items")
        start = stop
    return Prepared(flat, tuple(parts), report, fingerprint)


def _weights(sources: tuple[Source, ...]) -> list[float] | None:
    """The sources' weights, or None where none has one."""
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        without = next(source.path for source in sources if source.weight is None)
        raise ConfigError(f"data: '{without}' has no weight, but other sources have; give each one or none.")
    return weights or None


def sample_of(text: Rendered, joint: Encoded, tokenizer: Tokenizer, leading: list[int], plain: bool) -> Sample:
    """Token ids and mask; plain text gets the tokenizer's BOS before it and EOS after it."""
    ids, mask = mask_spans(tokenizer, text.text, joint, text.spans)
    if plain:
        whole = with_leading(leading, ids)
        mask = [False] * (len(whole) - len(ids)) + mask
        eos = cast("int | None", tokenizer.eos_token_id)
        ids = [*whole, eos] if eos is not None and whole[-1:] != [eos] else whole
        mask = mask + [True] * (len(ids) - len(whole))
    if mask:
        mask = [False, *mask[1:]]  # nothing predicts the first token
    if not any(mask):
        raise DataError("nothing to learn: no token is predicted in the loss")
    return Sample(list(ids), mask)
