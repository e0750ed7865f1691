"""Questions about unit conversion with exact answers and worked solutions, generated without a
download.

``python -m tunesmith.guide.recipes.unit_conversion DIRECTORY`` writes ``train.jsonl``,
``val.jsonl`` and ``test.jsonl`` (``prompt``, ``answer``), and ``few_shot.jsonl`` (``prompt``,
``completion``) with worked examples for the prompt. No two splits share a question, even in other
words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import typer

from tunesmith.guide.recipes.arithmetic import write_lines

ANSWER = r"<answer>(.*?)</answer>"
"""The pattern of the answer in a completion."""

UNITS: dict[str, dict[str, str]] = {
    "length": {"mm": "0.001", "cm": "0.01", "m": "1", "km": "1000"},
    "mass": {"mg": "0.001", "g": "1", "kg": "1000", "t": "1000000"},
    "volume": {"ml": "0.001", "cl": "0.01", "l": "1"},
    "time": {"second": "1", "minute": "60", "hour": "3600"},
}
"""Quantity → unit → its size in a common unit."""

PHRASES = (
    "How many {to} are there in {value} {unit}?",
    "Convert {value} {unit} to {to}.",
    "What is {value} {unit} in {to}?",
    "Express {value} {unit} in {to}.",
)
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    answer: str
    worked: str


def question(value: int, unit: str, to: str, factor: Decimal, phrase: str) -> Question:
    """One question.

    Example:
        >>> question(6, "kg", "g", Decimal(1000), PHRASES[1])
        Question(prompt='Convert 6 kg to g.', answer='6000', worked='1 kg is 1000 g. 6 * 1000 =
        6000. \
<answer>6000</answer>')
    """
    answer = _plain(value * factor)
    working = f"1 {unit} is {_plain(factor)} {to}. {value} * {_plain(factor)} = {answer}."
    prompt = phrase.format(value=value, unit=unit, to=to)
    return Question(prompt, answer, f"{working} <answer>{answer}</answer>")


def questions(seed: int, *sizes: int) -> list[list[Question]]:
    """Disjoint lists of questions, of the given sizes: no value is converted between the same units
    twice.

    Raises:
        ValueError: there are fewer questions.
    """
    rng = random.Random(seed)
    asked = [(value, *conversion) for conversion in _conversions() for value in range(2, 1000)]
    if sum(sizes) > len(asked):
        raise ValueError(f"{sum(sizes)} questions were asked for, and there are {len(asked)}")
    rng.shuffle(asked)
    every = iter(question(*one, rng.choice(PHRASES)) for one in asked)
    return [[next(every) for _ in range(size)] for size in sizes]


def _conversions() -> Iterator[tuple[str, str, Decimal]]:
    """``(unit, to, factor)`` of all conversions with a short exact answer."""
    for units in UNITS.values():
        for unit, size in units.items():
            for to, other in units.items():
                factor = Decimal(size) / Decimal(other)
                if unit != to and factor == factor.quantize(Decimal("1e-9")):
                    yield unit, to, factor


def _plain(number: Decimal) -> str:
    """The number without an exponent or trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def write(
    directory: Path, seed: int = 0, train: int = 1000, val: int = 100, test: int = 100
) -> None:
    """Write unit conversion questions: train.jsonl, val.jsonl, test.jsonl and few_shot.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    *splits, shown = questions(seed, train, val, test, SHOWN)
    for name, part in zip(("train", "val", "test"), splits, strict=True):
        lines = [{"prompt": q.prompt, "answer": q.answer} for q in part]
        write_lines(directory / f"{name}.jsonl", lines)
    examples = [{"prompt": q.prompt, "completion": q.worked} for q in shown]
    write_lines(directory / "few_shot.jsonl", examples)
    print(f"train.jsonl, val.jsonl, test.jsonl and few_shot.jsonl are in {directory}")


if __name__ == "__main__":
    typer.run(write)
