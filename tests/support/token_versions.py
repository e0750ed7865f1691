"""Checks that each token has the version of the weights that drew it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.engine_contract import FREE
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.types import Completion

LOADS = 10
LONG = 200
SHORT = 8


async def check_each_token_has_its_version(
    engine: RolloutEngine, norm: torch.Tensor, plain: Any
) -> None:
    """New weights come ten times while requests are in flight.

    Only the scale of the logits changes, so that what older weights left in the KV memory stays
    right, and each token tells by its log-probability which weights drew it.

    Args:
        norm: the weight of the last norm, which is changed.
        plain: a model with the weights from before.
    """
    first = norm.detach().clone()

    async def write(number: int, count: int) -> Completion:
        return await engine.generate(
            [20 + number] * 4, replace(FREE, max_new_tokens=count, seed=number)
        )

    await engine.load_weights(0)
    long = [asyncio.create_task(write(number, LONG)) for number in range(6)]
    completions = [await write(6, SHORT)]
    for version in range(1, LOADS + 1):
        _scale(norm, first, version)
        await engine.load_weights(version)
        completions.append(await write(6 + version, SHORT))
    _scale(norm, first, 0)
    across = await asyncio.gather(*long)
    for number, done in enumerate([*across, *completions]):
        assert done.versions == sorted(done.versions)
        assert done.logprobs == pytest.approx(_expected(plain, [20 + number] * 4, done), abs=1e-3)
    assert all(len({*done.versions}) > 1 for done in across)
    assert {version for done in completions for version in done.versions} == {*range(LOADS + 1)}


def _scale(norm: torch.Tensor, first: torch.Tensor, version: int) -> None:
    with torch.no_grad():
        norm.copy_(first * (1 + version))


@torch.inference_mode()
def _expected(plain: Any, prompt: list[int], done: Completion) -> list[float]:
    """The log-probabilities that the tokens have with the weights of their versions."""
    logits = plain(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
    scales = torch.tensor(done.versions).add(1).unsqueeze(1)
    drawn = torch.tensor(done.token_ids).unsqueeze(1)
    return (logits * scales).log_softmax(-1).gather(1, drawn).squeeze(1).tolist()
