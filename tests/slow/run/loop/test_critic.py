"""PPO's critic, of its own or on the policy's trunk: what it learns, what it freezes, that nothing
is lost."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support import tiny, training
from tests.support.algorithms import algorithm
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, same_tensors, sums, tensors, untimed, write_lines
from tests.support.training import Grads, difference, learner_of
from tunesmith.errors import CheckpointError, ConfigError, RewardError
from tunesmith.learn.algorithms.advantages import GAE, VAPO, compute_advantages
from tunesmith.learn.algorithms.objective import (
    ActorCriticObjective,
    ValueObjective,
    policy_objective,
)
from tunesmith.learn.algorithms.outcomes import Outcome, flat
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.score_model import ScoreModel, whole_sequence
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.loop.checkpoint import read_state
from tunesmith.run.loop.critic import Critic, value_metrics
from tunesmith.run.loop.experience import make_experience
from tunesmith.run.loop.learner import Learner
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Completion, Rollout, RolloutGroup, Sample, Task

OWN: dict[str, Any] = {"algorithm__name": "ppo"}
SHARED: dict[str, Any] = {"algorithm__name": "ppo", "critic__shared_trunk": True}


def rl(
    folder: Path, model: Path, run: str = "run", *more: str, **changed: Any
) -> tuple[Path, list[dict[str, Any]]]:
    outcome = assembly.run_rl(None, [*rl_settings(folder, model, run, **changed), *more])
    return outcome.checkpoint.parent, read_metrics(outcome.run_dir / "metrics.jsonl")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(t.equal(b[name]) for name, t in a.items())


def test_how_much_a_critic_explains() -> None:
    def batch(returns: list[float], values: list[float]) -> Batch:
        made = Batch.of([Sample([1] * (len(returns) + 1), [False] + [True] * len(returns))])
        made.add("returns", returns)
        made.add("old_values", values)
        return made

    found = value_metrics(batch([1.0, 2.0, 3.0], [1.0, 2.5, 2.5]))
    errors = np.array([0.0, -0.5, 0.5])
    assert found == {
        "returns": 2.0,
        "value_explained": pytest.approx(1 - errors.var() / np.array([1, 2, 3]).var()),
    }
    assert value_metrics(batch([1.0, 2.0], [1.0, 2.0]))["value_explained"] == 1
    assert value_metrics(batch([1.0, 2.0], [7.0, 7.0]))["value_explained"] == 0
    assert value_metrics(batch([2.0, 2.0], [1.0, 0.0])) == {"returns": 2.0}


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_returns_that_differ_by_rounding_leave_nothing_to_explain(reward: float) -> None:
    """The returns of equal rewards with λ = 1, each the sum of the differences of ten values."""
    values = np.random.default_rng(0).normal(size=(6, 10))
    rollouts = [Outcome(0, reward, 10, values=own) for own in values]
    returns = compute_advantages(VAPO(), rollouts).returns
    assert returns is not None
    made = Batch.of([Sample([1] * 61, [False] + [True] * 60)])
    made.add("returns", flat(returns))
    made.add("old_values", values.ravel())
    assert made.columns["returns"].var() > 0
    assert value_metrics(made) == {"returns": pytest.approx(reward, abs=1e-12)}


def test_a_value_that_is_not_finite_is_left_out_with_what_it_made() -> None:
    """The second rollout's first two advantages are sums with its broken value; the first rollout's
    and the last token's stay."""
    broken = np.array([0.5, math.nan, 0.25])
    rollouts = [Outcome(0, 1.0, 2, values=np.array([0.5, 0.5])), Outcome(1, 0.0, 3, values=broken)]
    estimated = compute_advantages(GAE(gae_lambda=1.0), rollouts)
    known = np.array([0.5, 0.5, -0.25])
    white = (known - known.mean()) / (known.std(ddof=1) + 1e-6)
    assert flat(estimated.advantages) == pytest.approx(
        [*white[:2], math.nan, math.nan, white[2]], nan_ok=True
    )
    assert estimated.returns is not None
    made = Batch.of([Sample([1] * 6, [False] + [True] * 5)])
    made.add("old_values", [0.5, 0.5, *broken])
    made.add("returns", flat(estimated.returns))
    assert value_metrics(made)["returns"] == pytest.approx(2 / 3)
    made.add("returns", [math.nan] * 5)
    assert value_metrics(made) == {}


def valued(seed: int = 0, groups: int = 4, size: int = 3) -> Batch:
    """Groups of completions with every column that PPO's two losses read; some tokens the policy
    did not write."""
    rng = np.random.default_rng(seed)
    found: list[Sample] = []
    for group in range(groups):
        prompt = rng.integers(5, 260, rng.integers(2, 10)).tolist()
        for _ in range(size):
            n = int(rng.integers(3, 13))
            mask = [False] * len(prompt) + [True, False] + [True] * (n - 2)
            found.append(Sample(prompt + rng.integers(5, 260, n).tolist(), mask, group))
    batch = Batch.of(found)
    for name, at in {
        "advantages": 0.0,
        "returns": 0.5,
        "old_values": 0.3,
        "old_logprobs": -5.0,
    }.items():
        batch.add(name, rng.normal(at, 0.7, batch.num_predictions))
    return batch


def learner(backend: TorchBackend[Any], max_tokens: int = 4096, share: bool = True) -> Learner:
    return learner_of(backend, max_tokens, share_prompts=share, aggregation="token_mean")


def gradient(backend: TorchBackend[Any], batch: Batch, objective: Any, *cut: Any) -> Grads:
    return training.gradient(learner(backend, *cut), batch, objective)[0]


def critic_of(path: Path) -> TorchBackend[ScoreModel]:
    critic = ScoreModel.load(path, dtype=torch.float64)
    torch.nn.init.normal_(critic.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return TorchBackend(critic, AdamWSettings(max_grad_norm=0.0), ScoreModel.predict)


def actor_critic_of(path: Path) -> TorchBackend[CausalLM]:
    head = torch.nn.Linear(32, 1, bias=False, dtype=torch.float64)
    torch.nn.init.normal_(head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    predict = partial(CausalLM.predict, value_head=head)
    policy = CausalLM.load(path, dtype=torch.float64)
    return TorchBackend(policy, AdamWSettings(max_grad_norm=0.0), predict, value_head=head)


POLICY = policy_objective(algorithm(name="ppo", kl="none"))


@pytest.fixture
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_is_the_same_however_the_batch_is_cut(model: Path, shared: bool) -> None:
    backend = actor_critic_of(model) if shared else critic_of(model)
    objective = ActorCriticObjective(POLICY, 0.2, 0.5) if shared else ValueObjective(0.2)
    batch = valued()
    whole = gradient(backend, batch, objective)
    for cut in ((60, True), (21, False), (4096, False)):
        assert difference(gradient(backend, batch, objective, *cut), whole) < 1e-10
    assert (
        difference(
            gradient(backend, batch.take(range(batch.num_samples)[::-1]), objective, 60), whole
        )
        < 1e-10
    )


@pytest.mark.usefixtures("float64")
def test_one_backward_gives_the_sum_of_both_gradients(model: Path) -> None:
    backend = actor_critic_of(model)
    batch = valued()
    policy = gradient(backend, batch, POLICY)
    assert "value_head.weight" not in policy
    value = gradient(backend, batch, ValueObjective(0.2))
    both = gradient(backend, batch, ActorCriticObjective(POLICY, 0.2, 0.5))
    expected = {name: 0.5 * t + policy.get(name, torch.zeros_like(t)) for name, t in value.items()}
    expected |= {name: t for name, t in policy.items() if name not in value}
    assert difference(both, expected) < 1e-12


def test_the_head_learns_at_its_own_rate(model: Path) -> None:
    head = torch.nn.Linear(32, 1, bias=False)
    predict = partial(CausalLM.predict, value_head=head)
    backend = TorchBackend(
        CausalLM.load(model),
        AdamWSettings(weight_decay=0.5),
        predict,
        value_head=head,
        head_lr_ratio=10.0,
    )
    before = {name: p.detach().clone() for name, p in backend.optimizer.parameters.items()}
    learner(backend).update(valued(), ActorCriticObjective(POLICY, None, 1.0))
    moved = {
        name: float((p.detach() - before[name]).abs().max())
        for name, p in backend.optimizer.parameters.items()
    }
    assert moved.pop("value_head.weight") == pytest.approx(0.1, rel=1e-3), (
        "Adam's first step is the learning rate"
    )
    assert max(moved.values()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(OWN, id="own"), pytest.param(SHARED, id="shared")])
def test_the_critic_learns_what_the_states_are_worth(
    tmp_path: Path, model: Path, kind: dict[str, Any]
) -> None:
    _, lines = rl(
        tmp_path,
        model,
        **kind,
        train__steps=8 if kind is OWN else 20,
        train__lr=1e-5,
        critic__lr=1e-2,
        algorithm__advantage__gae_lambda=1.0,
        rollout__prompts_per_step=12,
        rollout__group_size=8,
    )
    assert {"value", "value_loss", "value_error", "returns", "value_explained", "ref_kl"} <= lines[
        0
    ].keys()
    assert lines[0]["value_error"] == pytest.approx(lines[0]["value_loss"] * 2)
    assert np.mean([line["value_error"] for line in lines[-4:]]) < 0.7 * lines[0]["value_error"]
    assert abs(lines[-1]["value"] - lines[-1]["returns"]) < 0.15 < lines[0]["returns"]
    assert ("critic/lr" in lines[0]) == (kind is OWN)


def test_the_actor_is_frozen_for_exactly_as_many_steps_as_was_said(
    tmp_path: Path, model: Path
) -> None:
    checkpoint, lines = rl(
        tmp_path, model, **OWN, critic__freeze_actor_steps=2, train__steps=3, checkpoint__every=1,
        checkpoint__keep=3, train__passes_per_batch=2,
    )  # fmt: skip
    at = [weights(checkpoint.with_name(f"step-{step:06d}") / "model") for step in (1, 2, 3)]
    critics = [
        weights(checkpoint.with_name(f"step-{step:06d}") / "critic/model") for step in (1, 2, 3)
    ]
    assert same(at[0], weights(model)) and same(at[1], at[0]) and not same(at[2], at[1])
    assert not same(critics[0], critics[1]) and not same(critics[1], critics[2])
    assert [line["optimizer_steps"] for line in lines] == [0, 0, 2]
    assert [line["critic/optimizer_steps"] for line in lines] == [2, 2, 2]
    assert "policy_loss" not in lines[1] and "policy_loss" in lines[2]


def test_the_critic_has_its_own_schedule_and_passes(tmp_path: Path, model: Path) -> None:
    _, lines = rl(
        tmp_path,
        model,
        **OWN,
        train__steps=4,
        train__batch_size=8,
        critic__lr=1e-3,
        critic__schedule="linear",
        critic__warmup_steps=2,
        critic__passes_per_batch=2,
        critic__max_grad_norm=0.0,
    )
    assert [line["critic/optimizer_steps"] for line in lines] == [4] * 4
    assert [line["optimizer_steps"] for line in lines] == [2] * 4
    assert [line["lr"] for line in lines] == [1e-2] * 4
    rates = [5e-4, 1e-3, *(1e-3 * (1 - k / 14) for k in range(14))]
    assert [line["critic/lr"] for line in lines] == pytest.approx(
        [np.mean(rates[i : i + 4]) for i in range(0, 16, 4)]
    )


@pytest.mark.parametrize("kind", [OWN, SHARED], ids=["own", "shared"])
def test_a_step_does_not_depend_on_the_micro_batches(
    tmp_path: Path, model: Path, kind: dict[str, Any]
) -> None:
    more = {"train__steps": 1, "train__lr": 1e-3, "train__passes_per_batch": 2, **kind}
    whole, first = rl(tmp_path, model, "whole", **more)
    cut, second = rl(
        tmp_path,
        model,
        "cut",
        **more,
        system__max_tokens_per_microbatch=20,
        system__share_prompts=False,
    )
    assert second[0]["microbatches"] > 4 * first[0]["microbatches"]
    a = tensors(whole)
    b = tensors(cut)
    names = [
        name
        for name in a
        if name.split("/")[-1].startswith(("lm_head", "model.", "score", "weight"))
    ]
    assert a.keys() == b.keys() and len(names) > 10
    for name in names:
        # Adam's first steps have the size of the learning rate, whatever the gradient's: compare on
        # that scale.
        close = (a[name] - b[name]).abs() < 1e-4
        assert close.float().mean() > 0.99, name
    for key in ("value_loss", "policy_loss", "value_explained", "returns"):
        assert second[0][key] == pytest.approx(first[0][key], rel=1e-3, abs=1e-5), key


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("own", {**OWN, "critic__schedule": "cosine", "critic__freeze_actor_steps": 1}, "float32"),
    ("own", {**OWN, "train__passes_per_batch": 2, "train__batch_size": 8}, "bfloat16"),
    ("shared", {**SHARED, "train__passes_per_batch": 2, "train__batch_size": 8}, "float32"),
    ("shared", SHARED, "bfloat16"),
    ("averaged", {"train__ema_decay": 0.8, "eval__use_ema": True, "eval__every": 1}, "bfloat16"),
    (
        "averaged",
        {**OWN, "train__ema_decay": 0.8, "eval__use_ema": True, "eval__every": 1},
        "float32",
    ),
    ("refreshed", {"algorithm__kl__coef": 0.1, "algorithm__kl__reference_every": 2}, "float32"),
    ("remax", {"algorithm__name": "remax"}, "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changed", "dtype"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_resumed_in_the_middle_it_ends_bit_by_bit_as_if_it_had_run_through(
    tmp_path: Path, model: Path, name: str, changed: dict[str, Any], dtype: str
) -> None:
    if "eval__every" in changed:
        changed = {
            **changed,
            "data__eval": str(write_lines(tmp_path / "held_out.jsonl", sums(4, 40))),
        }
    more = {
        **changed,
        "train__steps": 4,
        "model__dtype": dtype,
        "checkpoint__every": 1,
        "checkpoint__keep": 4,
    }
    straight, _ = rl(tmp_path, model, "straight", **more)
    middle = straight.with_name("step-000002" if name != "refreshed" else "step-000003")
    resumed, _ = rl(tmp_path, model, "again", f'checkpoint.resume="{middle}"', **more)
    same_tensors(straight, resumed)
    assert read_state(straight) == read_state(resumed)
    left = [
        line
        for line in untimed(tmp_path / "straight/metrics.jsonl")
        if line["step"] > int(middle.name[-1])
    ]
    assert left == [
        line
        for line in untimed(tmp_path / "again/metrics.jsonl")
        if line["step"] > int(middle.name[-1])
    ]
    expected = {
        "own": {"critic"},
        "shared": {"value_head.safetensors"},
        "averaged": {"ema"},
        "refreshed": {"reference"},
        "remax": set[str](),
    }[name]
    extra = {"critic"} if "algorithm__name" in changed and name == "averaged" else set[str]()
    assert {p.name for p in straight.iterdir()} == {
        "model",
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
    } | expected | extra


def test_what_a_checkpoint_holds_loads_elsewhere(tmp_path: Path, model: Path) -> None:
    own, _ = rl(tmp_path, model, "own", **OWN, train__steps=1)
    critic = AutoModelForSequenceClassification.from_pretrained(own / "critic/model")
    assert critic.config.num_labels == 1 and critic.score.weight.abs().sum() > 0
    shared, _ = rl(tmp_path, model, "shared", **SHARED, train__steps=1)
    _, told = AutoModelForCausalLM.from_pretrained(shared / "model", output_loading_info=True)
    assert not told["unexpected_keys"] and not told["missing_keys"]
    assert load_file(shared / "value_head.safetensors")["weight"].shape == (1, 32)
    _, lines = rl(
        tmp_path, model, "next", **OWN, train__steps=1, critic__path=str(own / "critic/model")
    )
    assert lines[0]["value_explained"] != 0, (
        "it goes on from the saved critic, whose values are not 0"
    )


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path: Path, model: Path) -> None:
    plain, _ = rl(tmp_path, model, "plain", train__steps=1)
    for more, words in ((OWN, "holds no critic"), (SHARED, r"critic\.shared_trunk: false → true")):
        with pytest.raises(CheckpointError, match=words):
            rl(tmp_path, model, "next", f'checkpoint.resume="{plain}"', **more, train__steps=2)
        shutil.rmtree(tmp_path / "next")
    with pytest.raises(CheckpointError, match=r"without train\.ema_decay"):
        rl(
            tmp_path,
            model,
            "next",
            f'checkpoint.resume="{plain}"',
            train__ema_decay=0.9,
            train__steps=2,
        )


def test_a_critic_of_another_vocabulary_is_refused(tmp_path: Path, model: Path) -> None:
    other = save_model(tmp_path / "other")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(
        ConfigError, match=r"critic\.path: .* has a different vocabulary from the policy"
    ):
        rl(tmp_path, model, **OWN, critic__path=str(other))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"critic__lr": 1e-3}, "critic.lr has no effect without a critic"),
        (
            {**SHARED, "critic__freeze_actor_steps": 1},
            "critic.freeze_actor_steps has no effect with",
        ),
        ({**SHARED, "critic__path": "MODEL"}, "critic.path has no effect with critic.shared_trunk"),
        ({**OWN, "critic__value_coef": 0.5}, "critic.value_coef has no effect"),
        ({**OWN, "critic__freeze_actor_steps": 3}, "critic.freeze_actor_steps = 3"),
        (
            {**OWN, "critic__freeze_actor_steps": 3, "train__steps": None},
            "critic.freeze_actor_steps = 3",
        ),
        ({**OWN, "critic__warmup_steps": 4}, "longer than the critic's 3 optimizer steps"),
        ({**OWN, "critic__min_lr_ratio": 0.1}, "no effect on the constant schedule"),
        ({**OWN, "critic__path": "nowhere/at/all"}, "critic.path: nowhere/at/all does not exist"),
        (
            {"algorithm__kl__reference_every": 4, "algorithm__kl__coef": 0.1},
            "longer than the run of 3 steps",
        ),
        ({"rollout__oversample": 2.0}, "algorithm.dynamic_filter is off"),
        ({"eval__use_ema": True, "data__eval": "TRAIN"}, "set train.ema_decay"),
    ],
)
def test_settings_that_would_mean_nothing_are_refused(
    tmp_path: Path, model: Path, changed: dict[str, Any], words: str
) -> None:
    rl_settings(tmp_path, model)
    places = {"MODEL": str(model), "TRAIN": str(tmp_path / "train.jsonl")}
    with pytest.raises(ConfigError) as error:
        rl(
            tmp_path,
            model,
            **{key: places.get(str(value), value) for key, value in changed.items()},
        )
    assert words in str(error.value)


class Scorer:
    """A learner that scores as it is told."""

    def __init__(self, **columns: list[float]) -> None:
        self.columns = columns

    def score(self, batch: Batch, of: str = "logprobs", **_: Any) -> Floats:  # noqa: ARG002
        return np.array(self.columns["old_values" if of == "values" else "ref_logprobs"])


def played(
    reward: float, *turns: int, finish: Any = "stop", rewards: dict[str, float | None] | None = None
) -> Rollout:
    """A prompt of two tokens and turns of so many, with one token of the environment's between
    them."""
    rollout = Rollout(TASK, reward=reward, rewards=dict(rewards or {}))
    rollout.observe(TASK.prompt_ids)
    for place, count in enumerate(turns):
        if place:
            rollout.observe([9])
        rollout.act(Completion([7] * count, [-1.0] * count, [0] * count, finish))
    return rollout


TASK = Task("1", "ab", (5, 6))


def by_sample(batch: Batch) -> list[float]:
    """The advantage of the last token of each."""
    return [float(own[-1]) for own in batch.split(batch.columns["advantages"])]


def test_advantages_and_returns_skip_what_the_policy_did_not_write() -> None:
    section = algorithm(name="ppo", advantage__gae_lambda=0.5, kl__coef=0.1)
    values = [0.2, 0.4, 0.6]
    reference = [-1.5, -1.5, -1.5]
    scorer: Any = Scorer(old_values=values, ref_logprobs=reference)
    critic = Critic(scorer, 1, None)
    rollout = played(1.0, 2, 1)
    batch = make_experience(
        [RolloutGroup(TASK, [rollout])],
        section,
        scorer,
        kl_coef=0.1,
        max_new_tokens=8,
        seed=0,
        critic=critic,
    )
    # δ = r + V' − V with r = −0.1 · 0.5 per token and 1 at the end: 0.15, 0.15, 0.35; then A = δ +
    # 0.5 A'.
    expected = np.array([0.3125, 0.325, 0.35])
    assert batch.columns["returns"] == pytest.approx([0.5125, 0.725, 0.95])
    assert batch.columns["old_values"].tolist() == values
    whitened = (expected - expected.mean()) / (expected.std(ddof=1) + 1e-6)
    assert batch.columns["advantages"] == pytest.approx(whitened)
    assert batch.predicted.tolist() == [2, 3, 5]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shared", [False, True])
def test_with_bootstrap_a_cut_rollout_is_worth_what_the_critic_expects_of_going_on(
    model: Path, shared: bool
) -> None:
    """Of rollouts that stopped, were cut by length, and ran out of turns; a micro-batch holds no
    token more."""
    backend: Any = actor_critic_of(model) if shared else critic_of(model)
    rollouts = [played(1.0, 2, 1), played(0.5, 3, 4, finish="length"), played(0.25, 2, 2)]
    rollouts[2].metrics["unfinished"] = 1.0
    rollouts[1].records.insert(0, played(0.0, 5, finish="length").records[0])
    groups = [RolloutGroup(TASK, rollouts)]
    learned = learner(backend, max(len(r.token_ids) for r in rollouts))
    critic = Critic(learned, 1, None)

    def value_after(rollout: Rollout) -> float:
        [value] = learner(backend).score(Batch.of([whole_sequence(rollout.token_ids)]), "values")
        return float(value)

    ends = {False: [0.0, 0.0, 0.0], True: [0.0, value_after(rollouts[1]), value_after(rollouts[2])]}
    assert abs(ends[True][1]) > 0.01 < abs(ends[True][2])
    for bootstrap, finals in ends.items():
        section = algorithm(
            name="ppo",
            kl="none",
            advantage__critic_lambda=1.0,
            advantage__bootstrap_truncated=bootstrap,
        )
        batch = make_experience(
            groups, section, learned, kl_coef=0.0, max_new_tokens=8, seed=0, critic=critic
        )
        assert batch.num_samples == 4
        for sample, returns in enumerate(batch.split(batch.columns["returns"])):
            rollout = rollouts[batch.rollout[sample]]
            assert rollout.reward is not None
            assert returns == pytest.approx(
                rollout.reward + finals[batch.rollout[sample]], abs=1e-6
            )
        moved = gradient(
            backend,
            batch,
            ActorCriticObjective(POLICY, None, 0.1) if shared else ValueObjective(None),
        )
        assert sum(float(g.square().sum()) for g in moved.values()) > 0


@pytest.mark.slow
def test_a_run_bootstraps_only_when_it_is_asked_to(tmp_path: Path, model: Path) -> None:
    more: dict[str, Any] = {"critic__lr": 3e-2, "algorithm__kl": "none"}
    for name, kind in (("own", OWN), ("shared", SHARED)):
        _, off = rl(tmp_path, model, name, **kind, **more)
        _, on = rl(
            tmp_path,
            model,
            f"{name}-on",
            **kind,
            **more,
            algorithm__advantage__bootstrap_truncated=True,
        )
        assert off[0]["truncated"] > 0.5, "the limit cuts most"
        assert on[0]["returns"] == off[0]["returns"], "a critic that begins at zero expects nothing"
        assert on[2]["returns"] > off[2]["returns"] + 0.01


def test_a_token_whose_log_probability_is_not_a_number_pays_no_kl() -> None:
    scorer: Any = Scorer(ref_logprobs=[-1.5, float("nan"), -0.5])
    group = RolloutGroup(TASK, [played(1.0, 3)])
    batch = make_experience(
        [group], algorithm(name="distill"), scorer, kl_coef=1.0, max_new_tokens=8, seed=0
    )
    assert batch.columns["advantages"] == pytest.approx([-0.5, 0, 0.5])


def test_remax_compares_with_the_greedy_rollout_shaped_in_the_same_way() -> None:
    section = algorithm(name="remax", stop_properly=0.5)
    cut = played(0.8, 3, finish="length")
    whole = played(0.8, 2)
    group = RolloutGroup(TASK, [cut, whole], greedy=played(1.0, 4, finish="length"))
    batch = make_experience([group], section, Scorer(), kl_coef=0.0, max_new_tokens=8, seed=0)  # type: ignore[arg-type]
    assert by_sample(batch) == pytest.approx([0.4 - 0.5, 0.8 - 0.5]), (
        "the greedy rollout is not learned from"
    )


def test_a_rollout_that_did_not_stop_properly_keeps_a_share_of_its_reward_or_gets_a_penalty() -> (
    None
):
    def advantages(coef: float) -> list[float]:
        rollouts = [played(1.0, 2), played(1.0, 2, finish="length")]
        section = algorithm(name="dr_grpo", stop_properly=coef)
        found = make_experience(
            [RolloutGroup(TASK, rollouts)], section, Scorer(), kl_coef=0, max_new_tokens=8, seed=0
        )  # type: ignore[arg-type]
        return by_sample(found)

    assert advantages(1.0) == [0, 0]
    assert advantages(0.4) == pytest.approx([0.3, -0.3])
    assert advantages(-1.0) == pytest.approx([1, -1])


def test_gdpo_standardises_each_reward_and_weighs_it() -> None:
    rewards: list[dict[str, float | None]] = [
        {"a": 0.0, "b": 5.0},
        {"a": 1.0, "b": 3.0},
        {"a": 0.0, "b": None},
    ]
    group = RolloutGroup(TASK, [played(0.0, 1, rewards=r) for r in rewards])

    def advantages(**weights: float) -> list[float]:
        section = algorithm(name="gdpo")
        found = make_experience(
            [group],
            section,
            Scorer(),
            kl_coef=0,
            max_new_tokens=8,
            seed=0,
            reward_weights=weights,  # type: ignore[arg-type]
        )
        return by_sample(found)

    only_a = np.array([-1, 2, -1]) / 3**0.5
    assert advantages(a=2.0, b=0.0) == pytest.approx(only_a, rel=1e-5)
    assert advantages(a=0.0, b=1.0) == pytest.approx([1, -1, 0], rel=1e-5)


def test_a_group_whose_greedy_rollout_failed_is_not_learned_from(
    tmp_path: Path, model: Path
) -> None:
    rl_settings(tmp_path, model)
    (tmp_path / "rewards.py").write_text(
        "def share(completions, prompts, **_):\n"
        "    lone = len(completions) == 1 and prompts[0] < '4'  # of a greedy rollout\n"
        "    return [float('nan') if lone else len(text) / 9 for text in completions]\n"
    )
    _, lines = rl(
        tmp_path, model, algorithm__name="remax", train__steps=1, rollout__prompts_per_step=12,
        reward__max_failed_share=1.0,
    )  # fmt: skip
    assert lines[0]["groups_kept"] == pytest.approx(6 / 12), (
        "prompts 0 to 3, 10 and 11 have no baseline"
    )
    assert lines[0]["rollouts"] == 48 and lines[0]["rollouts/failed"] == 0
    with pytest.raises(RewardError, match="6 of 60 rollouts failed"):
        rl(
            tmp_path,
            model,
            "strict",
            algorithm__name="remax",
            rollout__prompts_per_step=12,
            train__steps=1,
            reward__max_failed_share=0.05,
        )


def test_the_failed_share_is_of_all_rollouts_of_a_step(tmp_path: Path, model: Path) -> None:
    """The first group has no contrast; one of four rollouts fails in the group that replaces it."""
    rl_settings(tmp_path, model)
    (tmp_path / "rewards.py").write_text(
        "seen = []\n\n\n"
        "def share(completions, **_):\n"
        "    seen.append(0)\n"
        "    scores = [float(n % 2) for n in range(len(completions))]\n"
        "    if len(seen) == 1:\n"
        "        return [1.0 for _ in scores]\n"
        "    return [float('nan'), *scores[1:]] if len(seen) == 5 else scores\n"
    )
    settings = {"rollout__prompts_per_step": 4, "rollout__group_size": 4, "train__steps": 1}
    _, lines = rl(
        tmp_path, model, **settings, algorithm__dynamic_filter=True, reward__max_failed_share=0.1
    )
    assert lines[0]["rollouts/failed"] == pytest.approx(1 / 20) and lines[0][
        "groups_kept"
    ] == pytest.approx(4 / 5)


def test_oversampling_tries_more_prompts_at_once_and_trains_on_as_many_as_were_wanted(
    tmp_path: Path, model: Path
) -> None:
    rl_settings(tmp_path, model)
    checkpoint, lines = rl(
        tmp_path,
        model,
        algorithm__name="dapo",
        algorithm__overlong__buffer=4,
        rollout__prompts_per_step=3,
        rollout__oversample=2.0,
        reward__functions=[f"{tmp_path}/rewards.py:sometimes"],
        monitor__samples=20,
    )
    assert {line["rollouts"] / 4 for line in lines} >= {6.0}
    trained = read_metrics(checkpoint.parents[1] / "rollouts.jsonl")
    assert [len({t["group"] for t in trained if t["step"] == step}) for step in (1, 2, 3)] == [
        3,
        3,
        3,
    ]
