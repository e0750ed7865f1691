"""Rejection-sampling fine-tuning (RFT; Yuan et al. 2023, arXiv:2308.01825): the files of a round, and what is in them.

::

    run/
        base/evaluation.jsonl, evaluation.json    the model before training
        round-1/
            samples.jsonl       every question with its sampled answers and their rewards
            train.jsonl         what is learned: prompt and completion
            questions.jsonl     samples, correct and kept answers of each question
            yield.json          the same in sum
            sft.toml, sft/      the training run, in every way that of ``tunesmith sft``
            trained.json        the model it ended with
            evaluation.jsonl, evaluation.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, DataError, boundary
from tunesmith.monitor.text import Example, last_message
from tunesmith.offline.generation import Json, read_lines, records_of, write_whole
from tunesmith.offline.selection import Yield, accuracy, correct_answers, select, usable
from tunesmith.storage import read_json, write_json
from tunesmith.types import Sample, Task


@dataclass(frozen=True, slots=True)
class Round:
    """A directory with the files of one round, or of the base model's evaluation."""

    directory: Path

    @property
    def samples(self) -> Path:
        return self.directory / "samples.jsonl"

    @property
    def train(self) -> Path:
        return self.directory / "train.jsonl"

    @property
    def sft(self) -> Path:
        return self.directory / "sft"

    @property
    def evaluation(self) -> Path:
        return self.directory / "evaluation.jsonl"

    @property
    def model(self) -> Path | None:
        """The model that the round's training ended with, once it has."""
        path = self.directory / "trained.json"
        return Path(read_json(path)["model"]) if path.exists() else None

    def finish(self, model: Path) -> None:
        write_json(self.directory / "trained.json", {"model": str(model)})


def report_of(run_dir: Path, rounds: Sequence[Round]) -> dict[str, dict[str, Json]]:
    """``{"evaluations": ..., "yields": ...}`` of what a run has so far, by the names of the directories."""
    found: dict[str, dict[str, Json]] = {}
    for kind, file in (("evaluations", "evaluation.json"), ("yields", "yield.json")):
        places = (Round(run_dir / "base"), *rounds)
        paths = [r.directory / file for r in places]
        found[kind] = {path.parent.name: read_json(path) for path in paths if path.exists()}
    return found


def adopt_answers(answers: Path, this: Round, tasks: Sequence[Task]) -> None:
    """Take another run's answers to the same questions as the round's samples.

    Raises:
        DataError: it cannot be read, or answers other questions than ``tasks``.
    """
    if this.samples.exists():
        return
    with boundary(DataError, f"cannot read rft.answers = '{answers}'", (OSError, ValueError)):
        lines = list(read_lines(answers))
    if len(lines) != len(tasks):
        raise DataError(f"{answers} answers {len(lines)} questions, and data.train has {len(tasks)}")
    for number, (line, task) in enumerate(zip(lines, tasks, strict=True), 1):
        if line.get("prompt") != task.prompt or "completions" not in line:
            raise DataError(f"{answers}:{number} does not answer the question of task {task.id}")
    this.directory.mkdir(parents=True, exist_ok=True)
    write_whole(this.samples, iter(lines))


def fallen(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether accuracy fell by more than chance explains: the 95% intervals do not overlap."""
    return after["accuracy"][2] < before["accuracy"][1]


def select_answers(this: Round, rule: str, threshold: float, samples_per_question: int) -> Json:
    """Write what is learned of a round's samples, and its yield, which is returned.

    Raises:
        ConfigError: no answer is right, so that there is nothing to learn.
    """
    found = Yield(samples_per_question)
    questions: list[Json] = []

    def learned() -> Iterator[Json]:
        for place, line in enumerate(read_lines(this.samples)):
            correct = correct_answers(line, threshold)
            kept = select(correct, rule)
            questions.append(found.add(line, len(correct), len(kept)))
            shared = {name: line[name] for name in ("tools",) if name in line}
            for record in kept:
                yield {"task": place, "prompt": line["prompt"], "completion": record["completion"], **shared}

    write_whole(this.train, learned())
    write_whole(this.directory / "questions.jsonl", iter(questions))
    report = {"threshold": threshold, "select": rule, **found.report()}
    write_json(this.directory / "yield.json", report)
    if not report["kept"]:
        best = max((r["reward"] for line in read_lines(this.samples) for r in usable(line)), default=0.0)
        raise ConfigError(
            f"none of the {report['samples']} samples in {this.samples} is a whole answer with a reward of at least "
            f"{threshold:g} (rft.threshold); the highest is {best:g}. Give examples with rft.few_shot, raise "
            "sampling.n or sampling.max_new_tokens, or train by example first: tunesmith sft"
        )
    return report


def check_prompts(train: Path, samples: Sequence[Sample], tasks: Sequence[Task]) -> None:
    """Every training sample begins with exactly the tokens that its question is asked with: templated once,
    without worked examples, and learned from where the answer begins.

    Raises:
        DataError: one does not.
    """
    lines = list(read_lines(train))
    if len(lines) != len(samples):
        raise DataError(f"{train} has {len(lines)} answers, and {len(samples)} samples came of them")
    for number, (line, sample) in enumerate(zip(lines, samples, strict=True), 1):
        prompt = sample.token_ids[: sample.loss_mask.index(True)]
        asked = list(tasks[line["task"]].prompt_ids)
        if prompt != asked:
            raise DataError(
                f"{train}:{number}: in training the prompt has {len(prompt)} tokens, and the question is asked with "
                f"{len(asked)} that differ: the chat template renders a finished conversation otherwise than one "
                "that is to be answered. Name another with model.chat_template, or say data.chat = false"
            )


def evaluate_file(this: Round, threshold: float, count: int) -> Json:
    """Accuracy and answered rate of the first ``count`` lines of a round's evaluation, which are written beside it."""
    found = accuracy(islice(read_lines(this.evaluation), count), threshold)
    write_json(this.directory / "evaluation.json", found)
    return found


def examples(first: Round, last: Round, count: int) -> list[Example]:
    """The first questions of an evaluation, as two models answered them."""
    lines = islice(zip(read_lines(first.evaluation), read_lines(last.evaluation), strict=False), count)
    return [Example(last_message(before["prompt"]), _answer(before), _answer(after)) for before, after in lines]


def _answer(line: Json) -> tuple[str, float | None]:
    record = records_of(line)[0]
    return record["completion"], record["reward"]


def describe(name: str, found: Mapping[str, Any]) -> str:
    """One line: shares with their 95% intervals."""
    parts = [f"{name:9}"]
    for key in ("accuracy", "answered", "accuracy_of_answered"):
        if found[key] is not None:
            share, low, high = found[key]
            parts.append(f"{key.replace('_', ' ')} {share:.1%} (95%: {low:.1%} to {high:.1%})")
    parts.append(f"of {found['questions']} questions")
    return "  ".join([*parts, *([f"failed {found['failed']}"] if found["failed"] else [])])


def describe_yield(name: str, found: Mapping[str, Any]) -> list[str]:
    """What sampling gave, and how many questions have how many right answers."""
    histogram: Mapping[str, int] = found["questions_by_correct_samples"]
    most = max(histogram.values()) or 1
    bars = [f"  {n:>4} right  {count:>7,}  {'█' * round(30 * count / most)}".rstrip() for n, count in histogram.items()]
    return [
        f"{name}: {found['correct']:,} of {found['samples']:,} samples are right, {found['solved']:,} of "
        f"{found['questions']:,} questions are solved, {found['kept']:,} answers are kept ({found['select']})",
        *bars,
    ]
