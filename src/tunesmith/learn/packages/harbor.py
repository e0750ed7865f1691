"""Task directories of Harbor (https://github.com/harbor-framework/harbor), without the package.

A directory has ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and perhaps
``solution/solve.sh``. The agent is ``environment.command``; the tests come into its sandbox when it
has ended, and write the reward to ``/logs/verifier``.

``python -m tunesmith.learn.packages.harbor DIR`` runs the solutions instead of an agent, which is
the format's own check of tasks and of the sandbox.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import dropwhile
from math import inf
from pathlib import Path, PurePosixPath

from tunesmith.config.sandboxes import Bubblewrap, DockerSandbox, LocalSandbox
from tunesmith.config.schema import EnvironmentSection
from tunesmith.config.values import megabytes, parse_size
from tunesmith.errors import ConfigError, TunesmithError, boundary
from tunesmith.learn.environments.commands import CommandTask, CommandTasks, Episode, archive_of
from tunesmith.learn.packages.adapter import Foreign, Options, TaskRow
from tunesmith.learn.sandboxes.base import refused
from tunesmith.learn.sandboxes.making import make_opener
from tunesmith.types import Rollout, Task

APP = "/app"
"""The working directory where nothing is said."""
TESTS = "/tests"
SOLUTION = "/solution"
LOGS = "/logs"
REWARDS = (f"{LOGS}/verifier/reward.json", f"{LOGS}/verifier/reward.txt")
PLAIN_IMAGES = ("alpine", "bash", "busybox", "debian", "python", "ubuntu")
"""Images of which tasks use only what a system with Python has."""
_WITHOUT_EFFECT = ("ARG", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "USER")
_PHASES = ("agent", "verifier")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


def rows(name: str, split: str, options: Options) -> Iterator[TaskRow]:
    """The tasks in a directory, or that directory as the only one, in the order of their names."""
    if options:
        raise ConfigError(f"harbor:{name} has no options; leave 'options' out.")
    if split != "train":
        raise ConfigError(
            f"harbor:{name} has no split '{split}'; name another directory, or a part of this one, "
            "as [train[90%:]]."
        )
    for folder in _folders(Path(name)):
        yield {"prompt": _read(str(folder)).instruction, "harbor": str(folder)}


def environment(name: str) -> CommandTasks:
    """Plays the tasks of a directory."""
    tasks = [_read(str(folder)) for folder in _folders(Path(name))]
    own = {folder for task in tasks for folder in task.writes}

    def check(section: EnvironmentSection) -> None:
        if section.command is None:
            raise ConfigError(
                f"harbor:{name} brings tasks and no agent; name one in environment.command",
                keys=("environment.command",),
            )
        _check_sandbox(name, section, tasks)

    return CommandTasks(_command_task, tuple(sorted({TESTS, SOLUTION, LOGS, *own})), check)


@dataclass(slots=True)
class HarborTask:
    """A task directory."""

    folder: Path
    settings: Mapping[str, Foreign]
    """The contents of ``task.toml``."""
    instruction: str
    workdir: str = APP
    variables: dict[str, str] = field(default_factory=dict[str, str])
    copies: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """What the image holds besides its base, as tar files by directory."""
    memory: int = 0
    """Bytes that it asks for; 0 if it does not say."""
    needs_image: str = ""
    """Why it cannot be played without a container."""

    @property
    def writes(self) -> set[str]:
        return {self.workdir, *self.copies}

    @property
    def network(self) -> set[str]:
        """The modes that it asks for: ``public``, ``allowlist`` or ``no-network``."""
        tables = [self.table(name) for name in ("environment", *_PHASES)]
        old: dict[Foreign, str] = {True: "public", False: "no-network"}
        said = (table.get("network_mode", old.get(table.get("allow_internet"))) for table in tables)
        return {mode for mode in said if mode}

    def table(self, name: str) -> Mapping[str, Foreign]:
        return self.settings.get(name, {})


def _command_task(section: EnvironmentSection, task: Task) -> CommandTask:
    read = _read(task.columns["harbor"])
    assert section.command is not None
    verifier = read.table("verifier")
    clean = f"mkdir -p {LOGS}/verifier {LOGS}/agent {LOGS}/artifacts; rm -f {' '.join(REWARDS)}"
    test = f"{TESTS}/test.sh"
    return CommandTask(
        section.command,
        setup=section.setup or (),
        verify=("sh", "-c", f"{clean}; chmod +x {test}; exec {test}"),
        archives=read.copies,
        hidden={TESTS: archive_of(*sorted((read.folder / "tests").iterdir()))},
        rewards=REWARDS,
        folder=read.workdir,
        seconds=read.table("agent").get("timeout_sec") or inf,
        verify_seconds=verifier.get("timeout_sec", 600.0),
        environment={**read.variables, **_variables(read.table("environment"))},
        verify_environment=_variables(verifier),
    )


def _folders(directory: Path) -> list[Path]:
    inside = [directory] if (directory / "task.toml").is_file() else sorted(directory.glob("*/"))
    found = [folder for folder in inside if (folder / "task.toml").is_file()]
    if not found:
        raise ConfigError(f"harbor:{directory}: there is no task.toml in it or a directory below")
    return found


@lru_cache(maxsize=100_000)
def _read(path: str) -> HarborTask:
    """Raises ConfigError: it is no task, or one that cannot be played."""
    folder = Path(path)
    with boundary(ConfigError, f"harbor:{folder}", (OSError, ValueError)):
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        said = "" if settings.get("steps") else (folder / "instruction.md").read_text("utf-8")
        memory = _memory_of(settings.get("environment", {}))
    task = HarborTask(folder, settings, _without_canary(said), memory=memory)
    place = task.table("environment")
    verifier = task.table("verifier")
    unserved = {
        "it has several steps": settings.get("steps"),
        "it is for Windows": place.get("os", "linux") != "linux",
        "its tests want an environment of their own": "environment" in verifier
        or verifier.get("environment_mode") == "separate",
        "it has a simulated user or servers (mcp_servers)": place.get("mcp_servers"),
        "it needs an accelerator": place.get("gpus") or place.get("tpu"),
        "it consists of several containers": list(folder.glob("environment/*compose*.y*ml")),
        "it waits for services (healthcheck)": place.get("healthcheck"),
        "it names a user": {task.table(of).get("user") for of in _PHASES} - {None, "root", 0},
        "its network is open to some hosts only": "allowlist" in task.network,
        "it has no tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
    }
    for why, there in unserved.items():
        if there:
            raise ConfigError(f"harbor:{folder} cannot be played: {why}")
    if place.get("docker_image"):
        task.needs_image = f"it names the image {place['docker_image']}"
    elif (folder / "environment" / "Dockerfile").is_file():
        _follow_dockerfile(task)
    task.workdir = place.get("workdir") or task.workdir
    return task


def _memory_of(place: Mapping[str, Foreign]) -> int:
    if "memory" in place:  # as tasks of older versions say it: "4G"
        return parse_size(f"{place['memory']}iB")
    return place.get("memory_mb", 0) * 2**20


def _without_canary(text: str) -> str:
    """The instruction without the lines at its beginning that mark a benchmark's files, and blank
    ones."""
    lines = dropwhile(lambda line: _CANARY.fullmatch(line.strip()), text.split("\n"))
    return "\n".join(dropwhile(lambda line: not line.strip(), lines))


def _follow_dockerfile(task: HarborTask) -> None:
    """Do what a Dockerfile says, as far as that is possible without its image. Also with an image,
    its last ``WORKDIR`` is where programs start."""
    text = (task.folder / "environment" / "Dockerfile").read_text(encoding="utf-8")
    for line in re.sub(r"\\\n", " ", text).splitlines():
        name, _, rest = line.strip().partition(" ")
        name = name.upper()
        if not name or name.startswith("#") or name in _WITHOUT_EFFECT:
            continue
        words = _words(rest)
        if name == "WORKDIR" and words:
            task.workdir = str(PurePosixPath(task.workdir) / words[0])
        elif not task.needs_image and not (words and _follow(task, name, words)):
            task.needs_image = f"its Dockerfile says '{line.strip()}'"


def _words(text: str) -> list[str]:
    """An instruction's words; none where they depend on variables, or a quotation goes on."""
    try:
        return [] if "$" in text else shlex.split(text)
    except ValueError:
        return []


def _follow(task: HarborTask, name: str, words: list[str]) -> bool:
    """Whether an instruction was followed."""
    match name:
        case "FROM":
            return words[0].partition(":")[0].rpartition("/")[2] in PLAIN_IMAGES
        case "ENV" if all("=" in word for word in words):
            task.variables |= dict(word.split("=", 1) for word in words)
            return True
        case "COPY":
            return _copy(task, words)
        case _:
            return False


def _copy(task: HarborTask, words: list[str]) -> bool:
    """Whether a COPY of files beside the Dockerfile was followed."""
    *sources, target = words
    paths = [task.folder / "environment" / source for source in sources]
    top = (task.folder / "environment").resolve()
    inside = all(path.exists() and path.resolve().is_relative_to(top) for path in paths)
    if not inside or any(word.startswith("-") or "*" in word for word in words):
        return False
    place = PurePosixPath(task.workdir) / target
    (first, *others) = paths
    if first.is_dir() and not others:
        added = {str(place): archive_of(*sorted(first.iterdir()))}
    elif target.endswith("/") or target == "." or others:
        added = {str(place): archive_of(*paths)}
    else:
        added = {str(place.parent): archive_of(first, name=place.name)}
    if added.keys() & task.copies.keys():
        return False
    task.copies |= added
    return True


def _variables(table: Mapping[str, Foreign]) -> dict[str, str]:
    """A table's ``env``; ``${NAME}`` and ``${NAME:-default}`` are the run's own variables."""

    def own(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name not in os.environ and match.start(2) < 0:
            raise ConfigError(f"a task of harbor needs the environment variable {name}")
        return os.environ.get(name, default)

    env: Mapping[str, str] = table.get("env", {})
    return {name: _VARIABLE.sub(own, text) for name, text in env.items()}


def _check_sandbox(name: str, section: EnvironmentSection, tasks: list[HarborTask]) -> None:
    sandbox = section.sandbox
    if isinstance(sandbox, LocalSandbox):
        for task in tasks:
            _check_limits(task, sandbox)
    if isinstance(sandbox, DockerSandbox):
        return
    if not isinstance(sandbox, Bubblewrap):
        raise refused(
            f"harbor:{name}: its tests have places of their own, such as {TESTS}; set "
            "environment.sandbox = 'bubblewrap' or 'docker'"
        )
    for task in tasks:
        if task.needs_image:
            raise refused(
                f"harbor:{task.folder} needs a container: {task.needs_image}. Build its image with "
                "docker (with python3 in it), and set environment.sandbox = "
                "{ type = 'docker', image = 'NAME' }, or leave this task out"
            )


def _check_limits(task: HarborTask, sandbox: LocalSandbox) -> None:
    """A task gets the memory that it asks for, and no network that it forbids."""
    if task.memory > parse_size(sandbox.memory):
        raise refused(
            f"harbor:{task.folder} asks for {megabytes(task.memory)} of memory; set "
            f"environment.sandbox.memory = '{megabytes(task.memory)}' or more"
        )
    if sandbox.network and "no-network" in task.network:
        raise refused(
            f"harbor:{task.folder} is played without network; leave environment.sandbox.network "
            "out, or this task"
        )


async def oracle(folder: Path, section: EnvironmentSection) -> float | None:
    """The reward of a task's own solution.

    Raises:
        TunesmithError: it could not be played.
    """
    tasks = environment(str(folder))
    solve = ("sh", "-c", f"chmod +x {SOLUTION}/solve.sh; exec {SOLUTION}/solve.sh")
    section = section.model_copy(update={"command": solve})
    tasks.check(section)
    assert isinstance(section.sandbox, Bubblewrap | DockerSandbox)
    rollout = Rollout(Task(folder.name, "", (), {"harbor": str(folder)}))
    read = _read(str(folder))
    given = tasks.task_of(section, rollout.task)
    solution = {SOLUTION: archive_of(*sorted((folder / "solution").iterdir()))}
    own = {**given.environment, **_variables(read.table("solution"))}
    given = replace(given, archives={**given.archives, **solution}, environment=own)
    opener = make_opener(section.sandbox, folders=tasks.folders)
    try:
        async with opener.open() as sandbox:
            episode = Episode(f"harbor:{folder}", section, sandbox, given, rollout)
            await episode.set_up()
            await episode.play({})
            await episode.verify()
    finally:
        opener.close()
    return rollout.reward


def main(directory: str) -> int:
    """Print the reward of each task's solution; 1 if one is not 1."""
    worst = 0
    for folder in _folders(Path(directory).resolve()):
        try:
            memory = megabytes(max(_read(str(folder)).memory, 4 * 10**9))
            section = EnvironmentSection(sandbox=Bubblewrap(memory=memory, processes=64))
            reward: object = asyncio.run(oracle(folder, section))
        except (TunesmithError, OSError) as error:
            reward = error
        worst |= reward != 1.0
        print(f"{folder.name}: {reward}")
    return worst


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
