"""What the loop of ``loop/supervised.py`` is given, for each command that trains on given data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.algorithms.objective import DistillationObjective, Objective, SFTObjective
from tunesmith.algorithms.preference import AGGREGATION, DPOObjective, KTOObjective, RewardObjective, StepObjective
from tunesmith.assembly.common import load_model, make_backend, make_learner
from tunesmith.assembly.opening import ReadyRun
from tunesmith.assembly.teacher import compare_with, load_teacher
from tunesmith.assembly.training_data import label_tokens
from tunesmith.backends.base import Metrics
from tunesmith.backends.torch import TorchBackend
from tunesmith.config.distillation import OfflineDistillConfig
from tunesmith.config.preference import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import RunConfig, SFTConfig
from tunesmith.data.batch import Batch
from tunesmith.data.preference import Comparison, Solution
from tunesmith.data.prepare import Prepared
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


def make_parts(run: ReadyRun[Any, Any], session: Session) -> SupervisedParts[Any]:
    """Loads the model, and whatever else the command needs."""
    return _MAKERS[type(run.config)](run, session)


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


def _learner(
    config: RunConfig,
    session: Session,
    backend: TorchBackend[Any],
    aggregation: str = AGGREGATION,
    *,
    keep_groups: bool = False,
) -> Learner:
    return make_learner(config, session, backend, aggregation, config.train.steps, keep_groups=keep_groups)


def _sft(run: ReadyRun[SFTConfig, Sample], session: Session) -> SupervisedParts[Sample]:
    learner, objective = _learner(run.config, session, _language_model(run), "token_mean"), SFTObjective()
    evaluate = partial(held_out, learner, objective, run.eval_items) if run.eval_items else None
    return _parts(run, learner, objective, Batch.of, evaluate)


def _distill(run: ReadyRun[OfflineDistillConfig, Sample], session: Session) -> SupervisedParts[Sample]:
    config = run.config
    predict = compare_with(load_teacher(config, run.tokenizer), config)
    backend = make_backend(config, load_model(CausalLM, config, run.tokenizer), predict)
    learner, objective = _learner(config, session, backend, "token_mean"), DistillationObjective(config.distill.alpha)
    names = ("loss", "nll", "teacher_kl")
    evaluate = partial(held_out, learner, objective, run.eval_items, names) if run.eval_items else None
    return _parts(run, learner, objective, Batch.of, evaluate)


def _rm(run: ReadyRun[RMConfig, Comparison], session: Session) -> SupervisedParts[Comparison]:
    config, held_out = run.config, run.eval_items
    model = load_model(ScoreModel, config, run.tokenizer)
    _set_padding_apart(model, run.train.items)
    backend = make_backend(config, model, ScoreModel.predict)
    learner = _learner(config, session, backend, keep_groups=True)
    objective = RewardObjective(margins=config.rm.loss == "sigmoid")
    prepare, summarise = preference.pair_batch, preference.with_reward_std
    evaluate = describe = None
    if held_out is not None:
        measure = partial(preference.evaluate, learner, objective, prepare, held_out, summarise)
        evaluate = preference.Latest(measure, backend)
        # Of the weights that are saved as the model, and not of their average.
        stats = measure if config.eval.use_ema else evaluate
        describe = partial(preference.write_reward_stats, stats, STATS_FILE)
    return _parts(run, learner, objective, prepare, evaluate, summarise=summarise, describe=describe)


def _set_padding_apart(model: ScoreModel, items: Sequence[Comparison]) -> None:
    """Choose a padding token that ends no sequence: transformers reads a score before the padding."""
    tokenizer: Any = model.tokenizer
    ends = {sample.token_ids[-1] for item in items for sample in item.samples}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        free = [token for token in tokenizer.all_special_ids if token not in ends]
        if not free:
            return
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(free[0])
    model.module.config.pad_token_id = tokenizer.pad_token_id


def _dpo(run: ReadyRun[DPOConfig, Comparison], session: Session) -> SupervisedParts[Comparison]:
    section = run.config.dpo
    objective = DPOObjective(section.loss, section.beta, section.label_smoothing, section.nll_coef)
    learner = _learner(run.config, session, _language_model(run), keep_groups=True)
    prepare = partial(preference.reference_pairs, learner)
    return _reference_parts(run, session, learner, objective, prepare, beforehand=section.precompute_reference)


def _kto(run: ReadyRun[KTOConfig, Comparison], session: Session) -> SupervisedParts[Comparison]:
    section = run.config.kto
    objective = KTOObjective(section.beta, section.desirable_weight, section.undesirable_weight)
    learner = _learner(run.config, session, _language_model(run))
    prepare, summarise = partial(preference.judged_answers, learner), preference.with_margin
    return _reference_parts(
        run, session, learner, objective, prepare, summarise, beforehand=section.precompute_reference
    )


def _prm(run: ReadyRun[PRMConfig, Solution], session: Session) -> SupervisedParts[Solution]:
    good, bad = label_tokens(run.config, run.tokenizer)
    learner, objective = _learner(run.config, session, _language_model(run), keep_groups=True), StepObjective()
    prepare = partial(preference.step_pairs, good=good, bad=bad)
    evaluate = partial(preference.evaluate, learner, objective, prepare, run.eval_items) if run.eval_items else None
    return _parts(run, learner, objective, prepare, evaluate)


def _reference_parts(
    run: ReadyRun[Any, Comparison],
    session: Session,
    learner: Learner,
    objective: Objective,
    prepare: Callable[[Sequence[Comparison]], Batch],
    summarise: Callable[[Metrics], Metrics] = dict,
    *,
    beforehand: bool,
) -> SupervisedParts[Comparison]:
    """With the reference scored batch by batch, or ``beforehand`` for all data and held-out data."""
    train, held_out = run.train, run.eval_items
    save_beside: Callable[[Path], None] | None = None
    if beforehand:
        references = preference.References(learner, session.resume_from)
        train = replace(train, items=references.attach("train", train.items))
        if held_out is not None:
            held_out = references.attach("eval", held_out)
        save_beside = references.save
    measure = partial(preference.evaluate, learner, objective, prepare, held_out, summarise) if held_out else None
    return _parts(run, learner, objective, prepare, measure, train=train, summarise=summarise, save_beside=save_beside)


def _language_model(run: ReadyRun[Any, Any]) -> TorchBackend[CausalLM]:
    config = run.config
    model = load_model(CausalLM, config, run.tokenizer)
    reference = load_model(CausalLM, config, run.tokenizer) if keeps_reference(config) else None
    return make_backend(config, model, partial(CausalLM.predict, chunk=config.system.logprob_chunk), reference)


_MAKERS: dict[type[RunConfig], Callable[[Any, Session], SupervisedParts[Any]]] = {
    SFTConfig: _sft,
    OfflineDistillConfig: _distill,
    RMConfig: _rm,
    DPOConfig: _dpo,
    KTOConfig: _kto,
    PRMConfig: _prm,
}
