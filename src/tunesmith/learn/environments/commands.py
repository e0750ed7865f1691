"""Agents that are programs: started once an episode, in a sandbox from which they reach the policy
alone.

A program finds the policy by the variables that OpenAI's and Anthropic's clients read, and the task
in its arguments, its standard input and the file that ``TUNESMITH_TASK`` names.
"""

from __future__ import annotations

import io
import json
import secrets
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.config.schema import EnvironmentSection
from tunesmith.config.values import PROMPT
from tunesmith.errors import DeadlineExceeded, EpisodeError, shortened
from tunesmith.learn.environments.agents import policy_of
from tunesmith.learn.environments.base import Generate
from tunesmith.learn.environments.conversation import EpisodeSettings
from tunesmith.learn.environments.games import columns_of
from tunesmith.learn.environments.steps import StepResult, as_step
from tunesmith.learn.sandboxes.base import Opened, Opener, SandboxError, SandboxJob, SandboxOutcome
from tunesmith.records.foreign import json_or
from tunesmith.types import Prompt, Rollout, Task, as_messages, text_of_content

if TYPE_CHECKING:
    from tunesmith.learn.endpoint.server import Endpoint

FOLDER = "task"
"""The working directory, below the sandbox's."""
TASK_FILE = "task.json"
REWARD = "reward"
KEPT = 2000
"""Characters of a program's output that are shown."""
_NOT_FOUND = 127


@dataclass(frozen=True, slots=True)
class Played:
    """What an agent's program left, for reward functions that take ``environments``."""

    rollout: Rollout
    exit_code: int
    stdout: str
    stderr: str
    files: Mapping[str, bytes]
    """By path in its working directory."""


@dataclass(frozen=True, slots=True)
class CommandTask:
    """What is run for one task."""

    command: tuple[str, ...]
    setup: tuple[str, ...] = ()
    verify: tuple[str, ...] = ()
    archives: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """The contents that are there before ``setup``, by directory."""
    hidden: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """What is there for ``verify`` alone."""
    rewards: tuple[str, ...] = ()
    """Files of which ``verify`` writes one; none: the one that it is told, if it likes."""
    folder: str = FOLDER
    seconds: float = inf
    """Seconds of the command, beside what the run allows."""
    verify_seconds: float | None = None
    """Seconds of ``verify``; None: ``environment.timeout``."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of all its programs."""
    verify_environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class CommandTasks:
    """What commands are run for tasks of a kind."""

    task_of: Callable[[EnvironmentSection, Task], CommandTask]
    folders: tuple[str, ...] = ()
    """Directories, besides the sandbox's own, in which they may write."""
    check: Callable[[EnvironmentSection], None] = lambda _: None
    """Raises ConfigError: tasks cannot be played with these settings."""


def _own(section: EnvironmentSection, task: Task) -> CommandTask:
    del task
    assert section.command is not None
    folder = Path(section.folder) if section.folder else None
    archives = {FOLDER: archive_of(*sorted(folder.iterdir()))} if folder else {}
    return CommandTask(section.command, section.setup or (), section.verify or (), archives)


OWN_TASKS = CommandTasks(_own)
"""The run's own commands, for any task."""


@cache
def archive_of(*paths: Path, name: str = "") -> bytes:
    """Files and directories as a tar file, under their names; ``name``: that of the only one."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in paths:
            archive.add(path, name or path.name)
    return data.getvalue()


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """An ``Environment`` whose episodes a program plays."""

    name: str
    tasks: CommandTasks
    setting: EpisodeSettings
    model: str
    endpoint: Callable[[], Endpoint]
    opener: Callable[[], Opener]
    keeps: bool
    """Whether the program's files stay on the rollout, for the reward functions."""

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        with policy_of(rollout, generate, self.setting, self.model, self.name) as policy:
            section = self.setting.section
            endpoint = self.endpoint()
            try:
                async with self.opener().open() as sandbox:
                    task = self.tasks.task_of(section, rollout.task)
                    episode = Episode(self.name, section, sandbox, task, rollout)
                    await episode.set_up()
                    async with endpoint.reached_by(sandbox.listener) as port:
                        with endpoint.open(policy) as (_, key):
                            base = f"http://127.0.0.1:{port}/{key}"
                            await episode.play(_policy(base, key, self.model), keeps=self.keeps)
                    await episode.verify()
            except SandboxError as error:
                raise EpisodeError(f"{self.name}: the sandbox failed: {error}") from None


@dataclass(frozen=True, slots=True)
class Episode:
    """A task's programs in one sandbox."""

    name: str
    section: EnvironmentSection
    sandbox: Opened
    given: CommandTask
    rollout: Rollout

    async def set_up(self) -> None:
        """Raises EpisodeError: it failed."""
        job = self._job(self.given.setup or ("true",), self._columns())
        job = replace(job, archives=self.given.archives)
        ended = await self._run("setup", job, self.section.timeout)
        if ended.code != 0:
            raise EpisodeError(f"{self.name}: setup {_ending(ended)}")

    async def play(self, policy: Mapping[str, str], *, keeps: bool = False) -> None:
        """Run the command.

        Args:
            policy: variables by which it finds the policy; none: there is none.
            keeps: whether its files stay on the rollout.

        Raises:
            EpisodeError: it did not ask the policy.
        """
        task = self.rollout.task
        said = text_of(task.prompt)
        words = tuple(word.replace(PROMPT, said) for word in self.given.command)
        # The columns may hold the answer, and the policy may read this file.
        shown = {"id": task.id, "prompt": said, "messages": as_messages(task.prompt)}
        job = replace(
            self._job(words, shown),
            stdin="" if words != self.given.command else said,
            reads=(self.given.folder,) if keeps else (),
        )
        job = replace(job, environment={**job.environment, **policy})
        limit = self.section.sandbox.seconds if self.section.sandbox else None
        ended = await self._run("command", job, min(limit or inf, self.given.seconds))
        assert ended.code is not None
        self.rollout.metrics["exit_code"] = float(ended.code)
        self.rollout.notes["output"] = _tail(ended)
        if policy and not self.rollout.turns:
            raise EpisodeError(f"{self.name}: no turn of the policy; command {_ending(ended)}")
        if keeps:
            start = f"{self.given.folder}/"
            files = {path.removeprefix(start): data for path, data in ended.files.items()}
            self.rollout.instance = Played(
                self.rollout, ended.code, ended.stdout, ended.stderr, files
            )

    async def verify(self) -> None:
        """Set the reward.

        Raises:
            EpisodeError: it could not be run, was killed, or gave no reward.
        """
        if not self.given.verify:
            return
        paths = self.given.rewards or (f"{REWARD}-{secrets.token_hex(8)}",)
        job = self._job(self.given.verify, self._columns())
        places = {**job.places, "TUNESMITH_REWARD": paths[0]}
        environment = {**job.environment, **self.given.verify_environment}
        job = replace(job, environment=environment, places=places, reads=paths)
        job = replace(job, archives=self.given.hidden)
        ended = await self._run("verify", job, self.given.verify_seconds or self.section.timeout)
        name = f"{self.name}: verify"
        assert ended.code is not None
        if ended.code < 0 or ended.code == _NOT_FOUND:
            raise EpisodeError(f"{name} {_ending(ended)}")
        self.rollout.notes["verified"] = _tail(ended)
        if ended.files:
            step = reward_in(next(iter(ended.files.values())), name)
        elif self.given.rewards:
            raise EpisodeError(f"{name} wrote no reward; it {_ending(ended)}")
        else:
            step = StepResult(reward=float(ended.code == 0))
        self.rollout.metrics.update(step.metrics)
        self.rollout.reward = step.reward

    async def _run(self, what: str, job: SandboxJob, seconds: float) -> SandboxOutcome:
        ended = await self.sandbox.run(job, seconds)
        if ended.ended == "timed_out":
            raise DeadlineExceeded(f"{self.name}: {what} did not end within {seconds:g} s")
        if ended.code is None:
            raise EpisodeError(f"{self.name}: {what} was killed with its sandbox")
        return ended

    def _job(self, command: tuple[str, ...], task: object) -> SandboxJob:
        return SandboxJob(
            command=command,
            files={TASK_FILE: json.dumps(task, ensure_ascii=False, default=str)},
            folder=self.given.folder,
            environment=self.given.environment,
            places={"TUNESMITH_TASK": TASK_FILE, "HOME": "home/", "TMPDIR": "tmp/"},
        )

    def _columns(self) -> dict[str, object]:
        task = self.rollout.task
        return {**columns_of(task), "id": task.id, "prompt": task.prompt}


def _policy(base: str, key: str, model: str) -> dict[str, str]:
    """The variables by which clients find the policy."""
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": model,
    }


def text_of(prompt: Prompt) -> str:
    return "\n\n".join(text_of_content(message["content"]) for message in as_messages(prompt))


def reward_in(data: bytes, name: str) -> StepResult:
    """The reward in a file: a number, or a JSON object of numbers with ``reward``; the others are
    metrics.

    Raises:
        EpisodeError: it is none.
    """
    text = data.decode(errors="replace").strip()
    with suppress(ValueError):
        return as_step(StepResult(reward=float(text), done=True), name)
    value: object = json_or(text, None)
    if isinstance(value, dict) and "reward" in value:
        reward = value.pop("reward")
        return as_step(StepResult(reward=reward, done=True, metrics=value), name)
    raise EpisodeError(
        f"{name} wrote {shortened(repr(text))}; expected a number, or JSON with 'reward'"
    )


def _ending(ended: SandboxOutcome) -> str:
    return f"ended with exit code {ended.code}; it printed:\n{_tail(ended)}"


def _tail(ended: SandboxOutcome) -> str:
    return f"{ended.stdout}{ended.stderr}"[-KEPT:]
