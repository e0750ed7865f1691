"""Trainer and engines are compared after each sync."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.support.tiny import save_model
from tests.support.training import backend_of, learner_of
from tunesmith.config.engines import EngineWeights
from tunesmith.config.schema import ModelSection
from tunesmith.errors import EngineError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu.products import compiled
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.loop.canary import OF_WEIGHTS, TOLERANCES, Canary
from tunesmith.run.specs.planes import file_plane, read_offer
from tunesmith.run.weights.base import Offer
from tunesmith.types import Completion, Sampling

PROMPT = list(range(20, 44))
SAMPLING = Sampling(8, ignore_eos=True, seed=1)


class Apart(LocalEngine):
    """A member of a pool with its own weights; it never updates those in ``keeps``."""

    def __init__(
        self,
        name: str,
        path: Path,
        dtype: torch.dtype,
        keeps: Iterable[str] = (),
        rounded: EngineWeights = "model",
    ) -> None:
        self.name = name
        lm = CausalLM.load(path, dtype=dtype)
        sizes: dict[str, Any] = {"kv_bytes": 1 << 20, "max_running": 4, "max_prefill_tokens": 64}
        super().__init__(lm, **sizes, rounded=rounded)
        self._own: dict[str, Tensor] = lm.module.state_dict()
        self._keeps = set(keeps)

    async def take(self, version: int, offer: Offer) -> None:
        for name, tensor in read_offer(offer):
            if name not in self._keeps:
                self._own[name].copy_(tensor)
        await self.load_weights(version)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("canary") / "model", "qwen3", tie_word_embeddings=False
    )


def bench(
    path: Path, dtype: str = "float32", *keeps: str, rounded: EngineWeights = "model"
) -> tuple[EnginePool, Canary, Any]:
    kind = getattr(torch, dtype)
    backend = backend_of(path, kind)

    async def start(number: int) -> Apart:
        return Apart(f"engine {number}", path, kind, keeps if number == 1 else (), rounded)

    pool = EnginePool(start, file_plane(backend.model.module.state_dict().items), size=2)
    learner = learner_of(backend)
    return (
        pool,
        Canary(
            lambda: {m.name: m for m in pool.members},
            learner,
            PROMPT,
            SAMPLING,
            max(TOLERANCES[dtype], OF_WEIGHTS[rounded]),
            "by hand",
        ),
        backend.model,
    )


def change(model: CausalLM) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engines_with_the_trainers_weights_pass(path: Path, dtype: str) -> None:
    pool, canary, model = bench(path, dtype)
    for version in range(3):
        await pool.load_weights(version)
        metrics = await canary.check(version)
        assert metrics.keys() == {"canary"} and 0 <= metrics["canary"] <= canary.tolerance / 4
        change(model)
    await pool.close()


async def test_a_head_that_stays_behind_is_caught(path: Path) -> None:
    pool, canary, model = bench(path, "float32", "lm_head.weight")
    await pool.load_weights(1)
    await canary.check(1)
    change(model)
    await pool.load_weights(2)
    with pytest.raises(
        EngineError, match=r"version 2 .* by hand, engine 1 .* 0\.001.* system\.canary"
    ):
        await canary.check(2)
    await pool.close()


@pytest.mark.skipif(not compiled(), reason="there is no C++ compiler")
@pytest.mark.parametrize("rounded", ["float16", "int8"])
async def test_rounded_weights_differ_little_and_a_head_that_stays_behind_is_caught(
    path: Path, rounded: EngineWeights
) -> None:
    pool, canary, model = bench(path, "float32", "lm_head.weight", rounded=rounded)
    await pool.load_weights(1)
    first = (await canary.check(1))["canary"]
    assert 1e-6 < first < canary.tolerance / 4
    change(model)
    await pool.load_weights(2)
    with pytest.raises(EngineError, match=r"engine 1 .* on average"):
        await canary.check(2)
    await pool.close()


class OneOff:
    """An engine that reports one token of its first answer wrongly, as rounding of a large model
    may."""

    def __init__(self, engine: Any, *, always: bool = False) -> None:
        self._engine = engine
        self._always = always
        self.asked = 0

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        done: Completion = await self._engine.generate(prompt_ids, sampling)
        self.asked += 1
        if self.asked > 1 and not self._always:
            return done
        return replace(done, logprobs=[done.logprobs[0] - 0.005, *done.logprobs[1:]])


async def test_a_single_token_does_not_end_a_run_but_a_mean_does(path: Path) -> None:
    pool, canary, _ = bench(path)
    await pool.load_weights(1)
    single, all_of_them = OneOff(pool.members[0]), OneOff(pool.members[0], always=True)

    metrics = await replace(canary, engines=lambda: {"engine 1": single}).check(1)
    assert metrics["canary"] == pytest.approx(0.005, abs=1e-4) and single.asked == 33

    narrow = replace(canary, engines=lambda: {"engine 1": all_of_them}, tolerance=0.005 / 9)
    with pytest.raises(EngineError, match=r"version 1 .* engine 1 .* on average"):
        await narrow.check(1)
    await pool.close()


async def test_weights_that_never_came_are_caught(path: Path) -> None:
    pool, canary, _ = bench(path)
    await pool.load_weights(1)
    with pytest.raises(EngineError, match=r"version 1 .* 2"):
        await canary.check(2)
    await pool.close()


def test_every_number_format_has_a_tolerance() -> None:
    formats, _ = get_args(ModelSection.model_fields["dtype"].annotation)
    assert set(TOLERANCES) == set(get_args(formats))
