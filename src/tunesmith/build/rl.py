"""``tunesmith rl``, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.build.common import data_seed, limits_of, load_model, load_tokenizer, make_backend, make_learner
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.config.sizes import parse_size
from tunesmith.data.chat import end_of_turn_id
from tunesmith.data.prepare import Prepared, load_tasks
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
from tunesmith.types import Sampling, Task

if TYPE_CHECKING:
    from tunesmith.engines.base import RolloutEngine
    from tunesmith.loop.evaluate import Evaluation
    from tunesmith.loop.rl import RLParts
    from tunesmith.loop.session import Session
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
        tokenizer = load_tokenizer(config)
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
    from tunesmith.models.causal_lm import CausalLM

    algorithm, rollout = config.algorithm, config.rollout
    assert algorithm.aggregation and config.train.steps, "not resolved"
    model = load_model(CausalLM, config, tokenizer)
    predict = partial(
        CausalLM.predict,
        temperature=rollout.temperature,
        entropy=needs_entropy(algorithm),
        chunk=config.system.logprob_chunk,
    )
    reference = load_model(CausalLM, config, tokenizer) if needs_reference(algorithm) else None
    backend = make_backend(config, model, predict, reference)
    sampling = _sampling(config, tokenizer)
    engine = _engine(config, model)
    decode: Callable[[Sequence[int]], str] = partial(tokenizer.decode, skip_special_tokens=True)
    return RLParts(
        config=config,
        sampling=sampling,
        tasks=train.loader(shuffle=config.data.shuffle, seed=data_seed(config)),
        rewards=rewards,
        collector=Collector(engine, rewards, {"single_turn": SingleTurn()}, decode, rollout.timeout),
        engine=engine,
        backend=backend,
        learner=make_learner(
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
        limits=limits_of(config),
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
