"""``tunesmith distill``, put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.build.common import load_model, make_backend, make_learner
from tunesmith.build.rl import run_rl
from tunesmith.build.supervised import Opened, answer_sizes, load_answers, make_parts, run_supervised
from tunesmith.build.teacher import compare_with, load_teacher
from tunesmith.config.distillation import DistillConfig, OfflineDistillConfig
from tunesmith.config.load import find_kind
from tunesmith.loop.opening import Outcome
from tunesmith.types import Sample

if TYPE_CHECKING:
    from tunesmith.loop.learner import Learner, Metrics
    from tunesmith.loop.supervised import SupervisedParts


def run_distill(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith distill``: a student learns from a teacher, as a run file says.

    On the student's own samples it is a run of ``build/rl.py``, on given answers a supervised one.
    """
    kind = find_kind(path, overrides)
    if issubclass(kind, OfflineDistillConfig):
        return run_supervised(
            OfflineDistillConfig,
            path,
            overrides,
            load=load_answers,
            sizes=answer_sizes,
            build=_parts,
            metric="eval/loss",
        )
    return run_rl(path, overrides, kind if issubclass(kind, DistillConfig) else DistillConfig)


def _parts(run: Opened[OfflineDistillConfig, Sample]) -> SupervisedParts[Sample]:
    from tunesmith.algorithms.distillation import distillation_objective
    from tunesmith.models.causal_lm import CausalLM

    config = run.config
    assert config.train.steps and config.distill.alpha, "not resolved"
    predict = compare_with(load_teacher(config, run.tokenizer), config)
    backend = make_backend(config, load_model(CausalLM, config, run.tokenizer), predict)
    objective = distillation_objective(config.distill.alpha)
    learner = make_learner(config, run.session, backend, objective, "token_mean", config.train.steps)
    return make_parts(run, learner, list, partial(_evaluate, learner, run.evaluation) if run.evaluation else None)


def _evaluate(learner: Learner, samples: Sequence[Sample]) -> Metrics:
    found = learner.evaluate(samples)
    return {f"eval/{name}": found[name] for name in ("loss", "nll", "teacher_kl")}
