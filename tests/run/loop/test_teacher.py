"""Teachers beside the trainer: one with another tokenizer, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import tokenizer, tokenizer_with_pairs
from tunesmith.errors import RewardError
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.run.loop.experience import rollout_batch
from tunesmith.run.loop.teacher import TeacherByColumn, TeacherOfText, TeacherOfTokens, Tongue
from tunesmith.types import Completion, Rollout, Sample, Task

OURS: Any = tokenizer()
THEIRS: Any = tokenizer_with_pairs("a", "b")


def answered(text: str, logprobs: list[float], *ends: int) -> tuple[Rollout, Batch]:
    prompt = tuple(OURS("q")["input_ids"])
    rollout = Rollout(Task("t", "q", prompt))
    rollout.observe(prompt)
    ids = [*OURS(text)["input_ids"], *ends]
    rollout.act(Completion(ids, logprobs, [0] * len(ids), "stop"))
    return rollout, rollout_batch([(rollout, 0)])


def teacher(scores: list[float], seen: list[Sample] | None = None) -> TeacherOfText:
    def score(samples: Sequence[Sample]) -> Mapping[str, Floats]:
        if seen is not None:
            seen.extend(samples)
        return {"ref_logprobs": np.array(scores)}

    ours = Tongue(OURS, (4, 2))
    return TeacherOfText(score, lambda _: [7, 8], ours, Tongue(THEIRS, (3, 2)))


def test_a_spans_difference_is_shared_by_its_tokens() -> None:
    """ "ab" is one token of the teacher: (−2 − (−1 − 2)) / 2 = 0.5 at each; "c" is compared alone,
    and so are the ends."""
    rollout, batch = answered("abc", [-1.0, -2.0, -4.0, -0.25], 4)
    seen: list[Sample] = []
    said = teacher([-2.0, -1.0, -0.5], seen)([rollout], batch)
    assert said["ref_logprobs"].tolist() == [-0.5, -1.5, -1.0, -0.5]
    assert said["teacher_aligned"].tolist() == [0.0, 1.0, 1.0, 1.0]
    (sample,) = seen
    assert sample.token_ids == [7, 8, *THEIRS("abc")["input_ids"], 3]
    assert sample.loss_mask == [False, False, True, True, True]


def test_what_follows_the_last_common_end_has_no_reference() -> None:
    half = OURS("é")["input_ids"][0]
    rollout, batch = answered("c", [-1.0, -2.0], half)
    said = teacher([-3.0])([rollout], batch)
    assert said["ref_logprobs"][0] == -3.0 and np.isnan(said["ref_logprobs"][1])
    batch.add("ref_logprobs", said["ref_logprobs"])
    assert batch.finite.tolist() == [True, False], "it is not learned from"


def test_nothing_that_aligns_is_refused() -> None:
    rollout, batch = answered("", [-1.0], OURS("é")["input_ids"][0])
    with pytest.raises(RewardError, match=r"teacher\.path"):
        teacher([])([rollout], batch)
    empty = rollout_batch([])
    assert len(teacher([])([], empty)["ref_logprobs"]) == 0


def test_each_sample_is_scored_by_the_teacher_that_its_task_names() -> None:
    def rollout(name: str, *ids: int) -> Rollout:
        made = Rollout(Task(name, "q", (5,), {"subject": name}))
        made.observe((5,))
        made.act(Completion(list(ids), [-1.0] * len(ids), [0] * len(ids), "stop"))
        return made

    def by(factor: float) -> TeacherOfTokens:
        def score(samples: Sequence[Sample]) -> Mapping[str, Floats]:
            written = [
                t for s in samples for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m
            ]
            values = factor * np.array(written, np.float64)
            return {"ref_logprobs": values, "pairs": np.stack([values, values], 1)}

        return TeacherOfTokens(score)

    rollouts = [rollout("math", 7, 8), rollout("code", 9), rollout("math", 6)]
    batch = rollout_batch([(one, 0) for one in rollouts])
    said = TeacherByColumn("subject", {"math": by(1.0), "code": by(-1.0), "law": by(5.0)})(
        rollouts, batch
    )
    assert said["ref_logprobs"].tolist() == [7.0, 8.0, -9.0, 6.0]
    assert said["pairs"].tolist() == [[7.0, 7.0], [8.0, 8.0], [-9.0, -9.0], [6.0, 6.0]]
