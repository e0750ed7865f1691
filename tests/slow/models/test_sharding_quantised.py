"""Ranks that shard a quantised base under an adapter compute what one process computes, and keep
only their part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import training
from tests.support.sharded_ranks import Ranks
from tests.support.tiny import save_model
from tunesmith.config.schema import LoraSection
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.quantised import Quantize, weights_of
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend

pytest.importorskip("bitsandbytes", reason="an optional extra: pip install 'tunesmith[quantize]'")
Start = Callable[..., Ranks]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of queries and of the second product are no multiples of 64, so blocks of weights span
    rows."""
    path = tmp_path_factory.mktemp("model") / "model"
    shape = {"hidden_size": 96, "intermediate_size": 160}
    return save_model(path, "qwen2", tie_word_embeddings=True, **shape)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Ranks] = []

    def start(path: Path, world: int, stage: int, **options: Any) -> Ranks:
        started.append(Ranks(path, world, stage, **{"adapter": 4, **options}))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def packing(groups: int = 4) -> Packing:
    return Packing.of(training.weighed(training.samples_of(groups=groups)), 40)


def alone(
    path: Path, quantize: Quantize | None, dtype: torch.dtype = torch.float32
) -> TorchBackend[CausalLM]:
    model = CausalLM.load(path, dtype=dtype, quantize=quantize)
    torch.manual_seed(0)
    attach(model, LoraSection(rank=4))
    return TorchBackend(model, AdamWSettings(max_grad_norm=1.0, weight_decay=0.1), CausalLM.predict)


def trained(backend: TorchBackend[CausalLM], batch: Packing, steps: int = 3) -> list[float]:
    norms: list[float] = []
    for _ in range(steps):
        backend.forward_backward(batch, SFTObjective())
        norms.append(backend.step(1e-2)["grad_norm"])
    return norms


def gradient(backend: TorchBackend[CausalLM], batch: Packing) -> tuple[float, training.Grads]:
    loss = backend.forward_backward(batch, SFTObjective())["loss"]
    return loss, {
        name: m.grad for name, m in backend.optimizer.masters.items() if m.grad is not None
    }


@pytest.mark.parametrize(
    ("world", "size", "stage", "groups", "options"),
    [
        *((2, 2, 1, 4, {}), (2, 2, 2, 4, {}), (2, 2, 3, 4, {}), (3, 3, 3, 1, {}), (4, 2, 3, 4, {})),
        *((2, 2, 3, 4, {"gradient_checkpointing": 1}), (2, 2, 3, 4, {"offload_activations": True})),
        (4, 4, 3, 5, {"sequence": 2}),
    ],
    ids=[
        "1",
        "2",
        "3",
        "a rank idles",
        "two copies",
        "computed again",
        "activations away",
        "two share sequences",
    ],
)
def test_gradients_and_weights_of_an_adapter_are_those_of_one_process(
    start: Start,
    model: Path,
    world: int,
    size: int,
    stage: int,
    groups: int,
    options: dict[str, Any],
) -> None:
    """The bytes of the base are the same, too. The second gradient is of matrices that are no
    longer 0."""
    batch = packing(groups)
    one = alone(model, "nf4")
    ranks = start(model, world, stage, size=size, quantize="nf4", **options)
    for _ in range(2):
        found = ranks("gradient", batch)
        (loss, ours) = gradient(one, batch)
        sequence = options.get("sequence", 1)
        assert sum(metrics["loss"] for metrics, _ in found[::sequence]) == pytest.approx(
            loss, rel=1e-5
        )
        assert ours and training.difference(found[0][1], ours) < 1e-5
        (norms, weights), *_ = ranks("train", batch)
        assert norms == pytest.approx(trained(one, batch), rel=1e-5)
        for name, weight in one.model.module.state_dict().items():
            assert float((weights[name].float() - weight).abs().mean()) < 1e-6, name


def test_rows_of_the_input_are_rounded_alike(start: Start, model: Path) -> None:
    """8 bits for each number of the input: one that is half way between two may go either way."""
    batch = packing()
    one = alone(model, "int8")
    ranks = start(model, 2, 3, quantize="int8")
    assert ranks("gradient", batch)[0][0]["loss"] > 0
    (norms, weights), *_ = ranks("train", batch)
    assert norms == pytest.approx(trained(one, batch), rel=1e-3)
    for name, weight in one.model.module.state_dict().items():
        near = 0 if weight.dtype == torch.uint8 else 1e-4
        assert float((weights[name].float() - weight).abs().mean()) <= near, name


def test_bfloat16_computes_on_the_same_bytes(start: Start, model: Path) -> None:
    batch = packing()
    one = alone(model, "nf4", torch.bfloat16)
    ranks = start(model, 2, 3, quantize="nf4", dtype=torch.bfloat16)
    assert np.sum(ranks("score", batch), 0) == pytest.approx(one.score(batch), abs=0.02)
    (norms, weights), *_ = ranks("train", batch)
    assert norms == pytest.approx(trained(one, batch), rel=0.05)
    for name, weight in one.model.module.state_dict().items():
        if "lora_" not in name:
            assert weights[name].equal(weight.to(weights[name].dtype)), name


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_rank_keeps_its_part_and_reads_one_weight_at_a_time(
    start: Start, tmp_path: Path, quantize: Quantize, dtype: torch.dtype
) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    path = save_model(tmp_path / "wide", "llama", **shape)
    whole = alone(path, quantize, dtype).model.module
    frozen = sum(p.nbytes for p in whole.parameters() if not p.requires_grad)
    unquantised = sum(4 * n for p, n in weights_of(whole) if not p.requires_grad)
    for kept, most in start(path, 2, 3, quantize=quantize, dtype=dtype)("base"):
        assert kept <= 1.02 * frozen / 2
        largest = 4 * 128 * 512  # in the files, which are in float32
        assert kept < most < kept + 1.9 * largest < 0.5 * unquantised


def test_a_checkpoint_of_ranks_continues_in_ranks_and_in_one_process(
    start: Start, model: Path, tmp_path: Path
) -> None:
    batch = packing()
    ranks = start(model, 2, 3, quantize="nf4")
    ranks("train", batch, 2)
    ranks("backend.save", tmp_path)
    (_, expected), *_ = ranks("train", batch, 1)
    ranks("backend.load", tmp_path)
    (_, again), *_ = ranks("train", batch, 1)
    assert all(again[name].equal(weight) for name, weight in expected.items())
    one = alone(model, "nf4")
    one.load(tmp_path)
    trained(one, batch, 1)
    three = start(model, 3, 2, quantize="nf4")
    three("backend.load", tmp_path)
    (_, found), *_ = three("train", batch, 1)
    for name, weight in one.model.module.state_dict().items():
        for other in (found[name].float(), weight.float()):
            torch.testing.assert_close(other, expected[name].float(), rtol=1e-4, atol=1e-5)
