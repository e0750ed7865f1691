"""The real vLLM against the engine contract. Runs where vLLM is installed: ``make test-vllm``."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.engine_contract import FREE, PROMPT, Subject
from tests.support.penalties import by_transformers, requests
from tests.support.pool_bench import LAST, each_check
from tests.support.tiny import save_model
from tests.support.token_versions import check_each_token_has_its_version
from tunesmith.errors import EngineError, ModelError, UserError
from tunesmith.plan.cost.passes import vllm_tokens
from tunesmith.plan.facts.hardware import Gpu
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.vllm.engine import VllmEngine
from tunesmith.run.engines.vllm.start import VllmSettings
from tunesmith.types import Completion

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

pytestmark = pytest.mark.gpu
CONTEXT = 64


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return save_model(folder, "llama", max_position_embeddings=CONTEXT, vocab_size=261, head_dim=32)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tied"
    return save_model(
        folder, "qwen3", max_position_embeddings=CONTEXT, head_dim=32, tie_word_embeddings=True
    )


@cache
def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def scorer(directory: Path) -> Callable[[Sequence[int], Sequence[int]], list[float]]:
    model = plain(directory)

    @torch.inference_mode()
    def score(prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        return (
            logits.log_softmax(-1)
            .gather(1, torch.tensor(completion).unsqueeze(1))
            .squeeze(1)
            .tolist()
        )

    return score


def subject(directory: Path, **changed: Any) -> Subject:
    model = plain(directory)
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "kv_bytes": 1 << 26,
        "max_running": 8,
    }
    settings = VllmSettings(str(directory), **{**options, **changed})
    tokenizer = AutoTokenizer.from_pretrained(directory)
    engine = VllmEngine(settings, lambda: model.state_dict().items())
    return Subject(engine, lambda ids: tokenizer.decode(list(ids)), scorer(directory), CONTEXT)


@contextmanager
def a_step_ahead() -> Generator[None]:
    """Engines that are made meanwhile begin a step before the last one's tokens are read, as on a
    GPU; otherwise vLLM's CPU build never does."""
    from vllm.platforms.cpu import CpuPlatform  # pyright: ignore[reportMissingImports]

    platform: Any = CpuPlatform
    settle = platform.check_and_update_config

    def settled(config: Any) -> None:
        settle(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "check_and_update_config", staticmethod(settled))
        yield


STEPPING: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "in turn": nullcontext,
    "ahead": a_step_ahead,
}
MODES = pytest.mark.parametrize("mode", STEPPING.values(), ids=STEPPING)


@pytest.fixture(scope="module", params=[*STEPPING.values()], ids=[*STEPPING])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """One engine for the whole contract, because starting one takes seconds; no other test changes
    its model."""
    folder = tmp_path_factory.mktemp("models") / "contract"
    save_model(folder, "llama", max_position_embeddings=CONTEXT, vocab_size=261, head_dim=32)
    with request.param():
        made = subject(folder)
    yield made
    asyncio.run(made.engine.close())


@pytest.mark.xdist_group("contract")
@each_check
async def test_contract(check: Callable[[Subject], Awaitable[None]], shared: Subject) -> None:
    await check(shared)


async def test_closing_fails_what_is_in_flight(directory: Path) -> None:
    await LAST(subject(directory))


@pytest.mark.parametrize("family", ["llama", "tied"])
async def test_new_weights_arrive_whole(family: str, request: pytest.FixtureRequest) -> None:
    """Also the head that shares its weights with the embedding, also where a prefix was cached
    before, and also under a number that others had, as averaged weights have in an evaluation."""

    made_of = request.getfixturevalue("directory" if family == "llama" else "tied")
    made = subject(made_of)
    assert made.score is not None
    try:
        prompt = list(range(20, 56))  # more than a block of the prefix cache
        first = await made.write(prompt=prompt)
        assert first.logprobs == pytest.approx(made.score(prompt, first.token_ids), abs=1e-4)
        for _ in range(2):
            with torch.no_grad():
                for parameter in plain(made_of).parameters():
                    parameter.mul_(1.1)
            await made.engine.load_weights(1)
            second = await made.write(prompt=prompt)
            assert second.versions == [1] * 12
            assert second.logprobs == pytest.approx(made.score(prompt, second.token_ids), abs=1e-4)
            assert second.logprobs != pytest.approx(first.logprobs, abs=1e-3)
    finally:
        await made.engine.close()


@MODES
async def test_each_token_has_the_version_of_the_weights_that_drew_it(
    mode: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    folder = save_model(
        tmp_path / "model", "llama", max_position_embeddings=256, vocab_size=261, head_dim=32
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with mode():
        made = subject(folder, max_model_len=256)
    engine: Any = made.engine
    engine._weights = lambda: model.state_dict().items()
    try:
        await check_each_token_has_its_version(engine, model.model.norm.weight, model)
    finally:
        await engine.close()


async def test_an_engine_whose_weights_came_in_part_waits_for_all_of_them(directory: Path) -> None:
    """A reload that ends in the middle of a joint projection can begin again, and no token is drawn
    in between."""
    model = plain(directory)
    failing = [False, True, False]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        fails = failing.pop(0)
        for name, tensor in model.state_dict().items():
            yield name, tensor
            if fails and name.endswith("layers.1.self_attn.q_proj.weight"):
                raise EngineError("the rest did not come")

    made = subject(directory)
    engine: Any = made.engine
    engine._weights = weights
    prompt = list(range(20, 56))
    try:
        await engine.load_weights(1)
        first = await made.write(prompt=prompt)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        flying = asyncio.create_task(made.write(replace(FREE, max_new_tokens=20)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="the rest did not come"):
            await engine.load_weights(2)
        drawn = engine.stats().sampled_tokens
        waiting = asyncio.create_task(made.write(prompt=prompt))
        for _ in range(5):
            await engine._thread.call(lambda: None)  # a step would follow
        assert engine.stats().sampled_tokens == drawn and not waiting.done()
        await engine.load_weights(3)
        assert {*(await flying).versions} <= {1, 3}
        second = await waiting
        assert second.versions == [3] * 12 and made.score is not None
        assert second.logprobs == pytest.approx(made.score(prompt, second.token_ids), abs=1e-4)
        assert second.logprobs != pytest.approx(first.logprobs, abs=1e-3)
    finally:
        await engine.close()


def test_a_prompt_is_prefilled_once_for_a_group_that_comes_at_once(directory: Path) -> None:
    async def run() -> EngineStats:
        made = subject(directory)
        try:
            prompt = list(range(20, 56))
            await asyncio.gather(*(made.write(prompt=prompt) for _ in range(4)))
            return made.engine.stats()
        finally:
            await made.engine.close()

    stats = asyncio.run(run())
    assert (stats.reused_prompt_tokens, stats.prefilled_tokens) == (3 * 32, 4 * 36 - 3 * 32)
    assert (stats.sampled_tokens, stats.decode_steps, stats.peak_running) == (48, 12, 4)
    assert 0 < stats.peak_kv_bytes <= stats.kv_budget_bytes <= 1 << 26
    assert stats.prefill_seconds > 0 < stats.decode_seconds


async def test_a_request_that_vllm_refuses_fails_alone(directory: Path) -> None:
    made = subject(directory)
    try:
        others = [asyncio.create_task(made.write()) for _ in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="vLLM refuses the request"):
            await made.write(prompt=[20, 9999])
        assert [len(done.token_ids) for done in await asyncio.gather(*others)] == [12] * 3
        for temperature in (0.005, 2.5):
            with pytest.raises(UserError) as caught:
                await made.write(replace(FREE, temperature=temperature))
            assert caught.value.keys == ("sampling.temperature",)
        with pytest.raises(UserError, match="vLLM refuses the request"):
            await made.write(replace(FREE, schema="[" * 80 + "]" * 80))
        await made.engine.sleep()  # nothing of them is left in flight
    finally:
        await made.engine.close()


async def test_a_request_that_vllm_gives_up_fails_alone(directory: Path) -> None:
    """It is not taken for one that was interrupted, which would be asked for again without end."""
    made = subject(directory)
    engine: Any = made.engine
    scheduler = engine._vllm.engine_core.engine_core.scheduler
    try:
        given_up, other = (asyncio.create_task(made.write()) for _ in range(2))
        await asyncio.sleep(0)

        def give_up() -> None:
            scheduler.grammar_compile_error_reqs.add(next(iter(scheduler.requests)))

        await engine._thread.call(give_up)
        with pytest.raises(EngineError, match="'error'"):
            await given_up
        assert len((await other).token_ids) == 12
    finally:
        await made.engine.close()


async def test_a_failed_step_fails_what_ran_and_the_engine_goes_on(directory: Path) -> None:
    """Who waits for it to do something in between two steps, such as taking new weights, waits no
    longer."""
    began = threading.Event()
    go_on = threading.Event()

    made = subject(directory)
    vllm: Any = made.engine._vllm  # pyright: ignore
    step = vllm.step

    def broken() -> Any:
        vllm.step = step
        began.set()
        assert go_on.wait(300)
        raise RuntimeError("out of luck")

    vllm.step = broken
    try:
        writing = asyncio.create_task(made.write())
        await asyncio.to_thread(began.wait, 300)
        loading = asyncio.create_task(made.engine.load_weights(5))
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(EngineError, match="vLLM failed: RuntimeError: out of luck"):
            await writing
        await asyncio.wait_for(loading, 300)
        assert (await made.write()).versions == [5] * 12
        assert not vllm.has_unfinished_requests()
    finally:
        await made.engine.close()


async def test_rounded_weights_are_rounded_again_at_each_sync(directory: Path) -> None:
    made = subject(directory, dtype="bfloat16", quantization="fp8_per_channel")
    try:
        assert made.score is not None
        for version, factor in ((1, 1.0), (2, 1.3)):
            with torch.no_grad():
                for parameter in plain(directory).parameters():
                    parameter.mul_(factor)
            await made.engine.load_weights(version)
            done = await made.write()
            apart = [
                abs(a - b)
                for a, b in zip(done.logprobs, made.score(PROMPT, done.token_ids), strict=True)
            ]
            assert 1e-4 < max(apart) < 0.1
    finally:
        await made.engine.close()


def test_kv_memory_bounds_what_is_asked(tmp_path: Path) -> None:
    """Short of the model's context, a completion is refused rather than cut."""
    folder = save_model(
        tmp_path / "long", "llama", max_position_embeddings=512, vocab_size=261, head_dim=32
    )

    async def run() -> None:
        made = subject(
            folder, max_model_len=None, kv_bytes=8 << 15
        )  # blocks of 32 tokens take 2^15 bytes
        try:
            with pytest.raises(UserError, match="raise system"):
                await made.write(replace(FREE, max_new_tokens=300))
            assert len((await made.write(replace(FREE, max_new_tokens=100))).token_ids) == 100
        finally:
            await made.engine.close()

    asyncio.run(run())
    with pytest.raises(EngineError, match="could not start"):
        subject(folder, max_model_len=512, kv_bytes=2 << 15)


def test_a_model_that_vllm_does_not_know_is_refused_before_its_weights_are_read(
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "odd", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"cannot serve .*OddForCausalLM"):
        VllmEngine(VllmSettings(str(folder), "float32", kv_bytes=1 << 26), lambda: ())


def test_another_version_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", "0.20.1")
    with pytest.raises(UserError, match=r"vLLM 0\.20\.1 is installed.*pip install 'vllm>="):
        subject(directory)


async def test_the_trainers_random_numbers_go_on(directory: Path) -> None:
    before = torch.get_rng_state()
    made = subject(directory)
    assert torch.get_rng_state().equal(before)
    await made.engine.close()


def test_a_model_that_rotates_long_sequences_otherwise_is_served_up_to_where_it_does(
    tmp_path: Path,
) -> None:
    factors = {
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "rope_theta": 100.0,
        "factor": 2.0,
    }
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    settings = {
        "head_dim": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rope_parameters": rope,
    }
    path = save_model(
        tmp_path / "phi3",
        "phi3",
        original_max_position_embeddings=32,
        max_position_embeddings=64,
        **settings,
    )
    with pytest.raises(UserError, match="max_model_len"):
        subject(path)
    engine = subject(path, max_model_len=32).engine
    done = asyncio.run(_complete_and_close(engine))
    assert done.logprobs == pytest.approx(scorer(path)(PROMPT, done.token_ids), abs=1e-3)


async def _complete_and_close(engine: VllmEngine) -> Completion:
    done = await engine.generate(PROMPT, replace(FREE, max_new_tokens=12))
    await engine.close()
    return done


def test_penalties_are_those_of_transformers(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    )  # `plain` is changed by other tests
    wanted = [(prompt, sampling) for prompt, sampling in requests() if len(prompt) > 1]

    async def run() -> list[Completion]:
        made = subject(directory)
        found = await asyncio.gather(*(made.write(sampling, prompt) for prompt, sampling in wanted))
        await made.engine.close()
        return list(found)

    for (prompt, sampling), done in zip(wanted, asyncio.run(run()), strict=True):
        expected = by_transformers(model, prompt, done, sampling)
        assert done.logprobs == pytest.approx(expected, abs=1e-3), sampling


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("NVIDIA H100", 79.6), ("NVIDIA A100", 80.0), ("NVIDIA L4", 22.5), ("NVIDIA B200", 179.1)],
)
def test_a_pass_is_as_large_as_vllm_itself_would_have_it(
    name: str, gigabytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine import arg_utils  # pyright: ignore[reportMissingImports]
    from vllm.usage.usage_lib import UsageContext  # pyright: ignore[reportMissingImports]

    on_cpu, _ = arg_utils.EngineArgs.get_batch_defaults(2)
    assert on_cpu[UsageContext.LLM_CLASS] == vllm_tokens(None, 2, on_gpu=False)
    memory = int(gigabytes * 2**30)
    there = Mock(is_tpu=lambda: False, is_cpu=lambda: False)
    there.get_device_total_memory = lambda: memory
    there.get_device_name = lambda: name
    monkeypatch.setattr(arg_utils, "current_platform", there)
    on_gpu, _ = arg_utils.EngineArgs.get_batch_defaults(1)
    assert on_gpu[UsageContext.LLM_CLASS] == vllm_tokens(Gpu(name, memory, memory, (9, 0)))
