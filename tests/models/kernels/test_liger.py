"""Layers with Liger's kernels: here functions of PyTorch with their contracts stand in for these.

``test_liger_kernels.py`` runs the kernels, where they are installed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.compiled_layers import FAMILIES, gradients, resolved
from tests.support.liger_in_torch import LigerInTorch
from tests.support.tiny import save_model
from tests.support.training import difference, forest_of, samples_of
from tunesmith.config.commands import KINDS
from tunesmith.config.load import load_config
from tunesmith.config.schema import LoraSection, RunConfig
from tunesmith.errors import ConfigError, ModelError
from tunesmith.guide.simulate.dry_run import check_dry_run
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu import functions
from tunesmith.models.kernels import lean_ops, liger
from tunesmith.models.kernels.functions import HeadShape
from tunesmith.models.kernels.lean_ops import OURS, Operations
from tunesmith.models.kernels.liger import LIGER
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.rules import checks
from tunesmith.plan.rules.checks import check, contradictions
from tunesmith.run.specs.from_plan import load_tokenizer, model_spec

GPU = "H100-80GB"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_they_compute_what_the_lean_layers_compute(
    family: str, checkpointing: bool, tmp_path: Path, stand_in: LigerInTorch
) -> None:
    model = CausalLM.load(save_model(tmp_path, family, **FAMILIES[family]))
    assert model.lean is not None
    if checkpointing:
        model.module.gradient_checkpointing_enable({"use_reentrant": False})
    forest = forest_of(samples_of())
    want = gradients(model)
    scores = model.predict(forest).logprobs.detach()
    model.use_liger()
    assert difference(gradients(model), want) < 1e-5
    layers = model.lean.layers
    norms = sum(
        isinstance(part, type(model.lean.norm)) for layer in layers for part in vars(layer).values()
    )
    again = 2 if checkpointing else 1
    gates = len(layers) * (layers[0].activation == "silu")
    assert stand_in.calls == Counter(
        rms_norm_forward=again * norms + 1,
        rms_norm_backward=norms + 1,
        rope_backward=again
        * sum(layer.rotates for layer in layers),  # ours is the other way around
        rope_forward=sum(layer.rotates for layer in layers),
        swiglu_fused_gate_up_forward=again * gates,
        swiglu_fused_gate_up_backward=gates,
    )
    with torch.no_grad():
        torch.testing.assert_close(model.predict(forest).logprobs, scores, rtol=1e-5, atol=1e-5)


def test_narrow_types_round_no_further_than_ours(tmp_path: Path, stand_in: LigerInTorch) -> None:
    model = CausalLM.load(save_model(tmp_path, "qwen3", head_dim=12), dtype=torch.bfloat16)
    want = gradients(model)
    model.use_liger()
    assert difference(gradients(model), want) < 0.03 and stand_in.calls


def test_the_gradient_of_a_norm_s_weight_is_a_sum_of_float32_terms(stand_in: LigerInTorch) -> None:
    x = torch.randn(700, 24).bfloat16()
    grad = torch.randn(700, 24).bfloat16()
    weight = torch.randn(24, requires_grad=True)
    LIGER.rms_norm(x, weight, 1e-6, False).backward(grad)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert weight.grad is not None and stand_in.calls["rms_norm_backward"] == 1
    torch.testing.assert_close(
        weight.grad.double(), (exact * grad.double()).sum(0), rtol=1e-5, atol=1e-4
    )


def rotate(of: Operations, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys ``[T, heads, D]``, the first ``heads`` of them queries, rotated."""
    shape = HeadShape(heads, x.shape[1] - heads)
    return torch.cat(
        of.heads(torch.cat((x, x[:, heads:]), 1).flatten(1), (cos, sin), [], shape)[:2], 1
    )


@pytest.mark.parametrize("rows", [1, 5])
def test_what_others_hold_is_not_written_over(rows: int, stand_in: LigerInTorch) -> None:
    """Each operation beside a residual, whose branches get one gradient; of one row every part is
    contiguous."""
    cos, sin = (torch.randn(rows, 1, 4).repeat(1, 1, 2) for _ in range(2))
    sin[..., :4].neg_()
    weight = torch.randn(8)
    for ours, theirs in (
        (
            lambda x: OURS.rms_norm(x, weight, 1e-6, False),
            lambda x: LIGER.rms_norm(x, weight, 1e-6, False),
        ),
        (
            lambda x: OURS.gated(x.flatten(0, 1), "silu").repeat(1, 2).view_as(x),
            lambda x: LIGER.gated(x.flatten(0, 1), "silu").repeat(1, 2).view_as(x),
        ),
        (lambda x: rotate(OURS, x, 2, cos, sin), lambda x: rotate(LIGER, x, 2, cos, sin)),
    ):
        x = torch.randn(rows, 3, 8)
        grad = torch.randn(rows, 3, 8)
        found = []
        for function in (ours, theirs):
            leaf = x.clone().requires_grad_()
            given = grad.clone()
            out = function(leaf)
            (leaf + out).backward(given, retain_graph=True)
            assert leaf.equal(x) and given.equal(grad)
            first = leaf.grad
            leaf.grad = None
            (leaf + out).backward(given)
            assert first is not None and leaf.grad is not None and first.equal(leaf.grad)
            found.append((out.detach(), first))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert len(stand_in.calls) == 6


def test_a_part_of_a_product_and_nothing_at_all(stand_in: LigerInTorch) -> None:
    """Queries and keys are a part of one product's rows; a rank without a sample computes no
    rows."""
    for rows in (1, 7, 0):
        qkv = torch.randn(rows, 5, 8, requires_grad=True)
        cos, sin = (torch.randn(rows, 1, 4).repeat(1, 1, 2) for _ in range(2))
        sin[..., :4].neg_()
        found = []
        for operations in (OURS, LIGER):
            weight = torch.arange(1.0, 9, requires_grad=True)
            q, k, _ = operations.heads(
                qkv.flatten(1), (cos, sin), [weight, weight], HeadShape(3, 1, 1e-6, True)
            )
            assert q.shape == (rows, 3, 8) and k.shape == (rows, 1, 8)
            out = operations.gated(q.flatten(1), "silu").sum() + k.sum()
            found.append((out.detach(), *torch.autograd.grad(out, (qkv, weight))))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert stand_in.calls["rms_norm_forward"] == 6


def test_adapters_and_their_reference(tmp_path: Path, stand_in: LigerInTorch) -> None:
    model = CausalLM.load(save_model(tmp_path, "qwen2"))
    adapter = adapters.attach(model, LoraSection(rank=4, alpha=8))
    for name, parameter in model.module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    forest = forest_of(samples_of())
    with torch.no_grad(), adapter.reference():
        base = model.predict(forest).logprobs
    want = gradients(model)
    model.use_liger()
    assert difference(gradients(model), want) < 1e-5 and stand_in.calls
    with torch.no_grad(), adapter.reference():
        torch.testing.assert_close(model.predict(forest).logprobs, base, rtol=1e-5, atol=1e-5)


def test_engines_compute_with_ours(tmp_path: Path, stand_in: LigerInTorch) -> None:
    model = CausalLM.load(save_model(tmp_path, "qwen3", head_dim=12))
    model.use_liger()
    with torch.inference_mode():
        model.predict(forest_of(samples_of()))
    assert not stand_in.calls and model.lean is not None
    decoder = model.lean.with_products(
        lambda weight, bias: lambda x: F.linear(x, weight, bias), torch.float32
    )
    assert decoder.operations is OURS and model.lean.operations is LIGER
    with torch.no_grad():
        model.predict(forest_of(samples_of()))
    assert stand_in.calls


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations_without_a_kernel_are_ours(
    activation: lean_ops.Activation, stand_in: LigerInTorch
) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    assert LIGER.gated(x, activation).equal(OURS.gated(x, activation)) and not stand_in.calls


def test_tensors_of_many_numbers_go_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []

    def forward(x: torch.Tensor, *arguments: object) -> tuple[object, ...]:
        modes.append(bool(arguments[-1]))
        return x.clone(), x, x[:, 0].clone(), 8, 4, 0

    monkeypatch.setattr(
        liger, "kernels", lambda _: type("Kernels", (), {"rms_norm_forward": staticmethod(forward)})
    )
    monkeypatch.setattr(liger, "_MOST_NUMBERS", 16)
    for rows in (1, 2):
        LIGER.rms_norm(torch.randn(rows, 8), torch.randn(8), 1e-6, False)
    assert modes == [False, True]


def test_a_family_without_a_lean_form_is_refused(tmp_path: Path, stand_in: LigerInTorch) -> None:
    with pytest.raises(ModelError, match=r"system\.kernels"):
        CausalLM.load(save_model(tmp_path, "gpt2")).use_liger()
    assert not stand_in.calls


def test_a_run_on_a_gpu_computes_with_them(
    tmp_path: Path, stand_in: LigerInTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_allowed", False)
    config = resolved(tmp_path, "sft", "system.kernels=liger", "model.dtype=float32", on=GPU)
    assert config.settings["system.kernels"] == "liger"
    here = config.with_devices(device="cpu", threads=1)
    model = model_spec(here).build(load_tokenizer(here.said))
    assert torch.isfinite(model.predict(forest_of(samples_of())).logprobs).all() and stand_in.calls
    with pytest.raises(ConfigError, match=r"system\.kernels = 'liger'"):
        check_dry_run(config)


def test_ours_is_the_default(
    tmp_path: Path, stand_in: LigerInTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_allowed", False)
    config = resolved(tmp_path, "sft", "system.device=cpu", "system.threads=1")
    assert config.settings["system.kernels"] == "torch"
    model_spec(config).build(load_tokenizer(config.said)).predict(forest_of(samples_of()))
    assert not stand_in.calls


@pytest.mark.parametrize(
    ("command", "said", "named"),
    [
        ("generate", ("sampling.max_new_tokens=8",), "nothing is trained"),
        ("sft", ("system.device=cpu",), "system.device"),
        ("sft", ("system.compile=default",), "system.compile"),
        ("sft", ("family=gpt2",), "gpt2"),
    ],
)
def test_what_does_not_go_together(
    command: str, said: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    family = "gpt2" if "family=gpt2" in said else "llama"
    options = [option for option in said if "." in option]
    with pytest.raises(ConfigError) as error:
        resolved(tmp_path, command, "system.kernels=liger", *options, family=family, on=f"2x{GPU}")
    assert "system.kernels" in str(error.value) and named in str(error.value)


def test_rows_that_are_too_wide_are_refused_with_their_width(tmp_path: Path) -> None:
    config = resolved(tmp_path, "sft", "system.kernels=liger", on=GPU)
    model = read_model_facts(Path(config.settings["model.path"]))
    assert model is not None
    for width, problems in ((65536, 0), (65537, 1)):
        found = list(
            contradictions(
                replace(config, facts=Facts(machine(GPU), replace(model, intermediate_size=width)))
            )
        )
        assert (
            len(
                [
                    each
                    for each in found
                    if str(width) in each.text and "system.kernels" in each.keys
                ]
            )
            == problems
        )


def kernels_asked_for() -> RunConfig:
    given = ["model.path=m", "data.train=d.jsonl", "system.kernels=liger"]
    return load_config(KINDS["sft"], None, given, files=False)


@pytest.mark.parametrize("installed", [None, "0.7.0", "0.8.1"])
def test_what_is_missing_or_too_old_is_refused(
    installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise checks.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(checks, "version", version)
    with pytest.raises(ConfigError, match=re.escape("pip install 'tunesmith[liger]'")) as error:
        check(kernels_asked_for())
    assert "0.8.2" in str(error.value) and (installed or "not installed") in str(error.value)
    check(kernels_asked_for(), installed=False)


@pytest.mark.parametrize("installed", ["0.8.2", "0.10.0", "1.0.0rc1"])
def test_newer_versions_are_not(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version", lambda _: installed)
    check(kernels_asked_for())
