"""Repetition penalty and least length are those of transformers; log-probabilities are of what was
drawn from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
)

import tunesmith
from tests.support.penalties import by_transformers, requests
from tests.support.tiny import save_model
from tunesmith.config.commands import GenerateConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.rules.checks import check
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.loop.gate import remaining
from tunesmith.types import Completion, Sampling


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), initializer_range=0.3)


@pytest.mark.more
def test_the_embedded_engine_draws_from_what_transformers_would(directory: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(directory)
    engine = LocalEngine(
        CausalLM.load(directory), kv_bytes=1 << 20, max_running=7, max_prefill_tokens=32
    )

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(prompt, sampling) for prompt, sampling in requests())
        )

    for (prompt, sampling), done in zip(requests(), asyncio.run(all_of_them()), strict=True):
        assert done.logprobs == pytest.approx(
            by_transformers(plain, prompt, done, sampling), abs=1e-4
        )
        assert len(done.token_ids) > sampling.min_new_tokens
        assert not set(done.token_ids[: sampling.min_new_tokens]) & set(sampling.stop_token_ids)
        if sampling.temperature == 0:
            ids = torch.tensor([prompt])
            settings = {
                "repetition_penalty": sampling.repetition_penalty,
                "min_new_tokens": sampling.min_new_tokens,
            }
            settings |= {
                "eos_token_id": list(sampling.stop_token_ids) or None,
                "max_new_tokens": 20,
            }
            want = plain.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings
            )
            assert done.token_ids == want[0, len(prompt) :].tolist()


def test_they_are_settings_of_every_command_that_samples(directory: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(directory)
    model = CausalLM.load(directory)
    [found] = tunesmith.generate(
        model, ["ab"], max_new_tokens=12, repetition_penalty=5.0, min_new_tokens=12, chat=False
    )
    prompt: list[int] = model.tokenizer("ab")["input_ids"]
    want = Sampling(
        12, 0.0, repetition_penalty=5.0, min_new_tokens=12, stop_token_ids=(2, 4)
    )  # EOS, end of turn
    done = Completion(found.token_ids[0], [], [], "length")
    assert found.logprobs[0] == pytest.approx(by_transformers(plain, prompt, done, want), abs=1e-4)
    assert len(done.token_ids) == len(set(done.token_ids)) == 12


@pytest.mark.parametrize(("kind", "section"), [(RLConfig, "rollout"), (GenerateConfig, "sampling")])
def test_a_least_length_above_the_longest_is_refused(kind: Any, section: str) -> None:
    said = [
        "model.path=org/m",
        "data.train=org/d",
        'reward.functions=["math"]',
        f"{section}.max_new_tokens=8",
    ]
    check(load_config(kind, None, [*said, f"{section}.min_new_tokens=8"]))
    with pytest.raises(ConfigError, match=rf"{section}\.min_new_tokens = 9"):
        check(load_config(kind, None, [*said, f"{section}.min_new_tokens=9"]))
    for bad in ("repetition_penalty=0", "min_new_tokens=-1"):
        with pytest.raises(ConfigError, match=bad.split("=")[0]):
            load_config(kind, None, [*said, f"{section}.{bad}"])


@pytest.mark.parametrize("setting", ["repetition_penalty=1.2", "min_new_tokens=4"])
def test_sglang_does_it_otherwise_and_is_refused_by_key(setting: str) -> None:
    said = [
        "model.path=org/m",
        "data.train=org/d",
        "system.engine=sglang",
        'system.engine_urls=["http://127.0.0.1:1"]',
    ]
    check(load_config(GenerateConfig, None, said))
    with pytest.raises(ConfigError, match=f"sampling.{setting.split('=')[0]}"):
        check(load_config(GenerateConfig, None, [*said, f"sampling.{setting}"]))


def test_what_is_left_of_an_interrupted_completion_may_end_when_all_of_it_might() -> None:
    sampling = Sampling(20, min_new_tokens=9, seed=1)
    assert [remaining(sampling, n).min_new_tokens for n in (0, 4, 12)] == [9, 5, 0]
    left = replace(remaining(sampling, 4), seed=1, min_new_tokens=9)
    assert left == replace(sampling, max_new_tokens=16, continued=4)
