"""Loading a checked configuration from a run file and overrides.

All problems of a file are reported at once, each with its line or override.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tunesmith.config.commands import KINDS, DistillConfig, all_keys, distill_kind
from tunesmith.config.reading.answers import answers
from tunesmith.config.reading.describe import choices_at, describe_at, meant_at, show
from tunesmith.config.reading.files import locate_files
from tunesmith.config.reading.overriding import Override, apply_overrides
from tunesmith.config.reading.problems import (
    DEEPEST,
    FileProblem,
    KeyPath,
    Origins,
    Tree,
    dotted,
    key_lines,
    raise_problems,
)
from tunesmith.config.reading.shape import shape_problems
from tunesmith.config.schema import RunConfig, SFTConfig
from tunesmith.config.section import Section
from tunesmith.errors import ConfigError, ProblemKind, boundary, closest, nearest, shortened
from tunesmith.records.toml import toml_value

C = TypeVar("C", bound=RunConfig)


def load_config(
    kind: type[C], path: Path | None, overrides: Sequence[Override] = (), *, files: bool = True
) -> C:
    """Read, override and check a run file; refuse it with every problem listed.

    Relative paths of existing files (model, data, rewards, chat template, checkpoint) are looked up
    first in the run file's directory, then in the working directory; for paths in overrides the
    order is reversed. A relative ``run_dir`` is below the working directory. Paths become absolute.
    A model or data set that is not a local path is kept as a hub name.

    Args:
        kind: the command's configuration class, such as ``RLConfig``.
        path: the TOML file; None for a configuration of overrides only.
        overrides: see ``apply_overrides``.
        files: whether to locate the files that it names; if False, their paths are kept as they
            are.

    Raises:
        ConfigError: names the file, line, key and valid values for each problem.
    """
    data, origins = read_tree(path, overrides)
    problems = [*origins.problems, *_unset_problems(kind, origins), *shape_problems(kind, data)]
    if any(len(problem.path) >= DEEPEST for problem in problems):
        raise_problems(problems, origins)
    if files:
        problems += locate_files(data, path.parent if path else None, origins.is_override)
    config: C | None = None
    try:
        # JSON mode, because it is strict about types and still takes lists for tuples and text for
        # paths.
        config = kind.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        problems += _problems_of(kind, data, error.errors(include_url=False))
    if problems or config is None:
        raise_problems(_deepest(problems), origins)
    return config


def find_kind(path: Path | None, overrides: Sequence[Override] = ()) -> type[RunConfig]:
    """The configuration class with most of the file's sections; among equals, the one with most
    sections that no other command has, and ``SFTConfig`` before all others."""
    data, _ = read_tree(path, overrides)
    having = Counter(section for kind in KINDS.values() for section in kind.model_fields)
    meant = {closest(name, having, 0.85) for name in data}  # also where one is misspelt

    def fit(kind: type[RunConfig]) -> tuple[int, int]:
        sections = kind.model_fields.keys() & meant
        return len(sections), sum(having[section] == 1 for section in sections)

    kind = max((SFTConfig, *KINDS.values()), key=fit)
    return distill_kind(data) if kind is DistillConfig else kind


def load_run(path: Path, overrides: Sequence[Override]) -> RunConfig:
    """``load_config`` with the configuration of ``find_kind``."""
    return load_config(find_kind(path, overrides), path, overrides)


def read_tree(path: Path | None, overrides: Sequence[Override]) -> tuple[Tree, Origins]:
    """The merged tree, and the origin of each key."""
    text = _read_text(path) if path else ""
    try:
        data = tomllib.loads(text)
    except ValueError as error:  # a TOMLDecodeError, or a number of thousands of digits
        raise _syntax_error(path, error) from None
    except RecursionError:
        raise ConfigError(f"{path} has lists and tables that are nested too deeply") from None
    origins = Origins(path, key_lines(text), {})
    apply_overrides(data, overrides, origins)
    return data, origins


def _read_text(path: Path) -> str:
    with boundary(ConfigError, f"cannot read {shortened(str(path), 400)}", (OSError, ValueError)):
        if path.is_dir():
            raise ConfigError(f"{path} is a directory; name a TOML run file")
        if not path.exists() and "=" in str(path):
            raise ConfigError(
                f"'{path}' is where the run file belongs: RUN.toml comes first, then '{path}'"
            )
        if not path.exists():
            siblings = [str(p) for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
            raise ConfigError(
                f"run file {path} does not exist.{nearest(str(path), siblings) if siblings else ''}"
            )
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin it with a mark


def _syntax_error(path: Path | None, error: ValueError) -> ConfigError:
    message = str(error)
    spot = re.search(r" \(at (.*)\)$", message)
    reason = message[: spot.start()] if spot else message
    where = re.sub(r"(line \d+), (column \d+)", r"\1, \2", spot[1]) if spot else "somewhere"
    hint = ""
    if reason.startswith("Invalid value"):
        hint = '. Text needs quotes: name = "value"'
    elif reason.startswith(("Invalid hex value", "Unescaped")):
        hint = ". A text with backslashes has single quotes: path = 'C:\\models\\mine'"
    return ConfigError(f"{path}, {where}: not valid TOML: {reason}{hint}")


def _unset_problems(kind: type[RunConfig], origins: Origins) -> Iterator[FileProblem]:
    """Problems for keys that an override unsets and the command does not have."""
    for path in origins.unset:
        name = dotted(path)
        if name not in kind.model_fields and name not in all_keys(kind, tables=True):
            yield from answers().unknown_key(kind, path, None)


def _problems_of(
    kind: type[RunConfig], data: Tree, errors: Sequence[ErrorDetails]
) -> list[FileProblem]:
    problems: list[FileProblem] = []
    for error in errors:
        path, value = _located(data, error["loc"])
        context = error.get("ctx", {})
        last = ("", *error["loc"])[-1]
        problem_kind: ProblemKind = "unknown" if error["type"] == "choice_key" else "invalid"
        match error["type"]:
            case "extra_forbidden":
                problems += answers().unknown_key(kind, path, value)
                continue
            case "missing" if isinstance(last, str):
                path = (*path, last)
                text = f"{dotted(path)} is missing: {describe_at(kind, path)}"
            case "value_error":
                text = f"{dotted(path)}: {context.get('error', error['msg'])}"
            case "choice_key":
                text = answers().unknown_in_table(kind, path)
                if not text:
                    end = "" if error["msg"].endswith("?") else "."
                    text = f"{dotted(path)}: {error['msg']}{end}"
            case "choice_field" if context["missing"]:
                # what a choice's key may be depends on the type
                valid = describe_at(context["kind"], (last,))
                text = f"{dotted((*path, last))} is missing: {valid}"
            case "choice_field":
                text = _wrong_value(context["kind"], path, value, path[-1:])
            case _:
                text = _wrong_value(kind, path, value)
        problems.append(FileProblem(path, text, problem_kind))
    return problems


def _wrong_value(kind: type[Section], path: KeyPath, value: object, inner: KeyPath = ()) -> str:
    """Args: inner: the path within ``kind``, if ``kind`` is only part of the configuration."""
    meant = meant_at(path, value)
    if meant:
        return f"{dotted(path)} is {show(value)}, and it is a table of settings: write {meant}."
    hint = ""
    inner = inner or path
    if isinstance(value, dict) and "type" in value:
        value = value["type"]
    why = answers().why_refused(dotted(path), value)
    ours = answers().our_value(dotted(path), value)
    if ours:
        hint = f" Write {toml_value(ours)}."
    elif isinstance(value, str) and (choices := choices_at(kind, inner)):
        close = closest(value, choices, 0.6)
        hint = f" Did you mean '{close}'?" if close else ""
    elif isinstance(value, str) and _unquoted(value):
        hint = f" Write {_unquoted(value)} without quotes."
    elif value in ("", [], {}):
        hint = f" To leave it out, write {dotted(path)}=none on the command line."
    hint += f" {why[0].upper()}{why[1:]}." if why else ""
    return f"{dotted(path)} is {show(value)}; it must be {describe_at(kind, inner)}.{hint}"


def _unquoted(text: str) -> str:
    """The boolean or the number in a text, as TOML has it; empty for any other text."""
    if not re.fullmatch(r"true|false|[-+]?[\d.]+([eE][-+]?\d+)?", text):
        return ""
    with suppress(ValueError):
        tomllib.loads(f"value = {text}")
        return text
    with suppress(ValueError):  # TOML has digits on both sides of the point
        return f"{float(text):g}"
    return ""


def _located(data: Tree, location: tuple[int | str, ...]) -> tuple[KeyPath, Any]:
    """pydantic's location without the names of union branches, and the value there."""
    node: Any = data
    path: list[int | str] = []
    for part in location:
        try:
            node = node[part]
        except (LookupError, TypeError):  # the name of a branch
            continue
        path.append(part)
    return tuple(path), node


def _deepest(problems: Sequence[FileProblem]) -> list[FileProblem]:
    """One problem per path; for a union, that of the branch that got furthest."""
    paths = {p.path for p in problems}
    inner = {path[:n] for path in paths for n in range(len(path))}
    return list({p.path: p for p in reversed(problems) if p.path not in inner}.values())
