"""A pool of engines elsewhere under the contract: one for a whole module, because starting an
engine takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine_contract import CHECKS, Subject
from tests.support.tiny import save_model
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.engines.base import Member
from tunesmith.run.engines.far import FarEngine
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.specs.engines import LocalSpec, VllmSpec
from tunesmith.run.specs.models import ModelSpec
from tunesmith.run.specs.planes import file_plane
from tunesmith.run.weights.base import Plane

CONTEXT = (
    256  # a long completion is still being written when weights have come from another process
)
LAST = next(check for check in CHECKS if check.__name__.endswith("close_fails_what_is_in_flight"))

each_check = pytest.mark.parametrize(
    "check", [c for c in CHECKS if c is not LAST], ids=lambda c: c.__name__.removeprefix("check_")
)
"""All but the one that closes the engine."""


def lose_patience(pool: EnginePool) -> None:
    """Have the pool's first engine killed, which answers no more; others have as long as always."""
    member = pool.members[0]
    assert isinstance(member, FarEngine)
    member.far._patience = 0.5  # pyright: ignore[reportPrivateUsage]
    member.far._watch()  # pyright: ignore[reportPrivateUsage]


async def complete(pool: EnginePool, size: int) -> None:
    """Wait until so many engines are running."""
    async with asyncio.timeout(600):
        while len(pool.members) < size:
            await asyncio.sleep(0.01)


def local_spec(path: str | Path, **changed: Any) -> LocalSpec:
    return LocalSpec(ModelSpec(str(path), "float32", "cpu", **changed), 1 << 20, 6, 32)


class PoolBench:
    """Trainer's model, pool and event loop; ``start`` says where an engine of ``spec`` runs."""

    def __init__(self, folder: Path, family: str = "llama", **shape: Any) -> None:
        self.path = save_model(
            folder / "model", family, max_position_embeddings=CONTEXT, vocab_size=261, **shape
        )
        self.model = CausalLM.load(self.path)
        self.named = self.model.module.state_dict().items
        self.spec: LocalSpec | VllmSpec = local_spec(self.path)
        self.said: list[str] = []
        self.runner = asyncio.Runner()

    def use_vllm(self, **options: Any) -> None:
        common = {
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "kv_bytes": 1 << 26,
            "max_running": 8,
        }
        self.spec = VllmSpec({"model": str(self.path), **common, **options})

    async def start(self) -> Member:
        raise NotImplementedError

    @contextmanager
    def opened(self) -> Generator[Self]:
        self.engine = self.another()
        with self.runner:
            yield self
            self.runner.run(self.engine.close())

    def another(self, plane: Plane | None = None, **options: Any) -> EnginePool:
        return EnginePool(
            lambda _: self.start(),
            plane or file_plane(self.named),
            report=self.said.append,
            **options,
        )

    def check(
        self, check: Callable[[Subject], Awaitable[None]], engine: EnginePool | None = None
    ) -> None:
        decode: Any = self.model.tokenizer.decode
        subject = Subject(engine or self.engine, lambda ids: decode(list(ids)), self.score, CONTEXT)

        async def run() -> None:
            await check(subject)

        self.runner.run(run())

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        plain = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        plain.load_state_dict(self.model.module.state_dict())
        logits = plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        return (
            logits.log_softmax(-1)
            .gather(1, torch.tensor(completion).unsqueeze(1))
            .squeeze(1)
            .tolist()
        )
