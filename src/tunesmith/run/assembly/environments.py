"""Assembly of a run's environments."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tunesmith.config.changing import with_values
from tunesmith.config.objects import parameters_in_source
from tunesmith.config.schema import DataSection, RLConfig, RunConfig
from tunesmith.errors import ConfigError, about
from tunesmith.learn.data.prepare import Prepared, Sources, load_tasks
from tunesmith.learn.data.prompts import with_system
from tunesmith.learn.data.tokens import decode
from tunesmith.learn.environments.agents import Agent
from tunesmith.learn.environments.base import Environment, SingleTurn
from tunesmith.learn.environments.commands import CommandAgent
from tunesmith.learn.environments.conversation import EpisodeSettings
from tunesmith.learn.environments.loading import SINGLE_TURN, EnvironmentSet, load_environments
from tunesmith.learn.environments.multi_turn import MultiTurn
from tunesmith.learn.environments.rendering import Renderer
from tunesmith.learn.rewards.function import INSTANCES, RESERVED
from tunesmith.learn.rewards.loading import INSTANCES_NEED, check_rewards, load_rewards
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.plan import Plan
from tunesmith.types import Message, Rollout, Status, Task, Tokenizer

KEEPING = ("trl", "command")
"""The kinds of environments that leave an instance for reward functions."""


def check_run_rewards(config: RLConfig, base_dir: Path) -> None:
    """As ``check_rewards``; a run whose environment returns the rewards needs no others."""
    if _has_rewards(config):
        check_rewards(config.reward, base_dir)


def instances_for(config: RunConfig, base_dir: Path) -> str | None:
    """The first reward function whose source takes ``environments``, in a run that has
    environments."""
    if not isinstance(config, RLConfig) or not config.environment.plays:
        return None
    own = (entry for entry in config.reward.functions if ":" in entry)
    return next(
        (entry for entry in own if INSTANCES in parameters_in_source(entry, base_dir)), None
    )


def sharing_process(config: RLConfig, base_dir: Path) -> RLConfig:
    """The configuration with rewards and environments in the run's own process if a reward takes
    the environments."""
    if instances_for(config, base_dir) is None:
        return config
    return with_values(
        config, dict.fromkeys(("reward.isolation", "environment.isolation"), "thread")
    )


@contextmanager
def open_user_code(config: RLConfig, base_dir: Path) -> Generator[tuple[RewardSet, EnvironmentSet]]:
    """The rewards and environments of a run, loaded from the user's files and closed at the end."""
    config = sharing_process(config, base_dir)
    with (
        closing(load_run_rewards(config, base_dir)) as rewards,
        closing(load_environments(config.environment, base_dir)) as environments,
    ):
        hand_instances(rewards, environments)
        yield rewards, environments


@about("reward.functions")
def hand_instances(rewards: RewardSet, environments: EnvironmentSet) -> None:
    """Give rewards that take ``environments`` the instances of TRL-style environments that play, or
    what commands left.

    Raises:
        ConfigError: there are no such instances, or they are in other processes.
    """
    asking = [f for f in rewards.functions if f.instances]
    there = any(one.kind in KEEPING for one in environments.loaded)
    near = environments.section.isolation == "thread"
    refused = next((f for f in asking if f.instances == "needed" and not (there and near)), None)
    if refused:
        raise ConfigError(f"'{refused.reference}' needs '{INSTANCES}'. {INSTANCES_NEED}")
    rewards.hands_instances = environments.keeps_instances = bool(asking) and there and near


class Unrewarded(RewardSet):
    """For samples that need no reward: each counts, with a reward of 0 that nothing reads."""

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:
        del texts
        for rollout in rollouts:
            if rollout.status is Status.OK and rollout.reward is None:
                rollout.reward = 0.0

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return {
            name: value
            for name, value in super().metrics(rollouts).items()
            if not name.startswith("reward")
        }


def load_run_rewards(config: RLConfig, base_dir: Path) -> RewardSet:
    if _has_rewards(config):
        own = config.environment
        return load_rewards(config.reward, base_dir, instances=own.plays, sandbox=own.sandbox)
    kind = Unrewarded if config.command == "distill" and not config.environment.plays else RewardSet
    return kind({}, config.reward.timeout)


def _has_rewards(config: RLConfig) -> bool:
    needed = not config.environment.pays and config.command != "distill"
    return config.reward.given or needed


def load_run_tasks(
    environments: EnvironmentSet, tokenizer: Tokenizer, section: DataSection, source: Sources
) -> Prepared[Task]:
    """The tasks of a source, each routed to its environment, whose tools are in its prompt.

    Raises:
        DataError, ConfigError: see ``load_tasks``, and ``EnvironmentSet``'s ``route`` and
            ``template``.
    """
    loaded = load_tasks(section, source, tokenizer, environments.tools_of)
    chat, _ = _prompts(section, tokenizer, loaded)
    environments.template(tokenizer, chat=chat)
    for name in sorted(RESERVED & {name for task in loaded.items for name in task.columns}):
        loaded.report.note(
            f"The column '{name}' reaches no reward function: '{name}' is what the run passes to "
            "it; rename the column."
        )
    loaded.items[:] = environments.route(loaded.items)
    return loaded


def make_environments(
    plan: Plan[RLConfig], environments: EnvironmentSet, tokenizer: Tokenizer, train: Prepared[Task]
) -> dict[str, Environment]:
    """Environments by the names to which tasks are routed."""
    said = plan.said
    chat, prompt_of = _prompts(said.data, tokenizer, train)
    longest = max(len(t.prompt_ids) for t in train.items)
    most = plan.lengths.episode or longest + said.rollout.max_new_tokens
    return build_environments(
        environments, tokenizer, prompt_of, chat=chat, max_tokens=most, model=said.model.path
    )


def build_environments(
    environments: EnvironmentSet,
    tokenizer: Tokenizer,
    prompt_of: Callable[[Task], list[Message]],
    *,
    chat: bool,
    max_tokens: int,
    model: str,
) -> dict[str, Environment]:
    """Environments by name.

    Args:
        prompt_of: a task's prompt as messages.
        chat: whether prompts go through the chat template.

    Raises:
        ConfigError: see ``EnvironmentSet.template``.
    """
    template = environments.template(tokenizer, chat=chat)
    section = environments.section
    setting = EpisodeSettings.of(tokenizer, template, prompt_of, section, max_tokens)

    # OpenRLHF's feedback includes the template's markers, so its conversations are plain text.
    def text_alone(task: Task) -> list[Message]:
        return [{"role": "user", "content": decode(tokenizer, task.prompt_ids)}]

    verbatim = replace(setting, renderer=Renderer(tokenizer), prompt_of=text_alone, parse=None)
    by_name: dict[str, Environment] = {SINGLE_TURN: SingleTurn()}
    for one in environments.loaded:
        if one.kind == "agent":
            by_name[one.name] = Agent(
                one.name, one.code, setting, model, lambda: environments.endpoint
            )
        elif one.kind == "command":
            by_name[one.name] = CommandAgent(
                one.reference,
                one.code,
                setting,
                model,
                lambda: environments.endpoint,
                lambda: environments.opener,
                environments.keeps_instances,
            )
        else:
            own = verbatim if one.kind == "openrlhf" else setting
            keeps = environments.keeps_instances and one.kind == "trl"
            by_name[one.name] = MultiTurn(partial(environments.open_game, one), own, keeps)
    return by_name


def goes_through_template(
    section: DataSection, tokenizer: Tokenizer, tasks: Sequence[Task]
) -> bool:
    """Whether prompts go through the chat template (as in ``data.prompts``)."""
    wanted = section.chat or (section.chat is None and tokenizer.chat_template)
    return bool(wanted) or any(isinstance(task.prompt, list) for task in tasks)


def _prompts(
    section: DataSection, tokenizer: Tokenizer, data: Prepared[Task]
) -> tuple[bool, Callable[[Task], list[Message]]]:
    """Whether prompts go through the chat template (as in ``data.prompts``), and a function to a
    task's messages."""
    chat = goes_through_template(section, tokenizer, data.items)

    def prompt_of(task: Task) -> list[Message]:
        if chat:
            return with_system(section, task.prompt)
        assert isinstance(task.prompt, str), "a conversation needs a chat template"
        return [{"role": "user", "content": task.prompt}]

    return chat, prompt_of
