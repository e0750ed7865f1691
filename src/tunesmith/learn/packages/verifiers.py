"""Environments of ``verifiers`` (https://github.com/PrimeIntellect-ai/verifiers), played as agents.

A taskset with its harness, or an ``Environment`` of the package's older half, runs its rollout
against the episode's endpoint, and scores it itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from itertools import islice

from tunesmith.config.objects import keeping_signals
from tunesmith.errors import ConfigError, EpisodeError, boundary
from tunesmith.learn.environments.steps import StepResult
from tunesmith.learn.packages.adapter import Foreign, Options, TaskRow
from tunesmith.learn.packages.splits import number
from tunesmith.types import as_messages

LOADER = "load_environment"
"""The package's conventional name of the function that creates an older environment."""
SIZE = 500
"""Tasks of a taskset that has no end."""
CHAT = "null"
"""The harness of a taskset without one of its own: a chat without a shell."""
HERE = "subprocess"
"""The runtime: processes of this machine."""

Play = Callable[..., Coroutine[object, object, StepResult]]


def rows(name: str, split: str, options: Options) -> Iterator[TaskRow]:
    """The tasks of a taskset, or of an older environment: ``train`` are its data set's, and
    ``test`` its evaluation set's. ``size`` is the largest number of them."""
    own = {key: value for key, value in options.items() if key != "size"}
    what = f"verifiers:{name}"
    size = number(what, options, "size", SIZE, 1)
    said = json.dumps(own, sort_keys=True)
    if _loader(name) is not None:
        environment = _older(name, said)
        take = environment.get_dataset if split == "train" else environment.get_eval_dataset
        for row in islice(take(), size if "size" in options else None):
            yield {**row, "verifiers": {"options": said}}
        return
    taskset = _environment(name, json.dumps(_with_split(what, name, split, own))).taskset
    bounded = size if "size" in options or not taskset.bounded else None
    for task in islice(taskset, bounded):
        data = task.data.model_dump(mode="json", exclude_none=True)
        place = {"options": said, "data": json.dumps(data)}
        yield {"prompt": _prompt(what, data), "verifiers": place}


def environment(name: str) -> Play:
    """The agent that plays a taskset, or an older environment."""
    older = _loader(name) is not None
    if not older:
        _environment(name, "{}")  # what is wrong is said before the run

    async def play(
        base_url: str, api_key: str, verifiers: Options, **columns: Foreign
    ) -> StepResult:
        options = str(verifiers["options"])
        if older:
            agent = as_agent(_older(name, options), f"verifiers:{name}")
            return await agent(base_url=base_url, api_key=api_key, **columns)
        data = json.loads(str(verifiers["data"]))
        return await _play(f"verifiers:{name}", _environment(name, options), data, base_url)

    return _scored_together(play)


def is_environment(code: object) -> bool:
    """Whether ``code`` is an older ``verifiers.Environment``; does not import the package."""
    kinds = [(k.__module__.split(".")[0], k.__name__) for k in type(code).__mro__]
    return ("verifiers", "Environment") in kinds


def as_agent(environment: Foreign, reference: str) -> Play:
    """An agent that runs an older environment's rollout and returns its reward and metrics. Where
    its rubric scores several rollouts together, the whole group is scored when all have been
    played."""

    async def play(base_url: str, api_key: str, prompt: Foreign, **columns: Foreign) -> StepResult:
        from openai import AsyncOpenAI

        clients = import_module("verifiers.legacy.clients")
        columns.pop("client", None)
        task = {"example_id": 0, **columns, "prompt": as_messages(prompt)}
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as http:
            client = clients.OpenAIChatCompletionsClient(http)
            if together:
                output = await environment.rollout(task, client, "policy", {})
            else:
                output = await environment.run_rollout(task, client, "policy", {}, state_columns=[])
        if output["error"] is not None:
            raise EpisodeError(f"{reference}: {output['error']}")
        if together:
            return StepResult(done=True, kept=(environment.rubric, output))
        return StepResult(reward=output["reward"], done=True, metrics=output["metrics"] or {})

    together = environment.requires_group_rollouts
    return _scored_together(play)


def _scored_together(play: Play) -> Play:
    """The agent, whose episodes are scored by their rubric if they were kept with it."""

    async def score_group(kept: Sequence[tuple[Foreign, Foreign]]) -> list[StepResult]:
        rubric = kept[0][0]
        states = [state for _, state in kept]
        await rubric.score_group(states)
        for state in states:
            await rubric.cleanup(state)
        return [StepResult(None, s["reward"], True, s["metrics"] or {}) for s in states]

    agent: Foreign = play
    agent.score_group = score_group
    return agent


async def _play(what: str, environment: Foreign, data: Options, base_url: str) -> StepResult:
    """One episode of a task of a taskset."""
    package = import_module("verifiers.v1")
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(data), environment.taskset.config.task)
    # The URL has the key.
    client = package.EvalClientConfig(base_url=base_url, api_key_var="UNUSED")
    context = package.ModelContext(model="policy", client=client)
    async with environment.serving():
        [slot] = environment.slots(task)
        episode = await environment.run_slot(slot, context)
    [trace] = episode.traces or [None]
    errors = [*episode.errors, *(trace.errors if trace else ())]
    if trace is None or errors:
        raise EpisodeError(f"{what}: {errors[0].type}: {errors[0].message}")
    metrics = {key: float(value) for key, value in trace.metrics.items() if value is not None}
    metrics |= {key: one.score for key, one in trace.rewards.items() if one is not None}
    return StepResult(reward=trace.reward, done=True, metrics=metrics)


def _prompt(what: str, data: Mapping[str, Foreign]) -> Foreign:
    prompt = data.get("prompt")
    if prompt is None:
        why = "its tasks have no prompt: another agent opens the conversation"
        raise ConfigError(f"{what}: {why}.")
    head = data.get("system_prompt")
    system = [{"role": "system", "content": head}] if head else []
    return [*system, *as_messages(prompt)] if system else prompt


def _with_split(what: str, name: str, split: str, options: Options) -> Options:
    """The options with the split, which a taskset has as a setting or not at all."""
    if split == "train":
        return options
    if "split" not in import_module("verifiers.v1").taskset_config_type(name).model_fields:
        raise ConfigError(f"{what} has no split '{split}': its settings have no 'split'.")
    return {**options, "split": split}


def _loader(name: str) -> Callable[..., Foreign] | None:
    """``load_environment`` of an older environment's module; None for a taskset."""
    try:
        module = import_module("verifiers.v1").import_taskset(name)
    except ImportError as error:
        raise ConfigError(f"verifiers:{name}: {error}") from error
    return None if hasattr(module, "__all__") else getattr(module, LOADER, None)


@lru_cache(maxsize=16)
def _older(name: str, options: str) -> Foreign:
    """An older environment, with its data sets; made while the tasks are read, on the main thread,
    as it handles signals."""
    loader = _loader(name)
    assert loader is not None
    with boundary(ConfigError, f"verifiers:{name} failed", Exception), keeping_signals():
        return loader(**json.loads(options))


def _environment(name: str, options: str) -> Foreign:
    """A taskset with one agent; ``harness`` and ``runtime`` among the options are its program and
    where that runs."""
    package = import_module("verifiers.v1")
    installed = version("verifiers")
    if installed.startswith("0.3."):
        raise ConfigError(f"verifiers:{name} needs verifiers 0.4; {installed} is installed.")
    said = json.loads(options)
    seat = {"runtime": {"type": said.pop("runtime", HERE)}}
    try:
        bundled = package.default_harness_id(name)
        seat["harness"] = {"id": said.pop("harness", bundled if bundled == name else CHAT)}
        kind = package.env_config_type(name)
        role = package.AgentConfig
        agents = [key for key, f in kind.model_fields.items() if isinstance(f.default, role)]
        said = {"taskset": {"id": name, **said}, **dict.fromkeys(agents, seat)}
        made = package.load_environment(package.resolve_env_config(said))
    except Exception as error:
        raise ConfigError(f"verifiers:{name}: {type(error).__name__}: {error}") from error
    if len(agents) > 1:
        several = f"verifiers:{name} has several agents ({', '.join(agents)})"
        raise ConfigError(f"{several}; one that is trained is supported.")
    return made
