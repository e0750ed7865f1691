"""``tunesmith rl``, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.assembly.checking import checked
from tunesmith.assembly.cluster import open_cluster, remote_engines, remote_trainer, run_with_restarts
from tunesmith.assembly.common import load_model, load_tokenizer, make_learner
from tunesmith.assembly.engines import make_engine, make_sampling
from tunesmith.assembly.environments import (
    hand_instances,
    instances_for,
    load_run_rewards,
    load_run_tasks,
    make_environments,
    sharing_process,
)
from tunesmith.assembly.opening import (
    Ready,
    RunResult,
    checkpoint_to_resume,
    keep_and_tell,
    make_ready,
    open_session,
    run_result,
)
from tunesmith.assembly.rewards import add_rewards
from tunesmith.config.schema import RLConfig
from tunesmith.environments.loading import EnvironmentSet, load_environments
from tunesmith.monitor.interrupts import keeping
from tunesmith.monitor.run_dir import open_run_dir
from tunesmith.plan.checks import optimizer_steps
from tunesmith.rewards.reward_set import RewardSet
from tunesmith.types import Sampling, Task

if TYPE_CHECKING:
    from tunesmith.cluster.ray_cluster import Cluster
    from tunesmith.engines.base import RolloutEngine
    from tunesmith.loop.evaluate import EvaluationPlan
    from tunesmith.loop.learner import Learner
    from tunesmith.loop.parts import RLParts
    from tunesmith.loop.session import Session


def run_rl(path: Path | None, overrides: Sequence[str] = (), kind: type[RLConfig] = RLConfig) -> RunResult:
    """``tunesmith rl``: reinforcement learning as a run file says."""
    base_dir, name = (path.parent, path.stem) if path else (Path.cwd(), "run")
    with ExitStack() as stack:
        config = stack.enter_context(checked(kind, path, overrides))
        name = config.monitor.run_name or name
        run_dir = stack.enter_context(open_run_dir(config.run_dir, name, config.checkpoint.resume))
        checkpoint = checkpoint_to_resume(config, run_dir)
        own = sharing_process(config, base_dir)
        rewards = load_run_rewards(own, base_dir)
        stack.callback(rewards.close)
        environments = load_environments(own.environment, base_dir)
        stack.callback(environments.close)
        hand_instances(rewards, environments)
        tokenizer = load_tokenizer(config)
        load = partial(load_run_tasks, environments, tokenizer)
        run = make_ready(
            config,
            run_dir,
            tokenizer,
            load,
            lambda task: (len(task.prompt_ids), 0),
            rewards.check_tasks,
            instances_for=instances_for(config, base_dir),
        )
        config = run.config
        cluster, metric = stack.enter_context(open_cluster(config)), config.eval.metric or "eval/reward"

        def attempt(resume_from: Path | None) -> RunResult:
            from tunesmith.loop import rl

            with ExitStack() as attempt_stack:
                session = open_session(attempt_stack, run, run_dir, base_dir, resume_from, metric)
                with session.phase("setup"):
                    learner, engine = _learner_and_engine(config, session, tokenizer, cluster)
                    try:
                        parts = _rl_parts(run, session, rewards, environments, cluster, learner, engine)
                        rl.restore(parts, session)
                    except BaseException:
                        asyncio.run(engine.close())
                        raise
                with asyncio.Runner() as runner, keeping(lambda: keep_and_tell(rl.keep(parts, session), run_dir)):
                    runner.run(_run(parts, session))
                return run_result(session, run_dir)

        return run_with_restarts(attempt, config, run_dir, checkpoint, cluster)


async def _run(parts: RLParts, session: Session) -> None:
    from tunesmith.loop import rl

    try:
        await rl.run(parts, session)
    finally:
        await parts.engine.close()


def _rl_parts(
    run: Ready[RLConfig, Task],
    session: Session,
    rewards: RewardSet,
    environments: EnvironmentSet,
    cluster: Cluster | None,
    learner: Learner,
    engine: RolloutEngine,
) -> RLParts:
    from tunesmith.algorithms.kl import AdaptiveKLController
    from tunesmith.assembly.critic import make_critic
    from tunesmith.assembly.teacher import objective_with_teacher
    from tunesmith.loop.canary import make_canary
    from tunesmith.loop.collect import Collector
    from tunesmith.loop.curriculum import Curriculum
    from tunesmith.loop.gate import Gate
    from tunesmith.loop.parts import RLParts

    config, tokenizer, train = run.config, run.tokenizer, run.train
    algorithm, rollout = config.algorithm, config.rollout
    add_rewards(rewards, config, tokenizer, session.note, cluster)
    sampling = make_sampling(rollout, tokenizer, rollout.temperature)
    if rollout.max_staleness:
        engine = Gate(engine, partial=rollout.partial)
    decode: Callable[[Sequence[int]], str] = partial(tokenizer.decode, skip_special_tokens=True)
    return RLParts(
        config=config,
        sampling=sampling,
        tasks=Curriculum(train.loader(shuffle=config.data.shuffle, seed=config.data.seed), algorithm.rest_epochs or 0),
        rewards=rewards,
        collector=Collector(
            engine,
            rewards,
            make_environments(config, environments, tokenizer, train),
            decode,
            rollout.timeout,
            asyncio.Semaphore(config.environment.concurrency) if environments.loaded else nullcontext(),
            session.timeline,
        ),
        learner=learner,
        critic=make_critic(config, session, tokenizer, learner, cluster),
        kl=AdaptiveKLController(algorithm.kl_coef or 0.0, algorithm.kl_target or 1.0, algorithm.kl_horizon or 1),
        evaluation=_evaluation(config, sampling, rewards, run.eval_items) if run.eval_items else None,
        canary=make_canary(config, engine, learner, train.items[0].prompt_ids),
        objective=objective_with_teacher(config),
    )


def _learner_and_engine(
    config: RLConfig, session: Session, tokenizer: Any, cluster: Cluster | None
) -> tuple[Learner, RolloutEngine]:
    """What trains the policy and what samples with it, here or on a cluster."""
    from tunesmith.algorithms.objective import policy_objective
    from tunesmith.assembly.policy import policy_backend
    from tunesmith.models.causal_lm import CausalLM

    algorithm = config.algorithm
    assert algorithm.aggregation, "not resolved"
    if cluster:
        backend, limits = remote_trainer(cluster, config)
        engine = remote_engines(cluster, config, backend, session.note, session.timeline)
    else:
        model = load_model(CausalLM, config, tokenizer)
        backend, limits = policy_backend(config, tokenizer, model), None
        engine = make_engine(config, model, session.note, session.timeline)
    learner = make_learner(
        config,
        session,
        backend,
        policy_objective(algorithm),
        algorithm.aggregation,
        optimizer_steps(config, config.train.steps),
        config.rollout.max_new_tokens,
        limits,
    )
    return learner, engine


def _evaluation(config: RLConfig, sampling: Sampling, rewards: RewardSet, tasks: list[Task]) -> EvaluationPlan:
    from tunesmith.loop.evaluate import EvaluationPlan

    return EvaluationPlan(
        tasks=tasks,
        sampling=sampling,
        samples=config.eval.samples,
        temperature=config.eval.temperature,
        pass_at=config.eval.pass_at or (config.eval.samples,),
        weights=rewards.weights,
        seed=config.train.seed,
    )
