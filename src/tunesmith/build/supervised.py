"""What the commands that train on given data have in common: the order of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tunesmith.build.common import data_seed, load_tokenizer
from tunesmith.config.load import load_config
from tunesmith.config.schema import DataSection, RunConfig
from tunesmith.data.prepare import Prepared, Sources, load_samples
from tunesmith.data.tokens import Tokenizer
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
    from tunesmith.backends.base import TrainBackend
    from tunesmith.loop.learner import Learner, Metrics
    from tunesmith.loop.session import Session
    from tunesmith.loop.supervised import SupervisedParts

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened(Generic[C, T]):
    """A run before its model is loaded. ``train`` and ``held_out`` are its data, ready for use."""

    config: C
    session: Session
    tokenizer: Any
    train: Prepared[T]
    held_out: Prepared[T] | None

    @property
    def evaluation(self) -> list[T] | None:
        """The held-out items that are evaluated."""
        return self.held_out.items[: self.config.eval.max_prompts] if self.held_out else None


def run_supervised(
    kind: type[C],
    path: Path | None,
    overrides: Sequence[str],
    *,
    load: Callable[[C, DataSection, Sources, Tokenizer], Prepared[T]],
    sizes: Callable[[C, T], tuple[int, int]],
    build: Callable[[Opened[C, T]], SupervisedParts[T]],
    metric: str,
) -> Outcome:
    """Check, load data, derive, say, build, train.

    Args:
        load: reads one source of data.
        sizes: of an item: tokens of its longest sequence, and tokens that have to share a micro-batch.
        build: the parts; the first thing that loads a model.
        metric: what the best checkpoint is judged by where the run file does not say.
    """
    config = load_config(kind, path, overrides)
    check(config)
    check_inputs(config, config.goal)
    with ExitStack() as stack:
        run_dir = stack.enter_context(enter_run_dir(config, path))
        checkpoint = checkpoint_to_resume(config, run_dir)
        tokenizer = load_tokenizer(config)
        data = limited_data(config)
        train = load(config, data, data.train, tokenizer)
        held_out = load(config, data, data.eval, tokenizer) if data.eval else None
        found = [sizes(config, item) for part in (train, held_out) if part for item in part.items]
        longest, together = (max(size) for size in zip(*found, strict=True))
        resolved = resolve_run(config, train, held_out, longest, together)
        config = announce(resolved, run_dir, train, held_out)
        session = open_session(stack, config, run_dir, checkpoint, config.eval.metric or metric)
        from tunesmith.loop import supervised

        with session.phase("setup"):
            parts = build(Opened(config, session, tokenizer, train, held_out))
            if config.eval.use_ema and parts.evaluate is not None:
                parts = replace(parts, evaluate=partial(_averaged, parts.backend, parts.evaluate))
            supervised.restore(parts, session)
        supervised.run(parts, session)
        return outcome_of(session, run_dir)


def load_answers(_: RunConfig, data: DataSection, source: Sources, tokenizer: Tokenizer) -> Prepared[Sample]:
    """``load`` of runs that learn given answers."""
    return load_samples(data, source, tokenizer)


def answer_sizes(_: RunConfig, sample: Sample) -> tuple[int, int]:
    """``sizes`` of such runs, whose samples are learned one by one."""
    return len(sample.token_ids), len(sample.token_ids)


def make_parts(
    run: Opened[Any, T],
    learner: Learner,
    prepare: Callable[[Sequence[T]], list[Sample]],
    evaluate: Callable[[], Metrics] | None,
    *,
    train: Prepared[T] | None = None,
    summarise: Callable[[Metrics], Metrics] = dict,
    save_beside: Callable[[Path], None] | None = None,
) -> SupervisedParts[T]:
    """The loop's parts. ``train`` is the run's data with what was added to it since it was opened."""
    from tunesmith.loop.supervised import SupervisedParts

    config: RunConfig = run.config
    assert config.train.batch_size, "not resolved"
    return SupervisedParts(
        items=(train or run.train).loader(config.train.batch_size, shuffle=config.data.shuffle, seed=data_seed(config)),
        backend=learner.backend,
        learner=learner,
        prepare=prepare,
        evaluate=evaluate,
        evaluate_at_start=config.eval.at_start,
        summarise=summarise,
        save_beside=save_beside,
    )


def _averaged(backend: TrainBackend, evaluate: Callable[[], Metrics]) -> Metrics:
    with backend.averaged():
        return evaluate()
