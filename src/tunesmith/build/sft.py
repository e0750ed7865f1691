"""``tunesmith sft``, put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.build.common import data_seed, load_model, make_backend, make_learner
from tunesmith.build.supervised import Opened, run_supervised
from tunesmith.config.schema import DataSection, SFTConfig
from tunesmith.data.prepare import Prepared, Sources, load_samples
from tunesmith.data.tokens import Tokenizer
from tunesmith.loop.opening import Outcome
from tunesmith.types import Sample

if TYPE_CHECKING:
    from tunesmith.loop.supervised import SupervisedParts


def run_sft(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith sft``: supervised fine-tuning as a run file says."""
    return run_supervised(SFTConfig, path, overrides, load=_load, sizes=_sizes, build=_sft_parts, metric="eval/loss")


def _load(_: SFTConfig, data: DataSection, source: Sources, tokenizer: Tokenizer) -> Prepared[Sample]:
    return load_samples(data, source, tokenizer)


def _sizes(_: SFTConfig, sample: Sample) -> tuple[int, int]:
    return len(sample.token_ids), len(sample.token_ids)


def _sft_parts(run: Opened[SFTConfig, Sample]) -> SupervisedParts[Sample]:
    from tunesmith.algorithms.objective import sft_objective
    from tunesmith.loop.supervised import SupervisedParts, held_out_loss
    from tunesmith.models.causal_lm import CausalLM

    config = run.config
    assert config.train.steps and config.train.batch_size, "not resolved"
    predict = partial(CausalLM.predict, chunk=config.system.logprob_chunk)
    backend = make_backend(config, load_model(CausalLM, config, run.tokenizer), predict)
    learner = make_learner(config, run.session, backend, sft_objective(), "token_mean", config.train.steps)
    return SupervisedParts(
        items=run.train.loader(config.train.batch_size, shuffle=config.data.shuffle, seed=data_seed(config)),
        backend=backend,
        learner=learner,
        prepare=list,
        evaluate=partial(held_out_loss, learner, run.evaluation) if run.evaluation else None,
        evaluate_at_start=config.eval.at_start,
    )
