"""A frozen teacher beside a student: its likeliest tokens, and how far the student is from it there.

Shape legend: ``N`` predictions, ``k`` tokens of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tunesmith.data.forest import Forest, Predictions
from tunesmith.errors import ModelError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.head import fused_logprobs, likeliest


def predict_with_teacher(
    student: CausalLM,
    forest: Forest,
    *,
    teacher: CausalLM,
    top_k: int,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Predictions:
    """The student's log-probabilities of the targets, and its ``divergence`` from the teacher at each.

    The teacher runs without gradient, and only its ``top_k`` log-probabilities of a row are kept.
    """
    # Some models pad the vocabulary, each to its own size: rows that the student lacks are left out.
    size, head = len(student.head.weight), teacher.scaled_head(temperature, chunk)
    if len(head.weight) > size:
        head = replace(head, weight=head.weight[:size], bias=None if head.bias is None else head.bias[:size])
    with torch.no_grad():
        tokens, theirs = likeliest(teacher.states(forest), head, min(top_k, len(head.weight)))
    # The target rides along as one more token, so that the student's logits are computed once.
    wanted = torch.cat([forest.targets[:, None], tokens], 1)
    ours, _ = fused_logprobs(student.states(forest), student.scaled_head(temperature, chunk), wanted)
    return Predictions(logprobs=ours[:, 0], divergence=forward_kl(theirs, ours[:, 1:]))


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """``KL(teacher ‖ student)`` in nats, ``[N]``, over the given tokens and all others taken together.

    Lumping the others into one outcome keeps it a divergence: never negative, zero only where the student agrees on
    every token given, and never above the divergence over the whole vocabulary, which it is when all are given.

    Args:
        teacher: log-probabilities ``[N, k]`` of ``k`` different tokens.
        student: of the same tokens, with gradient.
    """
    ours, theirs = _rest(student), _rest(teacher)
    kept = (teacher.exp() * (teacher - student)).sum(-1)
    return kept + theirs.exp() * (theirs - ours)


def _rest(logprobs: Tensor) -> Tensor:
    """``log(1 − Σ p)`` of ``[N, k]``, without loss where the sum is near 0 or near 1; bounded where nothing is left."""
    total = logprobs.logsumexp(-1).clamp(max=-torch.finfo(logprobs.dtype).eps)
    near_one = total > -0.6931
    high = torch.where(near_one, total, -1.0)
    low = torch.where(near_one, -1.0, total)
    return torch.where(near_one, (-torch.expm1(high)).log(), torch.log1p(-low.exp()))


def check_same_vocabulary(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, names: tuple[str, str]
) -> None:
    """Refuse a teacher whose tokens are not the student's.

    Args:
        names: what student and teacher are called.

    Raises:
        ModelError: with what differs.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    begin = f"the teacher '{names[1]}' has other tokens than the student '{names[0]}'"
    end = "Distillation compares probabilities token by token: take a teacher of the student's family."
    if missing := sorted(ours.keys() ^ theirs.keys(), key=lambda t: (ours.get(t, theirs.get(t, 0)), t)):
        owner = "student" if missing[0] in ours else "teacher"
        raise ModelError(f"{begin}: {len(ours)} and {len(theirs)}; only the {owner} has '{missing[0]}'. {end}")
    token = min((t for t in ours if ours[t] != theirs[t]), key=lambda t: ours[t])
    raise ModelError(f"{begin}: '{token}' is number {theirs[token]} of the teacher's and {ours[token]} here. {end}")
