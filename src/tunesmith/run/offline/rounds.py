"""The files of rejection-sampling fine-tuning (RFT; Yuan et al. 2023, arXiv:2308.01825), and their
contents.

::

    run/
        base/evaluation.jsonl, evaluation.json    the model before training
        round-1/
            samples.jsonl       every question with its sampled answers and their rewards
            train.jsonl         the training data: prompt and completion
            questions.jsonl     numbers of samples, correct and kept answers of each question
            yield.json          the totals of these numbers
            sft.toml, sft/      the training, a run of ``tunesmith sft``
            trained.json        the trained model
            evaluation.jsonl, evaluation.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, DataError, boundary
from tunesmith.records.storage import read_json, write_json
from tunesmith.records.text import EvalExample, last_message
from tunesmith.run.offline.lines import Json, read_lines, records_of, write_whole
from tunesmith.run.offline.selection import Yield, correct_answers, select, usable
from tunesmith.types import Sample, Task

SHARES = ("accuracy", "answered", "accuracy_of_answered")


class RftRound:
    """The files of one round, or of the base model's evaluation."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.name
        self.number = int(directory.name.partition("-")[2] or 0)
        """0 is the base model."""
        self.samples = directory / "samples.jsonl"
        self.train = directory / "train.jsonl"
        self.sft = directory / "sft"
        self.trained = directory / "trained.json"
        self.evaluation = directory / "evaluation.jsonl"
        self.evaluation_report = directory / "evaluation.json"
        self.yield_report = directory / "yield.json"

    @property
    def model(self) -> Path | None:
        """The trained model; None before training has ended."""
        there = self.trained.exists()
        return self.directory / read_json(self.trained)["model"] if there else None


def adopt_answers(answers: Path, this: RftRound, tasks: Sequence[Task]) -> None:
    """Use another run's answers to the same questions as the round's samples.

    Raises:
        DataError: the file cannot be read, or answers other questions than ``tasks``.
    """
    if this.samples.exists():
        return
    with boundary(DataError, f"cannot read rft.answers = '{answers}'", (OSError, ValueError)):
        numbered = enumerate(answers.read_bytes().split(b"\n"), 1)
        lines = {number: json.loads(line) for number, line in numbered if line.strip()}
    if len(lines) != len(tasks):
        raise DataError(f"{answers} answers {len(lines)} questions, data.train has {len(tasks)}")
    for (number, line), task in zip(lines.items(), tasks, strict=True):
        same = isinstance(line, dict) and line.get("prompt") == task.prompt
        records = records_of(line) if same else []
        if not same or not all("completion" in record for record in records):
            raise DataError(f"{answers}:{number} does not answer the question of task {task.id}")
        if not all("reward" in record for record in records):
            raise DataError(
                f"{answers}:{number} has answers without a reward: generate them with [reward]"
            )
    this.directory.mkdir(parents=True, exist_ok=True)
    write_whole(this.samples, iter(lines.values()))


def select_answers(this: RftRound, rule: str, threshold: float, samples_per_question: int) -> Json:
    """Write the training data selected from a round's samples, and its yield. Returns the yield.

    Raises:
        ConfigError: no answer is correct, so there is nothing to learn.
    """
    counts = Yield(samples_per_question)
    questions: list[Json] = []

    def learned() -> Iterator[Json]:
        for place, line in enumerate(read_lines(this.samples)):
            correct = correct_answers(line, threshold)
            kept = select(correct, rule)
            questions.append(counts.add(line, len(correct), len(kept)))
            tools = {"tools": line["tools"]} if "tools" in line else {}
            for record in kept:
                asked = {"task": place, "prompt": line["prompt"]}
                yield {**asked, "completion": record["completion"], **tools}

    write_whole(this.train, learned())
    write_whole(this.directory / "questions.jsonl", iter(questions))
    report = {"threshold": threshold, "select": rule, **counts.report()}
    write_json(this.yield_report, report)
    if not report["kept"]:
        lines = read_lines(this.samples)
        best = max((r["reward"] for line in lines for r in usable(line)), default=0.0)
        raise ConfigError(
            f"none of the {report['samples']} samples in {this.samples} is a whole answer with a "
            f"reward of at least {threshold:g} (rft.threshold); the highest is {best:g}. Give "
            "examples with rft.few_shot, raise sampling.n or sampling.max_new_tokens, or train by "
            "example first: tunesmith sft",
            keys=("rft.threshold",),
        )
    return report


def check_prompts(train: Path, samples: Sequence[Sample], tasks: Sequence[Task]) -> None:
    """Check that each training sample begins with exactly the prompt tokens of its question.

    Raises:
        DataError: a sample does not.
    """
    lines = list(read_lines(train))
    if len(lines) != len(samples):
        raise DataError(f"{train} has {len(lines)} answers, which gave {len(samples)} samples")
    for number, (line, sample) in enumerate(zip(lines, samples, strict=True), 1):
        prompt = sample.token_ids[: sample.loss_mask.index(True)]
        asked = list(tasks[line["task"]].prompt_ids)
        if prompt != asked:
            raise DataError(
                f"{train}:{number}: in training the prompt has {len(prompt)} tokens, and the "
                f"question is asked with {len(asked)} that differ: the chat template renders a "
                "finished conversation otherwise than one that is to be answered. Name another "
                "with model.chat_template, or say data.chat = false"
            )


def fallen(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether accuracy fell significantly: the 95% intervals do not overlap."""
    return after["accuracy"][2] < before["accuracy"][1]


def examples(first: RftRound, last: RftRound, count: int) -> list[EvalExample]:
    """The first questions of an evaluation, with the answers of two models."""

    def answer(line: Json) -> tuple[str, float | None]:
        record = records_of(line)[0]
        return record["completion"], record["reward"]

    both = zip(read_lines(first.evaluation), read_lines(last.evaluation), strict=False)
    lines = islice(both, count)
    return [EvalExample(last_message(a["prompt"]), answer(a), answer(b)) for a, b in lines]


def describe(name: str, shares: Mapping[str, Any]) -> str:
    """An evaluation in one line: shares with their 95% intervals."""
    parts = [f"{name:9}"]
    for key in SHARES:
        if shares[key] is not None:
            parts.append(f"{key.replace('_', ' ')} {_with_interval(*shares[key])}")
    if shares["answered"] and not shares["answered"][0]:
        parts.append("none answered")
    parts.append(f"of {shares['questions']} questions")
    if shares.get("few_shot"):
        parts.append("after worked examples")
    if shares["failed"]:
        parts.append(f"failed {shares['failed']}")
    return "  ".join(parts)


def _with_interval(share: float, low: float, high: float) -> str:
    return f"{share:.1%} (95%: {low:.1%} to {high:.1%})"


def evaluation_metrics(shares: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation as metrics."""
    known = {key: shares[key][0] for key in SHARES if shares[key]}
    known["failed"] = shares["failed"] / shares["questions"]
    return {f"eval/{key}": value for key, value in known.items()}


def yield_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """The result of a round's sampling as metrics."""
    counts = {name: float(report[name]) for name in ("questions", "solved")}
    counts["accepted"] = float(report["kept"])
    return {**counts, "sampled_right": report["correct_share"][0]}


def describe_yield(name: str, report: Mapping[str, Any]) -> str:
    """The result of sampling, and the number of questions by number of correct answers."""
    histogram: Mapping[str, int] = report["questions_by_correct_samples"]
    most = max(histogram.values()) or 1
    bars = [
        f"  {n:>4} right  {count:>7,}  {'█' * round(30 * count / most)}".rstrip()
        for n, count in histogram.items()
    ]
    totals = (
        f"{name}: {report['correct']:,} of {report['samples']:,} samples are right, "
        f"{_with_interval(*report['correct_share'])}; {report['solved']:,} of "
        f"{report['questions']:,} questions are solved, {report['kept']:,} answers are kept "
        f"({report['select']})"
    )
    return "\n".join([totals, *bars])
