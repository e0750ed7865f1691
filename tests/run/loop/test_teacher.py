"""Teachers beside the trainer: one with another tokenizer, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.support.tiny import tokenizer, tokenizer_with_pairs
from tunesmith.errors import RewardError
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.run.loop.experience import rollout_batch
from tunesmith.run.loop.teacher import TeacherOfText, Tongue
from tunesmith.types import Completion, Rollout, Sample, Task

OURS = tokenizer()
THEIRS = tokenizer_with_pairs("a", "b")


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
