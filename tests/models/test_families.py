"""Every family on the list gives, on a forest, what Hugging Face gives one sequence at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import tiny
from tests.support.families import (
    DECODERS,
    assert_same_gradients,
    build,
    gradients,
    logprobs,
    one_at_a_time,
    samples,
)
from tests.support.training import forest_of
from tunesmith.errors import ModelError
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import ModuleRunner, text_decoder
from tunesmith.models.source import load_config
from tunesmith.plan.facts.families import REFUSED, check_family, families, published
from tunesmith.run.specs.models import ModelSpec

LEAN = [name for name, each in families().items() if each.lean and not each.inner] + ["qwen3_vl"]


@pytest.mark.parametrize(
    ("model_type", "decoder"), [*((name, {}) for name in published()), *DECODERS.items()]
)
def test_forest_equals_one_sequence_at_a_time(model_type: str, decoder: dict[str, Any]) -> None:
    model = build(model_type, **decoder)
    assert model.training_cost().linear > 0
    batch = samples()
    want = one_at_a_time(model.module, batch, 0.8)
    want_gradients = gradients(model, want)
    model.module.set_attn_implementation(ATTENTION_NAME)
    forest = forest_of(batch)
    assert forest.num_tokens < sum(len(s.token_ids) for s in batch)
    for runner in dict.fromkeys((model.runner, ModuleRunner(text_decoder(model.module)))):
        model.runner = runner
        got, _ = logprobs(model, forest, temperature=0.8)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        assert_same_gradients(gradients(model, got), want_gradients, 1e-4)


def exact_norms(monkeypatch: pytest.MonkeyPatch, model: CausalLM) -> None:
    """Hugging Face takes root-mean-square norms in float32 even in a float64 model; take them in
    float64."""

    def forward(self: Any, x: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        weight = self.weight + 1 if "Gemma" in type(self).__name__ else self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    for kind in {type(m) for m in model.module.modules() if type(m).__name__.endswith("RMSNorm")}:
        monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize("model_type", LEAN)
def test_lean_equals_hugging_face_in_float64(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(model_type, torch.float64)
    forest = forest_of(samples())
    model.module.set_attn_implementation(ATTENTION_NAME)
    exact_norms(monkeypatch, model)
    lean = model.lean
    assert lean is not None
    model.runner = ModuleRunner(text_decoder(model.module))
    want, want_entropy = logprobs(model, forest, entropy=True)
    want_gradients = gradients(model, want)
    model.runner = lean
    got, entropy = logprobs(model, forest, entropy=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-10)
    assert_same_gradients(gradients(model, got), want_gradients, 1e-10)
    with torch.inference_mode():
        again, _ = logprobs(model, forest)
    torch.testing.assert_close(again, want, rtol=0, atol=1e-10)


def test_lean_with_biases_and_partly_frozen() -> None:
    model = build("llama", attention_bias=True, mlp_bias=True)
    forest = forest_of(samples())
    model.module.set_attn_implementation(ATTENTION_NAME)
    frozen = [p for n, p in model.module.named_parameters() if "k_proj" in n or "layers.0" in n]
    for parameter in frozen:
        parameter.requires_grad_(False)
    got = gradients(model, logprobs(model, forest)[0])
    model.runner = ModuleRunner(model.module.base_model)
    assert_same_gradients(got, gradients(model, logprobs(model, forest)[0]), 1e-5)


def test_lean_follows_the_modules(tmp_path: Path) -> None:
    """Optimizer steps reach the joint weights; replaced, hooked or moved modules are bound anew."""
    model = CausalLM.load(tiny.save_model(tmp_path / "m", "llama"))
    forest = forest_of(samples())
    lean = model.lean
    assert lean is not None and lean.bound()

    def check(*, bound: bool) -> None:
        assert lean.bound() == bound
        lean.bind()
        assert lean.bound()
        model.runner = lean
        got = logprobs(model, forest)[0]
        model.runner = ModuleRunner(model.module.base_model)
        torch.testing.assert_close(got, logprobs(model, forest)[0], rtol=0, atol=1e-5)

    optimizer = torch.optim.AdamW(model.module.parameters(), lr=0.01)
    logprobs(model, forest)[0].sum().backward()
    optimizer.step()
    check(bound=True)
    attention = model.module.base_model.layers[0].self_attn

    class Doubled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    attention.k_proj = Doubled(attention.k_proj)
    check(bound=False)
    attention.v_proj.register_forward_hook(lambda _m, _i, out: out + 1)
    check(bound=True)
    model.module.base_model.layers[1].self_attn.q_proj.register_forward_pre_hook(
        lambda _m, inputs: (2 * inputs[0],)
    )
    check(bound=False)
    attention.q_proj.weight = torch.nn.Parameter(torch.randn_like(attention.q_proj.weight))
    check(bound=True)
    model.module.double()
    model.module.float()
    check(bound=False)


def test_decoders_of_the_same_weights_share_their_memory(tmp_path: Path) -> None:
    """Each adapter on a base that is served has a decoder of its own."""
    path = tiny.save_model(tmp_path / "m", "qwen2")
    spec = ModelSpec(str(path), "float32", "cpu", frozen=True)
    model = spec.build()
    places = [parameter.data_ptr() for parameter in model.module.parameters()]
    twin = spec.twin(model)
    assert [parameter.data_ptr() for parameter in twin.module.parameters()] == places
    assert model.runner.bound() and twin.runner.bound()
    forest = forest_of(samples())
    assert torch.equal(logprobs(model, forest)[0], logprobs(twin, forest)[0])


def test_saved_model_loads_and_scores_the_same(tmp_path: Path) -> None:
    model = CausalLM.load(tiny.save_model(tmp_path / "m", "qwen3", tie_word_embeddings=True))
    forest = forest_of(samples())
    assert model.lean is not None
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        want, _ = logprobs(model, forest)
        model.save(tmp_path / "saved")
        again, _ = logprobs(CausalLM.load(tmp_path / "saved"), forest)
        assert torch.equal(again, want)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        torch.testing.assert_close(one_at_a_time(plain, samples(), 1.0), want, rtol=0, atol=1e-5)
    assert set(plain.state_dict()) == set(model.module.state_dict())
    size = sum(f.stat().st_size for f in (tmp_path / "saved").glob("*.safetensors"))
    assert size < 1.1 * sum(f.stat().st_size for f in (tmp_path / "m").glob("*.safetensors"))


def test_dropout_is_off_and_kept_in_the_configuration(tmp_path: Path) -> None:
    path = tiny.save_model(tmp_path / "m", "gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model = CausalLM.load(path)
    forest = forest_of(samples())
    want, _ = logprobs(model, forest)
    model.module.train()
    assert torch.equal(logprobs(model, forest)[0], want)
    model.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["resid_pdrop"] == 0.5


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_by_name_with_a_reason(model_type: str) -> None:
    class Config:
        pass

    config = Config()
    config.model_type = model_type  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=f"'{model_type}' cannot be trained here: it.*Choose"):
        check_family(config)


@pytest.mark.parametrize(
    ("model_type", "setting", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ("jetmoe", {}, "has not been shown"),
    ],
)
def test_refused_by_setting(model_type: str, setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_family(AutoConfig.for_model(model_type, **setting))


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer*", "has no tokenizer .*save_pretrained"),
        ("*.safetensors", "has no weights"),
    ],
)
def test_a_directory_that_lacks_something(tmp_path: Path, remove: str, message: str) -> None:
    path = tiny.save_model(tmp_path / "m")
    for file in path.glob(remove):
        file.unlink()
    with pytest.raises(ModelError, match=message):
        CausalLM.load(path)


def test_bad_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model directory"):
        CausalLM.load(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"removes its older checkpoints \(checkpoint.keep\)"):
        CausalLM.load(tmp_path / "checkpoints/step-000001/model")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        CausalLM.load(tmp_path / "file")
    path = tiny.save_model(tmp_path / "m")
    weights = path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        CausalLM.load(path)
    weights.unlink()
    torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickled weights, which can run code"):
        CausalLM.load(path)
    (path / "config.json").write_text('{"model_type": "frobnicator"}')
    weights.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read the configuration.*frobnicator"):
        load_config(path)
    (path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match=r"'mamba'.*recurrent state"):
        CausalLM.load(path)
