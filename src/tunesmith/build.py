"""The composition root: the one module that names adapters and puts a run together.

Order matters: everything that can be refused is refused before a model is loaded, and the resolved
configuration is printed and saved before that too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tunesmith.config.load import load_config
from tunesmith.config.resolved import Resolved, print_resolved, save_resolved
from tunesmith.config.schema import DataSection, RLConfig, RunConfig, SFTConfig
from tunesmith.config.sizes import parse_size
from tunesmith.data.chat import end_of_turn_id
from tunesmith.data.prepare import Prepared, load_samples, load_tasks, peek
from tunesmith.environments.base import SingleTurn
from tunesmith.environments.rewards import RewardSet, check_rewards, load_rewards
from tunesmith.errors import CheckpointError
from tunesmith.monitor.clock import Clock
from tunesmith.monitor.metrics import JsonLines, Metrics, check_sinks, drop_after, open_sinks, read_metrics
from tunesmith.monitor.progress import open_progress
from tunesmith.monitor.run_dir import RunDir, open_run_dir
from tunesmith.plan.checks import check, optimizer_steps
from tunesmith.plan.facts import Facts, ModelFacts, read_model_facts
from tunesmith.plan.hardware import Limits, measure_limits, read_hardware
from tunesmith.plan.resolve import resolve
from tunesmith.types import Sample, Sampling, Task

if TYPE_CHECKING:
    from tunesmith.algorithms.objective import Objective
    from tunesmith.backends.torch import TorchBackend
    from tunesmith.engines.base import RolloutEngine
    from tunesmith.loop.evaluate import Evaluation
    from tunesmith.loop.learner import Learner
    from tunesmith.loop.rl import RLParts
    from tunesmith.loop.session import Session
    from tunesmith.loop.supervised import SupervisedParts
    from tunesmith.models.causal_lm import CausalLM

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run leaves: where, and its last numbers."""

    run_dir: Path
    checkpoint: Path
    """The last checkpoint's model, in Hugging Face format."""
    evaluations: list[dict[str, Any]]
    """One entry per evaluation, first to last."""
    seconds: dict[str, float]
    """By phase."""


def run_rl(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith rl``: reinforcement learning as a run file says."""
    config = load_config(RLConfig, path, overrides)
    check(config)
    base_dir = path.parent if path else Path.cwd()
    check_rewards(config.reward, base_dir)
    formats = _check(config, "rl")
    with ExitStack() as stack:
        run_dir = stack.enter_context(_open_run_dir(config, path))
        checkpoint = _checkpoint_to_resume(config, run_dir)
        rewards = load_rewards(config.reward, base_dir)
        stack.callback(rewards.close)
        tokenizer = _load_tokenizer(config)
        data = _limited(config)
        train = load_tasks(data, data.train, tokenizer)
        held_out = load_tasks(data, data.eval, tokenizer) if data.eval else None
        rewards.check_tasks([*train.items, *(held_out.items if held_out else [])])
        longest = max(len(t.prompt_ids) for part in (train, held_out) if part for t in part.items)
        resolved = _resolve(config, train, held_out, longest)
        config = _announce(resolved, run_dir, formats, train, held_out)
        session = _open_session(stack, config, run_dir, checkpoint, config.eval.metric or "eval/reward")
        from tunesmith.loop import rl

        with session.phase("setup"):
            parts = _rl_parts(config, session, tokenizer, rewards, train, held_out)
            rl.restore(parts, session)
        asyncio.run(rl.run(parts, session))
        return _outcome(session, run_dir)


def run_sft(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith sft``: supervised fine-tuning as a run file says."""
    config = load_config(SFTConfig, path, overrides)
    check(config)
    formats = _check(config, "sft")
    with ExitStack() as stack:
        run_dir = stack.enter_context(_open_run_dir(config, path))
        checkpoint = _checkpoint_to_resume(config, run_dir)
        tokenizer = _load_tokenizer(config)
        data = _limited(config)
        train = load_samples(data, data.train, tokenizer)
        held_out = load_samples(data, data.eval, tokenizer) if data.eval else None
        longest = max(len(s.token_ids) for part in (train, held_out) if part for s in part.items)
        resolved = _resolve(config, train, held_out, longest)
        config = _announce(resolved, run_dir, formats, train, held_out)
        session = _open_session(stack, config, run_dir, checkpoint, config.eval.metric or "eval/loss")
        from tunesmith.loop import supervised

        with session.phase("setup"):
            parts = _sft_parts(config, session, tokenizer, train, held_out)
            supervised.restore(parts, session)
        supervised.run(parts, session)
        return _outcome(session, run_dir)


def _check(config: RunConfig, goal: Any) -> list[str]:
    """What can be refused by a look at the settings and the first lines of the data; the formats found."""
    check_sinks(config.monitor.sinks)
    formats = peek(config.data, config.data.train, goal)
    return formats + (peek(config.data, config.data.eval, goal) if config.data.eval else [])


def _open_run_dir(config: RunConfig, path: Path | None) -> RunDir:
    return open_run_dir(config.run_dir, path.stem if path else "run", config.checkpoint.resume)


def _checkpoint_to_resume(config: RunConfig, run_dir: RunDir) -> Path | None:
    from tunesmith.loop.checkpoint import Checkpoints, check_same_model, read_state

    resume = config.checkpoint.resume
    if resume is False:
        return None
    newest = Checkpoints(run_dir.checkpoints, config.checkpoint.keep).newest()
    checkpoint = resume if isinstance(resume, Path) else newest
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint to resume in {run_dir.checkpoints}: the run ended before its first one. "
            "Start it anew without checkpoint.resume, in another run_dir or after deleting this one"
        )
    read_state(checkpoint)
    check_same_model(checkpoint, config.model.path)
    return checkpoint


def _load_tokenizer(config: RunConfig) -> Any:
    from transformers.utils import logging

    from tunesmith.models.tokenizer import load_tokenizer

    logging.disable_progress_bar()  # its bars would be drawn over ours

    section = config.model
    return load_tokenizer(section.path, section.trust_remote_code, section.chat_template)


def _limited(config: RunConfig) -> DataSection:
    """The data section with the limit that model and micro-batch set, so that a line over it is told by its place."""
    is_rl = isinstance(config, RLConfig)
    key = "max_prompt_tokens" if is_rl else "max_tokens"
    facts = _model_facts(config)
    room = [n for n in (facts and facts.context, config.system.max_tokens_per_microbatch) if n is not None]
    if getattr(config.data, key) is not None or not room:
        return config.data
    limit = min(room) - (config.rollout.max_new_tokens if is_rl else 0)
    # Where nothing is left for a prompt, it is other settings that are at odds, and they are refused later.
    return config.data.model_copy(update={key: limit}) if limit > 0 else config.data


def _model_facts(config: RunConfig) -> ModelFacts | None:
    model = Path(config.model.path)
    return read_model_facts(model) if model.is_dir() else None


def _resolve(config: C, train: Prepared[T], held_out: Prepared[T] | None, longest: int) -> Resolved[C]:
    facts = Facts(
        hardware=read_hardware(),
        model=_model_facts(config),
        train_size=len(train),
        eval_size=len(held_out) if held_out else None,
        longest=longest,
    )
    return resolve(config, facts)


def _announce(
    resolved: Resolved[C], run_dir: RunDir, formats: Sequence[str], *loaded: Prepared[Any] | None
) -> C:
    """Print and save what the run will do and what became of the data, before anything heavy loads."""
    for line in [*formats, *(data.report.summary() for data in loaded if data)]:
        print(line)
    print_resolved(resolved)
    save_resolved(resolved, run_dir.path)
    for data in loaded:
        if data:
            data.report.write_skipped(run_dir.path / "skipped.jsonl")
    print(f"run directory: {run_dir.path}", flush=True)
    return resolved.config


def _open_session(
    stack: ExitStack, config: RunConfig, run_dir: RunDir, checkpoint: Path | None, metric: str
) -> Session:
    from tunesmith.loop.checkpoint import Checkpoints, read_state
    from tunesmith.loop.session import Best, Cadence, Session

    assert config.train.steps is not None, "the configuration is not resolved"
    step = read_state(checkpoint)["step"] if checkpoint else None
    drop_after(run_dir.rollouts, -1 if step is None else step)
    sinks = open_sinks(config.monitor.sinks, run_dir.path, step)
    metrics = Metrics(run_dir.metrics, sinks, config.monitor.every, step)
    progress = open_progress(
        config.train.steps, start=step or 0, live=config.monitor.progress, every=config.monitor.every
    )
    samples = JsonLines(run_dir.rollouts)
    stack.callback(samples.close)
    return Session(
        cadence=Cadence(config.train.steps, config.eval.every, config.checkpoint.every),
        metrics=stack.enter_context(metrics),
        progress=stack.enter_context(progress),
        checkpoints=Checkpoints(run_dir.checkpoints, config.checkpoint.keep),
        best=Best(metric, higher_is_better="loss" not in metric, target=config.eval.target),
        samples=samples,
        clock=Clock(),
        resume_from=checkpoint,
    )


def _load_model(config: RunConfig, tokenizer: Any) -> CausalLM:
    import torch

    from tunesmith.models.causal_lm import CausalLM

    if config.system.threads is not None:
        torch.set_num_threads(config.system.threads)
    assert config.model.dtype is not None and config.system.device is not None, "not resolved"
    model = CausalLM.load(
        config.model.path,
        dtype=getattr(torch, config.model.dtype),
        device=config.system.device,
        trust_remote_code=config.model.trust_remote_code,
    )
    model.tokenizer = tokenizer
    return model


def _limits(config: RunConfig) -> Limits:
    assert config.system.device is not None and config.model.dtype is not None, "not resolved"
    return measure_limits(config.system.device, config.model.dtype)


def _backend(config: RunConfig, model: CausalLM, **options: Any) -> TorchBackend:
    from tunesmith.backends.optimizer import AdamWSettings
    from tunesmith.backends.torch import TorchBackend

    train, system = config.train, config.system
    return TorchBackend(
        model,
        AdamWSettings(train.weight_decay, train.betas, train.eps, train.max_grad_norm),
        chunk=system.logprob_chunk,
        gradient_checkpointing=system.gradient_checkpointing,
        seed=train.seed,
        **options,
    )


def _learner(
    config: RunConfig,
    session: Session,
    backend: TorchBackend,
    objective: Objective,
    aggregation: str,
    optimizer_steps: int,
    max_new_tokens: int | None = None,
) -> Learner:
    from tunesmith.backends.optimizer import learning_rate
    from tunesmith.loop.learner import Learner
    from tunesmith.models.cost import training_cost

    train, system = config.train, config.system
    assert train.lr is not None and system.max_tokens_per_microbatch is not None, "not resolved"
    return Learner(
        backend=backend,
        objective=objective,
        aggregation=aggregation,
        max_new_tokens=max_new_tokens,
        learning_rate=partial(
            learning_rate,
            peak=train.lr,
            total=optimizer_steps,
            warmup=train.warmup_steps or 0,
            schedule=train.schedule,
            min_ratio=train.min_lr_ratio,
        ),
        max_tokens=system.max_tokens_per_microbatch,
        cost=training_cost(backend.model),
        share_prompts=system.share_prompts,
        flops_per_second=_limits(config).flops_per_second,
        report=session.note,
    )


def _rl_parts(
    config: RLConfig,
    session: Session,
    tokenizer: Any,
    rewards: RewardSet,
    train: Prepared[Task],
    held_out: Prepared[Task] | None,
) -> RLParts:
    from tunesmith.algorithms.kl import AdaptiveController
    from tunesmith.algorithms.objective import needs_entropy, needs_reference, policy_objective
    from tunesmith.loop.collect import Collector
    from tunesmith.loop.rl import RLParts

    algorithm, rollout = config.algorithm, config.rollout
    assert algorithm.aggregation and config.train.steps, "not resolved"
    model = _load_model(config, tokenizer)
    backend = _backend(
        config,
        model,
        reference=_load_model(config, tokenizer) if needs_reference(algorithm) else None,
        temperature=rollout.temperature,
        entropy=needs_entropy(algorithm),
    )
    sampling = _sampling(config, tokenizer)
    engine = _engine(config, model)
    decode: Callable[[Sequence[int]], str] = partial(tokenizer.decode, skip_special_tokens=True)
    return RLParts(
        config=config,
        sampling=sampling,
        tasks=train.loader(shuffle=config.data.shuffle, seed=_data_seed(config)),
        rewards=rewards,
        collector=Collector(engine, rewards, {"single_turn": SingleTurn()}, decode, rollout.timeout),
        engine=engine,
        backend=backend,
        learner=_learner(
            config,
            session,
            backend,
            policy_objective(algorithm),
            algorithm.aggregation,
            optimizer_steps(config, config.train.steps),
            rollout.max_new_tokens,
        ),
        kl=AdaptiveController(
            algorithm.kl_coef or 0.0, algorithm.kl_target or 1.0, algorithm.kl_horizon or 1
        ),
        evaluation=_evaluation(config, sampling, rewards, held_out) if held_out else None,
    )


def _sampling(config: RLConfig, tokenizer: Any) -> Sampling:
    """A turn ends where the chat template ends it, even if that token is not the model's EOS."""
    rollout = config.rollout
    end_of_turn = end_of_turn_id(tokenizer)
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids + (() if end_of_turn is None else (end_of_turn,)),
    )


def _engine(config: RLConfig, model: CausalLM) -> RolloutEngine:
    from tunesmith.engines.base import HardwareLimits
    from tunesmith.engines.local.engine import LocalEngine

    system, limits = config.system, _limits(config)
    assert system.kv_memory, "not resolved"
    return LocalEngine(
        model,
        kv_bytes=parse_size(system.kv_memory),
        max_running=system.max_running,
        max_prefill_tokens=system.max_prefill_tokens,
        limits=HardwareLimits(limits.bytes_per_second, limits.flops_per_second),
    )


def _evaluation(
    config: RLConfig, sampling: Sampling, rewards: RewardSet, held_out: Prepared[Task]
) -> Evaluation:
    from tunesmith.loop.evaluate import Evaluation

    return Evaluation(
        tasks=held_out.items[: config.eval.max_prompts],
        sampling=sampling,
        samples=config.eval.samples,
        temperature=config.eval.temperature,
        pass_at=config.eval.pass_at or (config.eval.samples,),
        threshold=sum(w for w in rewards.weights.values() if w > 0),
        seed=config.train.seed,
    )


def _sft_parts(
    config: SFTConfig,
    session: Session,
    tokenizer: Any,
    train: Prepared[Sample],
    held_out: Prepared[Sample] | None,
) -> SupervisedParts:
    from tunesmith.algorithms.objective import sft_objective
    from tunesmith.loop.supervised import SupervisedParts

    assert config.train.steps and config.train.batch_size, "not resolved"
    backend = _backend(config, _load_model(config, tokenizer))
    loader = train.loader(config.train.batch_size, shuffle=config.data.shuffle, seed=_data_seed(config))
    objective = sft_objective()
    return SupervisedParts(
        samples=loader,
        backend=backend,
        learner=_learner(config, session, backend, objective, "token_mean", config.train.steps),
        evaluation=held_out.items[: config.eval.max_prompts] if held_out else None,
        evaluate_at_start=config.eval.at_start,
    )


def _data_seed(config: RunConfig) -> int:
    return config.train.seed if config.data.seed is None else config.data.seed


def _outcome(session: Session, run_dir: RunDir) -> Outcome:
    newest = session.checkpoints.newest()
    assert newest is not None, "a run ends with a checkpoint"
    evaluations = [line for line in read_metrics(run_dir.metrics) if any(k.startswith("eval/") for k in line)]
    session.clock.lap()
    return Outcome(run_dir.path, newest / "model", evaluations, session.clock.totals())
