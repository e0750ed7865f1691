"""The composition root: the one module that names adapters and puts a run together.

Order matters: everything that can be refused is refused before a model is loaded, and the resolved
configuration is printed and saved before that too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.config.sizes import parse_size
from tunesmith.data.chat import end_of_turn_id
from tunesmith.data.prepare import Prepared, load_samples, load_tasks
from tunesmith.environments.base import SingleTurn
from tunesmith.environments.rewards import RewardSet, check_rewards, load_rewards
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
from tunesmith.plan.checks import check, optimizer_steps
from tunesmith.plan.hardware import Limits, measure_limits
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


def run_rl(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith rl``: reinforcement learning as a run file says."""
    config = load_config(RLConfig, path, overrides)
    check(config)
    base_dir = path.parent if path else Path.cwd()
    check_rewards(config.reward, base_dir)
    check_inputs(config, "rl")
    with ExitStack() as stack:
        run_dir = stack.enter_context(enter_run_dir(config, path))
        checkpoint = checkpoint_to_resume(config, run_dir)
        rewards = load_rewards(config.reward, base_dir)
        stack.callback(rewards.close)
        tokenizer = _load_tokenizer(config)
        data = limited_data(config)
        train = load_tasks(data, data.train, tokenizer)
        held_out = load_tasks(data, data.eval, tokenizer) if data.eval else None
        rewards.check_tasks([*train.items, *(held_out.items if held_out else [])])
        longest = max(len(t.prompt_ids) for part in (train, held_out) if part for t in part.items)
        resolved = resolve_run(config, train, held_out, longest)
        config = announce(resolved, run_dir, train, held_out)
        session = open_session(stack, config, run_dir, checkpoint, config.eval.metric or "eval/reward")
        from tunesmith.loop import rl

        with session.phase("setup"):
            parts = _rl_parts(config, session, tokenizer, rewards, train, held_out)
            rl.restore(parts, session)
        asyncio.run(rl.run(parts, session))
        return outcome_of(session, run_dir)


def run_sft(path: Path | None, overrides: Sequence[str] = ()) -> Outcome:
    """``tunesmith sft``: supervised fine-tuning as a run file says."""
    config = load_config(SFTConfig, path, overrides)
    check(config)
    check_inputs(config, "sft")
    with ExitStack() as stack:
        run_dir = stack.enter_context(enter_run_dir(config, path))
        checkpoint = checkpoint_to_resume(config, run_dir)
        tokenizer = _load_tokenizer(config)
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


def _load_tokenizer(config: RunConfig) -> Any:
    from transformers.utils import logging

    from tunesmith.models.loading import load_tokenizer

    logging.disable_progress_bar()  # its bars would be drawn over ours

    section = config.model
    return load_tokenizer(
        section.path, trust_remote_code=section.trust_remote_code, chat_template=section.chat_template
    )


def _load_model(config: RunConfig, tokenizer: Any) -> CausalLM:
    import torch

    from tunesmith.models.causal_lm import CausalLM

    if config.system.threads is not None:
        torch.set_num_threads(config.system.threads)
    assert config.model.dtype is not None and config.system.device is not None, "not resolved"
    return CausalLM.load(
        config.model.path,
        dtype=getattr(torch, config.model.dtype),
        device=config.system.device,
        trust_remote_code=config.model.trust_remote_code,
        tokenizer=tokenizer,
    )


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
        kl=AdaptiveController(algorithm.kl_coef or 0.0, algorithm.kl_target or 1.0, algorithm.kl_horizon or 1),
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
    from tunesmith.engines.local.engine import LocalEngine

    system = config.system
    assert system.kv_memory, "not resolved"
    return LocalEngine(
        model,
        kv_bytes=parse_size(system.kv_memory),
        max_running=system.max_running,
        max_prefill_tokens=system.max_prefill_tokens,
        limits=_limits(config),
    )


def _evaluation(config: RLConfig, sampling: Sampling, rewards: RewardSet, held_out: Prepared[Task]) -> Evaluation:
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
