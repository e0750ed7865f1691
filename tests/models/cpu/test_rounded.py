"""Weights in float16 and int8 (``system.engine_weights``): products are those of the rounded
weights, and the engine samples as a model that has them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiny import save_model
from tunesmith.config.engines import RoundedWeights
from tunesmith.config.schema import LoraSection
from tunesmith.errors import UserError
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu import decoding, products
from tunesmith.models.cpu.products import ROUNDED, compiled
from tunesmith.run.engines.local import decode_model
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.local.runner import probe
from tunesmith.types import Completion, Sampling

pytestmark = pytest.mark.skipif(not compiled(), reason="there is no C++ compiler")
FORMATS: tuple[RoundedWeights, ...] = ("float16", "int8")
MODELS = [("llama", {}), ("qwen2", {}), ("gemma2", {"head_dim": 24})]
"""Without biases, with biases of queries, keys and values, and with another gate and odd heads."""


def rounded(weight: Tensor, to: RoundedWeights) -> Tensor:
    """In float64."""
    if to == "float16":
        return weight.half().double()
    steps = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / steps).round().double() * steps.double()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 7), (33, 96), (208, 1), (1040, 93)])
def test_products_are_those_of_rounded_weights(
    to: RoundedWeights, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    biases = (None, torch.randn(outputs).to(dtype))
    exact = rounded(weight, to)
    for bias in biases:
        product = ROUNDED[to].prepare(weight, bias)
        for rows in (*range(18), 25, 49, 70):
            x = torch.randn(rows, inputs)
            wanted = x.double() @ exact.T + (0 if bias is None else bias.double())
            sizes = x.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())
            found = product(x)
            assert found.dtype == torch.float32
            assert ((found - wanted).abs() <= 1e-6 * sizes).all()
            assert torch.equal(found[:1], product(x[:1])), "a row's sums are those of it alone"


@pytest.mark.parametrize("to", FORMATS)
def test_weights_that_are_not_numbers_show(to: RoundedWeights) -> None:
    """So that the engine says that they may have diverged; a row of zeros is 0."""
    weight = torch.randn(8, 40)
    weight[3, 5] = torch.nan
    weight[4] = 0
    found = ROUNDED[to].prepare(weight, None)(torch.ones(2, 40))
    assert found.isfinite().all(0).tolist() == [row != 3 for row in range(8)]
    assert (found[:, 4] == 0).all()


def completions(engine: LocalEngine) -> list[Completion]:
    """Greedy ones; some share a prompt, which is prefilled in pieces."""
    prompts = [[5 + (7 * i + 3 * j) % 250 for j in range(n)] for i, n in enumerate((1, 12, 33))]

    async def all_of_them() -> list[Completion]:
        sampling = Sampling(12, temperature=0, ignore_eos=True)
        return await asyncio.gather(*(engine.generate(prompts[i % 3], sampling) for i in range(9)))

    return asyncio.run(all_of_them())


def engine_of(model: CausalLM, **options: Any) -> LocalEngine:
    return LocalEngine(model, kv_bytes=1 << 22, max_running=7, max_prefill_tokens=20, **options)


def change(model: CausalLM, seed: int, only: str = "") -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in (p for name, p in model.module.named_parameters() if only in name):
            weight.mul_(1.5 if weight.dim() > 1 else 1).add_(torch.randn_like(weight) * 0.02)


def round_all(model: CausalLM, to: RoundedWeights, but: str = "no name") -> None:
    with torch.no_grad():
        for name, module in model.module.named_modules():
            if isinstance(module, nn.Linear) and but not in name:
                module.weight.copy_(rounded(module.weight, to))


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(("family", "sizes"), MODELS)
@pytest.mark.more
def test_the_engine_samples_as_a_model_with_rounded_weights(
    family: str, sizes: dict[str, Any], to: RoundedWeights, tmp_path: Path
) -> None:
    """Prompts too, and again after new weights, from the model's own, which stay as they are."""
    path = save_model(tmp_path, family, tie_word_embeddings=False, **sizes)
    own, other = (CausalLM.load(path, dtype=torch.float32) for _ in range(2))
    engine = engine_of(own, rounded=to)
    told = []
    for version in range(2):
        for model in (own, other):
            change(model, version)
        kept = own.head.weight.detach().clone()
        exact = completions(engine_of(other, compiled=False))
        asyncio.run(engine.load_weights(version))
        found = completions(engine)
        assert torch.equal(own.head.weight, kept)
        unrounded = {name: p.detach().clone() for name, p in other.module.named_parameters()}
        round_all(other, to)
        wanted = completions(engine_of(other, compiled=False))
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        off = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(found, exact, strict=True)]
        assert max(off) > (1e-4 if to == "int8" else 1e-6)
        told.append([done.logprobs for done in found])
        with torch.no_grad():
            for name, parameter in other.module.named_parameters():
                parameter.copy_(unrounded[name])
    assert told[0] != told[1]


def test_bytes_of_a_step_are_those_that_are_read(tmp_path: Path) -> None:
    model = CausalLM.load(save_model(tmp_path), dtype=torch.float32)
    cost = probe(model, compiled=True)[1]
    for to, each in (("float16", 2), ("int8", 1)):
        engine = engine_of(model, rounded=to)
        read = engine._meter.cost  # pyright: ignore[reportPrivateUsage]
        assert read == replace(cost, weight_bytes=each * cost.weights)


ADAPTED = [
    ("llama", ("q_proj", "down_proj")),
    ("qwen2", ("k_proj", "v_proj", "gate_proj", "o_proj")),
    ("phi3", ("qkv_proj", "gate_up_proj")),
]
"""Some of the modules with one input, and modules that are joined in the model's files."""


def adapted(path: Path, targets: Sequence[str]) -> CausalLM:
    model = CausalLM.load(path, dtype=torch.float32)
    torch.manual_seed(0)
    attach(model, LoraSection(rank=4, targets=tuple(targets)))
    return model


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(("family", "targets"), ADAPTED)
def test_an_adapter_on_a_small_model_is_merged_before_the_weights_are_rounded(
    to: RoundedWeights, family: str, targets: Sequence[str], tmp_path: Path
) -> None:
    """At every version; the model itself keeps base and adapter apart."""
    model = adapted(save_model(tmp_path, family, tie_word_embeddings=False), targets)
    engine = engine_of(model, rounded=to)
    for version in range(2):
        change(model, version)
        asyncio.run(engine.load_weights(version))
        assert model.adapter is not None
        other = CausalLM(model.adapter.merged(), model.tokenizer)
        round_all(other, to)
        check_completions(engine, other)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(("family", "targets"), ADAPTED)
def test_an_adapter_on_a_larger_model_is_not_rounded(
    to: RoundedWeights,
    family: str,
    targets: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is computed beside the rounded weights of its base, at every version."""
    monkeypatch.setattr(decode_model, "merges_adapter", lambda _: False)
    path = save_model(tmp_path, family, tie_word_embeddings=False)
    model, other = (adapted(path, targets) for _ in range(2))
    engine = engine_of(model, rounded=to)
    for version in range(2):
        for each in (model, other):
            change(each, version, only=".lora_" if version else "")
        asyncio.run(engine.load_weights(version))
        round_all(other, to, but=".lora_")
        check_completions(engine, other)


def check_completions(engine: LocalEngine, other: CausalLM) -> None:
    wanted = completions(engine_of(other, compiled=False))
    for mine, theirs in zip(completions(engine), wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_where_nothing_can_be_compiled_float16_is_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is derived, and only saves time."""
    model = CausalLM.load(save_model(tmp_path, "llama"), dtype=torch.float32)
    wanted = completions(engine_of(model, compiled=False))
    monkeypatch.setattr(decoding, "compiled", lambda: False)
    monkeypatch.setattr(products, "compiled", lambda: False)
    found = completions(engine_of(model, rounded="float16"))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.parametrize("case", ["uncompiled", "float16", "another shape"])
def test_what_cannot_be_rounded_is_refused(case: str, tmp_path: Path) -> None:
    family = "gpt2" if case == "another shape" else "llama"
    dtype = torch.float16 if case == "float16" else torch.float32
    model = CausalLM.load(save_model(tmp_path, family), dtype=dtype)
    with pytest.raises(UserError, match="leave it out") as refused:
        engine_of(model, rounded="int8", compiled=case != "uncompiled")
    assert refused.value.keys == ("system.engine_weights",)
