"""What the backward pass has of the forward pass: the gradient stays the same bit by bit, and the
memory falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import training
from tests.support.planned_memory import A100, GB, QWEN_7B, SMALL, on, refusal, resolved
from tests.support.tiny import save_model
from tunesmith.config.load import load_config
from tunesmith.config.schema import LoraSection, SFTConfig
from tunesmith.errors import ConfigError, ModelError
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import ModuleRunner, decoder_layers
from tunesmith.models.parallel.activations import compute_again
from tunesmith.plan.cost.activations import (
    activation_bytes,
    backward_bytes,
    kept_bytes,
    layer_bytes,
    recomputed,
    sent_bytes,
)
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.price import price
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.parts import Checkpointing
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample

LAYERS = 4
KEY = "system.gradient_checkpointing"
SELECTIVE = f'{KEY}="selective"'
ON_THE_GPU = ("system.offload_activations=false", "system.offload_optimizer=false")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", "qwen3", num_hidden_layers=LAYERS)


def backend_of(path: Path, kind: str, **options: Any) -> TorchBackend[CausalLM]:
    """A backend on the lean decoder, on the Hugging Face modules, with an adapter, or in
    bfloat16."""
    torch.manual_seed(0)
    model = CausalLM.load(path, dtype=torch.bfloat16 if "bfloat16" in kind else torch.float32)
    if "lora" in kind:
        adapters.attach(model, LoraSection(rank=4, alpha=8.0, targets="all-linear"))
    if kind == "hugging face":
        model.runner = ModuleRunner(model.module.base_model)
    return TorchBackend(model, training.AdamWSettings(), CausalLM.predict, ema_decay=0.9, **options)


def gradient(backend: TorchBackend[CausalLM]) -> dict[str, Tensor]:
    """Of two micro-batches."""
    batch = Packing.of(training.weighed(training.samples_of()), 60)
    assert len(batch) >= 2
    backend.forward_backward(batch, SFTObjective())
    return {
        name: m.grad.clone() for name, m in backend.optimizer.masters.items() if m.grad is not None
    }


@cache
def plain(path: Path, kind: str) -> dict[str, Tensor]:
    """The gradient where the backward pass has all of the forward pass."""
    return gradient(backend_of(path, kind))


KINDS = pytest.mark.parametrize("kind", ["lean", "hugging face", "lora", "bfloat16"])


@KINDS
def test_the_gradient_is_the_same_for_every_share(path: Path, kind: str) -> None:
    expected = plain(path, kind)
    shares = (0.25, 0.5, 0.75, True) if kind == "hugging face" else (0.5, True, "selective")
    for share in shares:
        found = gradient(backend_of(path, kind, gradient_checkpointing=share))
        assert found.keys() == expected.keys()
        assert all(found[name].equal(grad) for name, grad in expected.items()), share


def saved(backend: TorchBackend[CausalLM]) -> int:
    """Bytes that the backward pass is given, each storage once."""
    sizes: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        backend.passes.predict(training.forest_of(training.samples_of()))
    weights = {p.untyped_storage().data_ptr() for p in backend.model.module.parameters()}
    return sum(t.untyped_storage().nbytes() for place, t in sizes.items() if place not in weights)


@pytest.mark.parametrize("kind", ["lean", "hugging face"])
def test_each_layer_that_is_computed_again_keeps_its_input_only(path: Path, kind: str) -> None:
    counts: list[int] = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        backend = backend_of(path, kind, gradient_checkpointing=share)
        backend.model.module.train()
        counts.append(saved(backend))
    steps = [before - after for before, after in pairwise(counts)]
    assert steps == pytest.approx([steps[0]] * 4, rel=0.1) and LAYERS * steps[0] > 0.6 * counts[0]


@pytest.mark.parametrize("kind", ["lean", "bfloat16", "lora", "lora bfloat16"])
def test_what_selective_layers_keep_is_what_was_planned(path: Path, kind: str) -> None:
    """Bytes of a layer with and without, of what the backward pass is given."""
    facts = read_model_facts(path)
    assert facts is not None
    rank = 4 if "lora" in kind else None
    of = Layout(2 if "bfloat16" in kind else 4, lora_rank=rank)
    kept = [
        saved_by_layer(backend_of(path, kind, gradient_checkpointing=value))
        for value in (False, "selective")
    ]
    tokens = training.forest_of(training.samples_of()).num_tokens
    planned = [tokens * kept_bytes(facts, replace(of, selective=flag)) for flag in (False, True)]
    assert kept == pytest.approx(planned, rel=0.02) and kept[1] < 0.7 * kept[0]


def saved_by_layer(backend: TorchBackend[CausalLM]) -> int:
    """Bytes that a layer in the middle saves, each storage once."""
    lean = backend.model.lean
    assert lean is not None
    sizes: list[dict[torch.UntypedStorage, int]] = [{}]

    def keep(tensor: Tensor) -> Tensor:
        sizes[-1][tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor

    lean.before_layers(lambda: sizes.append({}))
    backend.model.module.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        backend.passes.predict(training.forest_of(training.samples_of()))
    owned = {p.untyped_storage() for p in backend.model.module.parameters()}
    shared = owned | sizes[1].keys() | sizes[3].keys()  # tables; a layer's input is its own
    return sum(size for storage, size in sizes[2].items() if storage not in shared)


def test_layers_without_a_lean_form_keep_all_or_nothing(path: Path) -> None:
    with pytest.raises(ModelError, match="selective"):
        backend_of(path, "hugging face", gradient_checkpointing="selective")
    assert refusal(SFTConfig, on(A100, replace(SMALL, family="gpt2")), SELECTIVE).count("gpt2") == 1
    said = resolved(SFTConfig, on(A100, replace(SMALL, family="llama")), SELECTIVE)
    assert said.memory.selective and not said.memory.share_again


def test_selective_layers_by_hand() -> None:
    """Two vectors of 256, queries, keys and values, the attention output, gate and up."""
    kept = 2 * (2 * 256 + (256 + 2 * 128) + 256 + 2 * 768) + 4 * 6
    assert kept_bytes(SMALL, Layout(2, selective=True)) == kept
    assert kept_bytes(SMALL, Layout(2, selective=True, sequence=2)) == kept + 2 * 256
    assert kept_bytes(SMALL, Layout(2, selective=True, lora_rank=8)) == kept + 28 * 8
    assert activation_bytes(SMALL, Layout(2, selective=True)) == 6 * kept + 2 * 2 * 256
    assert kept_bytes(SMALL, Layout(2)) == layer_bytes(SMALL, Layout(2))


def test_selective_layers_are_derived_where_all_do_not_fit_and_it_is_faster() -> None:
    facts = on(A100, replace(THREE, family="qwen2"), longest=5500, memory=512 * GB)
    found = resolved(SFTConfig, facts, *ON_THE_GPU)
    assert found.settings["system.gradient_checkpointing"] == "selective"
    by_kind = {
        value: resolved(SFTConfig, facts, *ON_THE_GPU, f"{KEY}={value}")
        for value in ("true", '"selective"')
    }
    seconds = {value: compared_seconds(plan) for value, plan in by_kind.items()}
    assert seconds['"selective"'] < seconds["true"]
    assert compared_seconds(found) == seconds['"selective"']
    assert refusal(SFTConfig, facts, *ON_THE_GPU, f"{KEY}=false")


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 28, 80])
def test_the_layers_are_evenly_spread_and_the_last_one_is_kept(layers: int) -> None:
    assert not any(recomputed(layers, 0)) and all(recomputed(layers, 1))
    for count in range(1, layers):
        chosen = recomputed(layers, count / layers)
        assert sum(chosen) == count and not chosen[-1]
        for length in range(1, layers):
            windows = [sum(chosen[start : start + length]) for start in range(layers - length + 1)]
            assert max(windows) - min(windows) <= 1
    assert sum(recomputed(layers, 1e-9)) == 1 and sum(recomputed(layers, 1 - 1e-9)) == max(
        1, layers - 1
    )


def test_layers_that_have_no_switch_cannot_be_chosen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = CausalLM.load(path).module
    compute_again(module, 0.5)
    assert [layer.gradient_checkpointing for layer in decoder_layers(module)] == [
        True,
        False,
        True,
        False,
    ]
    monkeypatch.setattr("tunesmith.models.parallel.activations.GradientCheckpointingLayer", int)
    compute_again(module, 1.0)
    with pytest.raises(ModelError, match=r"0\.5.*true or false"):
        compute_again(module, 0.5)


@pytest.mark.parametrize("value", ["1.5", "-0.5", '"half"'])
def test_other_shares_are_refused(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"gradient_checkpointing.*true or false or a number above 0 and below 1"
    ):
        load_config(
            SFTConfig,
            None,
            ["model.path=m", "data.train=d", f"system.gradient_checkpointing={value}"],
        )


def away(backend: TorchBackend[CausalLM], chunk: int = 1000) -> TorchBackend[CausalLM]:
    """Also the smallest activations go to host memory, in chunks that they straddle."""
    assert backend.model.host_activations is not None
    backend.model.host_activations.least = 1
    backend.model.host_activations.chunk = chunk
    return backend


@KINDS
@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0, marks=pytest.mark.slow),
        0.5,
        pytest.param(True, marks=pytest.mark.slow),
        "selective",
    ],
)
def test_the_gradient_is_the_same_with_activations_in_host_memory(
    path: Path, kind: str, share: Checkpointing
) -> None:
    if kind == "hugging face" and share == "selective":
        pytest.skip("only lean layers keep products alone")
    expected = plain(path, kind)
    backend = away(backend_of(path, kind, gradient_checkpointing=share, offload_activations=True))
    for _ in range(2):
        found = gradient(backend)
        assert found.keys() == expected.keys() and all(
            found[name].equal(grad) for name, grad in expected.items()
        )


def sent(backend: TorchBackend[CausalLM], samples: Sequence[Sample]) -> int:
    """Bytes that a forward pass sends to host memory, in chunks of 1000."""
    home = backend.model.host_activations
    taken = [0]
    assert home is not None
    take = home.take

    def counted() -> Tensor:
        taken[0] += 1000
        return take()

    home.take = counted
    before = len(home.free)
    predictions = backend.passes.predict(training.forest_of(samples))
    assert len(home.free) == max(0, before - taken[0] // 1000), "what was used before is used again"
    del predictions
    assert len(home.free) == max(before, taken[0] // 1000), "they come back with the graph"
    home.take = take
    return taken[0]


@pytest.mark.parametrize("share", [0, 0.5, True, "selective"])
def test_what_goes_to_host_memory_is_what_was_planned(path: Path, share: Checkpointing) -> None:
    samples = training.samples_of(groups=8)
    backend = away(backend_of(path, "lean", gradient_checkpointing=share, offload_activations=True))
    backend.model.module.train()
    facts = read_model_facts(path)
    assert facts is not None
    selective = share == "selective"
    again = 0.0 if selective else float(share)
    layout = Layout(4, checkpointing=again, selective=selective, offload_activations=True)
    tables = 2 * 4 * facts.head_dim + 8  # sines, cosines and token ids, once
    planned = (sent_bytes(facts, layout) + tables) * training.forest_of(samples).num_tokens
    assert sent(backend, samples) == pytest.approx(planned, rel=0.01)


def test_weights_small_tensors_and_passes_without_gradient_stay(path: Path) -> None:
    samples = training.samples_of(groups=8)
    backend = backend_of(path, "hugging face", offload_activations=True)
    home = backend.model.host_activations
    assert home is not None
    home.chunk = 1000
    assert sent(backend, samples) == 0 and home.least == 1 << 20
    home.least = 1
    most = sent(backend, samples)
    assert 0 < most < saved(backend_of(path, "hugging face"))
    for name, parameter in backend.model.module.named_parameters():
        parameter.requires_grad_(
            "layers" not in name
        )  # autograd then saves views of the frozen weights
    assert sent(backend, samples) <= most
    backend.score(Packing.of(training.weighed(samples), 60))
    assert len(home.free) * 1000 == most


def test_its_price_by_hand() -> None:
    layer = layer_bytes(SMALL, Layout(2))
    hidden = 2 * 256
    for share, kept, most, host in (
        (0, 2 * layer, 2 * layer, 4 * layer),
        (0.5, hidden + layer, hidden + 2 * layer, 2 * (hidden + layer)),
        (1, 2 * hidden, 2 * hidden + layer, 4 * hidden),
    ):
        of, plain = (
            Layout(2, tokens=10, checkpointing=share, offload_activations=flag)
            for flag in (True, False)
        )
        assert activation_bytes(SMALL, of) == kept + 2 * hidden
        assert (
            backward_bytes(SMALL, of) - backward_bytes(SMALL, replace(plain, checkpointing=0))
            == most - kept
        )
        assert price(SMALL, of).host == 10 * host
        assert price(SMALL, replace(of, sequence=2, models=2)).host == 2 * 5 * host
    both = price(SMALL, Layout(2, tokens=10, offload=True, offload_activations=True))
    state = 16 * 5_000_000  # weights, gradients and two moments
    wasted = 4 * 5_000_000 // 10  # of the pinned pieces that the weights are in
    arriving = (
        2 * 2 * (4096 + 3 * 768) * 256
    )  # gradients of the head and a block, in pieces of up to twice their size
    assert both.host == state + wasted + arriving + 40 * layer


THREE = replace(QWEN_7B, parameters=3_000_000_000, context=400_000)


def with_memory(longest: int, memory: int) -> Facts:
    return on(A100, THREE, longest=longest, memory=memory * GB)


def test_what_is_sent_and_what_is_recomputed_by_hand() -> None:
    """Of a GPU of 79 GB, 95% are used: 1 GB by CUDA, 54 by the state of 3B, the rest by
    activations.

    In a layer's backward pass there are five vectors of the feed-forward size, too.
    """
    inputs = 2 * 3584
    hidden = 3584
    inner = 18944
    saved = 2 * (4 * hidden + 3 * 28 * 128 + 3 * 4 * 128 + 3 * inner) + 4 * (2 + 28)
    room = (0.95 * 79 - 1 - 18 * 3) * GB
    beside = 2 * inputs + 5 * 2 * inner

    def here(kept: int) -> int:
        return (28 - kept) * inputs + kept * saved + beside

    def sent(kept: int) -> int:
        return (26 - kept) * inputs + kept * saved

    def found(longest: int, memory: int) -> tuple[bool, bool, int]:
        system = resolved(SFTConfig, with_memory(longest, memory)).settings
        return (
            system["system.offload_activations"],
            system["system.offload_optimizer"],
            round(28 * system["system.gradient_checkpointing"]),
        )

    # A host with room for all layers but two, which stay; for ten of these; and for no more than
    # their inputs.
    assert 32_768 * here(2) > room > 32_768 * here(1)
    assert 32_768 * sent(26) < 0.95 * 512 * GB and found(32_768, 512) == (True, False, 0)
    assert 32_768 * sent(10) < 0.95 * 64 * GB < 32_768 * sent(11) and found(32_768, 64) == (
        True,
        False,
        17,
    )
    assert 32_768 * sent(0) > 0.95 * 4 * GB and found(32_768, 4) == (False, False, 27)
    # The layers' inputs do not fit on the GPU, and the optimizer not in host memory.
    assert 48_000 * here(1) > room > 48_000 * (beside + 2 * inputs + saved)
    assert 16 * 3 * GB > 0.95 * 20 * GB > 48_000 * sent(0) and found(48_000, 20) == (
        True,
        False,
        27,
    )
    # Nor do a layer and what it needs, unless the optimizer goes.
    assert 58_000 * (beside + 2 * inputs + saved) > room
    assert 16 * 3 * GB + 58_000 * sent(26) < 0.95 * 512 * GB and found(58_000, 512) == (
        True,
        True,
        0,
    )


def test_it_is_derived_where_the_inputs_of_the_layers_do_not_fit() -> None:
    key = "system.offload_activations"
    facts = with_memory(58_000, 512)
    assert (
        resolved(SFTConfig, on(A100, SMALL, longest=2048)).settings["system.offload_activations"]
        is False
    )
    shorter = with_memory(52_000, 512)
    assert f"{key} = true" in refusal(
        SFTConfig, shorter, f"{key}=false", "system.offload_optimizer=false"
    )
    assert "does not fit" in refusal(SFTConfig, replace(facts, longest=300_000))
    small = replace(facts, hardware=replace(facts.hardware, memory_available=4 * GB))
    assert f"{key} = true" in refusal(SFTConfig, small, f"{key}=true")
    assert resolved(SFTConfig, on(None, SMALL)).settings["system.offload_activations"] is False


@pytest.mark.parametrize(
    ("facts", "word"), [(on(None, SMALL), "GPUs"), (on(A100, replace(SMALL, layers=2)), "2")]
)
def test_activations_that_cannot_go_are_refused(facts: Any, word: str) -> None:
    text = refusal(SFTConfig, facts, "system.offload_activations=true")
    assert "system.offload_activations" in text and word in text
