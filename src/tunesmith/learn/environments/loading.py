"""Turns the ``[environment]`` section into a run's environments: checks it and imports the user's
code."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config import objects as user_code
from tunesmith.config.reading.packages import PACKAGES, PackageName, package_name
from tunesmith.config.sandboxes import LocalSandbox, ProcessSandbox
from tunesmith.config.schema import EnvironmentSection
from tunesmith.errors import ConfigError, DataError, about, boundary, nearest
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.data.formats import Example
from tunesmith.learn.environments.agents import GIVEN, OPPONENT, OVER_HTTP, is_agent
from tunesmith.learn.environments.commands import OWN_TASKS, CommandTasks
from tunesmith.learn.environments.games import TRL_RESERVED, Game, Loaded, open_game
from tunesmith.learn.environments.tools import Tool, make_tool
from tunesmith.learn.packages import verifiers
from tunesmith.learn.packages.adapter import adapter
from tunesmith.learn.sandboxes.base import Opener
from tunesmith.learn.sandboxes.making import make_opener
from tunesmith.learn.usercode.calls import check_keywords, required_parameters
from tunesmith.types import Task, Tokenizer, Tools

if TYPE_CHECKING:
    from tunesmith.learn.endpoint.server import Endpoint
    from tunesmith.learn.environments.isolated import IsolatedGames

SINGLE_TURN = "single_turn"
"""The environment of tasks without a user's environment; a valid value of the routing column."""
COMMAND = "environment.command"
BROUGHT = "environment"
"""The column in which a package's tasks name the package's environment."""


@about("environment.path")
def check_environment(section: EnvironmentSection, base_dir: Path) -> None:
    """Reject (``ConfigError``) a section that cannot work, without running any of the user's
    code."""
    references = references_of(section)
    if SINGLE_TURN in references and isinstance(section.path, dict):
        why = f"the name '{SINGLE_TURN}' is reserved for a prompt and one answer."
        raise ConfigError(f"environment.path: {why}", keys=("environment.path",))
    if section.memory is not None and section.isolation == "thread":
        why = 'environment.memory has no effect with environment.isolation = "thread".'
        raise ConfigError(why, keys=("environment.memory", "environment.isolation"))
    with about("environment.tools"):
        for reference in section.tools:
            user_code.check_reference(reference, base_dir)
    for reference in references.values():
        named = package_name(reference)
        if named is None:
            user_code.check_reference(reference, base_dir)
        else:
            _check_package(named)


@about("environment.path")
def check_agents(section: EnvironmentSection, base_dir: Path) -> None:
    """Reject (``ConfigError``) settings of environments and tools if all episodes are played by
    agents, and an address for agents if none uses it.

    Args:
        section: with only the values of the run file.
    """
    references = references_of(section).values()
    own = [each for each in references if package_name(each) is None]
    access = [user_code.parameters_in_source(each, base_dir) & GIVEN for each in own]
    has_packages = len(own) < len(references)
    unserved = all("client" in each and not each & OVER_HTTP for each in access)
    if unserved and not has_packages and "host" in section.model_fields_set:
        raise ConfigError(
            "environment.host is for agents that take 'base_url', and there are none: leave it out",
            keys=("environment.host",),
        )
    unread = [key for key in ("timeout", "isolation", "memory") if key in section.model_fields_set]
    if section.isolation == "thread":  # where agents run anyway
        unread.remove("isolation")
    if not unread or not references:
        return
    if access and all(access):
        key = f"environment.{unread[0]}"
        raise ConfigError(
            f"{key} is for environments and tools, and {' and '.join(references)} plays as an "
            "agent, in the run's own process: leave it out; rollout.timeout ends an agent's "
            "episode.",
            keys=(key,),
        )


def _check_package(named: PackageName) -> None:
    named.require()
    if not PACKAGES[named.package].plays:
        plays = ", ".join(name for name, package in PACKAGES.items() if package.plays)
        why = f"'{named.plain}' plays no episodes: name it in data.train alone"
        raise ConfigError(f"{why}. Packages that play: {plays}.")
    if named.split:
        why = f"'{named.plain}[{named.split}]' names a split, which belongs into data.train."
        raise ConfigError(why)


def references_of(section: EnvironmentSection) -> dict[str, str]:
    """References to the user's code by value of the routing column; a single reference by its own
    name."""
    if isinstance(section.path, str):
        return {section.path.rpartition(":")[2]: section.path}
    return dict(section.path or {})


@about("environment.path")
def load_environments(section: EnvironmentSection, base_dir: Path) -> EnvironmentSet:
    """Check the section and import the user's files; also a ConfigError if an object has no known
    form."""
    check_environment(section, base_dir)
    with about("environment.tools"):
        objects = [user_code.load_object(reference, base_dir) for reference in section.tools]
        defined = list(map(make_tool, objects, section.tools))
    tools = {tool.name: tool for tool in defined}
    for tool in defined:
        if tools[tool.name] is not tool:
            why = f"environment.tools has two tools called '{tool.name}'; rename one."
            raise ConfigError(why, keys=("environment.tools",))
    if section.command is not None and section.path is None:
        return EnvironmentSet(section, [Loaded("command", COMMAND, "command", OWN_TASKS)], base_dir)
    references = references_of(section).items()
    loaded = [_recognise(name, ref, _load(ref, base_dir), tools) for name, ref in references]
    if not loaded and tools:
        loaded = [Loaded("tools", "environment.tools", "tools", None, tools)]
    if tools and not any(one.tools for one in loaded):
        unused = "environment.tools is set, but no environment uses them"
        why = f"{unused}: an agent has its own, and OpenRLHF's form has none."
        raise ConfigError(why, keys=("environment.tools",))
    return EnvironmentSet(section, loaded, base_dir)


def _load(reference: str, base_dir: Path) -> Any:
    """The object of a reference; for a loader of the ``verifiers`` package, its environment as an
    agent."""
    named = package_name(reference)
    if named:
        return adapter(named).environment(named.name)
    code = user_code.load_object(reference, base_dir)
    if reference.rpartition(":")[2] == verifiers.LOADER and callable(code):
        with boundary(ConfigError, f"'{reference}' failed", Exception), user_code.keeping_signals():
            code = code()
    return verifiers.as_agent(code, reference) if verifiers.is_environment(code) else code


def _recognise(name: str, reference: str, code: object, tools: Mapping[str, Tool]) -> Loaded:
    """Detect the form of the user's code."""
    if isinstance(code, CommandTasks):
        return Loaded(name, reference, "command", code)
    if isinstance(code, type):
        _check_constructor(code, reference)
        if not hasattr(code, "step"):
            methods = _methods(code, reference)
            if not methods:
                raise ConfigError(
                    f"'{reference}' has neither step(action) nor public methods as tools; an "
                    "environment needs reset and step, or methods that the policy may call."
                )
            return Loaded(name, reference, "trl", code, tools, methods)
        if not hasattr(code, "reset"):
            raise ConfigError(f"'{reference}' has step but no reset(**columns).")
        first = list(inspect.signature(code.step).parameters)[1:2]
        if first in (["states"], ["state_dict"]):
            return Loaded(name, reference, "openrlhf", code)
        return Loaded(name, reference, "native", code, tools)
    if callable(code) and is_agent(code, reference):
        return Loaded(name, reference, "agent", code)
    raise ConfigError(
        f"'{reference}' is not an environment: write a class with reset(**columns) and "
        "step(action), or async def agent(client, **columns)."
    )


def _check_constructor(kind: type[Any], reference: str) -> None:
    for p in required_parameters(kind.__init__)[1:]:
        raise ConfigError(
            f"'{reference}' takes '{p.name}' in its constructor; each episode calls that without "
            "arguments. What depends on the task goes into reset(**columns)."
        )


def _methods(kind: type[Any], reference: str) -> dict[str, Tool]:
    """Public methods as tools, by method name; described as bound methods, to leave out
    ``self``."""
    tools: dict[str, Tool] = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in TRL_RESERVED:
            tools[name] = make_tool(types.MethodType(function, object()), f"{reference}.{name}")
    return tools


class EnvironmentSet:
    """The environments of a run."""

    def __init__(
        self, section: EnvironmentSection, loaded: Sequence[Loaded], base_dir: Path
    ) -> None:
        self.section = section
        self.loaded = tuple(loaded)
        self.keeps_instances = False
        """Whether instances of TRL's form stay on their rollouts for the reward functions."""
        self._base_dir = base_dir
        self._commands: list[CommandTasks] = [one.code for one in loaded if one.kind == "command"]
        for one in self._commands:
            one.check(section)
        if self._commands:
            assert self.opener  # what the machine lacks is said before the run

    def route(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks, each with the name of its environment.

        Raises:
            DataError: the routing column is missing or names no environment.
            ConfigError: an environment needs a column that no task has.
        """
        if not self.loaded:
            return list(tasks)
        routed = [replace(task, environment=self._environment_of(task)) for task in tasks]
        for one in self.loaded:
            mine = [task for task in routed if task.environment == one.name]
            columns = {"prompt", *(name for task in mine for name in task.columns)}
            if mine and one.kind == "agent":
                check_keywords(one.code, one.reference, columns | GIVEN | {OPPONENT})
            elif mine and one.kind in ("native", "trl") and hasattr(one.code, "reset"):
                check_keywords(one.code.reset, f"{one.reference}.reset", columns, skip=1)
        return routed

    def tools_of(self, task: Task | Example) -> Tools:
        """Descriptions of the tools in the environment of a task; a DataError as in ``route``."""
        schemas = {one.name: one.schemas for one in self.loaded if one.schemas}
        return schemas.get(self._environment_of(task)) if schemas else None

    def _environment_of(self, task: Task | Example) -> str:
        if not isinstance(self.section.path, dict):
            return self.loaded[0].name
        column = self.section.column
        brought = {one.reference: one.name for one in self.loaded if package_name(one.reference)}
        named = task.columns.get(BROUGHT)
        if isinstance(named, str) and named in brought:
            return brought[named]
        names = [*(one.name for one in self.loaded), SINGLE_TURN]
        if column not in task.columns:
            raise DataError(
                f"task {task.id} has no column '{column}' (environment.column), which names its "
                f"environment: {', '.join(names)}.{nearest(column, task.columns)}"
            )
        value = task.columns[column]
        if value not in names:
            hint = nearest(str(value), names)
            raise DataError(
                f"task {task.id}: there is no environment '{value}' (environment.path).{hint}"
            )
        return value

    def template(self, tokenizer: Tokenizer, *, chat: bool) -> ChatTemplate | None:
        """The chat template, if prompts go through it; a ConfigError if agents or tools need one
        that is missing."""
        template = ChatTemplate.of(tokenizer) if chat else None
        for one in self.loaded:
            problem = ""
            if template is None and (one.kind in ("agent", "command") or one.schemas):
                problem = (
                    "needs a chat template: agents and tools use messages. Name one with "
                    "model.chat_template, and leave data.chat = false out."
                )
            if template is not None and one.schemas and not template.takes_tools:
                problem = (
                    "has tools, and the chat template does not take tools: name one that does "
                    "with model.chat_template, such as 'hermes' for ChatML models."
                )
            if problem:
                raise ConfigError(f"'{one.reference}' {problem}", keys=("model.chat_template",))
        return template

    @cached_property
    def endpoint(self) -> Endpoint:
        """The policy over HTTP, for agents with their own client."""
        from tunesmith.learn.endpoint.server import Endpoint

        return Endpoint(host=self.section.host)

    @cached_property
    def opener(self) -> Opener:
        """Opens the sandboxes of commands."""
        sandbox = self.section.sandbox or ProcessSandbox()
        assert isinstance(sandbox, LocalSandbox)
        folders = {folder for one in self._commands for folder in one.folders}
        return make_opener(sandbox, folders=tuple(sorted(folders)))

    def open_game(self, loaded: Loaded) -> AbstractAsyncContextManager[Game]:
        """An episode in the environment ``loaded``, in its own threads or in a worker process."""
        if self.section.isolation == "thread":
            return open_game(loaded, self.section.timeout)
        return self._isolated.open_game(loaded)

    @cached_property
    def _isolated(self) -> IsolatedGames:
        from tunesmith.learn.environments.isolated import IsolatedGames

        return IsolatedGames(self.section, self._base_dir)

    def close(self) -> None:
        for name in ("_isolated", "endpoint", "opener"):  # a later episode starts new ones
            if name in vars(self):
                vars(self).pop(name).close()
