"""Conversion of a ``[data]`` section to tasks (reinforcement learning) or samples (supervised
training).

``load_tasks`` and ``load_samples`` read the data, detect its format, convert and tokenize it once,
and report on every line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tunesmith.config.schema import DataSection
from tunesmith.learn.data.chat import Rendered
from tunesmith.learn.data.formats import Example, Goal
from tunesmith.learn.data.images import shown
from tunesmith.learn.data.prompts import PromptEncoder, learned_texts, note_turn_end
from tunesmith.learn.data.reading import (
    Prepared,
    Reading,
    Sources,
    as_sources,
    check_section,
    examples_of,
    weights_of,
)
from tunesmith.learn.data.report import LoadReport
from tunesmith.learn.data.sources import on_hub, read
from tunesmith.types import Sample, Task, Tokenizer, Tools

TaskSet = Prepared[Task]
SampleSet = Prepared[Sample]


def peek(
    section: DataSection,
    source: Sources,
    goal: Goal,
    *,
    hub: bool = True,
    maps: bool = False,
    check: Callable[[Example], None] = lambda _: None,
) -> list[tuple[str, Example | None]]:
    """A sentence about each source's format, and its first usable line; needs no tokenizer.

    Args:
        hub: also fetch data sets from the hub.
        maps: run the user's ``data.map``; without it, mapped sources have no line yet.
        check: raises a DataError for a line that cannot be used.

    Raises:
        DataError: a source is missing, empty or has no usable line.
        ConfigError: a setting does not apply.
    """
    check_section(section, goal)
    weights_of(as_sources(source))
    firsts: list[tuple[str, Example | None]] = []
    for one in as_sources(source):
        if not hub and on_hub(one):
            continue
        if section.map and not maps:
            if next(iter(read(one)), None) is None:
                raise LoadReport().nothing_left(one.path)
            firsts.append((f"{one.path}: its rows go through {section.map}", None))
            continue
        report = LoadReport(skip_bad=section.skip_bad)
        for example in examples_of(section, one, goal, report):
            with report.line(example.where):
                check(example)
                firsts.append((report.formats[0], example))
                break
        else:
            raise report.nothing_left(one.path)
    return firsts


def load_tasks(
    section: DataSection,
    source: Sources,
    tokenizer: Tokenizer,
    tools_of: Callable[[Example], Tools] | None = None,
) -> TaskSet:
    """Tasks for reinforcement learning, each prompt tokenized once.

    A prompt that is a conversation, or text if ``data.chat`` is set, goes through the chat template
    up to the start of the assistant's turn; other text gets the tokenizer's leading tokens (BOS).

    Args:
        tools_of: returns the tools of a line's environment; if it has none, the prompt has the
            line's own tools.

    Raises:
        DataError: nothing is usable, or a line that may not be skipped is bad or too long.
        ConfigError: a setting does not apply to this data or tokenizer.
    """
    reading = Reading.of(section, source, tokenizer, "rl")
    if tools_of is not None and reading.template is not None and reading.template.takes_tools:
        for place, one in enumerate(reading.examples):
            reading.examples[place] = replace(one, tools=tools_of(one) or one.tools)
    encoder = PromptEncoder(section, tokenizer, reading.template)

    def render(example: Example) -> str:
        assert example.prompt is not None
        text = encoder.text(example.prompt, example.tools)
        reading.check_length(text)
        return text

    rendered = reading.each(render)
    tasks: list[tuple[int, Task]] = []
    encoded = encoder.encode([text for _, text in rendered])
    for (example, _), ids in zip(rendered, encoded, strict=True):
        with reading.report.line(example.where):
            ids, _ = reading.expanded(example, ids)
            prompt, fitted = reading.fit_prompt(encoder, example, ids)
            if isinstance(example.prompt, str) and isinstance(prompt, list):
                prompt = prompt[-1]["content"]  # rewards get the prompt in the data's own form
            task = Task(
                example.id, shown(prompt), tuple(fitted), example.columns, tools=example.tools
            )
            tasks.append((example.source, task))
    return reading.prepare(tasks)


def load_samples(section: DataSection, source: Sources, tokenizer: Tokenizer) -> SampleSet:
    """Samples for supervised training: token ids and a mask of the learned tokens.

    Depending on the format, the loss is on a whole text and its EOS; on a completion and its EOS or
    end-of-turn token; or on every assistant turn and its end-of-turn token. ``data.loss_on``
    overrides this. A conversation whose template rewrites earlier turns becomes several samples,
    and each assistant turn is learned once (see ``data.chat``).

    Raises:
        DataError, ConfigError: as ``load_tasks``.
    """
    reading = Reading.of(section, source, tokenizer, "sft")
    template = reading.template
    report = reading.report
    if template is None and tokenizer.eos_token_id is None:
        report.note("The tokenizer has no EOS token: the model does not learn to stop.")
    rendered = reading.each(lambda example: learned_texts(section, example, template))
    split = sum(len(texts) > 1 for _, texts in rendered)
    if split:
        report.note(
            f"{split} conversations became several samples each: the chat template renders earlier "
            "turns differently once a conversation continues. Every assistant turn is learned "
            "once, as it is sampled."
        )
    if template is not None:
        note_turn_end(template, [text for _, texts in rendered for text in texts], report)
    samples: list[tuple[int, Sample]] = []
    for example, texts in reading.tokenize(_not_far_too_long(reading, rendered)):
        for text, joint in texts:
            with report.line(example.where):
                sample = reading.fit_sample(reading.sample(example, text, joint))
                samples.append((example.source, sample))
    return reading.prepare(samples)


def _not_far_too_long(
    reading: Reading, rendered: Iterable[tuple[Example, Sequence[Rendered]]]
) -> list[tuple[Example, list[Rendered]]]:
    """The examples without the texts that ``Reading.check_length`` refuses; the report lists
    those."""
    kept: list[tuple[Example, list[Rendered]]] = []
    for example, texts in rendered:
        kept.append((example, []))
        for text in texts:
            with reading.report.line(example.where):
                reading.check_length(text.text)
                kept[-1][1].append(text)
    return kept
