"""From the ``[environment]`` section to environments: finding the user's code, checking it, making it ready."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from tunesmith.config.schema import EnvironmentSection
from tunesmith.environments import user_code
from tunesmith.environments.agents import GIVEN, Agent, Endpoints, check_agent, is_agent
from tunesmith.environments.base import Environment, SingleTurn
from tunesmith.environments.conversation import Limits
from tunesmith.environments.episode_code import check_keywords
from tunesmith.environments.games import TRL_RESERVED, open_native, open_openrlhf, open_tools, open_trl
from tunesmith.environments.multi_turn import MultiTurn, Open, Setting
from tunesmith.environments.rendering import ChatRenderer, PlainRenderer
from tunesmith.environments.tool_calls import parser_for
from tunesmith.environments.tools import Tool, make_tool
from tunesmith.errors import ConfigError, DataError, nearest
from tunesmith.types import Message, Task

SINGLE_TURN = "single_turn"
"""The environment of tasks that no environment of the user's plays; may stand in the routing column."""

Kind = Literal["agent", "native", "trl", "openrlhf", "tools"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The user's code behind one name."""

    name: str
    reference: str
    kind: Kind
    code: Any
    methods: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    """TRL: a tool for each public method."""


def check_environment(section: EnvironmentSection, base_dir: Path) -> None:
    """Refuse a section that cannot work, without running any of the user's code.

    Raises:
        ConfigError: an unknown file or name, or a name that is taken.
    """
    references = references_of(section)
    if SINGLE_TURN in references and isinstance(section.path, dict):
        raise ConfigError(f"environment.path: the name '{SINGLE_TURN}' is taken: it is a prompt and one answer.")
    for reference in (*references.values(), *section.tools):
        user_code.check_function(user_code.locate(reference, base_dir))


def references_of(section: EnvironmentSection) -> dict[str, str]:
    """The user's code by the name in the routing column; one environment alone is called by its own name."""
    if isinstance(section.path, str):
        return {section.path.rpartition(":")[2]: section.path}
    return dict(section.path or {})


def load_environments(section: EnvironmentSection, base_dir: Path) -> EnvironmentSet:
    """Check the section and import the user's files.

    Raises:
        ConfigError: as ``check_environment``; or a file does not import, or what it holds has no known shape.
    """
    check_environment(section, base_dir)
    tools = [make_tool(_load(reference, base_dir), reference) for reference in section.tools]
    repeated = {tool.name for tool in tools if sum(tool.name == other.name for other in tools) > 1}
    if repeated:
        raise ConfigError(
            f"environment.tools has two tools called '{min(repeated)}'; the policy could not tell them apart."
        )
    loaded = [_loaded(name, ref, _load(ref, base_dir)) for name, ref in references_of(section).items()]
    if not loaded and tools:
        loaded = [Loaded("tools", "environment.tools", "tools", None)]
    if tools and loaded and all(one.kind in ("agent", "openrlhf") for one in loaded):
        raise ConfigError(
            "environment.tools is set, but none of the environments would use them: an agent brings its own, "
            "and OpenRLHF's form has none."
        )
    return EnvironmentSet(section, tuple(loaded), {tool.name: tool for tool in tools})


def _load(reference: str, base_dir: Path) -> Any:
    return user_code.load_object(user_code.locate(reference, base_dir))


def _loaded(name: str, reference: str, code: Any) -> Loaded:
    """Tell the shape of the user's code.

    Raises:
        ConfigError: it has none of the known ones.
    """
    if isinstance(code, type):
        members = cast("type[Any]", code)
        _check_constructor(members, reference)
        if not hasattr(members, "step"):
            methods = _methods(members, reference)
            if not methods:
                raise ConfigError(
                    f"'{reference}' has neither step(action) nor public methods to be tools; an environment "
                    "needs reset and step, or methods that the policy may call."
                )
            return Loaded(name, reference, "trl", members, methods)
        if not hasattr(members, "reset"):
            raise ConfigError(f"'{reference}' has step but no reset(**columns).")
        first = list(inspect.signature(members.step).parameters)[1:2]
        return Loaded(name, reference, "openrlhf" if first in (["states"], ["state_dict"]) else "native", members)
    if callable(code) and is_agent(code):
        check_agent(code, reference)
        return Loaded(name, reference, "agent", code)
    raise ConfigError(
        f"'{reference}' is no environment: write a class with reset(**columns) and step(action), "
        "or async def agent(client, **columns)."
    )


def _check_constructor(kind: type[Any], reference: str) -> None:
    for p in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            raise ConfigError(
                f"'{reference}' needs '{p.name}' to be made; each episode makes one without arguments. "
                "What depends on the task goes into reset(**columns)."
            )


def _methods(kind: type[Any], reference: str) -> dict[str, Tool]:
    """Public methods as tools, by the method's name; described as bound, so that ``self`` is no argument."""
    found: dict[str, Tool] = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in TRL_RESERVED:
            found[name] = make_tool(types.MethodType(function, object()), f"{reference}.{name}")
    return found


@dataclass(frozen=True, slots=True)
class EnvironmentSet:
    """The environments of a run."""

    section: EnvironmentSection
    loaded: tuple[Loaded, ...]
    tools: Mapping[str, Tool]
    endpoints: Endpoints = field(default_factory=Endpoints)

    def route(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks, each with the environment that plays it; and what they lack refused.

        Raises:
            DataError: the routing column is missing or names no environment.
            ConfigError: an environment requires a column that no task has.
        """
        if not self.loaded:
            return list(tasks)
        routed = [replace(task, environment=self._environment_of(task)) for task in tasks]
        for one in self.loaded:
            mine = [task for task in routed if task.environment == one.name]
            columns = {"prompt", *(name for task in mine for name in task.columns)}
            if not mine:
                continue
            if one.kind == "agent":
                check_keywords(one.code, one.reference, columns | GIVEN)
            elif one.kind in ("native", "trl") and hasattr(one.code, "reset"):
                check_keywords(one.code.reset, f"{one.reference}.reset", columns, skip=1)
        return routed

    def _environment_of(self, task: Task) -> str:
        names = [one.name for one in self.loaded]
        if not isinstance(self.section.path, dict):
            return names[0]
        column = self.section.column
        if column not in task.columns:
            raise DataError(
                f"task {task.id} has no column '{column}' (environment.column), which says who plays it: "
                f"{', '.join([*names, SINGLE_TURN])}.{nearest(column, task.columns)}"
            )
        value = task.columns[column]
        if value not in (*names, SINGLE_TURN):
            raise DataError(
                f"task {task.id}: there is no environment '{value}' (environment.path)."
                f"{nearest(str(value), [*names, SINGLE_TURN])}"
            )
        return cast("str", value)

    def prepare(
        self, tasks: Sequence[Task], tokenizer: Any, prompt_of: Callable[[Task], list[Message]], *, chat: bool
    ) -> list[Task]:
        """``route``, and the prompts of those that have tools with these in them."""
        from tunesmith.data.chat import ChatTemplate

        routed = self.route(tasks)
        told = {one.name: tools for one in self.loaded if (tools := self.schemas(one))}
        if not told:
            return routed
        template = ChatTemplate.of(tokenizer) if chat else None
        self._check_template(template)
        assert template is not None, "tools need a chat template"
        renderer = ChatRenderer(template)
        return [
            replace(task, prompt_ids=tuple(renderer.whole(prompt_of(task), told[task.environment])))
            if task.environment in told
            else task
            for task in routed
        ]

    def schemas(self, one: Loaded) -> list[dict[str, Any]]:
        """What the policy is told that it may call."""
        tools = {} if one.kind in ("agent", "openrlhf") else self.tools
        return [tool.schema for tool in (*tools.values(), *one.methods.values())]

    def build(
        self, tokenizer: Any, prompt_of: Callable[[Task], list[Message]], *, chat: bool, max_tokens: int, model: str
    ) -> dict[str, Environment]:
        """Environments by name. ``prompt_of`` gives a task's prompt as messages; ``chat``: through the template.

        Raises:
            ConfigError: agents or tools without a chat template that has a place for them.
        """
        from tunesmith.data.chat import ChatTemplate

        plain = PlainRenderer(tokenizer)
        template = ChatTemplate.of(tokenizer) if chat else None
        self._check_template(template)
        section = self.section
        setting = Setting(
            renderer=ChatRenderer(template) if template else plain,
            limits=Limits(section.max_turns, max_tokens),
            prompt_of=prompt_of,
            parse=parser_for(tokenizer.get_chat_template()) if template else None,
            timeout=section.timeout,
            bad_call=section.bad_call,
        )

        def text_of(task: Task) -> str:
            return tokenizer.decode(list(task.prompt_ids), skip_special_tokens=False)

        # OpenRLHF's feedback holds the template's markers, so text is put behind text there.
        def text_alone(task: Task) -> list[Message]:
            return [{"role": "user", "content": text_of(task)}]

        verbatim = replace(setting, renderer=plain, prompt_of=text_alone)
        made: dict[str, Environment] = {SINGLE_TURN: SingleTurn()}
        for one in self.loaded:
            if one.kind == "agent":
                made[one.name] = Agent(one.name, one.code, setting, model, self.endpoints)
            else:
                own = verbatim if one.kind == "openrlhf" else setting
                made[one.name] = MultiTurn(one.name, self._open(one, text_of), own, self.schemas(one) or None)
        return made

    def _open(self, one: Loaded, text_of: Callable[[Task], str]) -> Open:
        match one.kind:
            case "native":
                return open_native(one.code, self.tools)
            case "trl":
                return open_trl(one.code, one.methods, self.tools)
            case "openrlhf":
                return open_openrlhf(one.code, text_of)
            case _:
                return open_tools(self.tools)

    def _check_template(self, template: Any) -> None:
        for one in self.loaded:
            uses_tools = bool(self.tools or one.methods) and one.kind != "openrlhf"
            if template is None and (one.kind == "agent" or uses_tools):
                raise ConfigError(
                    f"'{one.reference}' needs a chat template: agents and tools speak in messages. Name one with "
                    "model.chat_template, and leave data.chat = false out."
                )
            if template is not None and uses_tools and one.kind != "agent" and not template.takes_tools:
                raise ConfigError(
                    f"'{one.reference}' has tools, and the chat template has no place for them: name one that has "
                    "with model.chat_template."
                )

    def close(self) -> None:
        self.endpoints.close()
