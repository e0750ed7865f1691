"""The doctor finds each disease in a run's files, and none in a healthy run's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.tiny_runs import write_lines
from tunesmith.cli.main import app
from tunesmith.errors import ConfigError
from tunesmith.guide.explain.settings import settings_of
from tunesmith.records.doctor import nothing_learned
from tunesmith.records.doctor.answers import ROUND, RUN, yield_findings
from tunesmith.records.doctor.findings import RULES, diagnose
from tunesmith.records.doctor.record import read_record
from tunesmith.records.doctor.rules import Finding, Rule
from tunesmith.records.facts import RunFacts, write_facts
from tunesmith.records.standing import Standing

ALL: tuple[Rule[Any], ...] = (*RULES, *RUN, *ROUND, *nothing_learned.RULES)
STEPS = 30
Column = float | Callable[[int], float]

RL = {
    "rollout.group_size": 8,
    "rollout.prompts_per_step": 8,
    "rollout.max_new_tokens": 64,
    "rollout.max_staleness": 0,
    "train.lr": 1e-6,
    "train.batch_size": 64,
    "train.max_grad_norm": 1.0,
    "train.steps": STEPS,
    "algorithm.loss": "ppo",
    "system.device": "cuda",
    "system.engine": "vllm",
    "system.kv_memory": "4GB",
    "system.max_running": 256,
    "eval.every": 5,
    "critic.lr": 1e-5,
}
HEALTHY_RL: Mapping[str, Column] = {
    "loss": lambda n: 0.1 / n,
    "reward": lambda n: 0.3 + 0.01 * n,
    "reward/std": 0.4,
    "rollouts": 64,
    "correct": 0.4,
    "groups_equal": 0.3,
    "entropy": lambda n: 0.6 - 0.01 * n,
    "grad_norm": 0.5,
    "optimizer_steps": 1,
    "skipped_steps": 0,
    "completion_tokens": 30,
    "completion_tokens_max": 60,
    "truncated": 0.02,
    "policy_kl": 0.001,
    "clip_low": 0.01,
    "clip_high": 0.01,
    "seconds": 10,
    "seconds/rollout": 4,
    "seconds/train": 5,
    "seconds/sync": 0.5,
    "idle/engine": 0.4,
    "kv_used": 0.6,
    "prefix_hit_share": 0.6,
    "rollouts/failed": 0,
    "canary": 0.01,
    "memory/host_peak": 2e9,
    "ref_kl": lambda n: 0.001 * n,
}
SFT = {"train.lr": 1e-5, "train.steps": STEPS, "train.max_grad_norm": 1.0, "eval.every": 5}
HEALTHY_SFT: Mapping[str, Column] = {
    "loss": lambda n: 2 - 0.04 * n, "grad_norm": 0.8, "optimizer_steps": 1, "skipped_steps": 0,
    "epoch": lambda n: n / 15, "seconds": 1.0, "seconds/train": 0.9,
}  # fmt: skip


def rising(first: float, last: float) -> Callable[[int], float]:
    return lambda n: first + (last - first) * (n - 1) / (STEPS - 1)


def once(usual: float, step: int, value: float) -> Callable[[int], float]:
    return lambda n: value if n == step else usual


CASES: dict[str, tuple[dict[str, Column], dict[str, Any]]] = {
    "not_finite": ({"skipped_steps": lambda n: n % 3 == 0}, {}),
    "steps_dropped": ({"skipped_steps": once(0, 7, 1)}, {}),
    "tokens_not_finite": ({"nonfinite_tokens": once(0, 7, 3)}, {}),
    "spikes": ({"grad_norm": lambda n: 40 if n > 10 and n % 6 == 0 else 0.5}, {}),
    "spike": ({"grad_norm": once(0.5, 20, 40)}, {}),
    "always_clipped": ({"grad_norm": 30}, {}),
    "rollouts_fail": ({"rollouts/failed": 0.4, "rollouts/reward_error": 0.4}, {}),
    "some_rollouts_fail": ({"rollouts/failed": 0.1, "rollouts/timeout": 0.1}, {}),
    "judge_fails": ({"judge/a/failed": 0.3, "rollouts/failed": 0.3, "rollouts/x": 0.3}, {}),
    "judge_disagrees": ({"judge/a/agreement": 0.4, "judge/b/agreement": 0.9}, {}),
    "reward_threads_hang": ({"reward/abandoned_threads": 2}, {}),
    "no_answer_found": ({"answered": 0.2}, {}),
    "truncated": ({"truncated": rising(0.1, 0.6)}, {}),
    "constant_reward": ({"reward/a/std": 0.3, "reward/b/std": 0, "reward/b/mean": 0}, {}),
    "saturated_reward": ({"reward/a/std": 0.3, "reward/b/std": 0, "reward/b/mean": 1}, {}),
    "few_contrasts": ({"groups_equal": 0.9, "correct": 0.05}, {}),
    "too_easy": ({"groups_equal": 0.9, "correct": 0.92}, {}),
    "solved": ({"groups_equal": 0.9, "correct": rising(0.3, 0.95)}, {}),
    "reward_flat": ({"reward": 0.3, "entropy": 0.6}, {}),
    "loss_flat": ({"loss": lambda n: 2 - 0.001 * n}, {"sft": True, "facts": {"reach": 1e-5}}),
    "many_small_steps": ({"optimizer_steps": 32}, {"train.batch_size": 2}),
    "long_warmup": ({}, {"train.warmup_steps": 25}),
    "too_long_left_out": ({}, {"facts": {"too_long": 0.2}}),
    "bad_lines_left_out": ({}, {"facts": {"bad": 0.2}}),
    "one_source_dominates": ({}, {"facts": {"source_share": 0.97}}),
    "seen_in_training": ({}, {"facts": {"seen": 0.2}}),
    "evaluated_on_training": ({}, {"facts": {"seen": 1.0}, "environment.path": "games.py:Game"}),
    "repeated_data": ({}, {"facts": {"repeated": 0.3}}),
    "many_epochs": ({"epoch": rising(0, 20)}, {"sft": True}),
    "eval_too_small": ({}, {"facts": {"eval_size": 20}, "eval/accuracy": [0.4, 0.5]}),
    "entropy_collapse": ({"entropy": rising(0.6, -0.05)}, {}),
    "collapsed_experts": (
        {
            "experts/entropy": rising(0.9, 0.4),
            "experts/load_max": rising(2, 8),
            "experts/dead": 0.1,
        },
        {},
    ),
    "entropy_explosion": ({"entropy": rising(0.5, 4), "reward": 0.3}, {}),
    "length_explosion": ({"completion_tokens": rising(10, 60), "reward": 0.3}, {}),
    "length_is_rewarded": (
        {"completion_tokens": rising(10, 40), "truncated": rising(0, 0.9)},
        {"rollouts": True},
    ),
    "longer_scores_higher": ({"completion_tokens": rising(10, 40)}, {"rollouts": True}),
    "reward_hacking": ({}, {"eval/reward": [0.3, 0.5, 0.2, 0.2]}),
    "policy_drifts": ({"ref_kl": rising(0.01, 3)}, {}),
    "large_updates": ({"policy_kl": 0.4, "optimizer_steps": 4}, {}),
    "much_clipped": ({"clip_low": 0.2, "clip_high": 0.2}, {}),
    "stale_weights": ({"policy_kl": rising(0, 0.3)}, {}),
    "sampler_disagrees": ({"policy_kl": 0.05}, {}),
    "too_stale": ({"staleness/mean": 3.9}, {"rollout.max_staleness": 4}),
    "critic_useless": ({"value_explained": -0.5}, {}),
    "critic_explains_nothing": ({"value_explained": 0.0}, {}),
    "overfitting": ({}, {"sft": True, "eval/loss": [1.5, 1.2, 1.6]}),
    "loss_spike": ({"loss": lambda n: 9 if n == 20 else 2 - 0.04 * n}, {"sft": True}),
    "no_preference": ({"accuracy": 0.5, "margin": 0.01}, {"sft": True}),
    "chosen_unlikelier": (
        {
            "accuracy": 0.9,
            "margin": 2,
            "rewards/chosen": rising(0, -4),
            "rewards/rejected": rising(0, -6),
        },
        {"sft": True},
    ),
    "greedy_differs": ({"correct": 0.1}, {"eval/accuracy": [0.8, 0.8], "eval.samples": 1}),
    "stopped_early": ({}, {"train.steps": 100}),
    "far_from_limit": ({"limit_share": 0.05}, {}),
    "stragglers": ({"seconds/rollout": 8, "completion_tokens_max": 200}, {}),
    "slow_reward": ({"waiting/reward": 0.4}, {}),
    "slow_environment": ({"waiting/environment": 0.4}, {}),
    "engines_idle": ({"idle/engine": 0.8, "seconds/train": 8}, {"system.engine_process": True}),
    "trainer_waits": ({"seconds/rollout": 9, "idle/engine": 0.1}, {"system.engine": "local"}),
    "preempted": ({"preemptions": 4}, {}),
    "prompts_not_shared": ({"prefix_hit_share": 0.0}, {}),
    "slow_sync": ({"seconds/sync": 4}, {}),
    "slow_checkpoints": ({"seconds/checkpoint": 4}, {}),
    "slow_evaluation": ({"seconds/eval": 6}, {}),
    "too_many_threads": ({}, {"facts": {"threads_per_core": 4.0}, "system.threads": 8}),
    "busy_machine": ({"machine/others": 0.6}, {}),
    "drafts_rejected": ({"draft_acceptance": 0.1}, {}),
    "engines_lost": ({"engines": lambda n: 4 - (n > 20)}, {}),
    "slow_engine": (
        {f"idle/engine/{n}": 0.4 for n in range(3)}
        | {f"engine_tokens_per_second/{n}": 900 + 900 * (n != 1) for n in range(3)},
        {},
    ),
    "uneven_engines": ({"idle/engine/0": 0.1, "idle/engine/1": 0.8}, {}),
    "slow_rank": (
        {f"rank_busy/{n}": 0.6 if n == 2 else 0.3 for n in range(4)}
        | {f"rank_waiting/{n}": 0.0 if n == 2 else 0.3 for n in range(4)},
        {"system.max_tokens_per_microbatch": 8192},
    ),
    "memory_retries": ({"memory_retries": once(0, 7, 1)}, {}),
    "host_memory_grows": ({"memory/host_peak": rising(2e9, 9e9)}, {}),
    "kv_unused": ({"kv_used": 0.02}, {}),
}


def test_a_machine_that_was_busy_for_a_while(tmp_path: Path) -> None:
    """Also if the mean over the whole run is small; with how much slower its steps were."""
    columns: dict[str, Column] = {
        "machine/others": lambda n: 0.6 if n > 20 else 0.02,
        "seconds": lambda n: 25.0 if n > 20 else 10.0,
    }
    [finding] = found(write_run(tmp_path / "a", columns)).values()
    assert finding.key == "busy_machine"
    assert all(number in finding.numbers for number in ("21%", "60%", " 2.5 "))
    columns["machine/others"] = lambda n: 0.6 if n > 24 else 0.02
    assert found(write_run(tmp_path / "b", columns)) == {}


def test_an_engine_with_few_requests_is_not_called_slow(tmp_path: Path) -> None:
    columns: dict[str, Column] = {"idle/engine/0": 0.3, "idle/engine/1": 0.6}
    columns |= {"engine_tokens_per_second/0": 1800, "engine_tokens_per_second/1": 900}
    assert found(write_run(tmp_path, columns)) == {}


YIELD = {
    "questions": 200,
    "solved": 150,
    "samples": 800,
    "correct": 300,
    "kept": 250,
    "correct_share": [0.375],
}
"""The counts of a healthy round."""
ANSWERS: dict[str, dict[str, Any]] = {
    "run_failed": {"state": "failed", "error": "RewardError: no"},
    "run_stopped": {"state": "stopped"},
    "few_kept": {"yield": {"solved": 3, "correct": 4, "kept": 4}},
    "low_yield": {"yield": {"solved": 80, "correct": 80, "kept": 80}},
    "nearly_all_right": {"yield": {"correct": 799}},
    "answers_not_found": {"yield": {"answered_share": [0.2, 0.1, 0.3]}},
    "accuracy_fell": {"before": [0.5, 0.45, 0.55], "after": [0.3, 0.25, 0.35]},
    "greedy_answers_differ": {"before": [0.8, 0.75, 0.85]},
    "answers_fail": {"rollouts/failed": 0.05},
    "answers_cut_off": {"truncated": 0.4},
}
"""What is wrong with runs of batch inference and RFT."""


def write_answers(path: Path, case: Mapping[str, Any]) -> Path:
    """The directory of an RFT run of 200 questions with 4 samples each."""
    columns = {name: case.get(name, 0.0) for name in ("rollouts/failed", "truncated")}
    path.mkdir(exist_ok=True)
    write_lines(
        path / "metrics.jsonl",
        [{"step": n, "completions": 40, **columns} for n in range(10, 201, 10)],
    )
    settings = {
        "sampling.n": 4,
        "sampling.max_new_tokens": 64,
        "train.batch_size": 64,
        "train.lr": 1e-5,
    }
    document = {
        "settings": {key: {"value": value, "source": "said"} for key, value in settings.items()}
    }
    (path / "resolved.json").write_text(json.dumps(document))
    standing = Standing("rft", case.get("state", "done"), 200, 200, case.get("error"))
    (path / "state.json").write_text(json.dumps(asdict(standing)))
    made = {"base/evaluation": {"accuracy": case["before"]} if "before" in case else None}
    made["round-1/yield"] = {**YIELD, **case.get("yield", {})}
    made["round-1/evaluation"] = {"accuracy": case["after"]} if "after" in case else None
    for name, content in made.items():
        if content is not None:
            (path / name).parent.mkdir(exist_ok=True)
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("key", ANSWERS)
def test_what_is_wrong_with_answers_is_found(tmp_path: Path, key: str) -> None:
    [finding] = found(write_answers(tmp_path, ANSWERS[key])).values()
    assert finding.key == key
    assert not re.search(r"\?|\bnan\b", finding.numbers), "each number is known"


def test_healthy_answers(tmp_path: Path) -> None:
    assert found(write_answers(tmp_path, {})) == {}
    assert sorted(ANSWERS) == sorted(rule.key for rule in (*RUN, *ROUND))


def test_answers_without_a_line_of_metrics_are_judged_too(tmp_path: Path) -> None:
    path = write_answers(tmp_path, ANSWERS["run_failed"])
    (path / "metrics.jsonl").unlink()
    assert list(found(path)) == ["run_failed"]


@pytest.mark.parametrize(
    ("correct", "kept", "keys", "advised"),
    [
        (
            4,
            4,
            ["few_kept"],
            None,
        ),  # 1.7 % of 240: hundreds of samples per question would be needed
        (60, 60, ["few_kept"], 5),
        (64, 64, [], None),
        (200, 64, [], None),
    ],
)
def test_a_yield_is_judged_by_batch_and_questions(
    correct: int, kept: int, keys: list[str], advised: int | None
) -> None:
    counts = {
        "questions": 60,
        "solved": min(correct, 50),
        "samples": 240,
        "correct": correct,
        "kept": kept,
    }
    findings = yield_findings(counts, 4, 64, "round-1")
    assert [finding.key for finding in findings] == keys
    changes = [change for finding in findings for change in finding.change]
    assert changes == ([] if advised is None else [f"sampling.n = {advised}"])


def write_run(path: Path, columns: Mapping[str, Column], sft: bool = False, **changed: Any) -> Path:
    """A run's directory; ``changed`` are settings, and lists of values of evaluations."""
    facts = changed.pop("facts", {})
    rollouts = changed.pop("rollouts", False)
    table: dict[str, Column] = {**(HEALTHY_SFT if sft else HEALTHY_RL), **columns}
    path.mkdir(exist_ok=True)
    lines = [
        {"step": n, **{name: float(c(n)) if callable(c) else c for name, c in table.items()}}
        for n in range(1, STEPS + 1)
    ]
    held_out = {name: changed.pop(name) for name in list(changed) if name.startswith("eval/")}
    for name, values in held_out.items():
        lines += [
            {"step": 1 + n * STEPS // len(values), name: value} for n, value in enumerate(values)
        ]
    write_lines(path / "metrics.jsonl", lines)
    settings = {**(SFT if sft else RL), **changed}
    document = {
        "settings": {key: {"value": value, "source": "said"} for key, value in settings.items()}
    }
    (path / "resolved.json").write_text(json.dumps(document))
    write_facts(RunFacts(rollouts=not sft, train_size=100, **{"eval_size": 500, **facts}), path)
    if rollouts:
        rows = [
            {"kind": "train", "step": 1, "group": n // 8, "tokens": n % 8, "reward": n % 8 / 8}
            for n in range(64)
        ]
        write_lines(path / "rollouts.jsonl", rows)
    return path


def found(path: Path) -> dict[str, Finding]:
    return {finding.key: finding for finding in diagnose(read_record(path))}


@pytest.mark.parametrize("key", CASES)
def test_a_disease_is_found(tmp_path: Path, key: str) -> None:
    columns, changed = CASES[key]
    findings = found(write_run(tmp_path, columns, **changed))
    assert list(findings) == [key]
    finding = findings[key]
    assert re.search(r"\d", finding.numbers + " ".join(finding.change))
    assert not re.search(r"\?|\bnan\b", finding.numbers), "each number is known"
    [rule] = (rule for rule in RULES if rule.key == key)
    assert [change.partition(" = ")[0] for change in finding.change] == [
        change.key for change in rule.change
    ]


def test_every_rule_has_a_case() -> None:
    assert [rule.key for rule in RULES] == list(CASES)


def test_what_a_rule_explains_are_findings() -> None:
    keys = {rule.key for rule in ALL}
    assert {key for rule in ALL for key in rule.explains} <= keys
    assert all(rule.cause and rule.effect for rule in ALL)


@pytest.mark.parametrize("sft", [False, True])
def test_a_healthy_run(tmp_path: Path, sft: bool) -> None:
    assert found(write_run(tmp_path, {}, sft=sft)) == {}


def test_changes_are_settings() -> None:
    known = {setting.key for setting in settings_of("")}
    for rule in ALL:
        for change in rule.change:
            assert change.key in known or change.key.rpartition(".")[0] in known, (
                rule.key,
                change.key,
            )


def test_what_nothing_was_learned_from_comes_first(tmp_path: Path) -> None:
    path = write_run(
        tmp_path, {"reward": 0, "reward/std": 0, "correct": 0, "groups_equal": 1, "truncated": 0.5}
    )
    findings = diagnose(read_record(path))
    assert [finding.key for finding in findings] == ["always_wrong", "truncated"]
    assert findings[0].severity == "problem"


def test_the_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    finding = found(write_run(tmp_path, {"truncated": rising(0.1, 0.7)}))["truncated"]
    first, last = (
        sum(0.1 + 0.6 * n / 29 for n in steps) / 6 for steps in (range(6), range(24, 30))
    )
    assert f"{first:.0%}" in finding.numbers and f"{last:.0%}" in finding.numbers
    assert finding.change[0] == "rollout.max_new_tokens = 128"


def test_exit_codes_and_json(tmp_path: Path) -> None:
    runner = CliRunner()
    ill = write_run(tmp_path / "ill", {"truncated": 0.9})
    answer = runner.invoke(app, ["doctor", str(ill), "--json"])
    assert answer.exit_code == 3
    assert json.loads(answer.stdout)["findings"][0] == json.loads(
        json.dumps(asdict(found(ill)["truncated"]))
    )
    assert runner.invoke(app, ["doctor", str(write_run(tmp_path / "well", {}))]).exit_code == 0
    noted = write_run(tmp_path / "noted", {"grad_norm": 30})
    assert runner.invoke(app, ["doctor", str(noted)]).exit_code == 0


def test_a_run_that_was_killed_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, {"truncated": 0.9})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": null, "trunc')
    (path / "resolved.json").write_text('{"version": 9}')
    (path / "facts.json").write_text('{"of another": "version"}')
    finding = found(path)["truncated"]
    assert finding.change == () and "?" in finding.numbers, "the setting is not known"
    (path / "resolved.json").unlink()
    assert read_record(path).settings == {} and len(read_record(path).steps) == STEPS


def test_odd_files_are_read(tmp_path: Path) -> None:
    """As another version, or a hand, may have written them."""
    path = write_run(
        tmp_path, {"truncated": 0.9}, **{"train.steps": "many", "rollout.max_staleness": "two"}
    )
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"eval/reward": 0.5}\n[1]\n{"step": "x"}\n')
    assert list(found(path)) == ["truncated"]


def test_changes_that_cannot_be_made_are_left_out(tmp_path: Path) -> None:
    one = found(write_run(tmp_path / "one", {"preemptions": 4}, **{"system.max_running": 1}))
    assert one["preempted"].change == ()
    first = found(write_run(tmp_path / "first", {}, sft=True, **{"eval/loss": [1.2, 1.5, 1.6]}))
    assert [change.partition(" ")[0] for change in first["overfitting"].change] == [
        "train.steps",
        "eval.metric",
    ]


@pytest.mark.parametrize(
    ("key", "changed", "advice"),
    [
        ("slow_reward", {"reward.isolation": "process"}, ["rollout.max_staleness = 1"]),
        ("slow_reward", {"rollout.max_staleness": 2}, ['reward.isolation = "process"']),
        ("slow_sync", {"rollout.max_staleness": 1}, []),
        ("entropy_collapse", {"algorithm.loss": "gspo"}, ["train.lr = 5e-07"]),
        ("entropy_collapse", {"algorithm.loss.clip_high": 0.3}, ["train.lr = 5e-07"]),
        (
            "policy_drifts",
            {"algorithm.kl.coef": 0.001},
            ["algorithm.kl.coef = 0.01", "train.lr = 5e-07"],
        ),
        (
            "policy_drifts",
            {"algorithm.kl.coef": 0.05},
            ["algorithm.kl.coef = 0.1", "train.lr = 5e-07"],
        ),
        ("much_clipped", {"train.passes_per_batch": 1}, ["train.lr = 5e-07"]),
        ("slow_checkpoints", {"checkpoint.minutes": 60}, ["checkpoint.minutes = 120"]),
    ],
)
def test_advice_goes_on_from_what_is_set(
    tmp_path: Path, key: str, changed: dict[str, Any], advice: list[str]
) -> None:
    columns, before = CASES[key]
    finding = found(write_run(tmp_path, columns, **{**before, **changed}))[key]
    assert list(finding.change) == advice


def test_the_steps_of_a_finding_are_those_of_its_numbers(tmp_path: Path) -> None:
    steps = {
        key: found(write_run(tmp_path / key, *CASES[key][:1], **CASES[key][1]))[key].steps
        for key in ("constant_reward", "much_clipped", "too_easy", "critic_useless")
    }
    assert steps == {
        "constant_reward": "1-30",
        "much_clipped": "1-30",
        "too_easy": "25-30",
        "critic_useless": "25-30",
    }


@pytest.mark.parametrize("kind", ["missing", "empty", "no step", "runs"])
def test_what_is_no_run_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "no step":
        write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "eval/reward": 1.0}])
    if kind == "runs":
        (tmp_path / "a-1").mkdir()
        write_lines(tmp_path / "a-1" / "metrics.jsonl", [])
    with pytest.raises(ConfigError) as error:
        read_record(tmp_path / "no" if kind == "missing" else tmp_path)
    assert kind != "runs" or "a-1" in str(error.value)


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    """Of another program, or of a damaged file."""
    path = write_run(tmp_path, {})
    with (path / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 1e400}\n{"step": NaN}\n{"step": {"a": 1}}\n[1]\n'
            '{"step": 999, "reward": Infinity}\n'
        )
    record = read_record(path)
    assert [line["step"] for line in record.steps][-2:] == [
        STEPS,
        999,
    ] and "reward" not in record.steps[-1]
    assert not {finding.severity for finding in diagnose(record)} & {"problem"}
