"""A quantised base under an adapter: vLLM samples with the numbers that the trainer computes with,
whether it gets the adapter alone or merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine_contract import FREE, PROMPT
from tests.support.pool_bench import CONTEXT
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tests.support.training import whole
from tunesmith.config.schema import LoraSection
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.engines.vllm import KIND
from tunesmith.run.engines.vllm.engine import VllmEngine
from tunesmith.run.engines.vllm.start import VllmSettings
from tunesmith.run.specs.planes import published, published_bytes
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("bitsandbytes", reason="an optional extra: pip install 'tunesmith[quantize]'")

assert KIND.adapters is not None
SHAPE = {
    "max_position_embeddings": CONTEXT,
    "vocab_size": 261,
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 192,
}


class Trained:
    """A trainer with an adapter on a base in 4 or 8 bits, and vLLM, which takes its weights."""

    def __init__(self, path: Path, family: str, quantize: Any, *, merged: bool) -> None:
        self.model = CausalLM.load(path, quantize=quantize)
        torch.manual_seed(0)
        attach(self.model, LoraSection(rank=3, alpha=6.0))
        self.backend = TorchBackend(self.model, AdamWSettings(), CausalLM.predict)
        alone = {"adapter_rank": 8, "adapter_modules": KIND.adapters.modules[family]}
        settings = VllmSettings(
            str(path),
            "float32",
            max_model_len=CONTEXT,
            kv_bytes=1 << 26,
            base=quantize,
            **({} if merged else alone),
        )
        self.named = published(self.model, merged=merged, as_stored=True)
        self.engine = VllmEngine(settings, self.named)

    def score(self, completion: Sequence[int]) -> list[float]:
        """By the trainer."""
        ids = [*PROMPT, *completion]
        mask = [False] * len(PROMPT) + [True] * len(completion)
        return list(self.backend.score(whole([Sample(ids, mask)])))

    def step(self) -> None:
        ids = [*PROMPT, 8, 20, 6]
        batch = whole([Sample(ids, [False] * len(PROMPT) + [True] * 3)])
        self.backend.forward_backward(batch, SFTObjective())
        self.backend.step(0.02)


@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "merged"])
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
async def test_a_base_in_four_bits_gives_the_trainers_log_probabilities(
    family: str, merged: bool, tmp_path: Path
) -> None:
    """Before and after steps; phi3's projections are fused. The whole base is what is missed."""
    path = save_model(tmp_path / family, family, **SHAPE)
    made = Trained(path, family, "nf4", merged=merged)
    plain = CausalLM.load(path)
    apart: list[float] = []
    try:
        for version in range(3):
            await made.engine.load_weights(version)
            done = await made.engine.generate(PROMPT, FREE)
            assert done.logprobs == pytest.approx(made.score(done.token_ids), abs=1e-3)
            if not version:
                exact = TorchBackend(plain, AdamWSettings(), CausalLM.predict)
                made.backend, own = exact, made.backend
                apart = made.score(done.token_ids)
                made.backend = own
                assert max(abs(a - b) for a, b in zip(apart, done.logprobs, strict=True)) > 0.01
            made.step()
    finally:
        await made.engine.close()
    sizes = [tensor.nbytes for _, tensor in made.named()]
    assert (
        sum(sizes) <= published_bytes(made.model, merged=merged) <= sum(sizes) + 2048 * len(sizes)
    )


async def test_eight_bits_differ_by_the_rounding_of_activations(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "qwen3", **SHAPE)
    made = Trained(path, "qwen3", "int8", merged=False)
    try:
        await made.engine.load_weights(1)
        done = await made.engine.generate(PROMPT, FREE)
        assert done.logprobs == pytest.approx(made.score(done.token_ids), abs=0.05)
    finally:
        await made.engine.close()


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_a_run_samples_with_its_quantised_base(sync: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", **SHAPE)
    said = {
        "model__quantize": "nf4",
        "lora__rank": 4,
        "system__engine": "vllm",
        "system__engine_process": True,
        "system__adapter_sync": sync,
    }
    settings = rl_settings(tmp_path, model, "run", **said, train__steps=3)
    metrics = assembly.run_rl(None, settings).run_dir / "metrics.jsonl"
    lines = [line for line in read_metrics(metrics) if "grad_norm" in line]
    assert len(lines) == 3
    assert all(line["canary"] <= 1e-3 for line in lines)
    assert all(line["ratio"] == pytest.approx(1.0, abs=1e-3) for line in lines)
