"""The experts of Llama 4 compute the tokens that they were chosen for, at once or one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.support.families import (
    SPECIAL,
    assert_same_gradients,
    gradients,
    logprobs,
    samples,
)
from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.models.causal_lm import CausalLM


def test_experts_compute_the_same_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path, "llama4_text", **SPECIAL["llama4_text"])
    forest = forest_of(samples())
    model = CausalLM.load(path)
    want, _ = logprobs(model, forest)
    together = gradients(model, want)
    model = CausalLM.load(path, experts="eager")
    monkeypatch.setattr(functional, "grouped_mm", pytest.fail)
    got, _ = logprobs(model, forest)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert_same_gradients(gradients(model, got), together, 1e-5)
