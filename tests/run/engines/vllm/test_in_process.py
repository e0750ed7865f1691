"""What vLLM leaves of the trainer's process, and how deep it sleeps; a fake stands for vLLM."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunesmith.run.engines.vllm import engine as module
from tunesmith.run.engines.vllm.engine import VllmEngine
from tunesmith.run.engines.vllm.start import VllmSettings
from tunesmith.run.specs.engines import VllmSpec


class Fake:
    """Part of vLLM's ``LLMEngine``."""

    def __init__(self, *, speculates: bool) -> None:
        speculation = object() if speculates else None
        self.vllm_config = SimpleNamespace(max_concurrent_batches=1, speculative_config=speculation)
        self.model_config = SimpleNamespace(max_model_len=64)
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.levels: list[int] = []

    def get_tokenizer(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def abort_request(self, names: list[str]) -> None: ...

    def has_unfinished_requests(self) -> bool:
        return False

    def sleep(self, level: int) -> None:
        self.levels.append(level)


def made(
    patch: pytest.MonkeyPatch,
    fake: Fake,
    images: Any = None,
    begun: Any = lambda: None,
    **settings: Any,
) -> VllmEngine:
    def start(_: VllmSettings) -> Any:
        begun()
        return fake, 64

    patch.setattr(module, "start", start)
    patch.setattr(module, "kv_bytes", lambda _: 1 << 20)
    options = VllmSettings("model", "bfloat16", sleeps=True, **settings)
    return VllmEngine(options, dict[str, Any]().items, images)


@pytest.mark.parametrize(
    ("settings", "images", "speculates", "level"),
    [
        ({}, None, False, 2),
        ({"adapter_rank": 8}, None, False, 1),
        ({}, object(), False, 1),
        ({}, None, True, 1),
    ],
)
async def test_what_new_weights_do_not_bring_back_is_kept(
    settings: dict[str, Any],
    images: Any,
    speculates: bool,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second level discards all weights: also those of a draft, which are never sent."""
    fake = Fake(speculates=speculates)
    engine = made(monkeypatch, fake, images, **settings)
    await engine.sleep(2)
    await engine.close()
    assert fake.levels == [level]


def test_a_process_that_only_starts_ranks_does_not_initialise_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM could not fork them."""
    start: Any = import_module("tunesmith.run.engines.vllm.start")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("initialised"))
    before = torch.random.get_rng_state()
    with start._random_states():
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_new_weights_stay_on_the_trainers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums with an adapter, too: both computed on one GPU."""
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(
        "tunesmith.run.specs.engines.published", lambda _, **how: asked.append(how) or dict
    )
    monkeypatch.setattr("tunesmith.run.engines.vllm.engine.VllmEngine", lambda *_: None)
    source: Any = SimpleNamespace(model=object())
    VllmSpec({"model": "m", "dtype": "bfloat16"}).around(source, print, None)
    assert asked == [{"merged": True, "as_stored": True, "in_host_memory": False}]


def test_pytorch_stays_as_the_trainer_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_count = torch.set_num_threads
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()

    def begun() -> None:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(1)
        torch.set_num_threads = lambda _: None

    try:
        set_count(3)
        torch.set_float32_matmul_precision("high")
        engine = made(monkeypatch, Fake(speculates=False), begun=begun)
        asyncio.run(engine.close())
        assert torch.set_num_threads is set_count
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_num_threads = set_count
        set_count(before[0])
        torch.set_float32_matmul_precision(before[1])
