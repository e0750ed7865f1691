"""Layers that PyTorch compiles: here the functions themselves, uncompiled, beside the lean layers.

``slow/test_compiled_layers.py`` compiles them.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.support.compiled_layers import FAMILIES, gradients, resolved
from tests.support.sequence_ranks import SequenceRanks
from tests.support.sequence_ranks import gradients as gradients_of
from tests.support.tiny import save_model
from tests.support.training import backend_of, difference, forest_of, samples_of, whole
from tunesmith.config.schema import LoraSection
from tunesmith.errors import ConfigError, ModelError
from tunesmith.guide.simulate.dry_run import check_dry_run
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu import functions
from tunesmith.models.kernels import compiled
from tunesmith.models.kernels.inductor import CACHE
from tunesmith.run.specs.from_plan import load_tokenizer, model_spec


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` gives back the function; the cache's place is nobody's."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setenv(CACHE, "unused")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_they_compute_what_the_lean_layers_compute(
    family: str, checkpointing: bool, tmp_path: Path
) -> None:
    model = CausalLM.load(save_model(tmp_path, family, **FAMILIES[family]), dtype=torch.float64)
    assert model.lean is not None
    if checkpointing:
        model.module.gradient_checkpointing_enable({"use_reentrant": False})
    forest = forest_of(samples_of())
    want = gradients(model)
    scores = model.predict(forest).logprobs
    model.compile_layers("default")
    used = counted(model)
    assert difference(gradients(model), want) < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(model.predict(forest).logprobs, scores, rtol=1e-12, atol=1e-12)
    layers = len(model.lean.layers)
    assert (
        len(used) == (3 if checkpointing else 2) * layers
    )  # forward, again in backward, and scoring


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_between_products_are_compiled_one_by_one(family: str, tmp_path: Path) -> None:
    path = save_model(tmp_path, family, **FAMILIES[family])
    want = gradients(CausalLM.load(path, dtype=torch.float64))
    model = CausalLM.load(path, dtype=torch.float64)
    model.compile_layers("default")
    model.keep_products()
    used = counted(model)
    assert difference(gradients(model), want) < 1e-12 and not used


def counted(model: CausalLM) -> list[int]:
    """The layers that run compiled, as they do."""
    assert model.lean is not None and model.lean.compiled is not None
    run = model.lean.compiled
    used = list[int]()

    def counting(layer: Any, *arguments: Any) -> Any:
        used.append(layer.index)
        return run(layer, *arguments)

    cast(Any, model.lean).compiled = counting
    return used


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_adapters_their_reference_and_narrow_bases(targets: Any, tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen2")
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 0.03)):
        model = CausalLM.load(path, dtype=dtype)
        adapter = adapters.attach(model, LoraSection(rank=4, alpha=8, targets=targets))
        for name, parameter in model.module.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
        forest = forest_of(samples_of())
        with torch.no_grad(), adapter.reference():
            base = model.predict(forest).logprobs
        want = gradients(model)
        model.compile_layers("default")
        assert counted(model) == []
        assert difference(gradients(model), want) < bound
        with torch.no_grad(), adapter.reference():
            torch.testing.assert_close(model.predict(forest).logprobs, base, rtol=bound, atol=bound)


def test_an_adapter_that_training_continues_is_the_reference(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "llama")
    forest = forest_of(samples_of())
    model = CausalLM.load(path)
    adapters.attach(model, LoraSection(rank=2)).save(tmp_path / "adapter")
    model = CausalLM.load(path)
    adapter = adapters.attach(
        model, LoraSection(path=tmp_path / "adapter"), path=tmp_path / "adapter"
    )
    for name, parameter in model.module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        model.compile_layers("default")
        found = []
        for context in (adapter.reference, adapter.reference):
            with context():
                found.append(model.predict(forest).logprobs)
            assert model.lean is not None
            model.lean.compiled = None
        torch.testing.assert_close(found[0], found[1])


def test_the_engine_beside_it_decodes_without(tmp_path: Path) -> None:
    model = CausalLM.load(save_model(tmp_path))
    model.compile_layers("default")
    used = counted(model)
    with torch.inference_mode():
        model.predict(forest_of(samples_of()))
    assert not used
    with torch.no_grad():
        model.predict(forest_of(samples_of()))
    assert used


def test_one_token_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions for any number of rows are for two and more."""
    model = CausalLM.load(save_model(tmp_path))
    model.compile_layers("default")
    monkeypatch.setattr(compiled, "_operands", None)
    model.hidden(torch.tensor([7]), torch.tensor([0]), compiled_attention())


def compiled_attention() -> Any:
    from tunesmith.models.attention import ForestAttention
    from tunesmith.models.forest import Segment

    return ForestAttention([Segment(0, 1, -1)])


def test_ranks_share_sequences_around_compiled_layers(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    packing = whole(samples_of())

    def make(sequence: Any, on: bool = True) -> Any:
        backend = backend_of(path)
        if on:
            backend.model.compile_layers("default")
        backend.model.sequence = sequence
        backend.passes = type(backend.passes)(backend.model, CausalLM.predict)
        return backend

    one = make(None, on=False)
    ranks = SequenceRanks(partial(make), 2)
    expected = one.forward_backward(packing, SFTObjective())
    found, grads = ranks.gradient(packing, SFTObjective())
    assert found == pytest.approx(expected, rel=1e-5)
    assert difference(grads, gradients_of(one)) < 1e-5


def test_a_family_without_a_lean_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"system\.compile"):
        CausalLM.load(save_model(tmp_path, "gpt2")).compile_layers("default")


def test_inductors_cache_is_tunesmiths_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CausalLM.load(save_model(tmp_path))
    model.compile_layers("default")
    assert os.environ[CACHE] == "unused"
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model.compile_layers("default")
    assert Path(os.environ[CACHE]) == tmp_path / "tunesmith" / "inductor"


@pytest.mark.parametrize(
    ("command", "said", "named"),
    [
        ("generate", ("sampling.max_new_tokens=8",), "nothing is trained"),
        ("sft", ("lora.rank=4", "lora.dropout=0.1"), "lora.dropout"),
        ("sft", ("lora.rank=4", "model.quantize=nf4"), "model.quantize"),
        ("sft", ("family=gpt2",), "gpt2"),
        ("sft", ("CXX=/nowhere",), "compiler"),
    ],
)
def test_what_does_not_go_together(
    command: str, said: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "gpt2" if "family=gpt2" in said else "llama"
    if "CXX=/nowhere" in said:
        monkeypatch.setenv("CXX", "/nowhere")
    options = [option for option in said if "." in option and "CXX" not in option]
    with pytest.raises(ConfigError) as error:
        resolved(
            tmp_path,
            command,
            "system.device=cpu",
            "system.compile=default",
            *options,
            family=family,
        )
    assert "system.compile" in str(error.value) and named in str(error.value)


def test_an_unknown_mode_is_refused_with_its_name_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="default"):
        resolved(tmp_path, "sft", "system.compile=reduce-overhead")


def test_a_gpu_that_is_not_there_compiles_nothing(tmp_path: Path) -> None:
    config = resolved(tmp_path, "sft", "system.compile=max-autotune", on="H100-80GB")
    assert config.settings["system.compile"] == "max-autotune"
    with pytest.raises(ConfigError, match=r"system\.compile = 'max-autotune'"):
        check_dry_run(config)


def test_a_run_compiles_its_models_and_not_its_own_training_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_allowed", True)
    config = resolved(
        tmp_path, "sft", "system.device=cpu", "system.compile=default", "system.threads=1"
    )
    model = model_spec(config).build(load_tokenizer(config.said))
    assert model.lean is not None and isinstance(model.lean.compiled, compiled.CompiledLayers)
    assert not functions.usable()
    assert np.isfinite(model.predict(forest_of(samples_of())).logprobs.detach().numpy()).all()
