"""``tunesmith sft``, put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.build.common import load_model, make_backend, make_learner
from tunesmith.build.supervised import Opened, answer_sizes, load_answers, make_parts, run_supervised
from tunesmith.config.schema import SFTConfig
from tunesmith.loop.opening import Outcome
from tunesmith.types import Sample

if TYPE_CHECKING:
    from tunesmith.loop.supervised import SupervisedParts


def run_sft(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith sft``: supervised fine-tuning as a run file says."""
    return run_supervised(
        SFTConfig, path, overrides, load=load_answers, sizes=answer_sizes, build=_sft_parts, metric="eval/loss"
    )


def _sft_parts(run: Opened[SFTConfig, Sample]) -> SupervisedParts[Sample]:
    from tunesmith.algorithms.objective import sft_objective
    from tunesmith.loop.supervised import held_out_loss
    from tunesmith.models.causal_lm import CausalLM

    config = run.config
    assert config.train.steps, "not resolved"
    predict = partial(CausalLM.predict, chunk=config.system.logprob_chunk)
    backend = make_backend(config, load_model(CausalLM, config, run.tokenizer), predict)
    learner = make_learner(config, run.session, backend, sft_objective(), "token_mean", config.train.steps)
    evaluate = partial(held_out_loss, learner, run.evaluation) if run.evaluation else None
    return make_parts(run, learner, list, evaluate)
