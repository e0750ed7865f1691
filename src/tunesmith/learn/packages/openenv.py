"""Environments of OpenEnv, whose server a run starts, or finds at an address.

The policy answers each observation with an action: its fields as JSON, or the text alone where the
action has one field that must be given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from urllib.request import urlopen

from tunesmith.errors import ConfigError, EpisodeError
from tunesmith.learn.endpoint.client import PolicyClient
from tunesmith.learn.environments.conversation import OutOfRoom
from tunesmith.learn.environments.steps import StepResult
from tunesmith.learn.packages.adapter import Foreign, Options, TaskRow
from tunesmith.learn.packages.served import PackageServer, address_in
from tunesmith.learn.packages.splits import check_options, seeds_of
from tunesmith.records.foreign import json_or
from tunesmith.types import Message

SIZE = 200
PROMPT = "Answer each observation with an action."
STEP_SECONDS = 60.0
REFUSED = "VALIDATION_ERROR"
"""In the package's error: an action has values that its schema does not allow."""
LONGEST = 100_000
"""Characters of an observation; a longer one fails its episode."""

Play = Callable[..., Coroutine[object, object, StepResult]]


def rows(name: str, split: str, options: Options) -> Iterator[TaskRow]:
    """A task for each table of ``resets``, what the environment's ``reset`` takes; else ``size``
    tasks (200) with seeds from ``seed`` (0) on. ``prompt`` is said before the first observation."""
    what = f"openenv:{name}"
    check_options(what, options, ("size", "seed", "resets", "prompt"))
    drawn = [{"seed": each} for each in seeds_of(what, split, options, SIZE)]
    resets: Foreign = options.get("resets", drawn)
    for reset in resets:
        yield {"prompt": str(options.get("prompt", PROMPT)), "openenv": json.dumps(reset)}


def environment(name: str) -> Play:
    """The agent that carries the policy's actions to the environment."""
    server = _server(name)

    async def play(client: PolicyClient, prompt: str, openenv: str) -> StepResult:
        url = server.url()
        schema = _schema(url)
        package = import_module("openenv")
        async with package.GenericEnvClient(base_url=url, message_timeout_s=STEP_SECONDS) as far:
            result = await far.reset(**json.loads(openenv))
            return await _play(client, far, result, f"{prompt}\n\n{_head(schema)}", schema)

    return play


async def _play(
    client: PolicyClient, far: Foreign, result: Foreign, head: str, schema: Mapping[str, Foreign]
) -> StepResult:
    talk: list[Message] = [{"role": "user", "content": f"{head}\n{_shown(result.observation)}"}]
    total = 0.0
    unreadable = 0
    while not result.done:
        try:
            reply = await client.chat.completions.create(messages=talk)
        except OutOfRoom:
            cut = {"unfinished": 1.0, "bad_actions": float(unreadable)}
            return StepResult(reward=total, done=True, metrics=cut)
        text = reply.choices[0].message.content
        talk.append({"role": "assistant", "content": text})
        action = action_in(text, schema)
        moved = None if action is None else await _step(far, action)
        if moved is None:
            unreadable += 1
            talk.append({"role": "user", "content": f"No action. {_head(schema)}"})
            continue
        result = moved
        total += float(result.reward or 0.0)
        talk.append({"role": "user", "content": _shown(result.observation)})
    metrics = {"unfinished": 0.0, "bad_actions": float(unreadable)}
    return StepResult(reward=total, done=True, metrics=metrics)


async def _step(far: Foreign, action: Mapping[str, object]) -> Foreign | None:
    """The result of an action; None if the server does not take it for one."""
    try:
        return await far.step(action)
    except RuntimeError as error:
        if REFUSED in str(error):
            return None
        raise


def action_in(text: str, schema: Mapping[str, Foreign]) -> dict[str, object] | None:
    """The action that a turn holds; None if it holds none that the schema describes."""
    text = text.rpartition("</think>")[2].strip()
    value: object = json_or(text.removeprefix("```json").removesuffix("```"), text)
    needed = schema.get("required", ())
    fields = schema.get("properties", {})
    if isinstance(value, dict):
        known: dict[str, object] = {str(key): one for key, one in value.items() if key in fields}
        return known if set(needed) <= known.keys() and len(known) == len(value) else None
    if len(needed) != 1:
        return None
    (field,) = needed
    return {field: value if fields[field].get("type") != "string" else text}


def _head(schema: Mapping[str, Foreign]) -> str:
    fields = {name: one.get("type", "any") for name, one in schema["properties"].items()}
    fields.pop("metadata", None)
    return f"An action is JSON with these fields: {json.dumps(fields)}"


def _shown(observation: object) -> str:
    text = json.dumps(observation, ensure_ascii=False)
    if len(text) > LONGEST:
        raise EpisodeError(f"the observation has {len(text)} characters, {LONGEST} are the limit")
    return text


@lru_cache(maxsize=64)
def _schema(url: str) -> Mapping[str, Foreign]:
    """JSON schema of an action."""
    with urlopen(f"{url}/schema", timeout=STEP_SECONDS) as answer:
        return json.load(answer)["action"]


def _server(name: str) -> PackageServer:
    address = address_in(name)
    app = name if ":" in name else f"{name}.server.app:app"
    module = app.partition(":")[0]
    if not address and not _is_there(module):
        raise ConfigError(f"openenv:{name}: there is no module {module}; is it installed?")
    serve = [sys.executable, "-m", "uvicorn", app, "--log-level", "warning"]

    def command(port: int) -> list[str]:
        return [*serve, "--host", "127.0.0.1", "--port", str(port)]

    return PackageServer(f"openenv:{name}", command, _schema, address)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
