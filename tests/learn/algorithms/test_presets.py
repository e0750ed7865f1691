from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from tests.support.algorithms import algorithm, section
from tests.support.tiny_runs import rl_settings
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.families import KLInLoss, KLInReward, NoKL
from tunesmith.config.presets import NEEDS, PRESETS
from tunesmith.errors import ConfigError
from tunesmith.learn.algorithms.advantages import GAE, Estimator
from tunesmith.learn.algorithms.corrections import Correction, IcePop, TokenTruncate
from tunesmith.learn.algorithms.losses import GSPO, PPO, SAPO, Loss
from tunesmith.plan.derive.algorithm import resolve_algorithm
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly


def refused(**keys: object) -> str:
    with pytest.raises((ConfigError, ValidationError)) as error:
        algorithm(**keys)
    return str(error.value)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_resolves_with_a_reason_for_each_value_that_is_not_a_default(
    name: str,
) -> None:
    resolved, reasons = resolve_algorithm(section(name=name), max_new_tokens=100)
    assert PRESETS[name].source and PRESETS[name].text.endswith(".")
    assert resolved.needs <= NEEDS.keys() and all(reason for _, _, reason in reasons)
    assert {"algorithm.advantage", "algorithm.loss", "algorithm.aggregation"} <= {
        key for key, _, _ in reasons
    }
    said = {
        key
        for key, field in AlgorithmSection.model_fields.items()
        if getattr(resolved, key) != field.default
    }
    assert said - {"name"} == {key.split(".")[1] for key, _, _ in reasons}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_resolving_twice_changes_nothing(name: str) -> None:
    once = algorithm(name=name)
    written = AlgorithmSection.model_validate(once.model_dump())
    assert resolve_algorithm(written, max_new_tokens=7) == (once, [])


def test_what_some_presets_are() -> None:
    grpo = algorithm(name="grpo")
    dapo = algorithm(name="dapo", max_new_tokens=100)
    ppo = algorithm(name="ppo")
    assert (grpo.advantage.name, grpo.loss, grpo.aggregation) == (
        "grpo",
        PPO(),
        "seq_mean_token_mean",
    )
    assert (grpo.kl, grpo.dynamic_filter, grpo.overlong) == (NoKL(), False, False)
    assert (dapo.loss, dapo.aggregation) == (PPO(clip_high=0.28), "token_mean")
    assert (
        dapo.dynamic_filter
        and dapo.overlong
        and (dapo.overlong.buffer, dapo.overlong.factor) == (20, 1.0)
    )
    assert algorithm(name="dr_grpo").aggregation == "seq_mean_token_sum_norm"
    assert algorithm(name="gspo").loss == GSPO(clip_low=3e-4, clip_high=4e-4)
    assert (ppo.advantage, ppo.kl) == (GAE(gamma=1.0, gae_lambda=0.95), KLInReward(coef=0.01))


def test_what_is_said_stays_and_needs_no_reason() -> None:
    resolved, reasons = resolve_algorithm(
        section(name="dapo", loss__clip_high=0.4, dynamic_filter=False, overlong=False),
        max_new_tokens=100,
    )
    assert (resolved.loss, resolved.dynamic_filter, resolved.overlong) == (
        PPO(clip_high=0.4),
        False,
        False,
    )
    assert not {"algorithm.loss.clip_high", "algorithm.dynamic_filter"} & {
        key for key, _, _ in reasons
    }


def test_another_choice_brings_its_own_defaults() -> None:
    assert algorithm(name="dapo", loss="gspo").loss == GSPO()
    assert algorithm(name="dapo", loss="ppo").loss == PPO(clip_high=0.28)
    assert algorithm(name="dapo", loss__clip_low=0.1).loss == PPO(clip_low=0.1, clip_high=0.28)
    assert algorithm(loss={"type": "sapo", "tau_positive": 0.8}).loss == SAPO(tau_positive=0.8)
    assert algorithm(name="rloo", kl="loss").kl == KLInLoss()  # not the preset's coefficient or k1
    assert algorithm(name="rloo", kl__coef=0.1).kl == KLInReward(coef=0.1)
    assert algorithm(kl__coef=0.1).kl == KLInLoss(coef=0.1, estimator="k3")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": "drgrpo"}, "Did you mean 'dr_grpo'"),
        ({"loss__tau_positive": 2.0}, "the loss 'ppo' has no key tau_positive; it has clip_low"),
        ({"advantage__gae_lambda": 0.9}, "the advantage 'grpo' has no key gae_lambda; it has none"),
        (
            {"loss": {"type": "reinforce", "clip_low": 0.1}},
            "the loss 'reinforce' has no key clip_low",
        ),
        ({"kl": {"type": "none", "coef": 0.1}}, "the KL 'none' has no key coef"),
        ({"kl__horizon": 5}, "add target"),
        ({"correction__high": 3.0}, "type"),
        (
            {"correction": {"type": "token_truncate", "low": 0.5}},
            "'token_truncate' has no key low; it has high",
        ),
        (
            {"correction": {"type": "icepop", "low": 2.0, "high": 1.0}},
            "low = 2 has to be below high = 1",
        ),
        ({"dynamic_filter": {"low": 0.9, "high": 0.1}}, "low = 0.9 has to be below high = 0.1"),
        ({"reward_clip": (1.0, 0.0)}, "the lower bound comes first"),
    ],
)
def test_what_nothing_reads_cannot_be_written(keys: dict[str, object], words: str) -> None:
    assert words in refused(**keys)


def test_corrections() -> None:
    truncated = algorithm(correction="token_truncate")
    assert (truncated.decoupled, truncated.correction) == (True, TokenTruncate(high=2.0))
    assert algorithm(correction="icepop").correction == IcePop(low=0.5, high=5.0)
    assert "decoupled" in refused(correction="icepop", decoupled=False)
    assert algorithm(decoupled=True).correction.name == "none"
    stale, reasons = resolve_algorithm(section(), max_new_tokens=8, max_staleness=1)
    assert stale.correction == TokenTruncate() and stale.decoupled
    assert {"algorithm.correction", "algorithm.correction.high"} <= {key for key, _, _ in reasons}


@pytest.mark.parametrize("name", ["gdpo", "distill"])
@pytest.mark.parametrize(
    ("key", "value"), [("overlong", True), ("stop_properly", 0.5), ("reward_clip", (0.0, 1.0))]
)
def test_shaping_of_a_reward_that_the_estimator_does_not_read_is_refused(
    name: str, key: str, value: object
) -> None:
    assert f"algorithm.{key} would have no effect" in refused(name=name, **{key: value})
    assert not algorithm(name=name, overlong=False).overlong


def test_gdpo_takes_no_kl_in_the_reward() -> None:
    assert "algorithm.kl would have no effect" in refused(
        name="gdpo", kl__type="reward", kl__coef=0.1
    )
    assert algorithm(name="gdpo", kl__coef=0.1).kl == KLInLoss(coef=0.1)


@pytest.mark.parametrize("family", [Loss, Estimator, Correction])
def test_every_type_says_what_it_is(family: type[Loss | Estimator | Correction]) -> None:
    for name, kind in family.types.items():
        assert kind.name == name and kind.formula and kind.__doc__ and kind.use
        assert kind.needs <= NEEDS.keys()
        assert kind() == kind.chosen(kind().dumped())


def test_presets_load_without_torch() -> None:
    code = "import sys, tunesmith.config.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(n for n, p in PRESETS.items() if n != "distill"))
def test_every_preset_runs_from_end_to_end(tmp_path: Path, model: Path, name: str) -> None:
    rewards = [f"{tmp_path / 'rewards.py'}:{function}" for function in ("share", "sometimes")]
    settings = rl_settings(
        tmp_path,
        model,
        algorithm__name=name,
        train__steps=2,
        reward__functions=rewards,
        reward__weights=[1.0, 0.5],
        train__batch_size=8,
        train__lr=1e-2,
    )
    outcome = assembly.run_rl(None, settings)
    lines = read_metrics(outcome.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(
        line["grad_norm"] > 0 and line["nonfinite_tokens"] == 0 and line["optimizer_steps"] > 0
        for line in lines
    )
    start, end = (load_file(path / "model.safetensors") for path in (model, outcome.checkpoint))
    assert any(not end[key].equal(start[key]) for key in start)
    if "critic" in algorithm(name=name).needs:
        assert lines[-1]["value_loss"] > 0 and lines[-1]["critic/grad_norm"] > 0
        assert lines[0]["value_explained"] == 0 != lines[1]["value_explained"]
