"""vLLM in a Ray actor against the engine contract. Runs where both are installed: ``make test-vllm``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_contract import CHECKS, Subject
from tiny import save_model
from tunesmith.build.engine_worker import served
from tunesmith.config.system import SystemSection
from tunesmith.engines.pool import EnginePool
from tunesmith.errors import EngineLostError
from tunesmith.plan.cluster import Bundle
from tunesmith.weights.files import FilePlane, shared_directory

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")

from tunesmith.cluster.engine import RayEngine
from tunesmith.cluster.ray_cluster import Cluster

CONTEXT = 64
LAST = "close_fails_what_is_in_flight"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Subject]]:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_model(folder, max_position_embeddings=CONTEXT, vocab_size=261, head_dim=32)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = {
        "engine": "vllm", "model": str(folder), "dtype": "float32", "max_model_len": CONTEXT, "kv_bytes": 1 << 26,
        "max_running": 8,
    }  # fmt: skip

    @torch.inference_mode()
    def score(prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        logits: Any = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()

    with Cluster.open(SystemSection(), [Bundle(("rollout",), 1.0, 0.0)]) as cluster, asyncio.Runner() as runner:

        async def start(_: int) -> RayEngine:
            remote = cluster.spawn("rollout", EngineLostError)
            await remote.make_heard(partial(served, settings))
            return RayEngine(remote)

        plane = FilePlane(model.state_dict().items, shared_directory(1 << 20))
        engine = EnginePool(start, plane)
        yield runner, Subject(engine, lambda ids: tokenizer.decode(list(ids)), score, CONTEXT)
        runner.run(engine.close())


@pytest.mark.parametrize(
    "check",
    sorted(CHECKS, key=lambda c: c.__name__.endswith(LAST)),  # which closes it
    ids=lambda c: c.__name__.removeprefix("check_"),
)
def test_contract(check: Callable[[Subject], Awaitable[None]], bench: tuple[asyncio.Runner, Subject]) -> None:
    runner, subject = bench

    async def run() -> None:
        await check(subject)

    runner.run(run())
