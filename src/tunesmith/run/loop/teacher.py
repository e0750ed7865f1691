"""A teacher outside of the trainer's passes: what it sees of the student's rollouts, and what it
says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.types import Record, Rollout, Sample, Task

Score = Callable[[Sequence[Sample]], Mapping[str, Floats]]
"""From samples to columns over their predictions: ``ref_logprobs``, or the tokens that a teacher
finds likeliest (``models.teacher``)."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """Called with rollouts, and the batch of their records; returns columns of the batch.

    Nothing is tokenized again but the prompt.
    """

    score: Score
    prompt: Callable[[Task], list[int]] | None = None
    """The tokens of the prompt that it sees; None: the student's."""

    def __call__(self, rollouts: Sequence[Rollout], batch: Batch) -> Mapping[str, Floats]:
        records = [
            self._sample(rollout.task, record)
            for rollout in rollouts
            for record in rollout.records
            if record.num_sampled
        ]
        places = zip(records, batch.group.tolist(), batch.rollout.tolist(), strict=True)
        return self.score(
            [replace(sample, group=group, rollout=rollout) for sample, group, rollout in places]
        )

    def _sample(self, task: Task, record: Record) -> Sample:
        own = list(task.prompt_ids)
        # A record whose history was edited may begin with something else.
        if self.prompt is None or record.token_ids[: len(own)] != own:
            return Sample(record.token_ids, record.sampled)
        before = self.prompt(task)
        return Sample(
            [*before, *record.token_ids[len(own) :]],
            [False] * len(before) + record.sampled[len(own) :],
        )
