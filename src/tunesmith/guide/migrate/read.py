"""Determines the kind of a source file, and reads the launches in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tunesmith.errors import ConfigError, boundary
from tunesmith.guide.migrate.commands import read_shell
from tunesmith.guide.migrate.given import ForeignLaunch, Given
from tunesmith.guide.migrate.programs import MARKS, find_program
from tunesmith.guide.migrate.python import docstrings, read_python
from tunesmith.guide.migrate.trees import (
    LARGEST,
    accelerate_settings,
    read_tree_file,
    read_tree_text,
    tree_settings,
)
from tunesmith.guide.names.foreign import meanings_of
from tunesmith.records.foreign import parse_json

_MARKS = MARKS["tree"]


def read_source(path: Path, variables: Mapping[str, str]) -> list[ForeignLaunch]:
    """Everything in a file that trains or samples.

    Args:
        variables: values of shell variables that the script does not set.

    Raises:
        ConfigError: it holds nothing known, or cannot be read.
    """
    with boundary(ConfigError, f"cannot read {path}", OSError):
        if path.is_dir():
            raise ConfigError(f"{path} is a directory; name a script or a configuration")
        if path.stat().st_size > LARGEST:
            size = f"has more than {LARGEST // 10**6} MB"
            raise ConfigError(f"{path} {size}; name a script or a configuration")
        text = path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
    launches = read_text(text, path, variables)
    if not launches:
        raise ConfigError(
            f"{path} starts or configures nothing that is known. tunesmith migrate reads OpenRLHF, "
            "verl and TRL launch scripts, Python scripts of TRL, transformers and StateSet "
            "Agents, and YAML or JSON of verl, TRL, transformers, accelerate and DeepSpeed"
        )
    return launches


def read_text(text: str, path: Path, variables: Mapping[str, str]) -> list[ForeignLaunch]:
    """The launches in the text of a file.

    Raises:
        ConfigError: it is not valid, is nested too deeply, or only starts programs that do not
            train or sample.
    """
    try:
        launches = _read(text, path, variables)
    except RecursionError:
        deep = "has brackets or quotes that are nested too deeply"
        raise ConfigError(f"{path.name} {deep}") from None
    if launches and not any(launch.program.command for launch in launches):
        raise ConfigError(f"{path.name} starts {launches[0].name}: {launches[0].program.why}")
    return [_with_deepspeed(launch, path.parent) for launch in launches if launch.program.command]


def _with_deepspeed(launch: ForeignLaunch, folder: Path) -> ForeignLaunch:
    """The launch with the settings of DeepSpeed's file that it names; its own win."""
    settings = list[Given]()
    notes = list[str]()
    for given in launch.settings:
        if given.name not in _MARKS["names_deepspeed"] or given.unknown or not given.value:
            continue
        tree: Any = given.value
        if not isinstance(tree, Mapping):
            tree = read_tree_file(str(tree), folder)
        if tree is None:
            notes.append(f"line {given.line}: {given.text} was not found; migrate it as well")
        else:
            settings += tree_settings(tree, "deepspeed", given.line)
    return replace(launch, settings=(*settings, *launch.settings), notes=(*launch.notes, *notes))


def _read(text: str, path: Path, variables: Mapping[str, str]) -> list[ForeignLaunch]:
    suffix = path.suffix.lower()
    if suffix == ".ipynb":
        return read_python(_cells(text, path.name), path.name)
    if suffix == ".py":
        return _of_python(text, path, variables)
    if suffix in (".yaml", ".yml", ".json"):
        return _of_tree(read_tree_text(text, path.name), text, path, variables)
    return read_shell(text, variables, path.parent)


def _of_python(text: str, path: Path, variables: Mapping[str, str]) -> list[ForeignLaunch]:
    """The launches of a script; if it takes its settings from the command line, its docstring has
    the commands."""
    found = read_python(text, path.name)
    if any(launch.name.endswith(("Config", "Arguments")) for launch in found):
        return found
    commands: list[ForeignLaunch] = []
    for part, line in docstrings(text):
        commands += read_shell(part, variables, path.parent, line, (text, path.name))
    if not found and not commands and "zero_optimization" in text:
        tree = read_tree_text(text, f"{path.name}.json")  # DeepSpeed's, in a block of Python
        return _of_tree(tree, text, path, variables)
    return commands or found


def _of_tree(
    tree: object, text: str, path: Path, variables: Mapping[str, str]
) -> list[ForeignLaunch]:
    if not isinstance(tree, dict):
        return []
    names = set(map(str, cast("dict[Any, Any]", tree)))
    script = tree.get("run")
    if isinstance(script, str):  # a job that contains its script
        line = text[: max(text.find("\nrun:"), 0)].count("\n") + 3
        envs: Any = tree.get("envs")
        items = envs.items() if isinstance(envs, dict) else ()
        known = {str(k): str(v) for k, v in items if v is not None}
        return read_shell(script, known | dict(variables), path.parent, line)
    devices = None
    accelerate = {*_MARKS["accelerate"]}
    if any(isinstance(tree.get(name), dict) for name in names & {*_MARKS["verl"]}):
        rl = names & {"actor_rollout_ref", "algorithm"}
        kind = "verl.trainer.main_ppo" if rl else "fsdp_sft_trainer"
    elif names & accelerate - {"num_processes", "num_machines"} or names <= accelerate:
        kind = "accelerate"
        devices = tree.get("num_processes")
    elif names & {*_MARKS["deepspeed"]}:
        kind = "DeepSpeed"
    else:
        kinds: Mapping[str, str] = _MARKS["kinds"]
        kind = next((kind for name, kind in kinds.items() if name in names), "TrainingArguments")
    program = find_program(kind)
    assert program is not None
    leaves = tree_settings(tree, program.framework)
    if kind == "accelerate":
        leaves = accelerate_settings(tree)
    settings = _located(leaves, text)
    known = sum(bool(meanings_of(given.name)[1]) for given in settings)
    if program.framework in ("trl", "transformers") and known * 2 <= len(settings):
        return []
    count = devices if isinstance(devices, int) else None
    return [ForeignLaunch(kind, program, tuple(settings), count)]


def _located(settings: Iterable[Given], text: str) -> list[Given]:
    """Settings with the line of the text that holds the last part of their name, searched in
    order."""
    lines = text.splitlines()
    located = list[Given]()
    for given in settings:
        last = re.escape(given.name.rpartition(".")[2])
        key = re.compile(rf"""^\s*["']?{last}["']?\s*:""")
        numbers = [n for n, line in enumerate(lines, 1) if key.match(line)]
        before = located[-1].line if located else 0
        line = next((n for n in numbers if n > before), numbers[0] if numbers else 0)
        located.append(Given(given.name, given.value, line, given.framework, given.text))
    return located


def _cells(text: str, name: str) -> str:
    """The code of a notebook, without its shell lines and the cells that are not Python."""
    try:
        cells = parse_json(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{name} is not a notebook") from None
    return "\n".join(map(_python_of_cell, sources))


def _python_of_cell(source: str) -> str:
    """The cell with as many lines; blank if it is another language's, or cannot be parsed."""
    shell = re.compile(r"^(\s*)[%!].*(?:\\\n.*)*$", re.MULTILINE)
    code = shell.sub(lambda m: f"{m[1]}pass" + "\n" * m[0].count("\n"), source)
    try:
        compile(code, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        code = ""
    return code if code and not source.startswith("%%") else "\n" * source.count("\n")
