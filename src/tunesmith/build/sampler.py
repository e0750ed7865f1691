"""An engine with its rewards, for commands that sample and do not train meanwhile."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tunesmith.build.common import load_model
from tunesmith.build.engines import make_engine, make_sampling
from tunesmith.build.rewards import add_rewards
from tunesmith.config.generation import GenerateConfig, SamplingConfig
from tunesmith.config.resolved import Resolved
from tunesmith.config.schema import DataSection, RewardSection, RLConfig, RunConfig
from tunesmith.environments.base import SingleTurn
from tunesmith.environments.rewards import RewardSet
from tunesmith.loop.collect import Collector, derive_seed
from tunesmith.loop.generation import Json, Unscored, answer, window_of
from tunesmith.monitor.progress import Progress, open_progress
from tunesmith.plan.facts import Facts, known_model_facts
from tunesmith.plan.hardware import read_hardware
from tunesmith.plan.resolve import resolve
from tunesmith.types import RolloutGroup, Sampling, Task

if TYPE_CHECKING:
    from tunesmith.engines.base import RolloutEngine

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampler:
    """A loaded model that answers tasks into files."""

    collector: Collector
    engine: RolloutEngine
    sampling: Sampling
    n: int
    seed: int
    max_running: int
    max_failed_share: float
    live: bool | None

    @classmethod
    @contextmanager
    def open(
        cls,
        config: SamplingConfig,
        tokenizer: Any,
        rewards: RewardSet | None,
        decode: Callable[[Sequence[int]], str],
        *,
        greedy: bool = False,
        stop: tuple[str, ...] = (),
    ) -> Generator[Self]:
        """Load the model of a resolved configuration; leaving frees it.

        Args:
            greedy: one completion per prompt at temperature 0, whatever ``[sampling]`` says.
            stop: further strings to stop at.
        """
        from tunesmith.models.causal_lm import CausalLM

        section = config.sampling
        assert section.n is not None and section.temperature is not None, "not resolved"
        engine = make_engine(config, load_model(CausalLM, config, tokenizer), partial(print, flush=True))
        if rewards is not None:
            make_ready(rewards, config, tokenizer)
        yield cls(
            collector=Collector(engine, rewards or Unscored(), {"single_turn": SingleTurn()}, decode, section.timeout),
            engine=engine,
            sampling=make_sampling(section, tokenizer, 0.0 if greedy else section.temperature, stop),
            n=1 if greedy else section.n,
            seed=section.seed,
            max_running=config.system.max_running,
            max_failed_share=(config.reward or RewardSection()).max_failed_share,
            live=config.monitor.progress,
        )

    def answer(self, out: Path, tasks: Sequence[Task], writer: Callable[[RolloutGroup], Json], done: int) -> None:
        """Append the lines that ``out`` lacks; ``done`` it has already."""

        async def produce(place: int, task: Task) -> RolloutGroup:
            groups = await self.collector.collect([task], self.sampling, self.n, derive_seed(self.seed, place))
            return groups[0]

        async def run(progress: Progress) -> None:
            try:
                await answer(
                    out,
                    tasks,
                    produce,
                    writer,
                    window=window_of(self.max_running, self.n),
                    max_failed_share=self.max_failed_share,
                    progress=progress,
                    stats=self.engine.stats,
                )
            finally:
                await self.engine.close()

        with open_progress(len(tasks), start=done, live=self.live) as progress:
            run_async(run(progress))


def make_ready(rewards: RewardSet, config: SamplingConfig, tokenizer: Any) -> None:
    """Add the remote rewards and load the reward models, once."""
    if len(rewards.functions) < len(rewards.weights):
        add_rewards(rewards, reward_run(config), tokenizer, partial(print, flush=True))


def release_memory() -> None:
    """Give back what a sampler that is gone had of a GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; in a thread of its own where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def task_data(config: SamplingConfig) -> DataSection:
    """The data section as tasks are loaded with it, limited to prompts that leave room for a completion."""
    facts, data = known_model_facts(config.model.path), config.data
    changed: dict[str, Any] = {"completion": None, "loss_on": None, "max_tokens": None}
    if data.max_prompt_tokens is None and facts is not None and facts.context is not None:
        limit = facts.context - config.new_tokens
        # Where nothing is left for a prompt, that is refused when the configuration is resolved.
        changed |= {"max_prompt_tokens": limit} if limit > 0 else {}
    return data.model_copy(update=changed)


def resolve_sampling(config: C, tasks: Sequence[Task], *, count: bool = True) -> Resolved[C]:
    """Args: count: the number of tasks is the amount of work, and not of training data."""
    longest = max(len(task.prompt_ids) for task in tasks)
    size = len(tasks) if count else None
    return resolve(config, Facts(read_hardware(), known_model_facts(config.model.path), size, None, longest))


def reward_run(config: SamplingConfig) -> RLConfig:
    """The configuration as the makers of rewards take it."""
    assert config.reward is not None
    return RLConfig(model=config.model, data=config.data, reward=config.reward, system=config.system)


def identity(config: SamplingConfig, data: str) -> dict[str, Any]:
    """What the lines of an output depend on."""
    found: dict[str, Any] = {"model.path": config.model.path, "data": data}
    if config.lora.path is not None:
        found["lora.path"] = str(config.lora.path)
    for key in ("system_prompt", "chat", "too_long", "max_prompt_tokens"):
        found[f"data.{key}"] = getattr(config.data, key)
    if not (isinstance(config, GenerateConfig) and config.output.kind == "score"):
        found |= {f"sampling.{k}": v for k, v in config.sampling.model_dump(mode="json").items() if k != "timeout"}
    if isinstance(config, GenerateConfig):
        found["output.logprobs"] = config.output.logprobs
    if config.reward is not None:
        outcome = ("functions", "weights", "models", "remote", "answer", "pattern")
        found |= {f"reward.{k}": v for k, v in config.reward.model_dump(mode="json", include=set(outcome)).items()}
    return found
