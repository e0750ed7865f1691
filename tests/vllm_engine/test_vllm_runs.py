"""Whole runs that sample with the real vLLM, in the trainer's process and in one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, write_lines
from tunesmith.records.doctor.findings import diagnose
from tunesmith.records.doctor.record import read_record
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

PLACES: dict[str, dict[str, Any]] = {
    "colocated": {"system__engine": "vllm"},
    "process": {"system__engine": "vllm", "system__engine_process": True},
}


def steps(folder: Path, model: Path, name: str, **changed: Any) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    outcome = assembly.run_rl(None, rl_settings(folder, model, name, **changed))
    return [line for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "grad_norm" in line]


@pytest.mark.parametrize("place", PLACES)
def test_log_probabilities_are_as_trained_and_groups_share_their_prompt(
    tmp_path: Path, model: Path, place: str
) -> None:
    prompts = [f"{n:02}: a prompt that is longer than one block:" for n in range(12)]
    data = write_lines(
        tmp_path / "long.jsonl", [{"prompt": prompt, "answer": "A"} for prompt in prompts]
    )
    lines = steps(tmp_path, model, place, data__train=str(data), **PLACES[place])
    assert len(lines) == 3
    for line in lines:
        assert line.get("canary", 0.0) <= 1e-3
        assert (
            line["policy_kl"] <= 0.5 * 1e-3**2
        )  # so much is d²/2 of log-probabilities that lie d apart
        assert line["ratio"] == pytest.approx(1.0, abs=1e-3)
        assert line["sampled_tokens"] > 0 and line["grad_norm"] > 0
        # All of a group but the first find one block of their prompt; the canary has read one
        # prompt for all four.
        assert (
            line["reused_prompt_tokens"] in (4 * 3 * 32, 4 * 3 * 32 + 32)
            and 0.5 < line["prefix_hit_share"] < 0.65
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_mixtures_take_new_experts(tmp_path: Path, family: str) -> None:
    """A learning rate that changes them much; the ratio is one only if the engine has all of it."""
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "intermediate_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    own = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else experts
    path = save_model(tmp_path / "model", family, vocab_size=261, **sizes, **own)
    lines = steps(tmp_path, path, family, train__lr=5e-2, **PLACES["process"])
    assert all(line["ratio"] == pytest.approx(1.0, abs=1e-3) for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)


def test_the_doctor_finds_that_prompts_are_not_shared(tmp_path: Path, model: Path) -> None:
    off = {"system__vllm__prefix_caching": False, "rollout__group_size": 4, **PLACES["colocated"]}
    steps(tmp_path, model, "off", **off)
    (finding,) = (
        f for f in diagnose(read_record(tmp_path / "off")) if f.key == "prompts_not_shared"
    )
    assert finding.change == ("system.vllm.prefix_caching = true",)


def test_greedy_completions_give_the_local_engines_first_gradient(
    tmp_path: Path, model: Path
) -> None:
    """The likeliest token each time (``top_k = 1``), so that every engine writes the same."""
    greedy: dict[str, Any] = {
        "rollout__top_k": 1,
        "rollout__group_size": 1,
        "rollout__prompts_per_step": 8,
        "train__steps": 1,
        "algorithm__name": "reinforce",
    }
    local, *others = (
        steps(tmp_path, model, name, **greedy, **place)[0]
        for name, place in {"local": {}, **PLACES}.items()
    )
    assert local["grad_norm"] > 1e-3
    for other in others:
        assert other["reward"] == local["reward"] and other["tokens"] == local["tokens"]
        assert other["grad_norm"] == pytest.approx(local["grad_norm"], rel=1e-4)
