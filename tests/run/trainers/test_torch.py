"""The one-device backend: optimizer against torch's own, master weights, schedule, saving and
loading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from tests.support.tiny import save_model
from tests.support.training import whole
from tunesmith.errors import CheckpointError
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Forest, Predictions
from tunesmith.run.trainers.optimizer import (
    FIRST_SCALE,
    GROWS_AFTER,
    LEAST,
    AdamWSettings,
    LossScale,
    MasterOptimizer,
    learning_rate,
)
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 3).to(dtype))
        self.vector = nn.Parameter(torch.randn(3).to(dtype))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


def add_gradient(module: Two, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in (module.matrix, module.vector):
        noise = torch.randn(p.shape, generator=generator).to(p.dtype)
        (p * noise).sum().backward()


def test_it_is_torchs_adamw_with_decay_on_matrices_only() -> None:
    ours = Two()
    theirs = Two()
    made = MasterOptimizer(ours, AdamWSettings(0.1, (0.8, 0.95), 1e-7, None))
    groups = [
        {"params": [theirs.matrix], "weight_decay": 0.1},
        {"params": [theirs.vector], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-7)
    for step in range(4):
        add_gradient(ours, step), add_gradient(theirs, step)
        for group in plain.param_groups:
            group["lr"] = 0.1 * (step + 1)
        made.step(0.1 * (step + 1))
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(ours.matrix, theirs.matrix)
    torch.testing.assert_close(ours.vector, theirs.vector)
    assert ours.matrix.grad is None


def test_the_first_step_by_hand() -> None:
    """AdamW's first step is lr · g / (|g| + ε), after the weight has shrunk by lr · decay."""
    module = Two()
    before = module.matrix.detach().clone(), module.vector.detach().clone()
    add_gradient(module, 1)
    assert module.matrix.grad is not None and module.vector.grad is not None
    signs = module.matrix.grad.sign(), module.vector.grad.sign()
    MasterOptimizer(module, AdamWSettings(0.5, max_grad_norm=0.0)).step(0.01)
    torch.testing.assert_close(
        module.matrix.detach(), before[0] * (1 - 0.01 * 0.5) - 0.01 * signs[0]
    )
    torch.testing.assert_close(module.vector.detach(), before[1] - 0.01 * signs[1])


def test_clipping_scales_the_whole_gradient_and_reports_its_norm() -> None:
    module = Two()
    made = MasterOptimizer(module, AdamWSettings(max_grad_norm=0.5))
    add_gradient(module, 1)
    norm = math.sqrt(
        sum(
            float(p.grad.square().sum())
            for p in (module.matrix, module.vector)
            if p.grad is not None
        )
    )
    grad = module.matrix.grad.clone() if module.matrix.grad is not None else None
    metrics = made.step(0.0)
    assert metrics == {"grad_norm": pytest.approx(norm), "skipped_steps": 0.0}
    assert grad is not None
    torch.testing.assert_close(made.state()["exp_avg:matrix"], 0.1 * grad * 0.5 / norm)


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    module = Two()
    made = MasterOptimizer(module, AdamWSettings())
    add_gradient(module, 1)
    made.step(0.1)
    before = {n: t.clone() for n, t in made.state().items()} | {
        "matrix": module.matrix.detach().clone()
    }
    add_gradient(module, 2)
    assert module.vector.grad is not None
    module.vector.grad[0] = math.inf
    assert made.step(0.1)["skipped_steps"] == 1.0
    after = made.state() | {"matrix": module.matrix.detach()}
    assert all(after[n].equal(before[n]) for n in before)
    assert module.vector.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named_and_large_ones_are_not(dtype: torch.dtype) -> None:
    module = Two(dtype)
    made = MasterOptimizer(module, AdamWSettings())
    assert made.not_finite() is None
    with torch.no_grad():
        module.matrix.fill_(1e30)  # the sum of their squares is infinite
        assert made.not_finite() is None
        for broken in (math.nan, -math.inf):
            module.vector[0] = broken
            assert made.not_finite() == "vector"


def test_bfloat16_weights_have_float32_masters_that_gather_what_rounding_would_lose() -> None:
    module = Two(torch.bfloat16)
    made = MasterOptimizer(module, AdamWSettings(max_grad_norm=0.0))
    start = module.matrix.detach().clone()
    for seed in range(40):
        add_gradient(module, 0 * seed)
        assert module.matrix.grad is None, "the narrow gradient is not kept"
        made.step(1e-4)
    master = made.masters["matrix"]
    assert master.dtype == torch.float32 and module.matrix.dtype == torch.bfloat16
    assert module.matrix.equal(master.to(torch.bfloat16))
    moved = (master - start.float()).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 40e-4), rtol=0.02, atol=0.0)
    large = start.abs() > 0.5
    assert large.any() and (module.matrix - start)[large].abs().max() > 0, (
        "steps below its precision add up"
    )


def test_micro_batch_gradients_of_bfloat16_add_up_in_float32() -> None:
    module = Two(torch.bfloat16)
    made = MasterOptimizer(module, AdamWSettings())
    (module.vector * 256.0).sum().backward()
    for _ in range(4):
        (module.vector * 0.5).sum().backward()
    assert made.masters["vector"].grad is not None
    assert made.masters["vector"].grad.tolist() == [258.0] * 3  # bfloat16 would stay at 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_continues_exactly(dtype: torch.dtype) -> None:
    straight, first, second = (Two(dtype) for _ in range(3))
    settings = AdamWSettings(0.1)
    a = MasterOptimizer(straight, settings)
    b = MasterOptimizer(first, settings)
    for seed in range(3):
        add_gradient(straight, seed), a.step(0.01)
        add_gradient(first, seed), b.step(0.01)
    second.load_state_dict(first.state_dict())
    c = MasterOptimizer(second, settings)
    c.load_state({n: t.clone() for n, t in b.state().items()})
    for seed in range(3, 6):
        add_gradient(straight, seed), a.step(0.01)
        add_gradient(second, seed), c.step(0.01)
    assert straight.matrix.equal(second.matrix) and straight.vector.equal(second.vector)
    assert all(t.equal(c.state()[n]) for n, t in a.state().items())
    assert not any("frozen" in name for name in a.state())


def test_a_state_before_the_first_step_has_no_moments() -> None:
    """Also in an optimizer that has taken steps, as of a model that a client of serve-training
    loads again."""
    module = Two()
    made = MasterOptimizer(module, AdamWSettings())
    add_gradient(module, 1), made.step(0.01)
    assert made.state()
    made.load_state({})
    assert not made.state()


def test_the_whole_state_goes_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps too, which the fused kernel of CUDA wants there."""
    plain = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda groups, fused, **kw: plain(groups, fused=not fused, **kw)
    )
    module = Two()
    here, there = (
        MasterOptimizer(m, AdamWSettings()) for m in (module, Two().to("meta"))
    )  # in the place of a GPU
    add_gradient(module, 1), here.step(0.01)
    there.load_state(here.state())
    here.offload()
    here.reload("meta")
    assert len(here.state()) == len(there.state()) == 6
    assert {t.device.type for t in (*here.state().values(), *there.state().values())} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_continues_from_a_state_on_the_cpu_as_if_it_had_stayed(
    dtype: torch.dtype,
) -> None:
    one = Two(dtype).cuda()
    other = Two(dtype).cuda()
    a = MasterOptimizer(one, AdamWSettings())
    b = MasterOptimizer(other, AdamWSettings())
    a.parameters["matrix"].sum().backward(), a.step(0.01)
    b.offload()
    other.load_state_dict(one.state_dict())
    b.load_state({name: t.cpu() for name, t in a.state().items()})
    b.reload("cuda")
    for made in (a, b):
        made.parameters["matrix"].square().sum().backward(), made.step(0.01)
    assert one.matrix.equal(other.matrix)


def rates(total: int, **options: Any) -> list[float]:
    settings: dict[str, Any] = {"peak": 1.0, "total": total, "warmup": 0, "schedule": "constant"}
    return [learning_rate(step, **{**settings, **options}) for step in range(total)]


def test_schedules_by_hand() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="linear", min_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    assert rates(6, schedule="linear", warmup=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert rates(4, warmup=4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(2, warmup=1, schedule="cosine") == [1.0, 1.0]
    assert learning_rate(
        99, peak=1.0, total=5, warmup=0, schedule="cosine", min_ratio=0.1
    ) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("total", "warmup"), [(1, 0), (2, 0), (7, 0), (7, 1), (7, 3), (7, 6), (100, 10)]
)
@pytest.mark.parametrize(
    ("schedule", "theirs", "options"),
    [
        ("constant", "constant_with_warmup", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
def test_schedules_are_those_of_transformers_whose_warm_up_is_a_step_behind(
    schedule: str, theirs: str, options: dict[str, float], total: int, warmup: int
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler: Any = get_scheduler(theirs, optimizer, warmup, total, options)
    expected: list[float] = []
    for _ in range(total + 1):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    least = options.get("min_lr_rate", 0.0)
    ours = rates(total, schedule=schedule, warmup=warmup, min_ratio=least)
    assert ours == pytest.approx([expected[s + (s < warmup)] for s in range(total)])
    assert all(rate > least for rate in ours[warmup:]), "no step is without effect"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": save_model(folder / "llama"),
        "tied": save_model(folder / "tied", "qwen3", head_dim=8, tie_word_embeddings=True),
        "wide": save_model(folder / "wide", intermediate_size=96),
    }


def backend_of(path: Path, dtype: torch.dtype = torch.float32) -> TorchBackend[CausalLM]:
    return TorchBackend(CausalLM.load(path, dtype=dtype), AdamWSettings(0.1), CausalLM.predict)


def packing(seed: int) -> Packing:
    ids = torch.randint(5, 260, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    return whole([Sample(ids, [False] * 4 + [True] * 8)])


def nll(_: Forest, predictions: Predictions) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_of(predictions).mean(), {}


def logprobs_of(predictions: Predictions) -> Tensor:
    assert predictions.logprobs is not None
    return predictions.logprobs


def train(backend: TorchBackend[CausalLM], seeds: range) -> list[float]:
    losses: list[float] = []
    for seed in seeds:
        losses.append(backend.forward_backward(packing(seed), nll)["loss"])
        backend.step(0.01)
    return losses


def test_backend_version_counts_steps_and_a_step_lowers_the_loss(models: dict[str, Path]) -> None:
    backend = backend_of(models["llama"])
    losses = [train(backend, range(1))[0] for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and backend.optimizer_steps == 5
    metrics = backend.forward_backward(packing(0), nll)
    assert metrics["loss"] == pytest.approx(-backend.score(packing(0)).mean(), rel=1e-5)


@pytest.mark.parametrize("model", ["llama", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_and_loaded_it_continues_bit_by_bit(
    models: dict[str, Path], tmp_path: Path, model: str, dtype: torch.dtype
) -> None:
    straight = backend_of(models[model], dtype)
    train(straight, range(3))
    straight.save(tmp_path)
    resumed = backend_of(models[model], dtype)
    resumed.load(tmp_path)
    assert resumed.optimizer_steps == 3
    assert train(straight, range(3, 6)) == train(resumed, range(3, 6))
    ours = straight.model.module.state_dict()
    theirs = resumed.model.module.state_dict()
    assert all(ours[n].equal(theirs[n]) for n in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_the_model_and_computes_the_same(
    models: dict[str, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    backend = backend_of(models["tied"], dtype)
    train(backend, range(2))
    backend.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    for name, value in backend.model.module.state_dict().items():
        assert value.equal(loaded.state_dict()[name]), name
    plain = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=dtype)
    plain.load_state_dict(backend.model.module.state_dict())
    ids = torch.arange(5, 25)[None]
    assert loaded.eval()(ids).logits.equal(plain.eval()(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("1+1=").input_ids == backend.model.tokenizer("1+1=").input_ids
    assert tokenizer.chat_template == backend.model.tokenizer.chat_template
    endings = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert endings <= {".json", ".safetensors", ".jinja"}, "no pickles"


def test_scores_are_those_of_the_loaded_model(models: dict[str, Path], tmp_path: Path) -> None:
    backend = backend_of(models["llama"])
    train(backend, range(2))
    backend.save(tmp_path)
    again = backend_of(tmp_path / "model")
    assert again.score(packing(9)).tolist() == backend.score(packing(9)).tolist()


def test_random_state_comes_back(models: dict[str, Path], tmp_path: Path) -> None:
    backend = backend_of(models["llama"])
    torch.rand(3)
    backend.save(tmp_path)
    expected = torch.rand(5)
    backend_of(models["llama"]).load(tmp_path)
    assert torch.rand(5).equal(expected)


@pytest.mark.parametrize(
    ("then", "now"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_resumed_in_another_precision_nothing_learned_is_lost(
    models: dict[str, Path], tmp_path: Path, then: torch.dtype, now: torch.dtype
) -> None:
    before = backend_of(models["llama"], then)
    train(before, range(20))
    before.save(tmp_path)
    after = backend_of(models["llama"], now)
    after.load(tmp_path)
    after.forward_backward(packing(50), nll)
    after.step(0.0)
    torch.testing.assert_close(
        after.model.module.lm_head.weight.float(),
        before.model.module.lm_head.weight.float(),
        rtol=0.01,
        atol=1e-3,
    )
    exact = before.optimizer.masters["lm_head.weight"]
    if now is torch.float32:
        assert after.optimizer.masters["lm_head.weight"].equal(exact)


def test_small_gradients_survive_float16(models: dict[str, Path]) -> None:
    """Gradients of a hundred-thousandth of the loss are below float16's smallest number unless the
    loss is scaled."""

    def small(forest: Forest, predictions: Predictions) -> tuple[Tensor, dict[str, Tensor]]:
        return 1e-5 * nll(forest, predictions)[0], {}

    def gradient(dtype: torch.dtype, scaled: bool = True) -> Tensor:
        backend = backend_of(models["llama"], dtype)
        if not scaled:
            backend.optimizer.loss_scale = None
        backend.forward_backward(packing(0), small)
        factor = backend.optimizer.loss_scale.factor if backend.optimizer.loss_scale else 1.0
        grads = [
            m.grad.flatten() / factor
            for m in backend.optimizer.masters.values()
            if m.grad is not None
        ]
        return torch.cat(grads)

    exact = gradient(torch.float32)
    assert (gradient(torch.float16) - exact).norm() < 0.01 * exact.norm()
    assert (gradient(torch.float16, scaled=False) - exact).norm() > 0.05 * exact.norm()


def test_a_step_that_overflows_is_dropped_and_halves_the_factor(
    models: dict[str, Path], tmp_path: Path
) -> None:
    backend = backend_of(models["llama"], torch.float16)
    scale = backend.optimizer.loss_scale
    assert scale is not None
    scale.factor = 2.0**40
    before = {name: weight.detach().clone() for name, weight in backend.optimizer.masters.items()}
    loss = backend.forward_backward(packing(0), nll)["loss"]
    assert loss < 20, "the loss that is reported is not scaled"
    metrics = backend.step(0.01)
    assert (
        metrics["overflowed"] == 1 and metrics["loss_scale"] == 2.0**40 and scale.factor == 2.0**39
    )
    assert backend.optimizer_steps == 0
    assert all(weight.equal(before[name]) for name, weight in backend.optimizer.masters.items())
    scale.factor = 2.0**10
    train(backend, range(2))
    backend.save(tmp_path)
    resumed = backend_of(models["llama"], torch.float16)
    resumed.load(tmp_path)
    found = resumed.optimizer.loss_scale
    assert found is not None and (found.factor, found.steps) == (2.0**10, 2)
    backend_of(models["llama"], torch.bfloat16).load(tmp_path)  # which has no use for it


def test_the_factor_grows_after_enough_steps() -> None:
    scale = LossScale()
    for _ in range(GROWS_AFTER):
        assert not scale.update(True)
    assert (scale.factor, scale.steps) == (2 * FIRST_SCALE, 0)
    again = [scale.update(False) for _ in range(40)]
    assert scale.factor == LEAST and again == [True] * 17 + [False] * 23


def test_another_models_checkpoint_is_refused_by_tensor(
    models: dict[str, Path], tmp_path: Path
) -> None:
    backend_of(models["wide"]).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"another model than this run's: '.*mlp.*' differs"):
        backend_of(models["llama"]).load(tmp_path)


def test_a_damaged_optimizer_file_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    backend = backend_of(models["llama"])
    backend.save(tmp_path)
    file = tmp_path / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot read .*optimizer\.safetensors"):
        backend.load(tmp_path)
