"""The launches in a shell script: OpenRLHF's and TRL's options, verl's Hydra overrides, and
launchers' options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.guide.migrate.given import ForeignLaunch, Given
from tunesmith.guide.migrate.programs import find_program
from tunesmith.guide.migrate.python import read_python
from tunesmith.guide.migrate.shell import Word, read_script
from tunesmith.guide.migrate.trees import (
    accelerate_settings,
    read_named,
    read_tree_file,
    tree_settings,
)
from tunesmith.guide.names.foreign import spelled

_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "ray")
_DEVICES = ("num_processes", "nproc_per_node", "num_gpus")
_NODES = ("nnodes", "num_nodes")
_MENTIONS = re.compile(
    r"openrlhf\.cli\.|verl\.trainer|\btrl (sft|dpo|grpo|kto|reward|rloo)\b|trl/scripts/"
)


def read_shell(
    text: str,
    variables: Mapping[str, str],
    folder: Path,
    line: int = 1,
    script: tuple[str, str] = ("", ""),
) -> list[ForeignLaunch]:
    """Every known program that a script starts, including in files that it sources.

    Args:
        variables: values for variables that the script does not set.
        folder: searched for files that the script names, after the working directory.
        script: the text and name of the Python script whose docstring this is.
    """
    shell = read_script(text, variables, line)
    launches: list[ForeignLaunch] = []
    for words in shell.commands:
        inner = [w for w in words if re.search(r"\s", w.text) and _MENTIONS.search(w.text)]
        if inner and not _program(words):
            known = {k: v for k, v in shell.variables.items() if isinstance(v, str)}
            for word in inner:
                command = word.text.replace("\\'", "'").replace('\\"', '"')
                launches += read_shell(command, known | dict(variables), folder, word.line)
        elif program := _program(words):
            launches += _launch(*program, words, folder, script)
        elif len(words) > 1 and words[0].text in ("source", "."):
            file = folder / words[1].text
            other = file.read_text("utf-8", errors="replace") if file.is_file() else text
            launches += read_shell(other, variables, folder) if other != text else []
    return launches


def _program(words: Sequence[Word]) -> tuple[int, str] | None:
    """The index of a program's first option, and the program's name."""
    for at, word in enumerate(words):
        text = word.text
        following = words[at + 1].text if at + 1 < len(words) else ""
        if text.rpartition("/")[2] == "trl" and find_program(f"trl:{following}"):
            return at + 2, f"trl:{following}"
        if "=" in text or text.startswith("-"):
            continue
        if text.endswith(".py") and (find_program(text) or at):
            return at + 1, text
        dotted = re.fullmatch(r"(\w+\.)+\w+", text) and not text.endswith((".json", ".txt"))
        if dotted and find_program(text):
            return at + 1, text
    return None


def _launch(
    start: int, name: str, words: Sequence[Word], folder: Path, script: tuple[str, str]
) -> Iterator[ForeignLaunch]:
    """A launch, also of a program that does not train or sample."""
    program = find_program(name)
    if program and not program.command:
        yield ForeignLaunch(name, program)
        return
    before = words[: start - 1]
    framework = program.framework if program else "trl"
    read = _hydra if framework == "verl" else _options_with_config
    settings, notes = read(words[start:], framework, folder)
    text = ""
    file = ""
    if name.endswith(".py"):
        here = read_named(name, folder)
        text, file = script if here is None else (here, Path(name).name)
    if program is None:
        said = {spelled(given.name): given.value for given in settings}
        for launch in read_python(text, file, said):
            launcher = list(_launcher(before, folder, launch.program.framework))
            yield replace(
                launch,
                settings=(*launch.settings, *launcher, *settings),
                devices=_devices(before, launcher),
                notes=(*launch.notes, *notes),
            )
        return
    launcher = list(_launcher(before, folder, framework))
    settings = [*launcher, *settings]
    said = {spelled(given.name): given.value for given in settings}
    own = read_python(text, file, said) if text else []  # what the script itself says then
    of_script = [given for launch in own for given in launch.settings]
    known = [g for g in of_script if not g.unknown or g.name.endswith("_dataset")]
    notes += [note for launch in own for note in launch.notes]
    devices = _devices(before, launcher)
    yield ForeignLaunch(name, program, (*known, *settings), devices, tuple(notes))


def options(words: Sequence[Word], framework: str) -> Iterator[Given]:
    """``--name value``, ``--name=value``, ``--flag`` and ``--name a b``; ``--no_name`` turns a flag
    off."""
    groups: list[list[Word]] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word.text):
            groups.append([word])
        elif groups and "=" not in groups[-1][0].text:
            groups[-1].append(word)
    for option, *rest in groups:
        name, equals, value = option.text.lstrip("-").partition("=")
        values = [parsed(value)] if equals else [parsed(word.text) for word in rest]
        text = " ".join(word.text for word in (option, *rest))
        is_off = name.startswith("no_") and framework in ("trl", "transformers") and not values
        name = name.removeprefix("no_") if is_off else name
        result: Any = values or not is_off
        yield Given(name, values[0] if len(values) == 1 else result, option.line, framework, text)


def _options_with_config(
    words: Sequence[Word], framework: str, folder: Path
) -> tuple[list[Given], list[str]]:
    """Options, which override those in the file of TRL's ``--config FILE``; and what was not
    found."""
    settings = list(options(words, framework))
    named = next((g for g in settings if g.name == "config"), None)
    if named is None or framework != "trl":
        return settings, []
    settings.remove(named)
    tree = read_tree_file(str(named.value), folder)
    if tree is None:
        return settings, [f"line {named.line}: {named.text} was not found; migrate it as well"]
    return [*tree_settings(tree, framework), *settings], []


def _hydra(words: Sequence[Word], framework: str, folder: Path) -> tuple[list[Given], list[str]]:
    """``key=value``, ``+key=value``, ``++key=value``, after the file of ``--config-path`` and
    ``--config-name``."""
    flags = options([w for w in words if w.text.startswith("--")], framework)
    hydra = {given.name.replace("_", "-"): given for given in flags}
    settings = list[Given]()
    notes = list[str]()
    named = hydra.get("config-name")
    if named:
        path = f"{named.value}.yaml"
        if "config-path" in hydra:
            path = f"{hydra['config-path'].value}/{str(named.value).removesuffix('.yaml')}.yaml"
        tree = read_tree_file(path, folder)
        settings += tree_settings(tree or {}, framework)
        if tree is None:
            missing = f"the configuration {named.value} was not found; migrate it as well"
            notes.append(f"line {named.line}: {missing}")
    for word in words:
        override = re.match(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", word.text, re.DOTALL)
        if override:
            name, value = override.groups()
            settings.append(Given(name, parsed(value), word.line, framework, word.text))
    return settings, notes


def _launcher(words: Sequence[Word], folder: Path, framework: str) -> Iterator[Given]:
    """The launcher's own options, including those of accelerate's configuration file."""
    commands = (word.text.rpartition("/")[2] for word in words)
    which = next((command for command in commands if command in _LAUNCHERS), "")
    if not which:
        return
    for job in [word for word in words if which == "ray" and word.text == "submit"][:1]:
        yield Given("ray_job_submit", True, job.line, "openrlhf", "ray job submit")
    own = framework if which == "ray" else "accelerate"
    words = [w for w in words if w.text not in ("-m", "--module", "--", "-i", "-u")]
    for given in options(words, own):
        if given.name == "config_file" and (tree := read_tree_file(str(given.value), folder)):
            yield from accelerate_settings(tree, given.line)
        else:
            yield given


def _devices(words: Sequence[Word], launcher: Sequence[Given] = ()) -> int | None:
    """The total number of processes that a launcher starts on all machines."""
    said = {g.name.replace("-", "_"): g.value for g in (*options(words, "accelerate"), *launcher)}
    count = next((said[name] for name in _DEVICES if isinstance(said.get(name), int)), None)
    nodes = next((said[name] for name in _NODES if isinstance(said.get(name), int)), 1)
    return None if count is None else count * (1 if "num_processes" in said else nodes)


def parsed(text: str) -> Any:
    """The value that a command line or a YAML scalar means: ``1e-6``, ``True``, ``null``,
    ``[a,b]``, ``{"a": 1}``."""
    text = text.strip()
    if re.fullmatch(r"[-+]?\d+", text) and len(text) < 20:
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return float(text)
    word = text.lower()
    if word in ("true", "false"):
        return word == "true"
    if word in ("null", "none", "~", ""):
        return None
    if text[0] in "[{(" and not re.search(r"\$[{(]", text):
        return _listed(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _listed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text[0] in "[(" and text[-1] in "])":
        items = re.findall(r"'[^']*'|\"[^\"]*\"|[^,\s][^,]*", text[1:-1])
        return [parsed(item) for item in items]
    return text
