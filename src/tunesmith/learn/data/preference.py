"""Samples for reward models and preference losses: pairs, judged answers, answers in steps.

They are tokenized once, as in supervised training. A sample ends with its answer's EOS or
end-of-turn token, without the text that the template writes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tunesmith.config.schema import DataSection
from tunesmith.errors import DataError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.chat import Rendered
from tunesmith.learn.data.formats import Example
from tunesmith.learn.data.prompts import PromptEncoder, learned_texts
from tunesmith.learn.data.reading import Prepared, Reading, Sources
from tunesmith.learn.data.tokens import Span, mask_spans, with_leading
from tunesmith.learn.data.trie import num_forest_tokens
from tunesmith.types import Prompt, Sample, Tokenizer


@dataclass(frozen=True, slots=True)
class Comparison:
    """Samples that a loss compares, and their values: ``values[name][k]`` belongs to
    ``samples[k]``.

    In a pair the first sample is the chosen answer (``side`` +1), the second the rejected one (−1).
    """

    samples: tuple[Sample, ...]
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, "tuple[float, ...]"])


@dataclass(frozen=True, slots=True)
class Solution:
    """An answer in steps. Step ``k`` is judged at token ``marks[k]``, the last token of its
    separator."""

    token_ids: list[int]
    marks: tuple[int, ...]
    labels: tuple[float, ...]


def load_pairs(
    section: DataSection,
    source: Sources,
    tokenizer: Tokenizer,
    *,
    room: int | None = None,
    share: bool = True,
    shape: Callable[[Sample], Sample] = lambda sample: sample,
) -> Prepared[Comparison]:
    """Preference pairs, with ``side`` and ``margin``.

    Args:
        room: the capacity of a micro-batch in tokens; each pair must fit.
        share: whether the two answers share their prompt in the micro-batch.
        shape: converts each sample to the form that the model requires.

    Raises:
        DataError: nothing is usable, or a line that may not be skipped is bad or too long.
        ConfigError: a setting does not apply to this data or tokenizer.
    """
    items: list[tuple[int, Comparison]] = []
    reading = Reading.of(section, source, tokenizer, "pairs")
    for example, answers in _answers(reading):
        samples = tuple(map(shape, answers))
        with reading.report.line(example.where):
            if answers[0].token_ids == answers[1].token_ids:
                raise DataError("chosen and rejected are the same once they are tokenized and cut")
            tokens = num_forest_tokens(Batch.of(samples), share=share) if room else 0
            if room and tokens > room:
                raise DataError(
                    f"the pair has {tokens} tokens together, the limit is {room} "
                    "(system.max_tokens_per_microbatch)"
                )
            values = {"side": (1.0, -1.0), "margin": (example.margin, example.margin)}
            items.append((example.source, Comparison(samples, values)))
    return reading.prepare(items)


def load_judged(
    section: DataSection, source: Sources, tokenizer: Tokenizer
) -> Prepared[Comparison]:
    """Answers with ``side`` +1 (desirable) or −1, each with a mismatched sample for the KL of KTO.

    The mismatched sample is the same prompt with another prompt's answer. A line with two answers
    gives two items.

    Raises:
        DataError: as in ``load_pairs``, or all prompts are equal, so no answer can be mismatched.
        ConfigError: as in ``load_pairs``.
    """
    reading = Reading.of(section, source, tokenizer, "judged")
    judged: list[tuple[int, Sample, float]] = []
    for example, answers in _answers(reading):
        sides = (1.0, -1.0) if len(answers) == 2 else (1.0 if example.desirable else -1.0,)
        judged += [(example.source, *pair) for pair in zip(answers, sides, strict=True)]
    paths = ", ".join(source.path for source in reading.sources)
    others = _mismatch([sample for _, sample, _ in judged], paths)
    pairs = zip(judged, others, strict=True)
    items = [(i, Comparison((own, other), {"side": (s, s)})) for (i, own, s), other in pairs]
    return reading.prepare(items)


def load_steps(
    section: DataSection,
    source: Sources,
    tokenizer: Tokenizer,
    separator: str,
    marks: tuple[str, str] = ("+", "-"),
) -> Prepared[Solution]:
    """Answers in steps, with a ``separator`` after each step, appended to the prompt as a policy
    would write them.

    Args:
        marks: the labels of a good and a bad step in texts that have labels instead of separators.

    Raises:
        DataError, ConfigError: as ``load_pairs``.
    """
    reading = Reading.of(section, source, tokenizer, "steps")
    encoder = PromptEncoder(section, tokenizer, reading.template)

    def render(example: Example) -> tuple[Example, list[Rendered]]:
        """The example in steps, and its text with the spans of the separators."""
        example = with_steps(example, separator, marks)
        assert example.prompt is not None
        # A text with separators holds its question.
        text = encoder.text(example.prompt, example.tools) if example.prompt else ""
        spans: list[Span] = []
        for step in example.steps:
            text += step + separator
            spans.append((len(text) - len(separator), len(text)))
        reading.check_length(text)
        return example, [Rendered(text, tuple(spans))]

    items: list[tuple[int, Solution]] = []
    rendered = [in_steps for _, in_steps in reading.each(render)]
    for example, ((text, joint),) in reading.tokenize(rendered):
        with reading.report.line(example.where):
            bare, inside = mask_spans(tokenizer, text.text, joint, text.spans)
            in_chat = reading.template is not None and example.prompt
            ids = bare if in_chat else with_leading(reading.leading, bare)
            inside = [False] * (len(ids) - len(bare)) + inside
            last = [here and not after for here, after in pairwise([*inside, False])]
            fitted = reading.fit_sample(Sample(list(ids), last))
            places = tuple(place for place, judged in enumerate(fitted.loss_mask) if judged)
            cut = len(example.labels) - len(places) if section.too_long == "truncate_left" else 0
            labels = example.labels[cut : cut + len(places)]
            items.append((example.source, Solution(fitted.token_ids, places, labels)))
    return reading.prepare(items)


def _answers(reading: Reading) -> list[tuple[Example, list[Sample]]]:
    """Every usable example with the samples of its answers: one, or the preferred and the rejected
    one."""

    def render(example: Example) -> list[Rendered]:
        sides = (example.completion, example.rejected)
        answers = [answer for answer in sides if answer is not None]
        texts = [_one_text(reading, example, answer) for answer in answers]
        for text in texts:
            # What follows is left out of the sample.
            reading.check_length(text.text[: text.spans[-1][1]])
        return texts

    answered: list[tuple[Example, list[Sample]]] = []
    for example, texts in reading.tokenize(reading.each(render)):
        with reading.report.line(example.where):
            samples = [reading.sample(example, *each, ended=True) for each in texts]
            longest = max(len(sample.token_ids) for sample in samples)
            answered.append((example, [reading.fit_sample(s, longest) for s in samples]))
    return answered


def _one_text(reading: Reading, example: Example, answer: Prompt) -> Rendered:
    """Prompt and answer as one text with the assistant's spans in the answer; DataError if one text
    cannot hold it."""
    texts = learned_texts(reading.section, replace(example, completion=answer), reading.template)
    if len(texts) > 1:
        rewrites = "the chat template rewrites earlier turns of the answer"
        raise DataError(f"{rewrites}; give each turn its own line")
    return reading.template.up_to_the_end(texts[0]) if reading.template else texts[0]


def _mismatch(samples: Sequence[Sample], where: str) -> list[Sample]:
    """Each sample's prompt with the answer to a different prompt, searched from half the data set
    ahead, in order.

    Answers are cut so that no result is longer than the longest sample.
    """
    starts = [sample.loss_mask.index(True) for sample in samples]
    prompts = [tuple(s.token_ids[:start]) for s, start in zip(samples, starts, strict=True)]
    count = len(samples)
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    if len(set(prompts)) < 2:
        compares = "KTO compares with answers to other prompts"
        raise DataError(f"{where}: {compares}, and all prompts here are equal")
    others: list[Sample] = []
    following = [0] * count  # the next place with another prompt, around the end
    for place in reversed(range(2 * count)):
        here = place % count
        after = (here + 1) % count
        following[here] = following[after] if prompts[here] == prompts[after] else after
    for number, prompt in enumerate(prompts):
        ahead = (number + count // 2) % count
        other = ahead if prompts[ahead] != prompt else following[ahead]
        tail = slice(starts[other], starts[other] + longest - len(prompt))
        ids = samples[other].token_ids[tail]
        mask = samples[other].loss_mask[tail]
        others.append(Sample([*prompt, *ids], [False] * len(prompt) + mask))
    return others


def with_steps(example: Example, separator: str, marks: tuple[str, str]) -> Example:
    """Split an example whose text has separators (Math-Shepherd's format) into steps; return others
    unchanged.

    Raises:
        DataError: separators and labels do not match.
    """
    if example.text is None or example.tags is None:
        return example
    *steps, rest = example.text.split(separator)
    if not steps:
        raise DataError(f"the separator {separator!r} (prm.separator) is not in the text")
    if rest.strip() or not all(steps):
        raise DataError("every separator has to end a step, and nothing may come after the last")
    tags = _tags_in(example.tags, steps, marks) if isinstance(example.tags, str) else example.tags
    if len(tags) != len(steps):
        raise DataError(f"{len(steps)} separators and {len(tags)} labels; give one each")
    known = {marks[0]: 1.0, marks[1]: 0.0}
    labels = [known.get(tag.strip(), -1.0) if isinstance(tag, str) else tag for tag in tags]
    for tag, label in zip(tags, labels, strict=True):
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            valid = f"{marks[0]!r}, {marks[1]!r}, true, false nor a number from 0 to 1"
            raise DataError(f"the label {tag!r} is neither {valid}")
    labels = tuple(map(float, labels))
    return replace(example, text=None, prompt="", steps=tuple(steps), labels=labels)


def _tags_in(labelled: str, steps: list[str], marks: tuple[str, str]) -> list[str]:
    """The labels in ``labelled``, a copy of the text with labels instead of separators."""
    tags: list[str] = []
    for number, step in enumerate(steps, 1):
        labelled = labelled[len(step) :] if labelled.startswith(step) else ""
        mark = next((mark for mark in marks if labelled.startswith(mark)), None)
        if mark is None:
            differs = f"the labels' text differs from the answer's before label {number}"
            raise DataError(f"{differs}, or has no label there")
        tags.append(mark)
        labelled = labelled[len(mark) :]
    return tags
