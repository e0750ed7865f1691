"""Training with layers that Inductor compiles: the same steps, few functions, no more memory, and a
cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.long import again
from tests.support.tiny import save_model
from tests.support.training import backend_of, difference, samples_of
from tunesmith.config.schema import LoraSection
from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.inductor import CACHE
from tunesmith.run.trainers.torch import TorchBackend

pytestmark = pytest.mark.xdist_group("compiled layers")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Inductor's, empty at first."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("inductor")
        patch.setenv(CACHE, str(folder))
        yield folder


def packing() -> Packing:
    """Micro-batches of different lengths."""
    batch = Batch.of(samples_of(groups=6))
    weigh(batch, "token_mean")
    made = Packing.of(batch, 60)
    assert len({forest.num_tokens for forest in made.forests}) == len(made) > 2
    return made


def backend(
    path: Path, compiled: bool, lora: bool = False, **options: Any
) -> TorchBackend[CausalLM]:
    """One backend's model has an adapter that moves its states."""
    made = backend_of(path, **({"dtype": torch.float32} | options)) if not lora else None
    if made is None:
        torch.manual_seed(0)
        load = CausalLM.load

        def adapted(*arguments: Any, **settings: Any) -> CausalLM:
            model = load(*arguments, **settings)
            adapters.attach(model, LoraSection(rank=4, alpha=8, targets="all-linear"))
            for name, parameter in model.module.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(parameter, std=0.1)
            return model

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CausalLM, "load", adapted)
            made = backend_of(path, **options)
    if compiled:
        made.model.compile_layers("default")
    return made


def gradients(made: TorchBackend[CausalLM]) -> dict[str, Tensor]:
    made.sum_gradients()
    return {
        name: m.grad.clone() for name, m in made.optimizer.masters.items() if m.grad is not None
    }


@pytest.mark.parametrize(
    ("family", "shape", "options"),
    [
        again("qwen3", {"head_dim": 8}, {}),
        again("gemma2", {"head_dim": 8, "sliding_window": 6}, {"gradient_checkpointing": 0.5}),
        ("qwen2", {}, {"lora": True, "gradient_checkpointing": 1}),
        again("llama", {}, {"dtype": torch.bfloat16}),
    ],
    ids=["full", "checkpointing", "lora", "bfloat16"],
)
def test_three_steps_are_those_of_lean_layers(
    family: str, shape: Any, options: Any, tmp_path: Path
) -> None:
    path = save_model(tmp_path, family, num_hidden_layers=4, **shape)
    bound = 0.03 if "dtype" in options else 1e-5
    data = packing()
    off, on = (backend(path, compiled, **options) for compiled in (False, True))
    torch._dynamo.reset()
    counters.clear()
    for step in range(3):
        expected, found = (b.forward_backward(data, SFTObjective()) for b in (off, on))
        assert found == pytest.approx(expected, rel=bound)
        if not step:
            assert difference(gradients(on), gradients(off)) < bound
        assert on.step(1e-3)["grad_norm"] == pytest.approx(off.step(1e-3)["grad_norm"], rel=bound)
    assert counters["stats"]["unique_graphs"] == 2, "layers and lengths share their functions"
    for name, weight in off.optimizer.masters.items():
        # AdamW may move a weight whose gradient is near 0 by more than its rounding.
        assert float((on.optimizer.masters[name] - weight).abs().mean()) < 0.1 * bound, name
    torch.testing.assert_close(
        *(torch.as_tensor(b.score(data)) for b in (on, off)),
        rtol=10 * bound,
        atol=10 * bound,
        check_dtype=False,
    )


def saved_bytes(made: TorchBackend[CausalLM]) -> int:
    """What a pass of the layers keeps for its backward pass, without weights."""
    forest = max(packing().forests, key=lambda forest: forest.num_tokens)
    weights = {p.untyped_storage().data_ptr() for p in made.model.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (alive.append(t), keep(t))[1], lambda t: t
    ):
        made.model.states(forest)
    return sum(kept.values())


def test_the_backward_pass_needs_no_more_memory(tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen3", head_dim=8, num_hidden_layers=4)
    lean, compiled = (saved_bytes(backend(path, on)) for on in (False, True))
    assert compiled <= 1.02 * lean


def test_what_was_compiled_is_found_again(tmp_path: Path, cache: Path) -> None:
    path = save_model(tmp_path, "llama", intermediate_size=48)
    data = packing()
    found: list[int] = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        backend(path, True).forward_backward(data, SFTObjective())
        found.append(
            sum(n for name, n in counters["aot_autograd"].items() if name.endswith("cache_hit"))
        )
    assert found[0] == 0 and found[1] == 2
    assert os.listdir(cache)
