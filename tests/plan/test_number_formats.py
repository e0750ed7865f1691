"""Number formats of sampling: which are derived, quantised models without an adapter, and what
company changes."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tiny
from tests.support.machine_facts import CPU, facts
from tests.support.tiny_runs import sft_settings, write_lines
from tests.support.training import forest_of
from tunesmith.config.commands import GenerateConfig, RFTConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import LoraSection, RLConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.loading import Loading, load_module, takes_tf32
from tunesmith.models.lora import START
from tunesmith.plan.facts.hardware import Gpu
from tunesmith.plan.resolve import resolve
from tunesmith.records.metrics import read_metrics
from tunesmith.run.assembly import run_sft
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.offline.generate import run_generate
from tunesmith.types import Completion, Sample, Sampling

OLD = Gpu("T4", memory_total=16 * 10**9, memory_free=15 * 10**9, capability=(7, 5))
BASE = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
ROWS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny.save_model(path, hidden_size=64, intermediate_size=128, initializer_range=0.1)


def test_a_gpu_without_bfloat16_computes_in_float16() -> None:
    machine = facts(hardware=replace(CPU, gpus=(OLD,)))
    assert (
        resolve(load_config(GenerateConfig, None, BASE[:2]), machine).settings["model.dtype"]
        == "float16"
    )
    for kind, said in ((RLConfig, BASE), (RFTConfig, BASE), (SFTConfig, BASE[:2])):
        found: Any = resolve(load_config(kind, None, said), machine)
        assert found.settings["model.dtype"] == "float16"
        assert kind is RFTConfig or any("pair of a sample's tokens" in note for note in found.notes)


def test_products_in_float32_take_tf32_on_gpus_only(directory: Path) -> None:
    assert takes_tf32(torch.float32, "cuda:1")
    assert not takes_tf32(torch.bfloat16, "cuda") and not takes_tf32(torch.float32, "cpu")
    before = torch.get_float32_matmul_precision()
    try:
        load_module(directory, Loading(dtype=torch.float32, device="cpu"))
        assert torch.get_float32_matmul_precision() == before
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="cuda"):
                load_module(directory, Loading(dtype=torch.float32, device="cuda"))
            assert torch.get_float32_matmul_precision() == "high"
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["model.quantize=int8", "model.quantize=nf4", "model.dtype=float16"]
)
def test_generate_samples_from_rounded_weights_without_an_adapter(
    directory: Path, tmp_path: Path, setting: str
) -> None:
    write_lines(tmp_path / "train.jsonl", [{"prompt": text} for text in ("ab", "cd", "ef")])
    said = [f"model.path={directory}", f"data.train={tmp_path / 'train.jsonl'}", "data.chat=false"]
    said += [
        "sampling.max_new_tokens=6",
        "output.logprobs=true",
        "system.device=cpu",
        "model.dtype=float32",
    ]
    done = run_generate(None, [*said, f"run_dir={tmp_path / 'out'}", setting])
    rounds: dict[str, Any] = (
        {"quantize": setting.split("=")[1]} if "quantize" in setting else {"dtype": torch.float16}
    )
    exact = CausalLM.load(directory)
    rounded = CausalLM.load(directory, **rounds)
    with torch.no_grad():
        for line in map(json.loads, done.output.read_text().splitlines()):
            written: list[int] = line["token_ids"]
            prompt: list[int] = rounded.tokenizer(line["prompt"])["input_ids"]
            mask = [False] * len(prompt) + [True] * len(written)
            forest = forest_of([Sample(prompt + written, mask)])
            whole, found = (model.predict(forest).logprobs for model in (exact, rounded))
            assert whole is not None and found is not None
            assert line["logprobs"] == pytest.approx(found.tolist(), abs=0.02)
            assert line["logprobs"] != pytest.approx(whole.tolist(), abs=1e-5)


def test_training_on_rounded_weights_still_needs_an_adapter() -> None:
    for kind, said in ((SFTConfig, BASE[:2]), (RLConfig, BASE), (RFTConfig, BASE)):
        with pytest.raises(ConfigError, match=r"model\.quantize(.|\n)*lora\.rank"):
            resolve(load_config(kind, None, [*said, "model.quantize=nf4"]), facts())


def test_a_sampler_keeps_no_second_copy_of_its_adapter(directory: Path, tmp_path: Path) -> None:
    first = CausalLM.load(directory)
    attach(first, LoraSection(rank=4)).save(tmp_path / "adapter")
    sizes = {}
    for frozen in (False, True):
        found = attach(
            CausalLM.load(directory), LoraSection(), path=tmp_path / "adapter", frozen=frozen
        )
        assert (START in found.peft.peft_config) is not frozen
        sizes[frozen] = found.counts()
    adapter = sizes[False][0]
    assert sizes[True] == (0, sizes[False][1] - adapter) and adapter > 0


def completed(model: CausalLM, prompts: list[list[int]]) -> list[Completion]:
    engine = LocalEngine(
        model, kv_bytes=1 << 23, max_running=ROWS, max_prefill_tokens=512, compiled=False
    )

    async def all_of_them() -> list[Completion]:
        sampling = Sampling(24, temperature=0.0, ignore_eos=True)
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.more
def test_company_changes_a_greedy_completion_only_where_two_tokens_are_about_as_likely(
    directory: Path, dtype: torch.dtype
) -> None:
    """Without compiled products up to 12 rows of a bfloat16 model decode in float32, and more in
    bfloat16 where the CPU has such products; elsewhere nothing changes. In float32 nothing changes
    anywhere."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 260) for _ in range(4 + i % 7)] for i in range(ROWS)]
    model = CausalLM.load(directory, dtype=dtype)
    together = completed(model, prompts)
    alone = [completed(model, [prompt])[0] for prompt in prompts]
    rounding = 1e-4 if dtype == torch.float32 else 0.1
    for one, other in zip(together, alone, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
        # Where they part, each took its likeliest token, and the two are as likely up to rounding.
        assert one.logprobs[: same + 1] == pytest.approx(other.logprobs[: same + 1], abs=rounding)
        assert same == len(one.token_ids) or dtype == torch.bfloat16
    changed = [
        a.logprobs != pytest.approx(b.logprobs, abs=1e-4)
        for a, b in zip(together, alone, strict=True)
    ]
    assert not any(changed) or dtype == torch.bfloat16


@pytest.mark.more
def test_a_step_that_overflows_float16_is_taken_again(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a factor that is far too large the first step finds its own, and nothing is lost."""
    losses = {}
    for dtype, first in (("float32", 1.0), ("float16", 2.0**30)):
        monkeypatch.setattr("tunesmith.run.trainers.optimizer.FIRST_SCALE", first)
        said = sft_settings(tmp_path, directory, run=dtype, model__dtype=dtype, train__lr=1e-3)
        lines = read_metrics(run_sft(None, said).run_dir / "metrics.jsonl")
        losses[dtype] = [line["loss"] for line in lines]
        assert [line["skipped_steps"] for line in lines] == [0] * 6
    assert lines[0]["loss_scale"] < 2.0**30 and lines[-1]["loss_scale"] <= lines[0]["loss_scale"]
    assert losses["float16"] == pytest.approx(losses["float32"], rel=1e-3)
