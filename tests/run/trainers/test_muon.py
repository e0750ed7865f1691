"""Muon: the paper's formula on the same gradients, which weights it moves, its state, its
settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.planned_memory import SMALL
from tests.support.tiny import save_model
from tunesmith.config.load import load_config
from tunesmith.config.optimizer import Muon
from tunesmith.config.schema import SFTConfig
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.price import price
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.rules.checks import check
from tunesmith.run.trainers.muon import hidden_matrices
from tunesmith.run.trainers.optimizer import AdamWSettings, MasterOptimizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("muon") / "model", "qwen3")


def optimizer_of(
    path: Path, dtype: torch.dtype = torch.float32, decay: float = 0.1, **muon: Any
) -> tuple[CausalLM, MasterOptimizer]:
    loaded = CausalLM.load(path, dtype=dtype)
    return loaded, MasterOptimizer(
        loaded.module, AdamWSettings(decay, max_grad_norm=0.0, muon=Muon(**muon))
    )


def give_gradients(made: MasterOptimizer, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters.values():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        (parameter * noise).sum().backward()  # pyright: ignore[reportUnknownMemberType]
    return {name: m.grad.clone() for name, m in made.masters.items() if m.grad is not None}


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Jordan's iteration: X ← aX + (bA + cA²)X with A = XXᵀ, from X = M / ‖M‖."""
    x = matrix.bfloat16()
    x = x.mT if len(matrix) > matrix.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if len(matrix) > matrix.shape[1] else x).float()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_matrices_of_the_layers_take_the_published_steps(
    model: Path, nesterov: bool, scale: str
) -> None:
    lr = 0.01
    ratio = 2.0
    decay = 0.1
    beta = 0.9
    loaded, made = optimizer_of(
        model, momentum=beta, nesterov=nesterov, ns_steps=4, adjust_lr=scale, lr_ratio=ratio
    )
    names = hidden_matrices(loaded.module)
    start = {name: made.masters[name].detach().clone() for name in names}
    weights = dict(start)
    moments = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(3):
        grads = give_gradients(made, step)
        made.step(lr)
        for name, weight in weights.items():
            moments[name] = beta * moments[name] + (1 - beta) * grads[name]
            u = beta * moments[name] + (1 - beta) * grads[name] if nesterov else moments[name]
            a, b = weight.shape
            factor = 0.2 * max(a, b) ** 0.5 if scale == "match_rms_adamw" else max(1, a / b) ** 0.5
            weights[name] = weight * (1 - lr * ratio * decay) - lr * ratio * factor * newton_schulz(
                u, 4
            )
    for name, weight in weights.items():  # both iterate in bfloat16, in another order of operations
        moved = weight - start[name]
        assert float((made.masters[name].detach() - weight).norm() / moved.norm()) < 0.05, name


def test_its_steps_are_as_large_as_adamws(model: Path) -> None:
    """The root mean square of a step's entries is near 0.2 of the learning rate, for every
    shape."""
    loaded, made = optimizer_of(model, decay=0.0)
    before = {name: made.masters[name].detach().clone() for name in hidden_matrices(loaded.module)}
    give_gradients(made, 0)
    made.step(0.01)
    for name, weight in before.items():
        assert float(
            (made.masters[name].detach() - weight).square().mean().sqrt()
        ) == pytest.approx(0.002, rel=0.3), name


@pytest.mark.parametrize(("family", "each"), [("qwen3", 7), ("gpt2", 4)])
def test_it_moves_the_matrices_of_the_layers_and_adamw_all_else(
    tmp_path: Path, family: str, each: int
) -> None:
    loaded, made = optimizer_of(save_model(tmp_path, family))
    names = hidden_matrices(loaded.module)
    layers = int(loaded.module.config.num_hidden_layers)
    assert len(names) == each * layers
    plain = MasterOptimizer(CausalLM.load(tmp_path).module, AdamWSettings(0.1, max_grad_norm=0.0))
    for seed in range(2):
        give_gradients(made, seed), give_gradients(plain, seed)
        made.step(0.01), plain.step(0.01)
    same = {name for name, weight in made.masters.items() if weight.equal(plain.masters[name])}
    assert same == plain.masters.keys() - names
    assert {
        name for key in made.state() if (name := key.removeprefix("momentum_buffer:")) != key
    } == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_continues_exactly(model: Path, dtype: torch.dtype) -> None:
    (straight, a), (first, b), (second, c) = (optimizer_of(model, dtype) for _ in range(3))
    for seed in range(2):
        give_gradients(a, seed), a.step(0.01), give_gradients(b, seed), b.step(0.01)
    second.module.load_state_dict(first.module.state_dict())
    c.load_state({name: t.clone() for name, t in b.state().items()})
    give_gradients(a, 2), a.step(0.01), give_gradients(c, 2), c.step(0.01)
    ours = straight.module.state_dict()
    theirs = second.module.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert all(t.equal(c.state()[name]) for name, t in a.state().items())


def test_a_state_of_the_other_optimizer_is_refused(model: Path) -> None:
    _, made = optimizer_of(model)
    plain = MasterOptimizer(CausalLM.load(model).module, AdamWSettings())
    for optimizer in (made, plain):
        give_gradients(optimizer, 0), optimizer.step(0.01)
    for ours, state in ((made, plain.state()), (plain, made.state())):
        with pytest.raises(CheckpointError, match=r"train\.optimizer"):
            ours.load_state(state)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_cost_model_knows_that_matrices_have_one_moment(
    model: Path, dtype: torch.dtype, size: int
) -> None:
    _, made = optimizer_of(model, dtype)
    give_gradients(made, 0), made.step(0.01), give_gradients(made, 1)
    held = [t for name in made.masters for t in made.slot(name).values() if t.ndim]
    held += [
        *made.parameters.values(),
        *(m.grad for m in made.masters.values() if m.grad is not None),
    ]
    held += [m for name, m in made.masters.items() if m is not made.parameters[name]]
    facts = read_model_facts(model)
    assert facts is not None
    norms = sum(
        m.numel() for m in made.masters.values() if m.ndim < 2
    )  # few, and counted as the layers' matrices
    assert sum(t.nbytes for t in held) == price(facts, Layout(size, muon=True)).state + 4 * norms
    sharded = {"zero_stage": 3, "shards": 4}
    less = (
        price(SMALL, Layout(2, **sharded)).optimizer
        - price(SMALL, Layout(2, muon=True, **sharded)).optimizer
    )
    assert less == 4 * (5_000_000 - 2 * 4096 * 256) // 4


def config(*said: str) -> SFTConfig:
    return load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d", *said])


def test_settings() -> None:
    assert config("train.optimizer=muon").train.optimizer == Muon()
    chosen = config('train.optimizer={ type = "muon", momentum = 0.9 }').train.optimizer
    assert isinstance(chosen, Muon) and chosen.momentum == 0.9
    assert config(
        "train.optimizer.type=muon", "train.optimizer.ns_steps=3"
    ).train.optimizer == Muon(ns_steps=3)
    assert config().train.optimizer.name == "adamw"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["train.optimizer=mouon"], ["train.optimizer", "muon"]),
        (["train.optimizer=mine.py:Own"], ["train.optimizer", "adamw"]),
        (['train.optimizer={ type = "muon", betas = [0.9, 0.99] }'], ["betas", "momentum"]),
        (["train.optimizer.momentum=1.0", "train.optimizer.type=muon"], ["momentum", "below 1"]),
        (["train.optimizer=muon", "lora.rank=8"], ["train.optimizer", "adapter"]),
        (["train.optim=muon"], ["train.optimizer"]),
        (["actor.muon.ns_steps=3"], ["train.optimizer.ns_steps"]),
    ],
)
def test_bad_settings_are_refused_by_name(said: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(*said))
    assert all(word in str(caught.value) for word in words)
