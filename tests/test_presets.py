from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tiny import save_model
from tiny_runs import rl_settings
from tunesmith import assembly
from tunesmith.algorithms.advantages import ESTIMATORS, AdvantageParams
from tunesmith.algorithms.corrections import CORRECTIONS
from tunesmith.algorithms.losses import POLICY_LOSSES, LossParams
from tunesmith.algorithms.presets import NEEDS, PRESETS, algorithm_needs, resolve_algorithm
from tunesmith.config.schema import AlgorithmSection
from tunesmith.errors import ConfigError
from tunesmith.monitor.metrics import read_metrics


def section(**keys: object) -> AlgorithmSection:
    return AlgorithmSection.model_validate(keys)


def resolve(**keys: object) -> AlgorithmSection:
    return resolve_algorithm(section(**keys), max_new_tokens=100)[0]


def refused(**keys: object) -> str:
    with pytest.raises(ConfigError) as error:
        resolve_algorithm(section(**keys), max_new_tokens=100)
    return str(error.value)


def test_the_named_presets_exist() -> None:
    named = "ppo grpo dr_grpo dapo gspo rloo reinforce reinforce_pp reinforce_pp_baseline cispo vapo gepo"
    assert set(named.split()) <= set(PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_resolves_with_a_reason_for_each_key(name: str) -> None:
    found, reasons = resolve_algorithm(section(name=name), max_new_tokens=100)
    preset = PRESETS[name]
    assert preset.source and preset.description.endswith(".")
    assert preset.settings.keys() <= AlgorithmSection.model_fields.keys()
    assert preset.needs <= NEEDS.keys() and algorithm_needs(found) == preset.needs
    for key, value in preset.settings.items():
        assert getattr(found, key) == value
    for key, value, reason in reasons:
        assert getattr(found, key.removeprefix("algorithm.")) == value
        assert reason
    changed = {k for k in AlgorithmSection.model_fields if getattr(found, k) != getattr(section(name=name), k)}
    assert changed == {key.removeprefix("algorithm.") for key, _, _ in reasons}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_resolving_twice_changes_nothing(name: str) -> None:
    once = resolve(name=name)
    assert resolve_algorithm(once, max_new_tokens=7) == (once, [])
    written = {k: v for k, v in once.model_dump().items() if v is not None}
    assert resolve(**written) == once


def test_what_some_presets_are() -> None:
    grpo, dapo = resolve(name="grpo"), resolve(name="dapo")
    assert (grpo.advantage, grpo.loss, grpo.aggregation) == ("grpo", "ppo", "seq_mean_token_mean")
    assert (grpo.clip_low, grpo.clip_high, grpo.kl_coef, grpo.dynamic_filter) == (0.2, 0.2, 0.0, False)
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token_mean")
    assert (dapo.overlong_buffer, dapo.overlong_factor, dapo.dynamic_filter) == (20, 1.0, True)
    dr = resolve(name="dr_grpo")
    assert (dr.advantage, dr.aggregation) == ("dr_grpo", "seq_mean_token_sum_norm")
    gspo = resolve(name="gspo")
    assert (gspo.loss, gspo.clip_low, gspo.clip_high) == ("gspo", 3e-4, 4e-4)
    ppo = resolve(name="ppo")
    assert (ppo.gamma, ppo.gae_lambda, ppo.value_clip, ppo.kl_in) == (1.0, 0.95, 0.5, "reward")
    assert resolve(name="reinforce_pp").kl_estimator == "k1"


def test_what_is_said_stays_and_needs_no_reason() -> None:
    found, reasons = resolve_algorithm(
        section(name="dapo", clip_high=0.4, dynamic_filter=False, overlong_buffer=0), max_new_tokens=100
    )
    assert (found.clip_high, found.dynamic_filter, found.overlong_buffer) == (0.4, False, 0)
    assert found.overlong_factor is None
    assert not {"algorithm.clip_high", "algorithm.dynamic_filter"} & {key for key, _, _ in reasons}


def test_another_loss_brings_its_own_bounds() -> None:
    found = resolve(name="dapo", loss="gspo")
    assert (found.clip_low, found.clip_high) == (3e-4, 4e-4)
    assert (resolve(name="grpo", advantage="reinforce").gamma) == 1.0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": "drgrpo"}, "Did you mean 'dr_grpo'"),
        ({"loss": "pppo"}, "algorithm.loss: there is no 'pppo'. Did you mean 'ppo'"),
        ({"advantage": "zzz"}, "Valid: "),
    ],
)
def test_unknown_names(keys: dict[str, object], words: str) -> None:
    assert words in refused(**keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tau_positive": 2.0}, "the loss 'ppo' does not read it"),
        ({"gae_lambda": 0.9}, "the advantage 'grpo' does not read it"),
        ({"loss": "reinforce", "clip_low": 0.1}, "the loss 'reinforce' does not read it"),
        ({"kl_in": "reward"}, "kl_coef is 0"),
        ({"kl_coef": 0.1, "kl_horizon": 5}, "there is no kl_target"),
        ({"reference_every": 5}, "kl_coef is 0"),
        ({"overlong_factor": 2.0}, "overlong_buffer is 0"),
        ({"filter_low": 0.2}, "dynamic_filter is off"),
        ({"rest_epochs": 2}, "dynamic_filter is off"),
        ({"correction_high": 3.0}, "the correction 'none' does not read it"),
        ({"correction": "token_truncate", "correction_low": 0.5}, "'token_truncate' does not read it"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(keys: dict[str, object], words: str) -> None:
    message = refused(**keys)
    assert "would have no effect" in message and words in message


def test_kl_estimators_that_cannot_work_are_refused() -> None:
    message = refused(kl_coef=0.1, kl_in="loss", kl_estimator="k1")
    assert "expected gradient of zero" in message and "k1+" in message
    assert "a reward has none" in refused(kl_coef=0.1, kl_in="reward", kl_estimator="k3+")
    assert resolve(kl_coef=0.1).kl_estimator == "k3"
    assert resolve(kl_coef=0.1, kl_in="reward").kl_estimator == "k1"
    assert resolve(name="rloo", kl_in="loss").kl_estimator == "k3"  # not the preset's k1
    assert resolve(kl_coef=0.1, kl_target=0.05).kl_horizon == 10_000


def test_corrections() -> None:
    found = resolve(correction="token_truncate")
    assert (found.decoupled, found.correction_low, found.correction_high) == (True, None, 2.0)
    assert "decoupled" in refused(correction="icepop", decoupled=False)
    assert "below" in refused(correction="icepop", correction_low=2.0, correction_high=1.0)
    assert resolve(decoupled=True).correction == "none"
    for name, entry in CORRECTIONS.items():
        assert {k: getattr(resolve(correction=name), k) for k in entry.settings} == entry.settings


@pytest.mark.parametrize("key", ["overlong_buffer", "stop_properly", "reward_clip"])
def test_gdpo_refuses_shaping_which_its_rewards_one_by_one_do_not_see(key: str) -> None:
    value = {"overlong_buffer": 10, "stop_properly": 0.5, "reward_clip": (0.0, 1.0)}[key]
    assert "takes each reward as it is given" in refused(name="gdpo", **{key: value})
    assert "takes each reward" in refused(name="gdpo", kl_coef=0.1, kl_in="reward")
    assert resolve(name="gdpo", kl_coef=0.1, kl_in="loss", overlong_buffer=0).kl_estimator == "k3"


@pytest.mark.parametrize("key", ["overlong_buffer", "stop_properly", "reward_clip"])
def test_distillation_refuses_shaping_of_a_reward_that_it_does_not_read(key: str) -> None:
    value = {"overlong_buffer": 10, "stop_properly": 0.5, "reward_clip": (0.0, 1.0)}[key]
    assert "reads no rollout's reward" in refused(name="distill", **{key: value})
    assert resolve(name="distill", overlong_buffer=0).kl_in == "reward"


def test_registries_name_real_settings() -> None:
    """Each key of a loss or estimator is a setting, and a field of what the function is given."""
    # Read by the columns, the critic and where the outcomes are made.
    outside = {"cov_share", "cov_low", "cov_high", "value_clip", "bootstrap_truncated"}
    for registry, params in ((POLICY_LOSSES, LossParams), (ESTIMATORS, AdvantageParams)):
        for name, entry in registry.items():
            assert name == entry.name and entry.formula and entry.source and entry.fn.__doc__
            assert entry.needs <= NEEDS.keys()
            assert entry.settings.keys() <= AlgorithmSection.model_fields.keys()
            assert entry.settings.keys() <= params.__dataclass_fields__.keys() | outside


def test_presets_load_without_torch() -> None:
    code = "import sys, tunesmith.algorithms.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", sorted(n for n, p in PRESETS.items() if "teacher" not in p.needs))
def test_every_preset_runs_from_end_to_end(tmp_path: Path, model: Path, name: str) -> None:
    rewards = [f"{tmp_path / 'rewards.py'}:{function}" for function in ("share", "sometimes")]
    settings = rl_settings(
        tmp_path, model, algorithm__name=name, train__steps=2, reward__functions=rewards, reward__weights=[1.0, 0.5],
        train__batch_size=8, train__lr=1e-2,
    )  # fmt: skip
    outcome = assembly.run_rl(None, settings)
    lines = read_metrics(outcome.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(
        line["grad_norm"] > 0 and line["nonfinite_tokens"] == 0 and line["optimizer_steps"] > 0 for line in lines
    )
    start, end = (load_file(path / "model.safetensors") for path in (model, outcome.checkpoint))
    assert any(not end[key].equal(start[key]) for key in start)
    if "critic" in PRESETS[name].needs:
        assert lines[-1]["value_loss"] > 0 and lines[-1]["critic/grad_norm"] > 0
        assert lines[0]["value_explained"] == 0 != lines[1]["value_explained"]
