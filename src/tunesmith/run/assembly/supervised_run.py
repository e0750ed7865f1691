"""A run that trains on data without rollouts: its parts, for each command, and the loop over
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tunesmith.config.commands import (
    DPOConfig,
    KTOConfig,
    OfflineDistillConfig,
    PRMConfig,
    RMConfig,
)
from tunesmith.config.schema import RunConfig, SFTConfig
from tunesmith.learn.algorithms.objective import DistillationObjective, Objective, SFTObjective
from tunesmith.learn.algorithms.preference import (
    AGGREGATION,
    DPOObjective,
    KTOObjective,
    RewardObjective,
    StepObjective,
)
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.preference import Comparison, Solution
from tunesmith.learn.data.prepare import Prepared
from tunesmith.learn.rewards.stats import STATS_FILE
from tunesmith.plan.length import draws
from tunesmith.records.timeline import Timeline
from tunesmith.run.assembly.learners import make_learner, policy_rate
from tunesmith.run.assembly.opening import OpenRun
from tunesmith.run.assembly.session import RunResult, kept_on_interrupt, open_session, run_result
from tunesmith.run.assembly.teachers import teacher_of_samples
from tunesmith.run.assembly.training_data import TRAINING_DATA, label_tokens
from tunesmith.run.loop import preference, supervised
from tunesmith.run.loop.learner import Learner
from tunesmith.run.loop.parts import SupervisedParts
from tunesmith.run.loop.supervised import evaluate
from tunesmith.run.placement.port import Placement
from tunesmith.run.specs.base import Report
from tunesmith.run.specs.from_plan import trainer_spec
from tunesmith.run.specs.trainers import TrainerSpec
from tunesmith.run.trainers.base import Metrics
from tunesmith.types import Sample

T = TypeVar("T")


def train_on_data(
    run: OpenRun[Any, Any], placement: Placement, checkpoint: Path | None
) -> RunResult:
    """The run from ``checkpoint`` on, or from the beginning."""
    with open_session(run, checkpoint, TRAINING_DATA[type(run.config)].metric) as session:
        with session.phase("setup"):
            parts = make_parts(run, placement, session.note, checkpoint, session.recorder.timeline)
            session.start(parts, parts.describe)
        with kept_on_interrupt(run, session):
            supervised.run(parts, session)
        return run_result(run, session)


@dataclass(frozen=True, slots=True)
class Setup(Generic[T]):
    """The inputs for building the parts."""

    run: OpenRun[Any, T]
    placement: Placement
    report: Report
    checkpoint: Path | None
    """The one to resume from."""
    timeline: Timeline | None = None

    def learner(
        self,
        aggregation: str = AGGREGATION,
        *,
        spec: TrainerSpec | None = None,
        keep_groups: bool = False,
    ) -> Learner:
        """A learner with its model loaded. Args: spec: if it is not the run's as it is."""
        plan = self.run.plan
        trained = self.placement.trainer(spec or trainer_spec(plan))
        trained.record_ranks(self.timeline)
        return make_learner(
            plan,
            trained,
            self.report,
            aggregation,
            policy_rate(plan, len(self.run.train)),
            keep_groups=keep_groups,
        )

    def parts(
        self,
        learner: Learner,
        objective: Objective,
        prepare: Callable[[Sequence[T]], Batch],
        summarise: Callable[[Metrics], Metrics] = dict,
        *,
        train: Prepared[T] | None = None,
        held_out: Sequence[T] | None = None,
        without: tuple[str, ...] = ("nonfinite",),
    ) -> SupervisedParts[T]:
        """The loop's parts; ``train`` and ``held_out`` are the run's data with anything added since
        it was read.

        Args:
            without: name prefixes of metrics that evaluations omit.
        """
        plan = self.run.plan
        items = held_out or self.run.eval_items
        train = train or self.run.train
        training = plan.training
        assert training.batch is not None, "the run trains"
        return SupervisedParts(
            items=train.loader(
                training.batch,
                shuffle=plan.said.data.shuffle,
                seed=training.data_seed,
                draws=draws(training, len(train)),
            ),
            learner=learner,
            objective=objective,
            prepare=prepare,
            evaluate=partial(evaluate, learner, objective, prepare, items, summarise, without)
            if items
            else None,
            summarise=summarise,
        )


def make_parts(
    run: OpenRun[Any, Any],
    placement: Placement,
    report: Report,
    checkpoint: Path | None = None,
    timeline: Timeline | None = None,
) -> SupervisedParts[Any]:
    """Load the model and build everything else that the command needs."""
    return _MAKERS[type(run.config)](Setup(run, placement, report, checkpoint, timeline))


def _sft(setup: Setup[Sample]) -> SupervisedParts[Sample]:
    unneeded = ("nonfinite", "nll")  # nll is the loss
    return setup.parts(setup.learner("token_mean"), SFTObjective(), Batch.of, without=unneeded)


def _distill(setup: Setup[Sample]) -> SupervisedParts[Sample]:
    plan = setup.run.plan
    teacher = teacher_of_samples(setup.run) if plan.kind.served_teacher else None
    learner = setup.learner("token_mean")
    distillation = plan.training.distillation
    assert distillation is not None, "there is a teacher"

    def prepare(samples: Sequence[Sample]) -> Batch:
        batch = Batch.of(samples)
        for name, values in teacher(samples).items() if teacher else ():
            batch.add(name, values)
        return batch

    return setup.parts(learner, DistillationObjective(distillation.alpha), prepare)


def _rm(setup: Setup[Comparison]) -> SupervisedParts[Comparison]:
    run = setup.run
    config = setup.run.config
    spec = trainer_spec(run.plan)
    padding = padding_token(run.tokenizer, run.train.items)
    model = replace(spec.model, scores=True)
    learner = setup.learner(spec=replace(spec, model=model, padding=padding), keep_groups=True)
    objective = RewardObjective(margins=config.rm.loss == "sigmoid")
    parts = setup.parts(learner, objective, preference.pair_batch, preference.with_reward_std)
    measure = parts.evaluate
    if measure is None:
        return parts

    @lru_cache(maxsize=1)
    def measure_after(_: int) -> Metrics:
        """The metrics after a number of optimizer steps, shared by an evaluation and the checkpoint
        after it."""
        return measure()

    def latest() -> Metrics:
        return measure_after(learner.backend.optimizer_steps)

    # The statistics are for the saved weights, not their moving average.
    stats = partial(
        preference.write_reward_stats, measure if config.eval.use_ema else latest, STATS_FILE
    )
    return replace(parts, evaluate=latest, describe=stats)


def padding_token(tokenizer: Any, items: Sequence[Comparison]) -> str | None:
    """A padding token that ends no sequence: transformers reads the score before the padding; None
    if there is none."""
    ends = {sample.token_ids[-1] for item in items for sample in item.samples}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return tokenizer.pad_token
    free = [token for token in tokenizer.all_special_ids if token not in ends]
    return tokenizer.convert_ids_to_tokens(free[0]) if free else None


def _dpo(setup: Setup[Comparison]) -> SupervisedParts[Comparison]:
    section = setup.run.config.dpo
    objective = DPOObjective(section.loss, section.beta, section.label_smoothing, section.nll_coef)
    learner = setup.learner(keep_groups=True)
    prepare = partial(preference.reference_pairs, learner)
    return _reference_parts(
        setup, learner, objective, prepare, beforehand=section.precompute_reference
    )


def _kto(setup: Setup[Comparison]) -> SupervisedParts[Comparison]:
    section = setup.run.config.kto
    objective = KTOObjective(section.beta, section.desirable_weight, section.undesirable_weight)
    learner = setup.learner()
    prepare = partial(preference.judged_answers, learner)
    early = section.precompute_reference
    return _reference_parts(
        setup, learner, objective, prepare, preference.with_margin, beforehand=early
    )


def _prm(setup: Setup[Solution]) -> SupervisedParts[Solution]:
    good, bad = label_tokens(setup.run.config, setup.run.tokenizer)
    learner = setup.learner(keep_groups=True)
    return setup.parts(learner, StepObjective(), partial(preference.step_pairs, good=good, bad=bad))


def _reference_parts(
    setup: Setup[Comparison],
    learner: Learner,
    objective: Objective,
    prepare: Callable[[Sequence[Comparison]], Batch],
    summarise: Callable[[Metrics], Metrics] = dict,
    *,
    beforehand: bool,
) -> SupervisedParts[Comparison]:
    """The loop's parts, with the reference scored batch by batch, or ``beforehand`` for all the
    data."""
    if not beforehand:
        return setup.parts(learner, objective, prepare, summarise)
    references = preference.References(learner, setup.checkpoint)
    train = setup.run.train
    held_out = setup.run.eval_items
    train = replace(train, items=references.attach("train", train.items))
    held_out = references.attach("eval", held_out) if held_out is not None else None
    parts = setup.parts(learner, objective, prepare, summarise, train=train, held_out=held_out)
    return replace(parts, save_beside=references.save)


_MAKERS: dict[type[RunConfig], Callable[[Setup[Any]], SupervisedParts[Any]]] = {
    SFTConfig: _sft,
    OfflineDistillConfig: _distill,
    RMConfig: _rm,
    DPOConfig: _dpo,
    KTOConfig: _kto,
    PRMConfig: _prm,
}
