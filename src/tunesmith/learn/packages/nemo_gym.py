"""Resource servers of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym): one of the package's, which a
run starts, or one at an address.

The policy plays as the package's own agents do. Its function calls go to the server until a turn
has none, and the server scores the whole response; or, where the server has ``/step``, each of its
turns goes there until the episode is over.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp

from tunesmith.errors import ConfigError, EpisodeError, boundary, nearest, shortened
from tunesmith.learn.endpoint.client import PolicyClient
from tunesmith.learn.endpoint.responses import FunctionTool, messages_of
from tunesmith.learn.environments.conversation import OutOfRoom
from tunesmith.learn.environments.steps import StepResult
from tunesmith.learn.packages.adapter import Foreign, Options, TaskRow
from tunesmith.learn.packages.served import PackageServer, address_in
from tunesmith.learn.packages.splits import check_options
from tunesmith.records.foreign import json_or, parse_json

SERVERS = "resources_servers"
PARAMS = "responses_create_params"
ROW_ERRORS = (ValueError, KeyError, TypeError)
CALL_SECONDS = 60.0
LONGEST = 100_000
"""Characters of what a tool answers; a longer answer fails its episode."""

Play = Callable[..., Coroutine[object, object, StepResult]]


def rows(name: str, split: str, options: Options) -> Iterator[TaskRow]:
    """The lines of the server's ``data/SPLIT.jsonl``, or of ``file``."""
    what = f"nemo_gym:{name}"
    check_options(what, options, ("file",))
    for number, line in _lines(what, name, split, options):
        with boundary(ConfigError, f"{what}: line {number} of '{split}'", ROW_ERRORS):
            row: dict[str, Foreign] = json.loads(line)
            items = _items(row)
        tools = [
            FunctionTool.model_validate(tool).model_dump(exclude={"type"}, exclude_none=True)
            for tool in row[PARAMS].get("tools") or ()
        ]
        task: TaskRow = {"prompt": messages_of(items), "nemo_gym": line}
        if tools:
            task["tools"] = [{"type": "function", "function": tool} for tool in tools]
        yield task


def environment(name: str) -> Play:
    """The agent that carries the policy's function calls to the server."""
    server = _server(name)

    async def play(client: PolicyClient, nemo_gym: str) -> StepResult:
        cookies = aiohttp.CookieJar(unsafe=True)  # sessions of a server that has no name
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        url = server.url()
        async with aiohttp.ClientSession(url, cookie_jar=cookies, timeout=timeout) as session:
            play = _stepped if await _steps(session) else _play
            return await play(client, session, f"nemo_gym:{name}", json.loads(nemo_gym))

    return play


async def _steps(session: aiohttp.ClientSession) -> bool:
    """Whether the server answers each turn (``resources_servers.gymnasium``)."""
    async with session.get("/openapi.json") as answer:
        text = await answer.text()
    described = json_or(text, None)
    return isinstance(described, dict) and "/step" in described.get("paths", ())


async def _stepped(
    client: PolicyClient, session: aiohttp.ClientSession, what: str, row: Mapping[str, Foreign]
) -> StepResult:
    """The reward is the sum of the turns'."""
    items = _items(row)
    metrics = {"unfinished": 0.0, "tool_calls": 0.0}
    reward = 0.0
    turns = 0
    answer = json.loads(await _post(session, what, "reset", row))
    while not (answer.get("terminated") or answer.get("truncated")):
        for output in answer["info"].get("tool_outputs", ()):
            items.append({"type": "function_call_output", **output})
        if answer.get("observation"):
            items.append({"role": "user", "content": answer["observation"]})
        try:
            response = await client.responses.create(**{**row[PARAMS], "input": items})
        except OutOfRoom:
            if not turns:
                raise
            metrics["unfinished"] = 1.0
            break
        turns += 1
        items += response["output"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        metrics["tool_calls"] += len(calls)
        answer = json.loads(await _post(session, what, "step", {**row, "response": response}))
        reward += answer["reward"]
    return StepResult(reward=reward, done=True, metrics=metrics | _numbers(answer["info"]))


def _items(row: Mapping[str, Foreign]) -> list[Foreign]:
    """The task as items of OpenAI's ``responses``."""
    said = row[PARAMS]["input"]
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


def _numbers(values: Mapping[str, Foreign]) -> dict[str, float]:
    return {k: float(v) for k, v in values.items() if isinstance(v, bool | int | float)}


async def _play(
    client: PolicyClient, session: aiohttp.ClientSession, what: str, row: Mapping[str, Foreign]
) -> StepResult:
    asked = row[PARAMS]
    items = _items(row)
    written: list[Foreign] = []
    metrics = {"unfinished": 0.0, "tool_calls": 0.0}
    response: Foreign = None
    await _post(session, what, "seed_session", row)
    calls: list[Foreign] = []
    tools = {tool.get("name") for tool in asked.get("tools") or ()}
    while response is None or calls:
        try:
            response = await client.responses.create(**{**asked, "input": [*items, *written]})
        except OutOfRoom:
            if response is None:
                raise
            metrics["unfinished"] = 1.0
            break
        written += response["output"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        for call in calls:
            metrics["tool_calls"] += 1
            answer = await _called(session, call, tools)
            kind = "function_call_output"
            written.append({"type": kind, "call_id": call["call_id"], "output": answer})
    judged = {**row, "response": {**response, "output": written}}
    verdict = json.loads(await _post(session, what, "verify", judged))
    known = _numbers(verdict)
    metrics |= {key: known[key] for key in known.keys() - row.keys() - {"reward"}}
    return StepResult(reward=verdict["reward"], done=True, metrics=metrics)


async def _called(session: aiohttp.ClientSession, call: Mapping[str, str], tools: set[str]) -> str:
    """What the server answers to a function call, also where that is an error. Only the task's
    tools are asked: the server has other paths, such as ``verify``."""
    if call["name"] not in tools:
        return json.dumps({"error": f"There is no tool {call['name']}."})
    try:
        arguments = parse_json(call["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error}"})
    async with session.post(f"/{call['name']}", json=arguments) as answer:
        text = await answer.text()
    if len(text) > LONGEST:
        raise EpisodeError(f"the tool's answer has {len(text)} characters, {LONGEST} are the limit")
    return text


async def _post(session: aiohttp.ClientSession, what: str, path: str, body: object) -> str:
    async with session.post(f"/{path}", json=body) as answer:
        text = await answer.text()
        if answer.status != 200:
            raise EpisodeError(f"{what}: {path} answered {answer.status}: {shortened(text)}")
    return text


def _lines(what: str, name: str, split: str, options: Options) -> list[tuple[int, str]]:
    """The lines of the tasks, with their numbers; blank ones are left out."""
    if "file" in options:
        file = Path(str(options["file"])).expanduser()
    elif address_in(name):
        raise ConfigError(f"{what}: name the tasks of a server at an address: options.file")
    else:
        file = _folder(name) / "data" / f"{split}.jsonl"
    if not file.is_file():
        there = [path.stem for path in sorted(file.parent.glob("*.jsonl"))]
        raise ConfigError(
            f"{what}: there is no {file}; name another as options.file, or a split that is there: "
            f"{', '.join(there) or 'none'}"
        )
    # Not ``splitlines``: texts may hold its other line breaks, such as U+2028.
    lines = enumerate(file.read_text(encoding="utf-8").split("\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]


def _folder(name: str) -> Path:
    """A server's directory in the package; a ConfigError if there is none."""
    found = find_spec(SERVERS)
    places = [Path(place) for place in (found and found.submodule_search_locations) or ()]
    known = {app.parent.name: app.parent for place in places for app in place.glob("*/app.py")}
    if name not in known:
        raise ConfigError(f"nemo_gym has no server '{name}'.{nearest(name, known)}")
    return known[name]


def _server(name: str) -> PackageServer:
    address = address_in(name)
    if not address:
        _folder(name)  # what is wrong is said before the run
    program = "from tunesmith.learn.packages.nemo_gym import serve; serve()"

    def command(port: int) -> list[str]:
        return [sys.executable, "-c", program, name, str(port)]

    return PackageServer(f"nemo_gym:{name}", command, _ask, address)


def _ask(url: str) -> None:
    with suppress(HTTPError), urlopen(f"{url}/openapi.json", timeout=CALL_SECONDS):
        pass  # also with an error, it answers


def serve() -> None:
    """The process of a server, as the package starts one, but without its head server: models that
    a server asks, such as judges, are not there."""
    name = sys.argv[1]
    port = int(sys.argv[2])
    package = import_module("nemo_gym.server_utils")
    base: Foreign = import_module("nemo_gym.base_resources_server").SimpleResourcesServer
    folder = str(_folder(name))
    os.chdir(folder)
    sys.path.insert(0, folder)  # servers import the modules beside them
    module = import_module(f"{SERVERS}.{name}.app")
    own = [each for each in vars(module).values() if isinstance(each, type)]
    (kind,) = (e for e in own if issubclass(e, base) and e.__module__ == module.__name__)
    address = {"host": "127.0.0.1", "port": port}
    head = import_module("nemo_gym.config_types").BaseServerConfig(**address)
    nothing = import_module("omegaconf").OmegaConf.create({})
    said = {**_settings(name), **address, "name": name}
    server: Foreign = kind(
        config=kind.model_fields["config"].annotation.model_validate(said),
        server_client=package.ServerClient(head_server_config=head, global_config_dict=nothing),
    )
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    import_module("uvicorn").run(app, **address, log_level="warning")


def _settings(name: str) -> dict[str, Foreign]:
    """A server's settings in the configuration that the package brings."""
    import yaml

    files = sorted((_folder(name) / "configs").glob("*.yaml"))
    own = [file for file in files if file.stem == name] or files[:1]
    tables = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in own]
    named = [one for table in tables for one in table.values() if isinstance(one, dict)]
    servers = [settings for one in named for settings in one.get(SERVERS, {}).values()]
    return servers[0] if servers else {"entrypoint": "app.py"}
