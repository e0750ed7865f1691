"""Tasks and scores of ``reasoning-gym``, whose generators make any number of them from a seed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Protocol

from tunesmith.errors import ConfigError, DataError, nearest
from tunesmith.learn.packages.adapter import Options, TaskRow
from tunesmith.learn.packages.splits import SHARES, check_options, check_split, is_of, number
from tunesmith.types import Prompt

SIZE = 500
COMPOSITE = "composite"
"""A generator of others: ``datasets`` is a list of tables with ``name``, ``weight`` and
``config``."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Generator(Protocol):
    """A data set of the package."""

    def __getitem__(self, index: int, /) -> dict[str, object]: ...

    def score_answer(self, answer: str, entry: dict[str, object]) -> float: ...


def rows(name: str, split: str, options: Options) -> Iterator[TaskRow]:
    """``size`` tasks (500) of a split from the generator ``name`` with ``seed`` (0) and its other
    options."""
    what = f"reasoning_gym:{name}"
    check_split(what, split)
    size = number(what, options, "size", SIZE, 1)
    asked = 32 + 20 * size // len(SHARES[split])
    whole = json.dumps({"seed": 0, **options, "size": asked}, sort_keys=True)
    generator = _generator(name, whole)
    kept = 0
    for index in range(asked):
        entry = generator[index]
        question = str(entry["question"])
        if not is_of(split, question):
            continue
        answer = entry["answer"]
        place = {"dataset": name, "options": whole, "index": index}
        shown = "" if answer is None else str(answer)
        yield {"prompt": question, "answer": shown, "reasoning_gym": place}
        kept += 1
        if kept == size:
            return
    if not kept:
        raise DataError(f"{what}: none of {asked} questions is of '{split}'.")


def score(
    completions: Sequence[Prompt], reasoning_gym: Sequence[Options | None], **_: object
) -> list[float | None]:
    """The generator's score of each answer; None for tasks of other sources, 0 where it cannot read
    the answer."""
    pairs = zip(completions, reasoning_gym, strict=True)
    return [None if place is None else _score(said, place) for said, place in pairs]


def _score(completion: Prompt, place: Options) -> float:
    index = place["index"]
    assert isinstance(index, int)
    generator = _generator(str(place["dataset"]), str(place["options"]))
    entry = generator[index]
    try:
        return float(generator.score_answer(answer_in(completion), entry))
    except Exception:  # several generators parse the answer without care
        return 0.0


def answer_in(completion: Prompt) -> str:
    """The text in the last ``<answer>`` of a completion; without one, all after its thinking."""
    said = completion if isinstance(completion, str) else str(completion[-1]["content"])
    text = said.rpartition("</think>")[2]
    tagged = _ANSWER.findall(text)
    return (tagged[-1] if tagged else text).strip()


@lru_cache(maxsize=64)
def _generator(name: str, options: str) -> Generator:
    factory = import_module("reasoning_gym.factory")
    if name not in factory.DATASETS:
        hint = nearest(name, factory.DATASETS)
        raise ConfigError(f"reasoning_gym has no data set '{name}'.{hint}")
    given = json.loads(options)
    valid = [field.name for field in dataclasses.fields(factory.DATASETS[name][1])]
    check_options(f"reasoning_gym:{name}", given, valid)
    try:
        if name == COMPOSITE and "datasets" in given:
            spec = import_module("reasoning_gym.composite").DatasetSpec
            parts = [{"weight": 1.0, "config": {}, **part} for part in given["datasets"]]
            given["datasets"] = [spec(**part) for part in parts]
        return factory.create_dataset(name, **given)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"reasoning_gym:{name} refuses its options: {why}") from error
