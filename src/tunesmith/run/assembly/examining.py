"""Running the user's code as a run begins, in a process of its own: for commands that only
check."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.config.commands import SamplingConfig
from tunesmith.config.schema import DataSection, RLConfig, RunConfig
from tunesmith.errors import ConfigError, DataError, Problem, UserError, about
from tunesmith.learn.data.formats import Example
from tunesmith.learn.data.prepare import peek
from tunesmith.learn.environments.loading import references_of
from tunesmith.types import Task

S = TypeVar("S", bound=Any)

SECONDS = 60.0
"""Code that takes longer to import is left to the run."""
_PROGRAM = "from tunesmith.run.assembly.examining import main; main()"


def examine_user_code(config: RunConfig, base_dir: Path, examples: Sequence[Example]) -> str | None:
    """Import rewards, environments, tools and sinks, and check them with the first lines of the
    data.

    Returns:
        A note if the code was not checked to the end.

    Raises:
        ConfigError, DataError: what the run would refuse.
    """
    references = _references(config)
    if not references:
        return None
    keys = tuple(dict.fromkeys(key for key, _ in references))
    question = pickle.dumps((sys.path, config, base_dir, list(examples)))
    command = [sys.executable, "-P", "-c", _PROGRAM]
    try:
        ended = subprocess.run(
            command, input=question, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"your code was not checked: importing it took more than {SECONDS:g} s"
    if not ended.stdout:
        told = ended.stderr.decode(errors="replace").strip().splitlines()[-5:]
        names = " and ".join(f"'{reference}'" for _, reference in references)
        lines = [
            f"importing {names} ended its process with code {ended.returncode} "
            f"({' and '.join(keys)})",
            *told,
        ]
        raise ConfigError("\n  ".join(lines), keys=keys)
    kind, around, reasons = json.loads(ended.stdout)
    if reasons:
        problems = [Problem(tuple(keys), text, what) for keys, text, what in reasons]
        error = (DataError if kind == DataError.__name__ else ConfigError)(*problems)
        error.key_around = around
        raise error
    return None


def task_data(config: SamplingConfig) -> DataSection:
    """The data section for loading tasks."""
    return config.data.model_copy(update={"completion": None, "loss_on": None, "max_tokens": None})


def first_lines(
    config: RunConfig,
    *,
    hub: bool,
    maps: bool = False,
    check: Callable[[Example], None] = lambda _: None,
) -> list[Example]:
    """The first usable line of each source; see ``peek``."""
    sampling = isinstance(config, SamplingConfig)
    data, goal = (task_data(config), "rl") if sampling else (config.data, config.goal)
    found: list[Example | None] = []
    for key, source in (("data.train", data.train), ("data.eval", data.eval)):
        if source is not None:
            with about(key):
                found += [
                    line for _, line in peek(data, source, goal, hub=hub, maps=maps, check=check)
                ]
    return [line for line in found if line is not None]


def _references(config: RunConfig) -> list[tuple[str, str]]:
    """References to the user's code that the run imports, each after its setting."""
    found = [("monitor.sinks", sink) for sink in config.monitor.sinks if ":" in sink]
    found += [("data.map", config.data.map)] if config.data.map else []
    if isinstance(config, RLConfig | SamplingConfig) and config.reward is not None:
        found += [("reward.functions", entry) for entry in config.reward.functions if ":" in entry]
    if isinstance(config, RLConfig):
        environments = references_of(config.environment).values()
        found += [("environment.path", reference) for reference in environments]
        found += [("environment.tools", reference) for reference in config.environment.tools]
    return found


def main() -> None:
    """The child process: a configuration on standard input, the refusal as JSON on standard
    output."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's code prints
    sys.path[:], config, base_dir, examples = pickle.load(sys.stdin.buffer)
    refused: UserError | None = None
    try:
        _examine(config, base_dir, examples)
    except UserError as error:
        refused = error
    reasons = [(p.keys, p.text, p.kind) for p in refused.problems] if refused else []
    answer.write(
        json.dumps([type(refused).__name__, refused.key_around if refused else "", reasons])
    )
    answer.close()
    os._exit(0)  # threads of the user's code may run on


def _examine(config: RunConfig, base_dir: Path, examples: Sequence[Example]) -> None:
    from tunesmith.config.objects import load_object
    from tunesmith.learn.rewards.loading import load_rewards
    from tunesmith.run.assembly.environments import goes_through_template, open_user_code
    from tunesmith.run.assembly.sinks import ADAPTERS

    for sink in config.monitor.sinks:
        if sink not in ADAPTERS:
            with about("monitor.sinks"):
                load_object(sink, base_dir)
    if config.data.map:
        examples = first_lines(config, hub=False, maps=True)
    tasks = [Task(e.id, e.prompt, (1,), e.columns) for e in examples if e.prompt is not None][:1]
    if isinstance(config, SamplingConfig) and config.reward is not None:
        sandbox = config.environment.sandbox
        with closing(load_rewards(_here(config.reward), base_dir, sandbox=sandbox)) as rewards:
            rewards.check_tasks(tasks)
    if isinstance(config, RLConfig):
        given = {"reward": _here(config.reward), "environment": _here(config.environment)}
        with open_user_code(config.model_copy(update=given), base_dir) as (rewards, environments):
            rewards.check_tasks(tasks)
            if any(one.kind == "agent" or one.schemas for one in environments.loaded):
                from tunesmith.run.specs.from_plan import load_tokenizer

                tokenizer = load_tokenizer(config)
                chat = goes_through_template(config.data, tokenizer, tasks)
                environments.template(tokenizer, chat=chat)


def _here(section: S) -> S:
    return section.model_copy(update={"isolation": "thread", "memory": None})
