"""A run of reinforcement learning: its parts, in this process or in others, and the loop over
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from tunesmith.config.commands import SampledDistillConfig
from tunesmith.config.schema import RLConfig
from tunesmith.learn.algorithms.kl import KLController
from tunesmith.learn.algorithms.objective import DistillationObjective
from tunesmith.learn.environments.loading import EnvironmentSet
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.length import optimizer_steps
from tunesmith.plan.plan import devices_of
from tunesmith.run.engines.base import RolloutEngine, Sampler
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.loop import rl
from tunesmith.run.loop.canary import TOLERANCES, Canary
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.curriculum import Curriculum
from tunesmith.run.loop.evaluate import EvaluationPlan
from tunesmith.run.loop.gate import Gate
from tunesmith.run.loop.learner import Learner
from tunesmith.run.loop.parts import RLParts
from tunesmith.run.loop.rollouts import AsyncRollouts, RolloutSource, SyncRollouts
from tunesmith.run.loop.session import Session
from tunesmith.run.placement.engines import make_engine, make_engines, make_sampling
from tunesmith.run.placement.environments import make_environments
from tunesmith.run.placement.event_loop import event_loop, outside_event_loop
from tunesmith.run.placement.models import limits_of, saved_generation
from tunesmith.run.placement.opening import OpenRun
from tunesmith.run.placement.processes import remote_reward_model, remote_trainer
from tunesmith.run.placement.rewards import add_rewards
from tunesmith.run.placement.session import RunResult, kept_on_interrupt, open_session, run_result
from tunesmith.run.placement.trainers import make_critic, make_learner, make_policy
from tunesmith.run.processes.local import Processes
from tunesmith.run.weights.far import FarPlane
from tunesmith.types import Sampling, Task


def train_policy(
    run: OpenRun[RLConfig, Task],
    rewards: RewardSet,
    environments: EnvironmentSet,
    processes: Processes | None,
    checkpoint: Path | None,
) -> RunResult:
    """The run from ``checkpoint`` on, or from the beginning."""
    with (
        open_session(run, checkpoint, "eval/reward") as session,
        outside_event_loop(),
        event_loop() as runner,
    ):
        with session.phase("setup"):
            parts, rollouts = runner.run(
                make_rl_parts(run, session, rewards, environments, processes)
            )
        if run.caller.rollouts is not None:
            rollouts = run.caller.rollouts(rollouts)
        with kept_on_interrupt(run, session):
            runner.run(rl.run(parts, session, rollouts))
        return run_result(run, session)


async def make_rl_parts(
    run: OpenRun[RLConfig, Task],
    session: Session,
    rewards: RewardSet,
    environments: EnvironmentSet,
    processes: Processes | None,
) -> tuple[RLParts, RolloutSource]:
    """Load the models, start the engine and resume from the session's checkpoint; ``rl.run`` closes
    the engine."""
    config = run.config
    tokenizer = run.tokenizer
    train = run.train
    dynamic_filter = config.algorithm.dynamic_filter
    rollout = config.rollout
    learner, engine = make_learner_and_engine(run, session, processes)
    async with AsyncExitStack() as on_failure:
        on_failure.push_async_callback(engine.close)
        remote_reward = None
        if processes and config.system.cluster != "none":
            remote_reward = partial(remote_reward_model, processes, config, report=session.note)
        add_rewards(rewards, config, tokenizer, session.note, remote_reward)
        sampling = make_sampling(rollout, tokenizer, rollout.temperature, saved_generation(config))
        gate = Gate(engine, partial=rollout.partial) if rollout.max_staleness else None
        decode: Callable[[Sequence[int]], str] = partial(tokenizer.decode, skip_special_tokens=True)
        resting = dynamic_filter.rest_epochs or 0 if dynamic_filter else 0
        tasks = train.loader(shuffle=config.data.shuffle, seed=config.data.seed)
        parts = RLParts(
            config=config,
            engine=engine,
            sampling=sampling,
            tasks=Curriculum(tasks, resting),
            rewards=rewards,
            collector=Collector(
                (gate or engine).generate,
                rewards,
                make_environments(config, environments, tokenizer, train),
                decode,
                rollout.timeout,
                config.environment.concurrency if environments.loaded else None,
                session.recorder.timeline,
            ),
            learner=learner,
            critic=make_critic(config, session, tokenizer, learner, processes, len(train)),
            kl=KLController.of(config.algorithm.kl),
            evaluation=EvaluationPlan(
                run.eval_items, sampling, config.eval, rewards.weights, config.train.seed
            )
            if run.eval_items
            else None,
            canary=_canary(config, engine, learner, train.items[0].prompt_ids),
            objective=DistillationObjective(1.0)
            if isinstance(config, SampledDistillConfig)
            else None,
        )
        session.start(parts)
        on_failure.pop_all()
    return parts, AsyncRollouts(parts, session, gate) if gate else SyncRollouts(parts, session)


def make_learner_and_engine(
    run: OpenRun[RLConfig, Task], session: Session, processes: Processes | None
) -> tuple[Learner, RolloutEngine]:
    """The learner that trains the policy and the engine that samples from it, here or in other
    processes."""
    config = run.config
    tokenizer = run.tokenizer
    if processes:
        trained = remote_trainer(processes, config, make_policy)
        backend, _ = trained
        publishing = FarPlane(*backend.replicas[: devices_of(config).publishing_ranks])
        engine = make_engines(
            processes, config, publishing, session.note, session.recorder.timeline
        )
    else:
        backend = make_policy(config, tokenizer)
        trained = backend, limits_of(config)
        engine = make_engine(config, backend.model, session.note, session.recorder.timeline)
    learner = make_learner(
        config,
        session,
        trained,
        config.algorithm.aggregation,
        optimizer_steps(config, len(run.train)),
        config.rollout.max_new_tokens,
    )
    return learner, engine


def _canary(
    config: RLConfig, engine: RolloutEngine, learner: Learner, prompt_ids: Sequence[int]
) -> Canary | None:
    """The canary; None if trainer and engine share their weights or ``system.canary`` is off."""
    system = config.system
    if not system.canary or not devices_of(config).weights_apart:
        return None
    new = min(8, config.rollout.max_new_tokens)
    sampling = Sampling(new, temperature=config.rollout.temperature, ignore_eos=True, seed=1)
    way = (
        f"through system.weight_plane = {system.weight_plane}"
        if system.weight_plane
        else f"to {system.engine}"
    )

    def engines() -> Mapping[str, Sampler]:
        if isinstance(engine, EnginePool):
            return {member.name: member for member in engine.members}
        return {"the engine": engine}

    return Canary(engines, learner, prompt_ids[:40], sampling, TOLERANCES[config.model.dtype], way)
