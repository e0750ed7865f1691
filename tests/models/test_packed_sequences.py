"""Packed sequences of every family: nothing leaks, whatever else is packed, and a shared prompt is
a repeated one."""

from __future__ import annotations

import pytest
import torch

from tests.support.families import (
    assert_same_gradients,
    build,
    gradients,
    logprobs,
    module_of,
    one_at_a_time,
    samples,
)
from tests.support.training import forest_of
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.families import published
from tunesmith.types import Sample

STATES = ("lfm2", "qwen3_next", "bamba", "falcon_h1", "jamba")
"""A convolution, a delta net, a state space, and one beside attention in a layer."""
OTHERS = (pytest.mark.slow, pytest.mark.long)
EVERY = [
    *STATES,
    *(pytest.param(name, marks=OTHERS) for name in published() if name not in STATES),
]


def forest_model(kind: str) -> CausalLM:
    model = build(kind)
    model.module.set_attn_implementation(ATTENTION_NAME)
    return model


def alone(batch: list[Sample]) -> list[Sample]:
    """The same lengths, without any two that share a prompt."""
    return [
        Sample([5 + (i * 31 + t) % 290 for t in range(len(s.token_ids))], s.loss_mask)
        for i, s in enumerate(batch)
    ]


@pytest.mark.parametrize("kind", EVERY)
def test_neighbours_see_nothing_of_each_other(kind: str) -> None:
    """Another token in one sequence changes no bit of the others, in outputs and in gradients of
    their inputs."""
    model = forest_model(kind)
    batch = alone(samples())
    changed = [batch[0], Sample([7, *batch[1].token_ids[1:]], batch[1].loss_mask), *batch[2:]]
    with torch.no_grad():
        before, after = (logprobs(model, forest_of(each))[0] for each in (batch, changed))
    ends = torch.tensor([sum(s.loss_mask) for s in batch]).cumsum(0).tolist()
    same = before == after
    assert not same[ends[0] : ends[1]].all()
    assert same[: ends[0]].all() and same[ends[1] :].all()


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("count", [1, 2, 17])
def test_whatever_else_is_packed(kind: str, count: int) -> None:
    model = forest_model(kind)
    batch = alone(samples() * 3)[:count]
    with torch.no_grad():
        got, _ = logprobs(model, forest_of(batch))
        want = one_at_a_time(module_of(kind), batch, 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", EVERY)
def test_a_shared_prompt_is_a_repeated_one(kind: str) -> None:
    model = forest_model(kind)
    results = []
    for share in (True, False):
        found, _ = logprobs(model, forest_of(samples(), share=share))
        results.append((found, gradients(model, found)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    assert_same_gradients(results[0][1], results[1][1], 1e-4)
