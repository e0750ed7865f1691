"""``tunesmith rm``, ``dpo``, ``kto`` and ``prm``, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tunesmith.build.common import load_model, make_backend, make_learner
from tunesmith.build.supervised import Opened, make_parts, run_supervised
from tunesmith.config.preference import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import DataSection, RunConfig
from tunesmith.data.packing import num_forest_tokens
from tunesmith.data.preference import Comparison, Solution, load_judged, load_pairs, load_steps
from tunesmith.data.prepare import Prepared, Sources
from tunesmith.data.tokens import Tokenizer, encode
from tunesmith.environments.reward_stats import STATS_FILE
from tunesmith.errors import ConfigError
from tunesmith.loop.opening import Outcome
from tunesmith.plan.device import keeps_reference

if TYPE_CHECKING:
    from tunesmith.backends.base import LossFn
    from tunesmith.backends.torch import TorchBackend
    from tunesmith.loop.learner import Learner, Metrics
    from tunesmith.loop.supervised import SupervisedParts
    from tunesmith.models.score_model import ScoreModel
    from tunesmith.types import Sample

T = TypeVar("T")

METRIC = "eval/accuracy"


def run_rm(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith rm``: a reward model from pairs, as a run file says."""
    return run_supervised(RMConfig, path, overrides, load=_load_rm, sizes=_pair_sizes, build=_rm_parts, metric=METRIC)


def run_dpo(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith dpo``: direct preference optimisation as a run file says."""
    return run_supervised(
        DPOConfig, path, overrides, load=_load_dpo, sizes=_pair_sizes, build=_dpo_parts, metric=METRIC
    )


def run_kto(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith kto``: learning from answers judged one by one, as a run file says."""
    return run_supervised(
        KTOConfig, path, overrides, load=_load_kto, sizes=_single_sizes, build=_kto_parts, metric=METRIC
    )


def run_prm(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith prm``: a process reward model from judged steps, as a run file says."""
    return run_supervised(
        PRMConfig, path, overrides, load=_load_prm, sizes=_step_sizes, build=_prm_parts, metric=METRIC
    )


def _load_rm(config: RMConfig, data: DataSection, source: Sources, tokenizer: Tokenizer) -> Prepared[Comparison]:
    from tunesmith.models.score_model import whole_sequence

    room, share = config.system.max_tokens_per_microbatch, config.system.share_prompts
    found = load_pairs(data, source, tokenizer, room=room, share=share, shape=lambda s: whole_sequence(s.token_ids))
    if config.rm.loss == "logexp" and any(item.values["margin"][0] for item in found.items):
        raise ConfigError(
            "rm.loss = 'logexp' knows no margin, and the data has a column 'margin'; say rm.loss = 'sigmoid', "
            "or take the column out"
        )
    return found


def _load_dpo(config: DPOConfig, data: DataSection, source: Sources, tokenizer: Tokenizer) -> Prepared[Comparison]:
    room, share = config.system.max_tokens_per_microbatch, config.system.share_prompts
    return load_pairs(data, source, tokenizer, room=room, share=share)


def _load_kto(_: KTOConfig, data: DataSection, source: Sources, tokenizer: Tokenizer) -> Prepared[Comparison]:
    return load_judged(data, source, tokenizer)


def _load_prm(config: PRMConfig, data: DataSection, source: Sources, tokenizer: Tokenizer) -> Prepared[Solution]:
    _label_tokens(config, tokenizer)
    return load_steps(data, source, tokenizer, config.prm.separator, (config.prm.good, config.prm.bad))


def _label_tokens(config: PRMConfig, tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens of ``prm.good`` and ``prm.bad``.

    Raises:
        ConfigError: one of them is no single token.
    """
    ids = encode(tokenizer, [config.prm.good, config.prm.bad])
    for key, text, found in zip(("good", "bad"), (config.prm.good, config.prm.bad), ids, strict=True):
        if len(found) != 1:
            raise ConfigError(f"prm.{key} = '{text}' is {len(found)} tokens of this tokenizer; it has to be one")
    return ids[0][0], ids[1][0]


def _pair_sizes(config: RMConfig | DPOConfig, item: Comparison) -> tuple[int, int]:
    extra = int(isinstance(config, RMConfig))
    longest = max(len(sample.token_ids) for sample in item.samples) - extra
    return longest, num_forest_tokens(item.samples, config.system.share_prompts)


def _single_sizes(_: KTOConfig, item: Comparison) -> tuple[int, int]:
    longest = max(len(sample.token_ids) for sample in item.samples)
    return longest, longest


def _step_sizes(config: PRMConfig, item: Solution) -> tuple[int, int]:
    """The pair of the last step is the largest: all tokens, and both labels."""
    longest = item.marks[-1] + 1
    return len(item.token_ids), longest + 2 if config.system.share_prompts else 2 * (longest + 1)


def _rm_parts(run: Opened[RMConfig, Comparison]) -> SupervisedParts[Comparison]:
    from tunesmith.algorithms.preference import reward_objective
    from tunesmith.loop import preference
    from tunesmith.models.score_model import ScoreModel

    config, held_out = run.config, run.evaluation
    model = load_model(ScoreModel, config, run.tokenizer)
    _set_padding_apart(model, run.train.items)
    backend = make_backend(config, model, ScoreModel.predict)
    learner = _learner(run, backend, reward_objective(margins=config.rm.loss == "sigmoid"), keep_groups=True)
    prepare, summarise = preference.pair_samples, preference.with_reward_std
    evaluate = save_beside = None
    if held_out is not None:
        measure = partial(preference.evaluate, learner, prepare, held_out, summarise)
        evaluate = preference.Latest(measure, backend)
        # Of the weights that are saved as the model, and not of their average.
        stats = measure if config.eval.use_ema else evaluate
        save_beside = partial(preference.write_reward_stats, stats, STATS_FILE)
    return make_parts(run, learner, prepare, evaluate, summarise=summarise, save_beside=save_beside)


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


def _dpo_parts(run: Opened[DPOConfig, Comparison]) -> SupervisedParts[Comparison]:
    from tunesmith.algorithms.preference import dpo_objective
    from tunesmith.loop import preference

    section = run.config.dpo
    objective = dpo_objective(section.loss, section.beta, section.label_smoothing, section.nll_coef)
    backend = _language_model(run.config, run.tokenizer)
    learner = _learner(run, backend, objective, keep_groups=True)
    return _reference_parts(run, learner, partial(preference.reference_pairs, learner))


def _kto_parts(run: Opened[KTOConfig, Comparison]) -> SupervisedParts[Comparison]:
    from tunesmith.algorithms.preference import kto_objective
    from tunesmith.loop import preference

    section = run.config.kto
    objective = kto_objective(section.beta, section.desirable_weight, section.undesirable_weight)
    backend = _language_model(run.config, run.tokenizer)
    learner = _learner(run, backend, objective)
    prepare = partial(preference.judged_samples, learner)
    return _reference_parts(run, learner, prepare, preference.with_margin)


def _prm_parts(run: Opened[PRMConfig, Solution]) -> SupervisedParts[Solution]:
    from tunesmith.algorithms.preference import step_objective
    from tunesmith.loop import preference

    good, bad = _label_tokens(run.config, run.tokenizer)
    backend = _language_model(run.config, run.tokenizer)
    learner = _learner(run, backend, step_objective(), keep_groups=True)
    prepare = partial(preference.step_samples, good=good, bad=bad)
    evaluate = partial(preference.evaluate, learner, prepare, run.evaluation) if run.evaluation else None
    return make_parts(run, learner, prepare, evaluate)


def _reference_parts(
    run: Opened[DPOConfig, Comparison] | Opened[KTOConfig, Comparison],
    learner: Learner,
    prepare: Callable[[Sequence[Comparison]], list[Sample]],
    summarise: Callable[[Metrics], Metrics] = dict,
) -> SupervisedParts[Comparison]:
    """With the reference scored batch by batch, or once for all data and held-out data."""
    from tunesmith.loop.preference import References, evaluate

    config, train, held_out = run.config, run.train, run.evaluation
    save_beside: Callable[[Path], None] | None = None
    if (config.dpo if isinstance(config, DPOConfig) else config.kto).precompute_reference:
        references = References(learner, run.session.resume_from)
        train = replace(train, items=references.attach("train", train.items))
        if held_out is not None:
            held_out = references.attach("eval", held_out)
        save_beside = references.save
    measure = partial(evaluate, learner, prepare, held_out, summarise) if held_out else None
    return make_parts(run, learner, prepare, measure, train=train, summarise=summarise, save_beside=save_beside)


def _language_model(config: RunConfig, tokenizer: Any) -> TorchBackend[Any]:
    from tunesmith.models.causal_lm import CausalLM

    model = load_model(CausalLM, config, tokenizer)
    reference = load_model(CausalLM, config, tokenizer) if keeps_reference(config) else None
    return make_backend(config, model, partial(CausalLM.predict, chunk=config.system.logprob_chunk), reference)


def _learner(
    run: Opened[Any, Any], backend: TorchBackend[Any], objective: LossFn, *, keep_groups: bool = False
) -> Learner:
    from tunesmith.algorithms.preference import AGGREGATION

    assert run.config.train.steps, "not resolved"
    learner = make_learner(run.config, run.session, backend, objective, AGGREGATION, run.config.train.steps)
    learner.keep_groups = keep_groups
    return learner
