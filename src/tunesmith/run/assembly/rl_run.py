"""A run of reinforcement learning: specs, a placement that builds them, and the loop over the
parts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from tunesmith.config.algorithm import Algorithm
from tunesmith.config.schema import RLConfig
from tunesmith.learn.algorithms.kl import KLController
from tunesmith.learn.algorithms.objective import DistillationObjective
from tunesmith.learn.environments.loading import EnvironmentSet
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.plan import Plan
from tunesmith.records.timeline import Timeline
from tunesmith.run.assembly.environments import make_environments
from tunesmith.run.assembly.event_loop import event_loop, outside_event_loop
from tunesmith.run.assembly.learners import make_canary, make_critic, make_learner, policy_rate
from tunesmith.run.assembly.opening import OpenRun
from tunesmith.run.assembly.rewards import add_rewards
from tunesmith.run.assembly.seeing import see_requests
from tunesmith.run.assembly.session import RunResult, kept_on_interrupt, open_session, run_result
from tunesmith.run.assembly.teachers import teacher_of_rollouts
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.loop import rl
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.curriculum import Curriculum
from tunesmith.run.loop.evaluate import EvaluationPlan, passes
from tunesmith.run.loop.gate import Gate
from tunesmith.run.loop.parts import RLParts
from tunesmith.run.loop.rollouts import AsyncRollouts, RolloutSource, SyncRollouts
from tunesmith.run.placement.port import Placement
from tunesmith.run.specs.base import EngineSpec, Report
from tunesmith.run.specs.engines import make_sampling
from tunesmith.run.specs.from_plan import engine_spec, trainer_spec
from tunesmith.run.specs.models import saved_generation
from tunesmith.types import Sampling, Task

RLRun = OpenRun[RLConfig, Task]


def train_policy(
    run: RLRun,
    rewards: RewardSet,
    environments: EnvironmentSet,
    placement: Placement,
    checkpoint: Path | None,
) -> RunResult:
    """The run from ``checkpoint`` on, or from the beginning."""

    async def set_up() -> tuple[RLParts, RolloutSource]:
        timeline = session.recorder.timeline
        parts = await make_parts(run, placement, rewards, environments, session.note, timeline)
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(parts.engine.close)
            session.start(parts)
            on_failure.pop_all()
        rollouts = AsyncRollouts if parts.gate else SyncRollouts
        return parts, rollouts(parts, session)

    with (
        open_session(run, checkpoint, "eval/reward") as session,
        outside_event_loop(),
        event_loop() as runner,
    ):
        see_requests(run.plan, run.tokenizer, run.directory.path)
        with session.phase("setup"):
            parts, rollouts = runner.run(set_up())
        if run.caller.rollouts is not None:
            rollouts = run.caller.rollouts(rollouts)
        with kept_on_interrupt(run, session):
            runner.run(rl.run(parts, session, rollouts))
        return run_result(run, session)


async def make_parts(
    run: RLRun,
    placement: Placement,
    rewards: RewardSet,
    environments: EnvironmentSet,
    report: Report,
    timeline: Timeline | None,
) -> RLParts:
    """Load the models and start the engine; ``rl.run`` closes it."""
    plan = run.plan
    said = plan.said
    algorithm = plan.algorithm
    assert algorithm is not None, "it is reinforcement learning"
    rollout = said.rollout
    tokenizer = run.tokenizer
    trained = placement.trainer(trainer_spec(plan))
    trained.record_ranks(timeline)
    engine = placement.engine(_engine_spec(plan), trained.source, report, timeline)
    async with AsyncExitStack() as on_failure:
        on_failure.push_async_callback(engine.close)
        learner = make_learner(
            plan,
            trained,
            report,
            algorithm.aggregation,
            policy_rate(plan, len(run.train)),
            max_new_tokens=rollout.max_new_tokens,
        )
        sampling = make_sampling(rollout, tokenizer, rollout.temperature, saved_generation(said))
        gate = Gate(engine, partial=rollout.partial) if rollout.max_staleness else None
        generate = (gate or engine).generate
        add_rewards(rewards, plan, tokenizer, report, placement, run.directory.path, generate)
        parts = RLParts(
            plan=plan,
            algorithm=algorithm,
            engine=engine,
            engines=(lambda: engine.roster.seats) if isinstance(engine, EnginePool) else None,
            gate=gate,
            sampling=sampling,
            tasks=_tasks(run, algorithm, rewards),
            rewards=rewards,
            collector=Collector(
                generate,
                rewards,
                make_environments(plan, environments, tokenizer, run.train),
                partial(tokenizer.decode, skip_special_tokens=True),
                rollout.timeout,
                said.environment.concurrency if environments.loaded else None,
                timeline,
            ),
            learner=learner,
            critic=make_critic(plan, placement, learner, tokenizer, report, len(run.train)),
            kl=KLController.of(algorithm.kl),
            evaluation=_evaluation(run, sampling, rewards),
            canary=make_canary(plan, engine, learner, run.train.items[0].prompt_ids),
            objective=DistillationObjective(1.0) if plan.training.distillation else None,
            teacher=teacher_of_rollouts(run, learner, report),
            kl_name="teacher_kl" if plan.kind.distils else "ref_kl",
        )
        on_failure.pop_all()
    return parts


def _engine_spec(plan: Plan[RLConfig]) -> EngineSpec:
    spec = engine_spec(plan)
    rollout = plan.said.rollout
    # A gate continues what a lost engine has begun.
    return spec.keeping() if rollout.max_staleness and rollout.partial else spec


def _evaluation(run: RLRun, sampling: Sampling, rewards: RewardSet) -> EvaluationPlan | None:
    """None: there is no data to evaluate on."""
    items = run.eval_items
    if not items:
        return None
    said = run.plan.said
    pass_at = run.plan.intervals.pass_at
    return EvaluationPlan(items, sampling, said.eval, rewards.weights, said.train.seed, pass_at)


def _tasks(run: RLRun, algorithm: Algorithm, rewards: RewardSet) -> Curriculum:
    section = algorithm.dynamic_filter
    resting = section.rest_epochs or 0 if section else 0
    data = run.plan.said.data
    loader = run.train.loader(shuffle=data.shuffle, seed=run.plan.training.data_seed)
    by_rate = data.curriculum == "success_rate"
    right = partial(passes, weights=rewards.weights) if by_rate else None
    return Curriculum(loader, resting, right)
