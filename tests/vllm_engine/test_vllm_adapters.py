"""Adapters that reach vLLM alone, as its LoRA requests, onto the base that it has loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.engine_contract import FREE, PROMPT, Subject
from tests.support.pool_bench import CONTEXT, PoolBench, each_check
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tests.support.token_versions import LOADS
from tunesmith.config.schema import LoraSection
from tunesmith.config.system import SystemSection
from tunesmith.errors import EngineError, EngineLostError
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.cluster import Bundle
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.engines.far import FarEngine
from tunesmith.run.engines.vllm import KIND
from tunesmith.run.engines.vllm.engine import VllmEngine
from tunesmith.run.engines.vllm.start import VllmSettings
from tunesmith.run.specs.planes import published
from tunesmith.types import Completion

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

pytestmark = pytest.mark.gpu
assert KIND.adapters is not None
MODULES = KIND.adapters.modules
SHAPE = {"hidden_size": 128, "head_dim": 32}
RANK = 8


def change(model: CausalLM) -> None:
    """Give the adapter other weights."""
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if ".lora_" in name:
                weight.normal_(std=0.2)


@torch.inference_mode()
def log_probabilities(
    weights: Mapping[str, Tensor], path: Path, prompt: Sequence[int], completion: Sequence[int]
) -> list[float]:
    """By transformers, with the weights that an adapter was merged into."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain.load_state_dict(dict(weights))
    logits = plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    drawn = torch.tensor(completion).unsqueeze(1)
    return logits.log_softmax(-1).gather(1, drawn).squeeze(1).tolist()


class Adapted:
    """A trainer's model with an adapter, and an engine that takes the adapter alone."""

    def __init__(self, folder: Path, family: str, lora: LoraSection, **changed: Any) -> None:
        sizes = {"max_position_embeddings": CONTEXT, "vocab_size": 261, **SHAPE}
        self.path = save_model(folder / family, family, **sizes)
        self.model = CausalLM.load(self.path)
        attach(self.model, lora)
        change(self.model)
        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "kv_bytes": 1 << 26,
            "max_running": 8,
            "adapter_rank": RANK,
            "adapter_modules": MODULES[family],
            **changed,
        }
        self.named = published(self.model, merged=False, as_stored=True)
        self.engine = VllmEngine(VllmSettings(str(self.path), **settings), self.named)

    def merged(self) -> Mapping[str, Tensor]:
        assert self.model.adapter is not None
        return {name: weight.clone() for name, weight in self.model.adapter.merged_weights()}

    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        return log_probabilities(self.merged(), self.path, prompt, completion)


@pytest.mark.parametrize("family", MODULES)
async def test_an_adapter_alone_gives_the_trainers_log_probabilities(
    family: str, tmp_path: Path
) -> None:
    """Of each family, whatever rank and scale."""
    made = Adapted(tmp_path, family, LoraSection(rank=3, alpha=5.0))
    try:
        for version in (1, 2):
            change(made.model)
            await made.engine.load_weights(version)
            done = await made.engine.generate(PROMPT, FREE)
            assert done.versions == [version] * 12
            assert done.logprobs == pytest.approx(made.score(PROMPT, done.token_ids), abs=1e-3)
    finally:
        await made.engine.close()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """An engine in the trainer's process, which has an adapter from the start."""
    made = Adapted(tmp_path_factory.mktemp("here"), "llama", LoraSection(rank=RANK))
    tokenizer: Any = AutoTokenizer.from_pretrained(made.path)
    asyncio.run(made.engine.load_weights(0))
    yield Subject(made.engine, lambda ids: tokenizer.decode(list(ids)), made.score, CONTEXT)
    asyncio.run(made.engine.close())


@pytest.mark.xdist_group("adapter")
@each_check
async def test_contract(check: Callable[[Subject], Awaitable[None]], here: Subject) -> None:
    await check(here)


class Bench(PoolBench):
    """Engines in other processes that take the adapter alone."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder, "qwen3", **SHAPE, tie_word_embeddings=True)
        attach(self.model, LoraSection(rank=RANK))
        change(self.model)
        self.named = published(self.model, merged=False, as_stored=True)
        adapter = {"adapter_rank": RANK, "adapter_modules": MODULES["qwen3"]}
        self.use_vllm(tensor_parallel_size=ranks, **adapter)

    async def start(self) -> FarEngine:
        far = ChildProcess("the engine's process", EngineLostError)
        return await FarEngine.start(far, self.spec.build)

    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        assert self.model.adapter is not None
        weights = dict(self.model.adapter.merged_weights())
        return log_probabilities(weights, self.path, prompt, completion)

    async def check_bytes(self) -> None:
        """New weights are the adapter's, and arrive."""
        await self.engine.load_weights(100)
        for version in (101, 102):
            change(self.model)
            before = self.engine.stats().sync_bytes
            await self.engine.load_weights(version)
            done = await self.engine.generate(PROMPT, FREE)
            assert done.versions == [version] * 12
            assert done.logprobs == pytest.approx(self.score(PROMPT, done.token_ids), abs=1e-4)
            sent = self.engine.stats().sync_bytes - before
            adapter = sum(tensor.nbytes for _, tensor in self.named())
            assert adapter < sent < 1.2 * adapter + 10_000


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def apart(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("apart"), request.param)
    with made.opened():
        made.runner.run(made.engine.load_weights(0))
        yield made


@pytest.mark.xdist_group("adapter ranks")
@each_check
def test_contract_apart(check: Callable[[Subject], Awaitable[None]], apart: Bench) -> None:
    apart.check(check)


@pytest.mark.xdist_group("adapter ranks")
def test_new_weights_are_the_adapters_bytes(apart: Bench) -> None:
    apart.runner.run(apart.check_bytes())


@pytest.mark.xdist_group("ray")
def test_an_adapter_reaches_an_actor_alone(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")
    from tunesmith.run.processes.ray_cluster import RayCluster

    bundle = Bundle(("rollout",), 1.0, 0.0)
    with RayCluster.open(SystemSection(), [bundle]) as cluster:

        class InRay(Bench):
            async def start(self) -> FarEngine:
                far = cluster.spawn("rollout", EngineLostError)
                return await FarEngine.start(far, self.spec.build)

        with InRay(tmp_path, 1).opened() as made:
            made.runner.run(made.check_bytes())


async def test_each_token_has_the_version_of_the_adapter_that_drew_it(tmp_path: Path) -> None:
    """Only the last layer is adapted, so that what older adapters left in the KV memory stays
    right; the scale of B tells by each token's log-probability which adapter drew it."""
    target = LoraSection(rank=2, targets=("layers.1.mlp.down_proj",))
    made = Adapted(tmp_path, "llama", target, adapter_modules=("down_proj",))
    first = dict(made.model.module.named_parameters())
    [factor] = [weight for name, weight in first.items() if ".lora_B." in name]
    original = factor.detach().clone()
    weights: list[Mapping[str, Tensor]] = []

    async def load(version: int) -> None:
        factor.data.copy_(original * (1 + version))
        weights.append(made.merged())
        await made.engine.load_weights(version)

    async def write(number: int, count: int) -> Completion:
        sampling = replace(FREE, max_new_tokens=count, seed=number)
        return await made.engine.generate([20 + number] * 4, sampling)

    try:
        await load(0)
        long = [asyncio.create_task(write(number, 200)) for number in range(4)]
        completions = [await write(4, 8)]
        for version in range(1, LOADS + 1):
            await load(version)
            completions.append(await write(4 + version, 8))
        across = await asyncio.gather(*long)
    finally:
        await made.engine.close()
    assert all(len({*done.versions}) > 1 for done in across)
    for number, done in enumerate([*across, *completions]):
        assert done.versions == sorted(done.versions)
        prompt = [20 + number] * 4
        by_version = {
            version: log_probabilities(weights[version], made.path, prompt, done.token_ids)
            for version in {*done.versions}
        }
        expected = [by_version[version][i] for i, version in enumerate(done.versions)]
        assert done.logprobs == pytest.approx(expected, abs=1e-3)


async def test_the_first_adapter_ends_what_was_begun_without_one(tmp_path: Path) -> None:
    made = Adapted(tmp_path, "llama", LoraSection(rank=RANK))
    try:
        sampling = replace(FREE, max_new_tokens=200)
        writing = asyncio.create_task(made.engine.generate(PROMPT, sampling))
        await made.engine.generate(PROMPT, replace(FREE, max_new_tokens=2))
        await made.engine.load_weights(1)
        base = await writing
        assert base.finish_reason == "abort" and {*base.versions} == {0}
        assert (await made.engine.generate(PROMPT, FREE)).versions == [1] * 12
    finally:
        await made.engine.close()


async def test_an_adapter_that_vllm_refuses_is_said_and_the_next_one_arrives(
    tmp_path: Path,
) -> None:
    made = Adapted(tmp_path, "llama", LoraSection(rank=RANK))
    engine: Any = made.engine
    wide = {name: torch.zeros(99, 99) for name, _ in made.named()}
    try:
        engine._weights = wide.items
        with pytest.raises(Exception, match="rank 99"):
            await engine.load_weights(1)
        engine._weights = made.named
        await engine.load_weights(2)
        done = await engine.generate(PROMPT, FREE)
        assert done.versions == [2] * 12
        assert done.logprobs == pytest.approx(made.score(PROMPT, done.token_ids), abs=1e-4)
    finally:
        await engine.close()
    with pytest.raises(EngineError):
        await engine.generate(PROMPT, FREE)


def test_a_run_samples_with_its_adapter_and_resumes(tmp_path: Path) -> None:
    """In the trainer's process, bitwise as a run that was not stopped; and in one of its own."""
    model = save_model(
        tmp_path / "model", "llama", max_position_embeddings=64, vocab_size=261, **SHAPE
    )
    said = {
        "system__engine": "vllm",
        "system__adapter_sync": "adapter",
        "lora__rank": 4,
        "checkpoint__every": 2,
    }

    def steps(name: str, count: int, **more: Any) -> list[dict[str, Any]]:
        settings = rl_settings(tmp_path, model, name, **said, train__steps=count, **more)
        metrics = assembly.run_rl(None, settings).run_dir / "metrics.jsonl"
        return [line for line in read_metrics(metrics) if "grad_norm" in line]

    whole = steps("whole", 4)
    assert all(line["ratio"] == pytest.approx(1.0, abs=1e-3) for line in whole)
    steps("parts", 2)
    parts = steps("parts", 4, checkpoint__resume=True)
    kept = ("step", "loss", "reward", "grad_norm", "tokens")
    assert [[line[key] for key in kept] for line in parts] == [
        [line[key] for key in kept] for line in whole
    ]
    for line in steps("apart", 2, system__engine_process=True)[1:]:  # after that of the start
        # rank, layers, and the widths of q and o, of k and v, and of the feed-forward block
        numbers = 4 * 2 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 64))
        assert 4 * numbers < line["sync_bytes"] < 1.3 * 4 * numbers + 10_000
        assert line["canary"] <= 1e-3
