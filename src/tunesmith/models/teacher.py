"""The divergence of a student from a frozen teacher, over the teacher's most likely tokens.

Shape legend: ``N`` predictions, ``k`` tokens per row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from tunesmith.errors import ModelError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.embedding_rows import enough_rows, rows_of
from tunesmith.models.forest import Forest, Predictions
from tunesmith.models.head import Head, fused_logprobs, likeliest
from tunesmith.types import Tokenizer

TEACHER_TOKENS = "teacher_tokens"
"""Column: the tokens that a teacher finds likeliest, ``[N, k]``; exact in float32 below 2^24."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""Column: their log-probabilities, ``[N, k]``."""


def predict_with_teacher(
    student: CausalLM,
    forest: Forest,
    *,
    teacher: CausalLM,
    top_k: int,
    temperature: float = 1.0,
    chunk: int | None = None,
    weights: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Predictions:
    """The student's log-probabilities of the targets, and its ``divergence`` from the teacher at
    each.

    The teacher runs without gradient; only its ``top_k`` log-probabilities per row are kept.

    Args:
        weights: a context in which the teacher's weights are on the device.

    Raises:
        ModelError: in a sequence group, teacher and student both split forests by length, but at
            different lengths.
    """
    if student.sequence is not None and student.lengths != teacher.lengths:
        raise ModelError(
            "the teacher's rotary frequencies depend on the length in another way than the "
            "student's, so ranks cannot "
            "share a sequence of both: leave system.sequence_parallel out",
            keys=("system.sequence_parallel.size",),
        )
    # Models pad the vocabulary to different sizes: teacher rows that the student lacks are dropped.
    size = len(student.head.weight)
    head = teacher.scaled_head(temperature, chunk)
    if len(head.weight) > size:
        head = replace(
            head, weight=head.weight[:size], bias=None if head.bias is None else head.bias[:size]
        )
    with torch.no_grad(), weights():
        tokens, theirs = likeliest(teacher.states(forest), head, min(top_k, len(head.weight)))
    return _compared(student, forest, student.scaled_head(temperature, chunk), tokens, theirs)


def predict_with_said(
    student: CausalLM, forest: Forest, *, chunk: int | None = None
) -> Predictions:
    """As ``predict_with_teacher``, with what a teacher has said before in the forest's columns.

    A forest without them, which is scored, is predicted without a divergence.
    """
    if TEACHER_TOKENS not in forest.columns:
        return student.predict(forest, chunk=chunk)
    tokens = forest.columns[TEACHER_TOKENS].long()
    theirs = forest.columns[TEACHER_LOGPROBS]
    return _compared(student, forest, student.scaled_head(chunk=chunk), tokens, theirs)


def _compared(
    student: CausalLM, forest: Forest, head: Head, tokens: Tensor, theirs: Tensor
) -> Predictions:
    """Args: theirs: the teacher's log-probabilities of ``tokens [N, k]``."""
    # The target is appended as one more token, so that the student's logits are computed only once.
    wanted = torch.cat([forest.targets[:, None], tokens], 1)
    ours, _ = fused_logprobs(student.states(forest), head, wanted)
    return Predictions(logprobs=ours[:, 0], divergence=forward_kl(theirs, ours[:, 1:]))


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """``KL(teacher ‖ student)`` in nats, ``[N]``, over ``k`` tokens and one outcome for all others.

    It is never negative, zero only where the student agrees on all ``k`` tokens, and at most the
    divergence over the whole vocabulary.

    Args:
        teacher: log-probabilities of ``k`` different tokens, ``[N, k]``.
        student: log-probabilities of the same tokens, with gradient.
    """
    ours = _rest(student)
    theirs = _rest(teacher)
    kept = (teacher.exp() * (teacher - student)).sum(-1)
    return kept + theirs.exp() * (theirs - ours)


def _rest(logprobs: Tensor) -> Tensor:
    """``log(1 − Σ p)``, ``[N]``, exact where the sum is near 0 or near 1 and bounded where it is
    1."""
    total = logprobs.logsumexp(-1).clamp(max=-torch.finfo(logprobs.dtype).eps)
    near_one = total > -0.6931
    high = torch.where(near_one, total, -1.0)
    low = torch.where(near_one, -1.0, total)
    return torch.where(near_one, (-torch.expm1(high)).log(), torch.log1p(-low.exp()))


def check_same_vocabulary(student: Tokenizer, teacher: Tokenizer, names: tuple[str, str]) -> None:
    """Refuse a teacher whose vocabulary differs from the student's.

    Args:
        names: the paths of student and teacher.

    Raises:
        ModelError: with the first difference.
    """
    ours = student.get_vocab()
    theirs = teacher.get_vocab()
    problem = f"the teacher '{names[1]}' has other tokens than the student '{names[0]}'"
    remedy = (
        "Distillation compares probabilities token by token: use a teacher of the student's family."
    )
    if not enough_rows(student, teacher):
        rows = f"{rows_of(teacher)} rows in its embedding, and the student {rows_of(student)}"
        raise ModelError(f"{problem}: it has {rows}. {remedy}")
    if ours == theirs:
        return
    missing = sorted(ours.keys() ^ theirs.keys(), key=lambda t: (ours.get(t, theirs.get(t, 0)), t))
    if missing:
        owner = "student" if missing[0] in ours else "teacher"
        difference = f"{len(ours)} and {len(theirs)}; only the {owner} has '{missing[0]}'"
    else:
        token = min((t for t in ours if ours[t] != theirs[t]), key=ours.__getitem__)
        numbers = f"number {theirs[token]} in the teacher and {ours[token]} in the student"
        difference = f"'{token}' has {numbers}"
    raise ModelError(f"{problem}: {difference}. {remedy}")
