"""What ``tunesmith generate`` and ``tunesmith rft`` share: tasks opened with their rewards, and answered into files."""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.assembly.checking import frozen_parameters, task_data
from tunesmith.assembly.common import load_model, load_tokenizer, run_async
from tunesmith.assembly.engines import make_engine, make_sampling
from tunesmith.assembly.rewards import add_rewards
from tunesmith.config.generation import GenerateConfig, SamplingConfig
from tunesmith.config.resolved import Resolved
from tunesmith.config.schema import DataSection, RewardSection, RunConfig
from tunesmith.data.loader import fingerprint_of
from tunesmith.data.prepare import Prepared, load_tasks
from tunesmith.engines.base import RolloutEngine
from tunesmith.engines.stats import EngineStats
from tunesmith.environments.base import SingleTurn
from tunesmith.loop.collect import Collector
from tunesmith.loop.seeds import derive_seed
from tunesmith.loop.usage import Usage
from tunesmith.monitor.run_dir import RunDir, open_run_dir
from tunesmith.monitor.waits import long_wait
from tunesmith.offline.generation import LineWriter, Unscored, answer, repair, window_of
from tunesmith.plan.facts import Facts
from tunesmith.plan.hardware import read_hardware
from tunesmith.plan.hub import known_model_facts
from tunesmith.plan.resolve import resolve
from tunesmith.plan.weights import loads_model, weights_apart
from tunesmith.rewards.loading import load_rewards
from tunesmith.rewards.reward_set import RewardSet
from tunesmith.types import RolloutGroup, Task

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that samples, before its model is loaded."""

    run_dir: RunDir
    data: DataSection
    """As the tasks were loaded with it."""
    tokenizer: Any
    rewards: RewardSet | None
    train: Prepared[Task]
    held_out: Prepared[Task] | None

    @property
    def tasks(self) -> list[Task]:
        return [*self.train.items, *(self.held_out.items if self.held_out else [])]


@contextmanager
def opened(config: SamplingConfig, path: Path | None, name: str) -> Generator[Opened]:
    """Enter the run's directory, and load its rewards and its data.

    Args:
        path: the run file, whose name the run has; ``name`` where there is none.
    """
    base_dir, name = (path.parent, path.stem) if path else (Path.cwd(), name)
    data = _task_data(config)
    with ExitStack() as stack:
        run_dir = stack.enter_context(open_run_dir(config.run_dir or Path("runs").absolute() / name, name, False))
        rewards = load_rewards(config.reward, base_dir) if config.reward else None
        if rewards is not None:
            stack.callback(rewards.close)
        tokenizer = load_tokenizer(config)
        with long_wait("reading data.train"):
            train = load_tasks(data, data.train, tokenizer)
        with long_wait("reading data.eval"):
            held_out = load_tasks(data, data.eval, tokenizer) if data.eval else None
        run = Opened(run_dir, data, tokenizer, rewards, train, held_out)
        if rewards is not None:
            rewards.check_tasks(run.tasks)
        yield run


def answer_tasks(
    config: SamplingConfig,
    run: Opened,
    tasks: Sequence[Task],
    writer: LineWriter,
    out: Path,
    usage: Usage,
    *,
    greedy: bool = False,
    stop: tuple[str, ...] = (),
) -> None:
    """Append the lines that ``out`` lacks. The model is loaded where it lacks any, and freed afterwards.

    Args:
        config: resolved.
        usage: a phase of it is open.
        greedy: one completion per prompt at temperature 0, whatever ``[sampling]`` says.
        stop: further strings to stop at.
    """
    writer.check_columns(tasks)
    if repair(out) >= len(tasks):
        return
    section = config.sampling
    n, temperature = (1, 0.0) if greedy else (section.n, section.temperature)
    with usage.phase("setup"):
        engine = _engine(config, run)
    sampling = make_sampling(section, run.tokenizer, temperature, stop)
    scorer, environments = run.rewards or Unscored(), {"single_turn": SingleTurn()}
    collector = Collector(engine, scorer, environments, writer.decode, section.timeout)

    async def produce(place: int, task: Task) -> RolloutGroup:
        [group] = await collector.collect([task], sampling, n, derive_seed(section.seed, place))
        return group

    def stats() -> EngineStats:
        usage.add_engine(found := engine.stats())
        return found

    async def write() -> None:
        try:
            # Engines of other makers start from the model's files, without the adapter; SGLang takes what it is given.
            if weights_apart(config) and (config.lora.on or config.system.engine == "sglang"):
                with usage.phase("setup"):
                    await engine.load_weights(0)
            await answer(
                out,
                tasks,
                produce,
                writer.line,
                window=window_of(config.system.max_running, n),
                max_failed_share=(config.reward or RewardSection()).max_failed_share,
                live=config.monitor.progress,
                stats=stats,
            )
            stats()
        finally:
            await engine.close()

    run_async(write())


def _engine(config: SamplingConfig, run: Opened) -> RolloutEngine:
    """With the model that it needs; the models of rewards are loaded too."""
    from tunesmith.models.causal_lm import CausalLM

    model = load_model(CausalLM, config, run.tokenizer, frozen=True) if loads_model(config) else None
    engine = make_engine(config, model, partial(print, flush=True))
    if run.rewards is not None:
        add_rewards(run.rewards, config, run.tokenizer, partial(print, flush=True))
    return engine


def release_memory() -> None:
    """Give back what a sampler that is gone had of a GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _task_data(config: SamplingConfig) -> DataSection:
    """The data section as tasks are loaded with it, limited to prompts that leave room for a completion."""
    facts, data = known_model_facts(config.model.path), task_data(config)
    if data.max_prompt_tokens is None and facts is not None and facts.context is not None:
        limit = facts.context - config.new_tokens
        # Where nothing is left for a prompt, that is refused when the configuration is resolved.
        return data.model_copy(update={"max_prompt_tokens": limit}) if limit > 0 else data
    return data


def resolve_sampling(config: C, tasks: Sequence[Task], *, count: bool = True) -> Resolved[C]:
    """Args: count: the number of tasks is the amount of work, and not of training data."""
    longest = max(len(task.prompt_ids) for task in tasks)
    size = len(tasks) if count else None
    facts = Facts(read_hardware(), known_model_facts(config.model.path), size, None, longest)
    return resolve(config, replace(facts, frozen_parameters=frozen_parameters(config)))


def identity(config: SamplingConfig, data: str, tokenizer: Any, *, greedy: bool = False) -> dict[str, Any]:
    """What the lines of an output depend on. ``data`` is the data's fingerprint; ``greedy`` as for ``answer_tasks``."""
    model, template = config.model, tokenizer.chat_template
    found: dict[str, Any] = {"model.path": model.path, "model.dtype": model.dtype, "model.quantize": model.quantize}
    found |= {"data": data, "chat template (digest)": template and fingerprint_of([template])}
    if config.lora.path is not None:
        found["lora.path"] = str(config.lora.path)
    for key in ("system_prompt", "chat", "chat_template_kwargs", "too_long", "max_prompt_tokens"):
        found[f"data.{key}"] = getattr(config.data, key)
    if not (isinstance(config, GenerateConfig) and config.output.kind == "score"):
        unread = {"timeout", "n", "temperature", "top_p", "top_k", "min_p", "seed"} if greedy else {"timeout"}
        found |= {f"sampling.{k}": v for k, v in config.sampling.model_dump(mode="json", exclude=unread).items()}
    if isinstance(config, GenerateConfig):
        found["output.logprobs"] = config.output.logprobs
    if config.reward is not None:
        outcome = ("functions", "weights", "models", "remote", "answer", "pattern")
        found |= {f"reward.{k}": v for k, v in config.reward.model_dump(mode="json", include=set(outcome)).items()}
    return found
