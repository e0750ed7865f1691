"""Losses, estimators, corrections and presets from a file outside the package."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from tests.support.tiny_runs import rl_settings
from tests.support.training import backend_of, difference, gradient, learner_of, samples_of
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.learn.algorithms.objective import policy_objective, prepare_columns
from tunesmith.learn.data.batch import Batch
from tunesmith.plan.derive.algorithm import resolve_algorithm
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

MINE = """\
from typing import Annotated

import numpy as np
from pydantic import Field

from tunesmith.learn.algorithms.advantages import Estimator, GroupEstimator
from tunesmith.learn.algorithms.corrections import Correction
from tunesmith.learn.algorithms.losses import Loss, TokenLoss
from tunesmith.learn.algorithms.outcomes import Advantages


class Scaled(Loss):
    "The policy gradient, times alpha."
    alpha: Annotated[float, Field(ge=0)] = 1.0
    "The factor."

    def __call__(self, batch):
        return TokenLoss(-self.alpha * batch.advantages * batch.logprobs)


class Plain(Estimator):
    def __call__(self, outcomes):
        return Advantages([np.full(o.length, o.total) for o in outcomes])


class Half(Correction):
    share: float = 0.5

    def __call__(self, log_weights):
        return np.full_like(log_weights, self.share)


class NotCallable(Loss):
    pass


class TakesTwo(Loss):
    def __call__(self, batch, more):
        return batch


class Unrelated:
    pass


class Fading(Loss):
    "The policy gradient, halved with every token of the completion."

    def columns(self, batch, rng):
        first = np.concatenate([[0], np.cumsum(batch.counts)])[:-1]
        return {"weight": 0.5 ** (np.arange(batch.num_predictions) - first[batch.sample])}

    def __call__(self, batch):
        return TokenLoss(-batch.columns["weight"] * batch.advantages * batch.logprobs)


class TakesNoRng(Fading):
    def columns(self, batch):
        return {}


class NoRelative(GroupEstimator):
    pass


PRESET = {"advantage": "mine.py:Plain", "loss": {"type": "mine.py:Scaled", "alpha": 2.0}, "aggregation": "token_mean"}
INCOMPLETE = {"loss": "ppo"}
WRONG = {"loss": "ppo", "lozz": 1}
"""
TOML = """\
source = "here"
advantage = "grpo"
loss = { type = "mine.py:Scaled", alpha = 2.0 }
aggregation = "token_mean"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.toml").write_text(TOML)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def config(folder: Path, algorithm: str, *overrides: str) -> RLConfig:
    text = (
        '[model]\npath = "org/model"\n[data]\ntrain = "data.jsonl"\n[reward]\n'
        'functions = "exact_match"\n'
    )
    (folder / "run.toml").write_text(f"{text}[algorithm]\n{algorithm}\n")
    return load_config(RLConfig, folder / "run.toml", overrides)


def algorithm(folder: Path, text: str, *overrides: str) -> AlgorithmSection:
    return resolve_algorithm(config(folder, text, *overrides).algorithm, max_new_tokens=8)[0]


def norms(run: Path) -> list[float]:
    return [
        line["grad_norm"] for line in read_metrics(run / "metrics.jsonl") if "grad_norm" in line
    ]


@pytest.mark.more
def test_a_run_learns_by_them_and_resumes(folder: Path, model: Path) -> None:
    """With alpha = 1 the run is that of the package's reinforce; with alpha = 2 its gradients are
    twice as large."""
    ours = {
        "algorithm__advantage": "grpo",
        "algorithm__decoupled": True,
        "train__max_grad_norm": 0,
        "train__steps": 2,
    }
    theirs = assembly.run_rl(
        None, rl_settings(folder, model, "theirs", algorithm__loss="reinforce", **ours)
    )
    mine = {**ours, "algorithm__loss": f"{folder / 'mine.py'}:Scaled"}
    same = assembly.run_rl(None, rl_settings(folder, model, "same", **mine))
    assert norms(same.run_dir) == norms(theirs.run_dir)
    half = {
        **ours,
        "algorithm__loss": f"{folder / 'mine.py'}:Scaled",
        "algorithm__loss__alpha": 2.0,
    }
    half["algorithm__correction"] = f"{folder / 'mine.py'}:Half"
    run = assembly.run_rl(None, rl_settings(folder, model, "half", **half))
    assert norms(run.run_dir)[0] == pytest.approx(norms(theirs.run_dir)[0])  # twice, and half
    again = assembly.run_rl(
        run.run_dir / "config.toml", ["train.steps=3", "checkpoint.resume=true"]
    )
    assert [
        line["step"]
        for line in read_metrics(again.run_dir / "metrics.jsonl")
        if "grad_norm" in line
    ] == [1, 2, 3]


def test_a_loss_computes_a_column_of_its_own(folder: Path, model: Path) -> None:
    """However the batch is split, it is right; its name may be one that the training loop uses
    too."""
    ours = algorithm(folder, 'loss = "mine.py:Fading"')
    theirs = algorithm(folder, 'loss = "reinforce"')
    samples = samples_of()
    advantages = [1.0 + group.group for group in samples for _ in range(sum(group.loss_mask))]
    fading = [0.5**place for sample in samples for place in range(sum(sample.loss_mask))]

    def prepared(section: AlgorithmSection, advantages: ArrayLike) -> Batch:
        batch = Batch.of(samples)
        batch.add("old_logprobs", np.full(batch.num_predictions, -1.0))
        batch.add("advantages", advantages)
        prepare_columns(batch, section, seed=0)
        return batch

    backend = backend_of(model, torch.float64)
    by_hand = prepared(theirs, np.multiply(advantages, fading))
    expected, _ = gradient(learner_of(backend), by_hand, policy_objective(theirs))
    batch = prepared(ours, advantages)
    order = np.random.default_rng(0).permutation(batch.num_samples)
    for tokens, share in ((4096, True), (80, True), (4096, False), (40, False)):
        for whole in (batch, batch.take(order)):
            found, _ = gradient(
                learner_of(backend, tokens, share_prompts=share), whole, policy_objective(ours)
            )
            assert difference(found, expected) < 1e-6, (tokens, share)
    keys = {"algorithm__loss": f"{folder / 'mine.py'}:Fading", "train__steps": 1}
    assert norms(assembly.run_rl(None, rl_settings(folder, model, "fading", **keys)).run_dir)[0] > 0


def test_tables_and_overrides_reach_their_fields(folder: Path) -> None:
    found = algorithm(folder, 'loss = "mine.py:Scaled"', "algorithm.loss.alpha=0.3")
    assert (
        found.loss.model_dump() == {"alpha": 0.3}
        and found.loss.name == f"{folder / 'mine.py'}:Scaled"
    )
    assert (
        algorithm(folder, 'advantage = "mine.py:Plain"').advantage.name
        == f"{folder / 'mine.py'}:Plain"
    )
    assert algorithm(folder, 'correction = { type = "mine.py:Half", share = 0.1 }').decoupled


@pytest.mark.parametrize(
    ("preset", "estimator"), [("mine.py:PRESET", "Plain"), ("mine.toml", "grpo")]
)
def test_presets_of_their_own(folder: Path, preset: str, estimator: str) -> None:
    found = algorithm(folder, f'name = "{preset}"')
    assert found.loss.model_dump() == {"alpha": 2.0} and found.advantage.name.endswith(estimator)
    assert algorithm(folder, f'name = "{preset}"\nloss.alpha = 3.0').loss.model_dump() == {
        "alpha": 3.0
    }
    assert algorithm(folder, f'name = "{preset}"\nloss = "ppo"').loss.name == "ppo"


def test_a_users_class_may_have_static_and_class_methods(folder: Path) -> None:
    (folder / "static.py").write_text(
        "from tunesmith.learn.algorithms.losses import PPO\n\n\nclass Static(PPO):\n"
        "    @staticmethod\n"
        "    def clipped(ratio, advantages):\n        return ratio * advantages\n\n"
        "    @classmethod\n"
        "    def columns(cls, batch, rng):\n        return {}\n"
    )
    assert algorithm(folder, 'loss = "static.py:Static"').loss.name.endswith("static.py:Static")


def test_another_process_finds_the_class_by_its_reference(folder: Path) -> None:
    objective = policy_objective(
        algorithm(folder, 'loss = { type = "mine.py:Scaled", alpha = 0.3 }')
    )
    (folder / "objective").write_bytes(pickle.dumps(objective))
    code = (
        f"import pickle; print(pickle.load(open({str(folder / 'objective')!r}, 'rb')).loss.alpha)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.3"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('loss = "nothere.py:Loss"', ["line 8", "algorithm.loss", "nothere.py does not exist"]),
        ('loss = "mine.py:Scalde"', ["line 8", "algorithm.loss", "Did you mean 'Scaled'"]),
        ('loss = "mine.py"', ["line 8", "mine.py:Name"]),
        (
            'loss = "mine.py:Unrelated"',
            ["mine.py, line 42", "subclass of tunesmith.learn.algorithms.losses.Loss"],
        ),
        ('loss = "mine.py:Half"', ["Half is not a loss"]),
        ('loss = "mine.py:NotCallable"', ["NotCallable has no __call__(self, batch)"]),
        (
            'loss = "mine.py:TakesTwo"',
            ["mine.py, line 37", "TakesTwo.__call__ has to take (self, batch)"],
        ),
        (
            'loss = "mine.py:TakesNoRng"',
            ["mine.py, line 57", "TakesNoRng.columns has to take (self, batch, rng)"],
        ),
        (
            'advantage = "mine.py:NoRelative"',
            ["NoRelative has no relative(self, rewards, lengths)"],
        ),
        ('loss = "mine.py:PRESET"', ["is not a class"]),
        ('loss = { type = "mine.py:Scaled", beta = 1 }', ["has no key beta; it has alpha"]),
        (
            'loss = { type = "mine.py:Scaled", alpha = -1 }',
            ["algorithm.loss.alpha is -1", "a number of at least 0"],
        ),
        ('name = "mine.py:NOPE"', ["algorithm.name", "NOPE"]),
        ('name = "mine.py:Half"', ["a table"]),
        ('name = "nothere.toml"', ["algorithm.name", "does not exist"]),
        ('name = "mine.py:INCOMPLETE"', ["has no advantage"]),
        ('name = "mine.py:WRONG"', ["lozz"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(
    folder: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        algorithm(folder, text)
    assert all(word in str(caught.value) for word in words), str(caught.value)
