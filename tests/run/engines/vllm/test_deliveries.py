"""What the vLLM engine makes of vLLM's outputs; vLLM itself need not be installed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tunesmith.errors import EngineError
from tunesmith.run.engines.vllm import engine

PARTS: Any = engine


def output(*tokens: tuple[int, float]) -> Any:
    """A finished output of a request "r" with these new tokens and log-probabilities."""
    logprobs = [{token: SimpleNamespace(logprob=logprob)} for token, logprob in tokens]
    new = SimpleNamespace(
        token_ids=[token for token, _ in tokens],
        logprobs=logprobs,
        finish_reason="stop",
        routed_experts=None,
    )
    return SimpleNamespace(request_id="r", outputs=[new], finished=True)


def engine_of_one(aborted: list[str]) -> tuple[Any, Any]:
    """An engine without vLLM, and its request "r"."""
    request = PARTS._Request(None, sees=False)
    made = object.__new__(PARTS.VllmEngine)
    made._requests = {"r": request}
    made._version = 3
    made._vllm = SimpleNamespace(abort_request=aborted.extend)
    return made, request


def test_a_completion_has_vllms_tokens_and_log_probabilities() -> None:
    made, request = engine_of_one([])
    made._deliver(output((5, -0.5), (2, -0.25)))
    done = request.done.result(0)
    assert (done.token_ids, done.logprobs, done.versions) == ([5, 2], [-0.5, -0.25], [3, 3])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_log_probability_that_is_not_finite_fails_its_request(bad: float) -> None:
    """As with the other engines; its tokens would be left out of the loss without a word."""
    aborted: list[str] = []
    made, request = engine_of_one(aborted)
    made._deliver(output((5, -0.5), (7, bad), (2, -0.25)))
    with pytest.raises(EngineError, match="token 7"):
        request.done.result(0)
    assert aborted == ["r"]
