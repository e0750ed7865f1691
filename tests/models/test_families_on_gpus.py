"""On a GPU every family gives what it gives on the CPU, where transformers is the reference."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import tiny
from tests.support.families import build, gradients, logprobs, samples
from tests.support.training import forest_of
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.families import families, published
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Completion, Sample, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ([5, 6, 7], [8, 9] * 15)
TEXT = [name for name, each in families().items() if not (each.multimodal or each.inner)]


@pytest.fixture(scope="module", params=published())
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family, saved."""
    folder = tmp_path_factory.mktemp("model")
    build(request.param).module.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def loaded(path: Path, device: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    """In float32 with exact products, where loading chose TF32."""
    model = CausalLM.load(path, device=device, dtype=dtype)
    torch.set_float32_matmul_precision("highest")
    return model


def pass_over(path: Path, device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients of a forest, in float32 on the CPU."""
    model = loaded(path, device, dtype)
    got, _ = logprobs(model, forest_of(samples()).to(torch.device(device)))
    found = gradients(model, got.float().cpu())
    return got.detach().float().cpu(), {name: g.float().cpu() for name, g in found.items()}


def apart(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients, by the norm of those wanted."""
    assert got.keys() == wanted.keys()
    missed = sum(float((got[name] - gradient).norm() ** 2) for name, gradient in wanted.items())
    return (missed / sum(float(g.norm() ** 2) for g in wanted.values())) ** 0.5


def test_a_forest_has_the_gradients_that_it_has_on_the_cpu(path: Path) -> None:
    want, gradients_wanted = pass_over(path, "cpu", torch.float32)
    got, found = pass_over(path, "cuda", torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)
    assert apart(found, gradients_wanted) < 1e-3


def test_bfloat16_is_as_far_from_float32_as_on_the_cpu(path: Path) -> None:
    """Kernels of flash attention, grouped products and scans that float32 does not take."""
    want, gradients_wanted = pass_over(path, "cpu", torch.float32)
    on_cpu, found_on_cpu = pass_over(path, "cpu", torch.bfloat16)
    got, found = pass_over(path, "cuda", torch.bfloat16)
    assert (got - want).abs().mean() < 2 * (on_cpu - want).abs().mean() + 0.02
    assert apart(found, gradients_wanted) < 1.5 * apart(found_on_cpu, gradients_wanted) + 0.05


@pytest.mark.parametrize("model_type", TEXT)
def test_sampled_tokens_have_the_probabilities_of_the_whole(
    model_type: str, tmp_path: Path
) -> None:
    build(model_type).module.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    engine = LocalEngine(
        loaded(tmp_path, "cuda"),
        kv_bytes=1 << 22,
        max_running=3,
        max_prefill_tokens=16,
    )

    async def all_of_them() -> list[Completion]:
        samplings = [Sampling(12 + i, ignore_eos=True, seed=i) for i in range(6)]
        asked = [engine.generate(PROMPTS[i % 2], each) for i, each in enumerate(samplings)]
        return await asyncio.gather(*asked)

    completions = asyncio.run(all_of_them())
    asyncio.run(engine.close())
    plain = CausalLM.load(tmp_path)
    for i, done in enumerate(completions):
        sample = sample_of(PROMPTS[i % 2], done.token_ids)
        with torch.inference_mode():
            expected, _ = logprobs(plain, forest_of([sample]))
        assert done.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def sample_of(prompt: list[int], completion: list[int]) -> Sample:
    mask = [False] * len(prompt) + [True] * len(completion)
    return Sample([*prompt, *completion], mask)


def test_selective_checkpointing_changes_no_gradient_and_takes_less_memory(tmp_path: Path) -> None:
    """Beside no and full checkpointing, on layers whose activations dwarf the rest."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
    tiny.save_model(tmp_path, "qwen3", num_hidden_layers=8, **sizes)
    forest = forest_of([sample_of([5] * 100, [6 + i] * 400) for i in range(8)]).to(
        torch.device("cuda")
    )
    kept: list[int] = []
    found: list[dict[str, Tensor]] = []
    for kind in (0, "selective", 1):
        model = CausalLM.load(tmp_path, device="cuda", dtype=torch.bfloat16)
        backend = TorchBackend(
            model, AdamWSettings(), predict=CausalLM.predict, gradient_checkpointing=kind
        )
        model.module.train()
        before = torch.cuda.memory_allocated()
        logprobs = backend.passes.predict(forest).logprobs
        kept.append(torch.cuda.memory_allocated() - before)
        assert logprobs is not None
        found.append(gradients(model, logprobs.float().cpu()))
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name
    none, selective, full = kept
    assert full < selective < 0.8 * none
