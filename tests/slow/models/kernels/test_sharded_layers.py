"""Lean layers whose weights are gathered as they run: ours, Liger's and compiled ones, in a group of
one rank.

``slow/models/test_compiled_sharded_layers.py`` has two ranks and compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.compiled_layers import FAMILIES, gradients
from tests.support.liger_in_torch import LigerInTorch
from tests.support.tiny import save_model
from tests.support.training import difference, forest_of, samples_of
from tunesmith.config.schema import LoraSection
from tunesmith.models import adapters
from tunesmith.models.attention import ForestAttention
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.inductor import CACHE
from tunesmith.models.parallel.sharding import Sharding, local, run
from tunesmith.run.processes.rank_group import join_group_of_one

KINDS = ("torch", "liger", "compiled")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one rank; ``torch.compile`` gives back the function; the cache's place is
    nobody's."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setenv(CACHE, "unused")
    join_group_of_one("cpu")
    yield
    dist.destroy_process_group()


def sharded(path: Path, kind: str, stage: int = 3, *, streams: bool = False) -> CausalLM:
    model = CausalLM.load(path, sharding=Sharding.over("cpu", stage, 1, streams=streams))
    if kind == "compiled":
        model.compile_layers("default")
    if kind == "liger":
        model.use_liger()
    return model


def gathered_gradients(model: CausalLM) -> dict[str, Tensor]:
    model.module.train()
    forest = forest_of(samples_of())
    (found,) = run(model.module, lambda: (model.predict(forest).logprobs.clone(),))
    assert found is not None
    found.sum().backward()
    named = {name: p.grad for name, p in model.module.named_parameters()}
    return {name: local(grad).clone() for name, grad in named.items() if grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_they_give_the_gradients_of_whole_layers(
    family: str, kind: str, tmp_path: Path, stand_in: LigerInTorch
) -> None:
    path = save_model(tmp_path, family, **FAMILIES[family])
    want = gradients(CausalLM.load(path))
    model = sharded(path, kind)
    assert difference(gathered_gradients(model), want) < 1e-5
    assert bool(stand_in.calls) == (kind == "liger")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "streams"), [(1, False), (2, False), (3, False), (3, True)])
def test_computed_again_they_give_the_same(
    kind: str, stage: int, streams: bool, tmp_path: Path
) -> None:
    path = save_model(tmp_path, "qwen3", head_dim=12, num_hidden_layers=3)
    want = gradients(CausalLM.load(path))
    model = sharded(path, kind, stage, streams=streams)
    model.module.gradient_checkpointing_enable({"use_reentrant": False})
    assert difference(gathered_gradients(model), want) < 1e-5


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "streams"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_products_alone_they_give_the_same_bit_by_bit(
    kind: str, stage: int, streams: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = save_model(tmp_path, "qwen3", head_dim=12)
    found: list[dict[str, Tensor]] = []
    for selective in (False, True):
        sharding = Sharding.over("cpu", stage, 1, streams=streams)
        model = CausalLM.load(path, dtype=dtype, sharding=sharding)
        if kind == "liger":
            model.use_liger()
        if kind == "compiled":
            model.compile_layers("default")
        if selective:
            model.keep_products()
        found.append(gathered_gradients(model))
    if kind == "compiled":  # a layer's products are joined in another order
        assert difference(found[1], found[0]) < (1e-5 if dtype == torch.float32 else 0.03)
    else:
        assert all(found[1][name].equal(grad) for name, grad in found[0].items())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_has_its_weights_while_it_runs(
    kind: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stage 3 only then, in stage 2 until the backward pass is over."""
    model = sharded(save_model(tmp_path, num_hidden_layers=3), kind, stage)
    assert model.lean is not None
    weights = [layer.module.mlp.up_proj for layer in model.lean.layers]
    seen: list[list[bool]] = []
    attend = ForestAttention.attend

    def looking(self: ForestAttention, *operands: Any) -> Tensor:
        seen.append([not isinstance(module.weight, DTensor) for module in weights])
        return attend(self, *operands)

    monkeypatch.setattr(ForestAttention, "attend", looking)
    gathered_gradients(model)
    before = stage == 2
    assert seen == [[True, False, False], [before, True, False], [before, before, True]]
    assert all(isinstance(module.weight, DTensor) for module in weights)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_them_is_trained(kind: str, tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen2")

    def adapted(model: CausalLM) -> CausalLM:
        torch.manual_seed(0)
        adapters.attach(model, LoraSection(rank=4, alpha=8, targets="all-linear"))
        for name, parameter in model.module.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    want = gradients(adapted(CausalLM.load(path)))
    found = gathered_gradients(adapted(sharded(path, kind)))
    assert found.keys() == want.keys() and difference(found, want) < 1e-5
