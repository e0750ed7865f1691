"""Each trainer learns on given data: held-out thresholds on three seeds, from a model made of
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.long import again
from tests.support.tiny import save_model
from tests.support.tiny_preferences import RUNS, lines_of, preference_settings
from tests.support.tiny_runs import sft_settings, write_lines
from tunesmith.run import assembly

SEEDS = (0, again(1), again(2))


def learned(
    command: str, folder: Path, seed: int, **changed: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The evaluations before and after a run on 256 lines; the held-out prompts are others."""
    model = save_model(folder / "model", seed=seed)
    write_lines(folder / f"{command}.jsonl", lines_of(command, 256))
    write_lines(folder / f"{command}_held_out.jsonl", lines_of(command, 64, 300))
    settings = preference_settings(
        command,
        folder,
        model,
        train__batch_size=32,
        train__steps=60,
        eval__every=None,
        checkpoint__every=None,
        train__seed=seed,
        **changed,
    )
    evaluations = RUNS[command](None, settings).evaluations
    return evaluations[0], evaluations[-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_loss_falls(tmp_path: Path, seed: int) -> None:
    """From log 300 = 5.7 to no more than the answer's own uncertainty: the last digit is one of
    four."""
    model = save_model(tmp_path / "model", seed=seed)
    lines = [{"prompt": x["prompt"], "completion": x["chosen"]} for x in lines_of("dpo", 320)]
    data = write_lines(tmp_path / "d.jsonl", lines[:256])
    held_out = write_lines(tmp_path / "h.jsonl", lines[256:])
    settings = sft_settings(
        tmp_path,
        model,
        data__train=str(data),
        data__eval=str(held_out),
        train__batch_size=32,
        train__steps=60,
        train__lr=5e-3,
        train__seed=seed,
    )
    losses = [row["eval/loss"] for row in assembly.run_sft(None, settings).evaluations]
    assert losses[0] == pytest.approx(5.7, abs=0.3) and losses[-1] < 1.6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_model_tells_good_from_bad(tmp_path: Path, seed: int) -> None:
    before, after = learned("rm", tmp_path, seed)
    assert before["eval/accuracy"] == 0.5 and before["eval/loss"] == pytest.approx(0.693, abs=1e-3)
    assert (
        after["eval/accuracy"] >= 0.95 and after["eval/margin"] > 1.0 and after["eval/loss"] < 0.3
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_parts_the_two_answers(tmp_path: Path, seed: int) -> None:
    before, after = learned("dpo", tmp_path, seed)
    assert (
        before["eval/loss"] == pytest.approx(0.693, abs=1e-3) and abs(before["eval/margin"]) < 1e-4
    )
    assert after["eval/accuracy"] >= 0.95 and after["eval/margin"] > 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_kto_parts_good_answers_from_bad(tmp_path: Path, seed: int) -> None:
    before, after = learned("kto", tmp_path, seed, kto__beta=0.3)
    assert before["eval/loss"] == pytest.approx(0.5, abs=1e-3) and abs(before["eval/margin"]) < 1e-4
    assert after["eval/accuracy"] >= 0.9 and after["eval/margin"] > 1.0 and after["eval/loss"] < 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_reward_model_judges_steps(tmp_path: Path, seed: int) -> None:
    before, after = learned("prm", tmp_path, seed)
    assert 0.2 < before["eval/accuracy"] < 0.8
    assert after["eval/accuracy"] >= 0.9 and after["eval/loss"] < 0.25
