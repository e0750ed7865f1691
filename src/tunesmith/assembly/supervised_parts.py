"""What the loop of ``loop/supervised.py`` is given, for each command that trains on given data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tunesmith.algorithms.objective import DistillationObjective, Objective, SFTObjective
from tunesmith.algorithms.preference import AGGREGATION, DPOObjective, KTOObjective, RewardObjective, StepObjective
from tunesmith.assembly.common import load_model, make_backend, make_learner
from tunesmith.assembly.opening import ReadyRun
from tunesmith.assembly.processes import MakeBackend, remote_trainer
from tunesmith.assembly.teacher import compare_with, load_teacher
from tunesmith.assembly.training_data import label_tokens
from tunesmith.backends.base import Metrics, TrainBackend
from tunesmith.backends.torch import TorchBackend
from tunesmith.config.distillation import OfflineDistillConfig
from tunesmith.config.preference import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import RunConfig, SFTConfig
from tunesmith.data.batch import Batch
from tunesmith.data.preference import Comparison, Solution
from tunesmith.data.prepare import Prepared
from tunesmith.distributed.local import Processes
from tunesmith.loop import preference
from tunesmith.loop.learner import Learner
from tunesmith.loop.session import Session
from tunesmith.loop.supervised import SupervisedParts, held_out
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.score_model import ScoreModel
from tunesmith.plan.memory import keeps_reference
from tunesmith.rewards.stats import STATS_FILE
from tunesmith.types import Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setup(Generic[T]):
    """What the parts are made of."""

    run: ReadyRun[Any, T]
    session: Session
    processes: Processes | None
    """Where the trainer's ranks run; None: here."""

    def learner(self, make: MakeBackend, aggregation: str = AGGREGATION, *, keep_groups: bool = False) -> Learner:
        """Loads the model."""
        config, limits = self.run.config, None
        if self.processes is None:
            backend: TrainBackend = make(config, self.run.tokenizer)
        else:
            backend, limits = remote_trainer(self.processes, config, make)
        return make_learner(
            config, self.session, backend, aggregation, config.train.steps, limits=limits, keep_groups=keep_groups
        )


def make_parts(run: ReadyRun[Any, Any], session: Session, processes: Processes | None) -> SupervisedParts[Any]:
    """Loads the model, and whatever else the command needs."""
    return _MAKERS[type(run.config)](Setup(run, session, processes))


def _parts(
    run: ReadyRun[Any, T],
    learner: Learner,
    objective: Objective,
    prepare: Callable[[Sequence[T]], Batch],
    evaluate: Callable[[], Metrics] | None,
    *,
    train: Prepared[T] | None = None,
    summarise: Callable[[Metrics], Metrics] = dict,
    save_beside: Callable[[Path], None] | None = None,
    describe: Callable[[Path], None] | None = None,
) -> SupervisedParts[T]:
    """The loop's parts. ``train`` is the run's data with what was added to it since it was read."""
    config: RunConfig = run.config
    return SupervisedParts(
        items=(train or run.train).loader(config.train.batch_size, shuffle=config.data.shuffle, seed=config.data.seed),
        learner=learner,
        objective=objective,
        prepare=prepare,
        evaluate=evaluate,
        evaluation=config.eval,
        summarise=summarise,
        save_beside=save_beside,
        describe=describe,
    )


def _sft(setup: Setup[Sample]) -> SupervisedParts[Sample]:
    run, learner, objective = setup.run, setup.learner(_language_model, "token_mean"), SFTObjective()
    evaluate = partial(held_out, learner, objective, run.eval_items) if run.eval_items else None
    return _parts(run, learner, objective, Batch.of, evaluate)


def _distill(setup: Setup[Sample]) -> SupervisedParts[Sample]:
    run, learner = setup.run, setup.learner(_student, "token_mean")
    objective, names = DistillationObjective(run.config.distill.alpha), ("loss", "nll", "teacher_kl")
    evaluate = partial(held_out, learner, objective, run.eval_items, names) if run.eval_items else None
    return _parts(run, learner, objective, Batch.of, evaluate)


def _rm(setup: Setup[Comparison]) -> SupervisedParts[Comparison]:
    run, config, held_out = setup.run, setup.run.config, setup.run.eval_items
    padding = padding_token(run.tokenizer, run.train.items)
    learner = setup.learner(partial(_reward_model, padding=padding), keep_groups=True)
    objective = RewardObjective(margins=config.rm.loss == "sigmoid")
    prepare, summarise = preference.pair_batch, preference.with_reward_std
    evaluate = describe = None
    if held_out is not None:
        measure = partial(preference.evaluate, learner, objective, prepare, held_out, summarise)
        evaluate = preference.Latest(measure, learner.backend)
        # Of the weights that are saved as the model, and not of their average.
        stats = measure if config.eval.use_ema else evaluate
        describe = partial(preference.write_reward_stats, stats, STATS_FILE)
    return _parts(run, learner, objective, prepare, evaluate, summarise=summarise, describe=describe)


def padding_token(tokenizer: Any, items: Sequence[Comparison]) -> str | None:
    """A padding token that ends no sequence: transformers reads a score before the padding. None where all do."""
    ends = {sample.token_ids[-1] for item in items for sample in item.samples}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return tokenizer.pad_token
    free = [token for token in tokenizer.all_special_ids if token not in ends]
    return tokenizer.convert_ids_to_tokens(free[0]) if free else None


def _dpo(setup: Setup[Comparison]) -> SupervisedParts[Comparison]:
    section = setup.run.config.dpo
    objective = DPOObjective(section.loss, section.beta, section.label_smoothing, section.nll_coef)
    learner = setup.learner(_language_model, keep_groups=True)
    prepare = partial(preference.reference_pairs, learner)
    return _reference_parts(setup, learner, objective, prepare, beforehand=section.precompute_reference)


def _kto(setup: Setup[Comparison]) -> SupervisedParts[Comparison]:
    section = setup.run.config.kto
    objective = KTOObjective(section.beta, section.desirable_weight, section.undesirable_weight)
    learner = setup.learner(_language_model)
    prepare, summarise = partial(preference.judged_answers, learner), preference.with_margin
    return _reference_parts(setup, learner, objective, prepare, summarise, beforehand=section.precompute_reference)


def _prm(setup: Setup[Solution]) -> SupervisedParts[Solution]:
    run = setup.run
    good, bad = label_tokens(run.config, run.tokenizer)
    learner, objective = setup.learner(_language_model, keep_groups=True), StepObjective()
    prepare = partial(preference.step_pairs, good=good, bad=bad)
    evaluate = partial(preference.evaluate, learner, objective, prepare, run.eval_items) if run.eval_items else None
    return _parts(run, learner, objective, prepare, evaluate)


def _reference_parts(
    setup: Setup[Comparison],
    learner: Learner,
    objective: Objective,
    prepare: Callable[[Sequence[Comparison]], Batch],
    summarise: Callable[[Metrics], Metrics] = dict,
    *,
    beforehand: bool,
) -> SupervisedParts[Comparison]:
    """With the reference scored batch by batch, or ``beforehand`` for all data and held-out data."""
    run, train, held_out = setup.run, setup.run.train, setup.run.eval_items
    save_beside: Callable[[Path], None] | None = None
    if beforehand:
        references = preference.References(learner, setup.session.resume_from)
        train = replace(train, items=references.attach("train", train.items))
        if held_out is not None:
            held_out = references.attach("eval", held_out)
        save_beside = references.save
    measure = partial(preference.evaluate, learner, objective, prepare, held_out, summarise) if held_out else None
    return _parts(run, learner, objective, prepare, measure, train=train, summarise=summarise, save_beside=save_beside)


# What each rank of a trainer builds


def _language_model(config: RunConfig, tokenizer: Any) -> TorchBackend[CausalLM]:
    model = load_model(CausalLM, config, tokenizer)
    reference = load_model(CausalLM, config, tokenizer) if keeps_reference(config) else None
    return make_backend(config, model, partial(CausalLM.predict, chunk=config.system.logprob_chunk), reference)


def _student(config: OfflineDistillConfig, tokenizer: Any) -> TorchBackend[CausalLM]:
    predict = compare_with(load_teacher(config, tokenizer), config)
    return make_backend(config, load_model(CausalLM, config, tokenizer), predict)


def _reward_model(config: RMConfig, tokenizer: Any, padding: str | None) -> TorchBackend[ScoreModel]:
    model = load_model(ScoreModel, config, tokenizer)
    if padding is not None:
        tokenizer.pad_token = padding
        model.module.config.pad_token_id = tokenizer.pad_token_id
    return make_backend(config, model, ScoreModel.predict)


_MAKERS: dict[type[RunConfig], Callable[[Setup[Any]], SupervisedParts[Any]]] = {
    SFTConfig: _sft,
    OfflineDistillConfig: _distill,
    RMConfig: _rm,
    DPOConfig: _dpo,
    KTOConfig: _kto,
    PRMConfig: _prm,
}
