"""Teachers beside the trainer's passes over a batch: what they see of the student's rollouts, and
what they say of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tunesmith.errors import RewardError
from tunesmith.learn.data.alignment import SpanPair, align, decode_ends
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.learn.data.tokens import encode_after
from tunesmith.types import Record, Rollout, Sample, Task, Tokenizer

ALIGNED = "teacher_aligned"
"""Column: whether a token of a teacher with another tokenizer ends where the student's does."""
Score = Callable[[Sequence[Sample]], Mapping[str, Floats]]
"""From samples to columns over their predictions: ``ref_logprobs``, or the tokens that a teacher
finds likeliest (``models.teacher``)."""
Teacher = Callable[[Sequence[Rollout], Batch], Mapping[str, Floats]]
"""From rollouts, and the batch of their records, to columns of the batch."""


def _records(rollouts: Sequence[Rollout]) -> Iterator[tuple[Task, Record]]:
    for rollout in rollouts:
        for record in rollout.records:
            if record.num_sampled:
                yield rollout.task, record


@dataclass(frozen=True, slots=True)
class TeacherOfTokens:
    """A teacher with the student's tokenizer: only the prompt is tokenized again."""

    score: Score
    prompt: Callable[[Task], list[int]] | None = None
    """The tokens of the prompt that it sees; None: the student's."""

    def __call__(self, rollouts: Sequence[Rollout], batch: Batch) -> Mapping[str, Floats]:
        samples = [self._sample(task, record) for task, record in _records(rollouts)]
        places = zip(samples, batch.group.tolist(), batch.rollout.tolist(), strict=True)
        return self.score([replace(s, group=g, rollout=rollout) for s, g, rollout in places])

    def _sample(self, task: Task, record: Record) -> Sample:
        own = list(task.prompt_ids)
        # A record whose history was edited may begin with something else.
        if self.prompt is None or record.token_ids[: len(own)] != own:
            return Sample(record.token_ids, record.sampled)
        before = self.prompt(task)
        mask = [False] * len(before) + record.sampled[len(own) :]
        return Sample([*before, *record.token_ids[len(own) :]], mask)


@dataclass(frozen=True, slots=True)
class Tongue:
    """A tokenizer, and the token that ends an answer."""

    tokenizer: Tokenizer
    ends: tuple[int, ...]
    """The first one ends a teacher's answers; the student may end its own with any."""


@dataclass(frozen=True, slots=True)
class TeacherOfText:
    """A teacher with another tokenizer, which scores the answers' text.

    Over the shortest spans of text at whose ends a token of either ends, the log-probabilities of
    each are summed. The difference is shared equally by the student's ``n`` tokens of the span,
    ``logπ_T − logπ = (Σ logπ_T − Σ logπ) / n`` at each, so that the differences of an answer add up
    to that of its text. A token that ends an answer is compared with the teacher's own. Tokens
    after the last common end have no reference and are not learned from.
    """

    score: Score
    prompt: Callable[[Task], list[int]]
    student: Tongue
    teacher: Tongue

    def __call__(self, rollouts: Sequence[Rollout], batch: Batch) -> Mapping[str, Floats]:
        """Raises RewardError: no token of the batch ends where one of the teacher's does."""
        retold = [self.retell(task, record) for task, record in _records(rollouts)]
        told = self.score([sample for sample, _ in retold])["ref_logprobs"]
        cuts = np.cumsum([sum(sample.loss_mask) for sample, _ in retold])[:-1]
        theirs = np.split(told, cuts) if retold else []
        ours = batch.split(batch.columns["old_logprobs"])
        reference = [np.full(len(own), np.nan) for own in ours]
        aligned = [np.zeros(len(own)) for own in ours]
        for number, (_, spans) in enumerate(retold):
            for (start, stop), other in spans:
                own = ours[number][start:stop]
                change = theirs[number][slice(*other)].sum() - own.sum()
                reference[number][start:stop] = own + change / (stop - start)
                aligned[number][stop - 1] = 1.0
        shares = np.concatenate([np.zeros(0), *aligned])
        if len(shares) and not shares.any():
            raise RewardError(
                "no token of the student's answers ends where one of the teacher's does "
                "(teacher.path): their tokenizers make different texts of them"
            )
        return {"ref_logprobs": np.concatenate([np.zeros(0), *reference]), ALIGNED: shares}

    def retell(self, task: Task, record: Record) -> tuple[Sample, list[SpanPair]]:
        """What the teacher sees of a record with one answer, and the spans of its text."""
        first = record.sampled.index(True)
        before = record.token_ids[:first]
        answer = record.token_ids[first:]
        ended = bool(self.teacher.ends) and answer[-1] in self.student.ends
        written = answer[:-1] if ended else answer
        text, ends = decode_ends(self.student.tokenizer, before, written)
        prompt = self.prompt(task)
        ids = encode_after(self.teacher.tokenizer, "", text) if text else []
        spans = align((text, ends), decode_ends(self.teacher.tokenizer, prompt, ids))
        if ended:
            spans.append(SpanPair((len(written), len(answer)), (len(ids), len(ids) + 1)))
            ids = [*ids, self.teacher.ends[0]]
        return Sample([*prompt, *ids], [False] * len(prompt) + [True] * len(ids)), spans


@dataclass(frozen=True, slots=True)
class TeacherByColumn:
    """Several, each for the tasks that name it in a column."""

    column: str
    teachers: Mapping[str, Teacher]

    def __call__(self, rollouts: Sequence[Rollout], batch: Batch) -> Mapping[str, Floats]:
        names = [rollout.task.columns[self.column] for rollout in rollouts]
        columns: dict[str, Floats] = {}
        for name, teacher in self.teachers.items():
            chosen = [number for number, own in enumerate(names) if own == name]
            samples = np.flatnonzero(np.isin(batch.rollout, chosen))
            said = teacher([rollouts[number] for number in chosen], batch.take(samples))
            for key, values in said.items():
                shape = (batch.num_predictions, *values.shape[1:])
                column = columns.setdefault(key, np.full(shape, np.nan))
                column[batch.predictions_of(samples)] = values
        return columns
