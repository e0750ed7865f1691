"""Quantised linear modules: numbers by hand, bitsandbytes' own modules, and memory while they
load."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.support.families import SPECIAL
from tests.support.live_bytes import LiveBytes
from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.config.schema import LoraSection
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.quantised import (
    FORMATS,
    QuantisedLinear,
    Quantize,
    is_quantised,
    weights_of,
)
from tunesmith.types import Sample

pytest.importorskip("bitsandbytes", reason="an optional extra: pip install 'tunesmith[quantize]'")

NF4_LEVELS = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.09105004,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)
"""Of QLoRA (arXiv:2305.14314), appendix E."""


def quantised(
    module: nn.Linear | Conv1D, quantize: Quantize, dtype: torch.dtype = torch.float32
) -> QuantisedLinear:
    weight = module.weight.detach()
    found = FORMATS[quantize](module, dtype)
    found.weight.copy_(found.quantised(weight))
    return found


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias)


def test_numbers_that_the_formats_have_come_back_by_hand() -> None:
    """One scale of 2, which is the mean of all; and rows whose largest number is 127."""
    module = nn.Linear(32, 2, bias=False)
    module.weight.data = 2 * torch.tensor([*NF4_LEVELS, *NF4_LEVELS] * 2).view(2, 32)
    found = quantised(module, "nf4")
    torch.testing.assert_close(
        found.whole(found.open(found.weight), torch.float32), module.weight.data
    )
    module.weight.data = torch.arange(-31.0, 33.0).view(2, 32)
    module.weight.data[:, 0] = torch.tensor([127.0, -127.0])
    found = quantised(module, "int8")
    torch.testing.assert_close(
        found.whole(found.open(found.weight), torch.float32), module.weight.data
    )
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([127.0, 2.0])
    expected = [[127.0 * 127 - 30 * 2, -127.0 * 127 + 2 * 2]]
    torch.testing.assert_close(found(x), torch.tensor(expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("quantize", "inputs", "outputs", "expected"),
    [
        (
            "nf4",
            64,
            64,
            64 * 64 // 2 + 64 + 16 + 16,
        ),  # a scale for 64 weights, one for 256 scales, the mean
        (
            "nf4",
            33,
            3,
            64 + 16 + 16 + 16,
        ),  # 99 weights, 2 scales, 1, the mean; each rounded up to 16 bytes
        ("int8", 64, 40, 64 * 40 + 4 * 40),
    ],
)
def test_bytes_by_hand(quantize: Quantize, inputs: int, outputs: int, expected: int) -> None:
    found = quantised(linear(inputs, outputs), quantize)
    assert (
        found.weight.shape == (expected,)
        and found.weight.dtype == torch.uint8
        and not found.weight.requires_grad
    )
    assert [n for p, n in weights_of(found) if p is found.weight] == [inputs * outputs]


def theirs(module: nn.Linear, quantize: Quantize) -> nn.Module:
    own: Any = import_module("bitsandbytes.nn")
    shape = (module.in_features, module.out_features)
    if quantize == "int8":
        made = own.Linear8bitLt(*shape, has_fp16_weights=False, threshold=0.0)
        made.weight = own.Int8Params(
            module.weight.detach().clone(), has_fp16_weights=False, requires_grad=False
        )
    else:
        made = own.Linear4bit(*shape, quant_type="nf4", compress_statistics=True)
        made.weight = own.Params4bit(
            module.weight.detach().clone(), requires_grad=False, quant_type="nf4", module=made
        )
        made.support_avx512bf16_for_cpu = False  # repacked weights have no gradient
    made.bias = module.bias
    return made.to("cpu").eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_numbers_are_those_of_bitsandbytes_modules(quantize: Quantize, dtype: torch.dtype) -> None:
    module = linear(96, 200).to(dtype)
    x = torch.randn(2, 5, 96, dtype=dtype)
    ours = quantised(module, quantize, dtype)
    others = theirs(module, quantize)
    found = []
    expected = []
    for each, into in ((ours, found), (others, expected)):
        own = x.clone().requires_grad_()
        out = each(own)
        out.square().sum().backward()
        with torch.no_grad():
            into += [out.detach(), own.grad, each(x)]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float32 else 0.01, atol=1e-6)


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_the_backward_pass_keeps_the_bytes_alone(quantize: Quantize) -> None:
    """They may have been freed and gathered again by then; and no rows at all have a gradient
    too."""
    found = quantised(linear(96, 200), quantize)
    kept = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(7, 96, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = found(x)
    assert [tensor is found.weight for tensor in kept] == [True]
    storage = found.weight.untyped_storage()
    before = found.weight.detach().clone()
    storage.resize_(0)
    storage.resize_(before.nbytes)
    found.weight.data.copy_(before)
    out.sum().backward()
    whole = found.whole(found.open(found.weight), torch.float32)
    torch.testing.assert_close(x.grad, whole.sum(0).expand(7, -1))
    none = torch.empty(0, 96, requires_grad=True)
    found(none).sum().backward()
    assert none.grad is not None and none.grad.shape == (0, 96)


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_a_transposed_module_is_its_linear_one(quantize: Quantize) -> None:
    module = linear(96, 200)
    turned = Conv1D(200, 96)
    turned.weight.data = module.weight.data.t().contiguous()
    turned.bias.data = module.bias.data
    ours = quantised(turned, quantize)
    same = quantised(module, quantize)
    assert (ours.in_features, ours.out_features) == (96, 200) and ours.weight.equal(same.weight)
    x = torch.randn(3, 96)
    torch.testing.assert_close(ours(x), same(x))


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral"])
def test_a_model_is_quantised_but_for_embeddings_norms_and_head(
    tmp_path: Path, family: str, quantize: Quantize
) -> None:
    """Also one whose files transformers converts."""
    shape: dict[str, Any] = {"num_local_experts": 2} if family == "mixtral" else {}
    path = save_model(tmp_path, family, hidden_size=64, **shape)
    model, exact = (CausalLM.load(path, quantize=each) for each in (quantize, None))
    assert is_quantised(model.module) and not is_quantised(exact.module)
    kinds = {name: type(part) for name, part in exact.module.base_model.named_modules()}
    for name, part in model.module.base_model.named_modules():
        expected = FORMATS[quantize] if kinds[name] in (nn.Linear, Conv1D) else kinds[name]
        assert type(part) is expected, name
    plain = dict(exact.module.named_parameters())
    for name, parameter in model.module.named_parameters():
        assert parameter.dtype == torch.uint8 or parameter.equal(plain[name]), name
    assert sum(n for _, n in weights_of(model.module)) == sum(p.numel() for p in plain.values())
    forest = forest_of([Sample(torch.randint(5, 260, (40,)).tolist(), [False] * 39 + [True])])
    with torch.no_grad():
        ours, expected = (each.states(forest) for each in (model, exact))
    assert 1e-6 < float((ours - expected).norm() / expected.norm()) < 0.3


@pytest.mark.more
def test_only_one_weight_at_a_time_is_not_quantised(tmp_path: Path) -> None:
    """While a model loads there is what it keeps, one weight of the files, and that one's bytes."""
    path = save_model(
        tmp_path, "llama", hidden_size=128, intermediate_size=512, num_hidden_layers=6
    )
    with LiveBytes() as seen:
        model = CausalLM.load(path, quantize="nf4")
    kept = sum(t.nbytes for t in (*model.module.parameters(), *model.module.buffers()))
    largest = 4 * 128 * 512
    whole = sum(4 * n for _, n in weights_of(model.module))
    assert kept < seen.most <= kept + 1.3 * largest < 0.5 * whole


def test_an_adapter_is_on_whole_shapes(tmp_path: Path) -> None:
    path = save_model(tmp_path, "llama", hidden_size=64)
    model = CausalLM.load(path, quantize="nf4")
    adapter = adapters.attach(model, LoraSection(rank=4))
    plain = adapters.attach(CausalLM.load(path), LoraSection(rank=4))
    assert adapter.counts() == plain.counts()
    shapes = {name: tensor.shape for name, tensor in plain.own_weights()}
    assert {name: tensor.shape for name, tensor in adapter.own_weights()} == shapes


def test_the_bias_that_balances_experts_is_never_rounded(tmp_path: Path) -> None:
    """It is far larger than the scores that it is added to: in 16 bits, tokens would choose others.

    Neither where weights are read one by one nor where an adapter is merged."""
    path = save_model(tmp_path / "base", "deepseek_v3", **SPECIAL["deepseek_v3"])
    file = path / "model.safetensors"
    weights = load_file(file)
    (name,) = (name for name in weights if name.endswith("e_score_correction_bias"))
    weights[name] = torch.linspace(13.01, 14.02, len(weights[name]))
    save_file(weights, file, metadata={"format": "pt"})
    for quantize in (None, "nf4"):
        model = CausalLM.load(path, dtype=torch.bfloat16, quantize=quantize)
        assert model.module.state_dict()[name].equal(weights[name]), quantize
    adapters.attach(model, LoraSection(rank=2))
    model.save(tmp_path / "adapter")
    adapters.merge(tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged[name].equal(weights[name])
    assert merged["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_run_is_silent_about_a_kernel_that_nothing_here_uses() -> None:
    """peft imports bitsandbytes, quantised or not, which warns where a CPU could use the kernel."""
    spec = find_spec("bitsandbytes")
    module = (
        Path(spec.origin).parent / "backends" / "cpu" / "ops.py" if spec and spec.origin else Path()
    )
    assert "logger = logging.getLogger(__name__)" in module.read_text(encoding="utf-8")
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
