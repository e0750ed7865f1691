"""The average of the weights, and a reference that follows the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.tiny_runs import rl_settings, sft_settings, sums, write_lines
from tests.support.training import whole
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.models.causal_lm import CausalLM
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample


def step(backend: TorchBackend[Any]) -> dict[str, torch.Tensor]:
    """Take one; the weights after it, as the optimizer keeps them."""
    backend.forward_backward(
        whole([Sample([5, 9, 30, 77], [False, False, True, True])]), SFTObjective()
    )
    backend.step(1e-2)
    return {name: m.detach().clone() for name, m in backend.optimizer.masters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_follows_each_step_in_float32(model: Path, dtype: torch.dtype) -> None:
    backend = TorchBackend(
        CausalLM.load(model, dtype=dtype), AdamWSettings(), CausalLM.predict, ema_decay=0.75
    )
    expected = {name: m.detach().clone() for name, m in backend.optimizer.masters.items()}
    for _ in range(3):
        weights = step(backend)
        expected = {name: 0.75 * t + 0.25 * weights[name] for name, t in expected.items()}
    assert all(t.dtype == torch.float32 for t in backend.optimizer.average.values())
    for name, average in backend.optimizer.average.items():
        torch.testing.assert_close(average, expected[name])
    module = backend.model.module
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(KeyError), backend.ema_weights():
        inside = {name: t.clone() for name, t in module.named_parameters()}
        raise KeyError
    assert all(t.equal(backend.optimizer.average[name].to(dtype)) for name, t in inside.items())
    assert all(t.equal(before[name]) for name, t in module.state_dict().items()), (
        "bitwise as it was"
    )


@pytest.mark.more
def test_the_saved_average_is_the_model_that_was_evaluated(tmp_path: Path, model: Path) -> None:
    held_out = str(write_lines(tmp_path / "held_out.jsonl", sums(6, 40)))
    more = {"data__eval": held_out, "train__lr": 3e-2}
    outcome = assembly.run_rl(
        None,
        rl_settings(
            tmp_path, model, train__ema_decay=0.6, eval__use_ema=True, eval__at_start=False, **more
        ),
    )
    average = outcome.checkpoint.with_name("ema")
    AutoModelForCausalLM.from_pretrained(average)
    a, b = (load_file(path / "model.safetensors") for path in (average, outcome.checkpoint))
    assert a.keys() == b.keys() and not all(a[name].equal(b[name]) for name in a)
    again = assembly.run_rl(None, rl_settings(tmp_path, average, "again", train__steps=1, **more))
    plain = assembly.run_rl(
        None, rl_settings(tmp_path, outcome.checkpoint, "plain", train__steps=1, **more)
    )
    ours, theirs, other = (o.evaluations[0] for o in (outcome, again, plain))
    assert (ours["eval/reward"], ours["eval/length"]) == (
        theirs["eval/reward"],
        theirs["eval/length"],
    )
    assert ours["eval/reward"] != other["eval/reward"]


def test_supervised_runs_evaluate_the_average_too(tmp_path: Path, model: Path) -> None:
    lines = [{"prompt": s["prompt"], "completion": s["answer"]} for s in sums(6, 40)]
    more = {"data__eval": str(write_lines(tmp_path / "held_out.jsonl", lines))}
    averaged = assembly.run_sft(
        None, sft_settings(tmp_path, model, train__ema_decay=0.9, eval__use_ema=True, **more)
    )
    average = averaged.checkpoint.with_name("ema")
    again = assembly.run_sft(None, sft_settings(tmp_path, average, "again", train__steps=1, **more))
    assert averaged.evaluations[-1]["eval/loss"] == pytest.approx(
        again.evaluations[0]["eval/loss"], rel=1e-6
    )
    falling = {"train__lr": 3.0, "eval__every": 2, "eval__at_start": False, **more}
    worse = assembly.run_sft(
        None,
        sft_settings(tmp_path, model, "worse", train__ema_decay=0.1, eval__use_ema=True, **falling),
    )
    assert worse.best is not None and worse.best.endswith("/ema"), "what was evaluated"


def test_the_reference_becomes_the_policy_every_so_many_steps(tmp_path: Path, model: Path) -> None:
    outcome = assembly.run_rl(
        None,
        rl_settings(
            tmp_path,
            model,
            algorithm__kl__coef=0.05,
            algorithm__kl__reference_every=2,
            train__steps=5,
        ),
    )
    kl = [line["ref_kl"] for line in read_metrics(outcome.run_dir / "metrics.jsonl")]
    assert kl[0] == kl[2] == kl[4] == pytest.approx(0, abs=1e-6)
    assert kl[1] > 1e-4 and kl[3] > 1e-4
    saved = load_file(outcome.checkpoint.with_name("reference") / "model.safetensors")
    assert not all(
        t.equal(saved[name])
        for name, t in load_file(outcome.checkpoint / "model.safetensors").items()
    )
