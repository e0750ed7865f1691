"""``tunesmith sft``, put together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.build.common import data_seed, load_model, load_tokenizer, make_backend, make_learner
from tunesmith.config.load import load_config
from tunesmith.config.schema import SFTConfig
from tunesmith.data.prepare import Prepared, load_samples
from tunesmith.loop.opening import (
    Outcome,
    announce,
    check_inputs,
    checkpoint_to_resume,
    enter_run_dir,
    limited_data,
    open_session,
    outcome_of,
    resolve_run,
)
from tunesmith.plan.checks import check
from tunesmith.types import Sample

if TYPE_CHECKING:
    from tunesmith.loop.session import Session
    from tunesmith.loop.supervised import SupervisedParts


def run_sft(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith sft``: supervised fine-tuning as a run file says."""
    config = load_config(SFTConfig, path, overrides)
    check(config)
    check_inputs(config, "sft")
    with ExitStack() as stack:
        run_dir = stack.enter_context(enter_run_dir(config, path))
        checkpoint = checkpoint_to_resume(config, run_dir)
        tokenizer = load_tokenizer(config)
        data = limited_data(config)
        train = load_samples(data, data.train, tokenizer)
        held_out = load_samples(data, data.eval, tokenizer) if data.eval else None
        longest = max(len(s.token_ids) for part in (train, held_out) if part for s in part.items)
        resolved = resolve_run(config, train, held_out, longest)
        config = announce(resolved, run_dir, train, held_out)
        session = open_session(stack, config, run_dir, checkpoint, config.eval.metric or "eval/loss")
        from tunesmith.loop import supervised

        with session.phase("setup"):
            parts = _sft_parts(config, session, tokenizer, train, held_out)
            supervised.restore(parts, session)
        supervised.run(parts, session)
        return outcome_of(session, run_dir)


def _sft_parts(
    config: SFTConfig,
    session: Session,
    tokenizer: Any,
    train: Prepared[Sample],
    held_out: Prepared[Sample] | None,
) -> SupervisedParts:
    from tunesmith.algorithms.objective import sft_objective
    from tunesmith.loop.supervised import SupervisedParts
    from tunesmith.models.causal_lm import CausalLM

    assert config.train.steps and config.train.batch_size, "not resolved"
    predict = partial(CausalLM.predict, chunk=config.system.logprob_chunk)
    backend = make_backend(config, load_model(CausalLM, config, tokenizer), predict)
    loader = train.loader(config.train.batch_size, shuffle=config.data.shuffle, seed=data_seed(config))
    objective = sft_objective()
    return SupervisedParts(
        samples=loader,
        backend=backend,
        learner=make_learner(config, session, backend, objective, "token_mean", config.train.steps),
        evaluation=held_out.items[: config.eval.max_prompts] if held_out else None,
        evaluate_at_start=config.eval.at_start,
    )
