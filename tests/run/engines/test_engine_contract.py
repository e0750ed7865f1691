"""Every engine against the contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.engine_contract import CHECKS, Subject
from tests.support.fake_engine import FakeEngine
from tests.support.tiny import save_model
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.engines.local.engine import LocalEngine

pytestmark = pytest.mark.usefixtures("guesses_in_batches")

CONTEXT = 64


def fake(_: Path) -> Subject:
    return Subject(
        FakeEngine(context=CONTEXT), lambda ids: "".join(f"{i} " for i in ids), context=CONTEXT
    )


@cache
def model(directory: Path) -> CausalLM:
    path = save_model(directory, "llama", max_position_embeddings=CONTEXT, vocab_size=261)
    return CausalLM.load(path)


def local(directory: Path, assistant: CausalLM | None = None) -> Subject:
    from transformers import AutoModelForCausalLM

    lm = model(directory)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.inference_mode()
    def score(prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        logits = plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        return (
            logits.log_softmax(-1)
            .gather(1, torch.tensor(completion).unsqueeze(1))
            .squeeze(1)
            .tolist()
        )

    engine = LocalEngine(
        lm, kv_bytes=1 << 20, max_running=6, max_prefill_tokens=32, assistant=assistant
    )
    return Subject(engine, lambda ids: lm.tokenizer.decode(list(ids)), score, CONTEXT)


def drafts(directory: Path) -> Subject:
    return local(directory, model(directory))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny_llama")


@pytest.mark.parametrize("make", [fake, local, drafts])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
async def test_contract(
    make: Callable[[Path], Subject], check: Callable[[Subject], Awaitable[None]], directory: Path
) -> None:
    await check(make(directory))
