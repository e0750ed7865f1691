"""Shared by ``tunesmith generate`` and ``tunesmith rft``: opens a run that samples, and answers its
tasks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.config.commands import GenerateConfig, RFTConfig, SamplingConfig
from tunesmith.config.reading.overriding import Override
from tunesmith.config.schema import RewardSection
from tunesmith.learn.data.loader import fingerprint_of
from tunesmith.learn.data.prepare import load_tasks
from tunesmith.learn.environments.base import SingleTurn
from tunesmith.learn.rewards.loading import load_rewards
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.plan import AnyPlan
from tunesmith.records.interrupts import handled, keeping
from tunesmith.records.run_dir import how_to_continue
from tunesmith.run.assembly.contents import weights_and_code
from tunesmith.run.assembly.opening import FROM_A_COMMAND, Caller, OpenRun, open_run
from tunesmith.run.assembly.rewards import add_rewards
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.seeds import derive_seed
from tunesmith.run.offline.answering import answer, window_of
from tunesmith.run.offline.lines import CONTENTS, LineWriter, repair
from tunesmith.run.offline.unfinished import Unfinished
from tunesmith.run.offline.usage import Usage
from tunesmith.run.offline.watch import JobWatch
from tunesmith.run.placement.choosing import on_this_machine
from tunesmith.run.specs.engines import make_sampling
from tunesmith.run.specs.from_plan import engine_spec, frozen_source
from tunesmith.run.specs.models import saved_generation
from tunesmith.types import RolloutGroup, Task, Tokenizer

C = TypeVar("C", GenerateConfig, RFTConfig)
_OF_PROMPTS = (
    "map", "system_prompt", "chat", "chat_template_kwargs", "too_long", "max_prompt_tokens",
)  # fmt: skip
"""``[data]`` keys that prompts depend on."""
_ENVIRONMENTS = {"single_turn": SingleTurn()}


@contextmanager
def open_sampling(
    kind: type[C], path: Path | None, overrides: Sequence[Override], caller: Caller = FROM_A_COMMAND
) -> Generator[tuple[OpenRun[C, Task], RewardSet | None]]:
    """Like ``open_run``; also load the rewards, if any, and read the data."""
    with handled(), open_run(kind, path, overrides, caller) as run:
        section = run.config.reward
        sandbox = run.config.environment.sandbox
        run_dir = run.directory.path
        with (
            keeping(lambda: how_to_continue(run_dir)),
            closing(load_rewards(section, run.base_dir, sandbox=sandbox))
            if section
            else nullcontext() as rewards,
        ):
            run.read(partial(load_tasks, tokenizer=run.tokenizer), rewards and rewards.check_tasks)
            yield run, rewards


def longest_prompt(tasks: Sequence[Task]) -> int:
    return max(len(task.prompt_ids) for task in tasks)


def answer_tasks(
    plan: AnyPlan,
    tokenizer: Tokenizer,
    rewards: RewardSet | None,
    tasks: Sequence[Task],
    writer: LineWriter,
    out: Path,
    usage: Usage,
    watch: JobWatch,
    *,
    stop: tuple[str, ...] = (),
) -> None:
    """Append the lines that ``out`` lacks. If any are missing, the model is loaded, and freed
    afterwards.

    Args:
        usage: must have an open phase.
        stop: strings to stop at, in addition to those of ``[sampling]``.
    """
    writer.check_columns(tasks)
    if repair(out) >= len(tasks):
        return
    config: SamplingConfig = plan.said
    section = config.sampling
    n = plan.sampling.n
    temperature = plan.sampling.temperature
    with usage.phase("setup"):
        engine = _load(plan, tokenizer, rewards, out.parent)
    sampling = make_sampling(section, tokenizer, temperature, saved_generation(config), stop)

    async def produce(place: int, task: Task, unfinished: Unfinished) -> RolloutGroup:
        alone = n == 1 and rewards is None  # a completion is a line at once
        complete = engine.generate if alone else unfinished.completing(place, engine.generate)
        collector = Collector(complete, rewards, _ENVIRONMENTS, writer.decode, section.timeout)
        [group] = await collector.collect([task], sampling, n, derive_seed(section.seed, place))
        return group

    watch.follow(config, tokenizer, lambda: usage.add_engine(engine.stats()), n)
    answer(
        out,
        tasks,
        produce,
        writer.line,
        window=window_of(plan.sampling.running, n),
        max_failed_share=(config.reward or RewardSection()).max_failed_share,
        watch=watch,
        serving=_serving(plan, engine, usage),
    )


@asynccontextmanager
async def _serving(plan: AnyPlan, engine: RolloutEngine, usage: Usage) -> AsyncGenerator[None]:
    """The engine with the weights to sample from; closed at the end."""
    try:
        # An engine with its own weights has read them from the model's files, without the adapter;
        # SGLang has not.
        adapted = plan.kind.adapter or plan.devices.engine.served
        if plan.devices.weights_apart and adapted:
            with usage.phase("setup"):
                await engine.load_weights(0)
        yield
    finally:
        await engine.close()


def _load(
    plan: AnyPlan, tokenizer: Tokenizer, rewards: RewardSet | None, folder: Path
) -> RolloutEngine:
    """The engine, with the model that it needs; also loads the reward models."""
    report = partial(print, flush=True)
    placement = on_this_machine(plan)
    engine = placement.engine(engine_spec(plan), frozen_source(plan, tokenizer), report)
    if rewards is not None:
        add_rewards(rewards, plan, tokenizer, report, placement, folder, engine.generate)
    return engine


def identity(
    plan: AnyPlan, data: str, tokenizer: Tokenizer, *, greedy: bool = False
) -> dict[str, Any]:
    """Everything that the lines of an output depend on, by dotted key.

    Args:
        data: the data's fingerprint.
        greedy: the lines are greedy answers, one to each prompt.
    """
    config: SamplingConfig = plan.said
    model = config.model
    template = tokenizer.chat_template
    values: dict[str, Any] = {
        "model.path": model.path,
        "model.dtype": plan.devices.dtype,
        "model.quantize": model.quantize,
    }
    values |= {"data": data, "chat template (digest)": template and fingerprint_of([template])}
    if config.lora.path is not None:
        values["lora.path"] = str(config.lora.path)
    values |= {f"data.{key}": getattr(config.data, key) for key in _OF_PROMPTS}
    if config.sampling_settings:
        unread = {"timeout"}
        if greedy:
            unread |= {"n", "temperature", "top_p", "top_k", "min_p", "seed"}
        read = config.sampling.model_dump(mode="json")
        read |= {"n": plan.sampling.n, "temperature": plan.sampling.temperature}
        read = {key: value for key, value in read.items() if key not in unread}
        values |= {f"sampling.{key}": value for key, value in read.items()}
    if isinstance(config, GenerateConfig):
        values["output.logprobs"] = config.output.logprobs
    if config.reward is not None:
        outcome = {"functions", "weights", "models", "remote", "judge", "answer", "pattern"}
        reward = config.reward.model_dump(mode="json", include=outcome)
        of_tests = {"tests", "partial_credit"}
        reward |= config.reward.model_dump(include=of_tests, exclude_defaults=True)
        values |= {f"reward.{key}": value for key, value in reward.items()}
    values[CONTENTS] = {name: found.digest for name, found in weights_and_code(plan).items()}
    return values
