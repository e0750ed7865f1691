"""YAML and JSON configurations: verl's, TRL's, transformers', DeepSpeed's, accelerate's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tunesmith.errors import ConfigError, shortened
from tunesmith.guide.migrate.given import Given

LARGEST = 5_000_000
"""Maximum size of a file in bytes."""
Tree = Mapping[str, Any]
_MOST = 200_000
"""Maximum number of values in a file; YAML's aliases can make it endless."""


_OF_ANOTHER = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,[^{}]*)?\}")
"""OmegaConf's reference to another setting."""
_STEPS = 5
"""Maximum length of a chain of references."""


class _Loader(yaml.SafeLoader):
    """YAML with ``1e-6`` as a number and dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_tree_text(text: str, name: str) -> Any:
    """The tree of a YAML or JSON text.

    Raises:
        ConfigError: the text is neither.
    """
    try:
        return _read_json(text) if name.endswith(".json") else _bounded(yaml.load(text, _Loader))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        why = shortened(" ".join(str(error).split()), 200)
        raise ConfigError(f"{name} is not valid: {why}") from None


def _read_json(text: str) -> Any:
    """JSON, which may have comments, as DeepSpeed's documentation writes it: then it is read as
    YAML."""
    try:
        return json.loads(text)
    except ValueError as error:
        without = re.sub(r"^\s*(//|#).*$", "", text, flags=re.MULTILINE)
        if without == text:
            raise error
        return _bounded(yaml.load(without, _Loader))


def _bounded(tree: object) -> Any:
    """A tree as it is, if it has no more values than any run file needs.

    Raises:
        ValueError: it has too many values.
    """
    nodes = [tree]
    for node in nodes:  # which grow meanwhile
        if len(nodes) > _MOST:
            raise ValueError(f"it has more than {_MOST} values, as its aliases are written out")
        if isinstance(node, Mapping):
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return tree


def read_named(name: str, folder: Path) -> str | None:
    """The text of a file that a script names, in the working directory or beside the script; None
    if there is none."""
    for path in (Path(name), folder / name, folder / Path(name).name):
        if path.is_file() and path.stat().st_size < LARGEST:
            return path.read_text(encoding="utf-8", errors="replace")
    return None


def read_tree_file(name: str, folder: Path) -> Tree | None:
    """The mapping in a file that a script names; None if there is no such file here."""
    text = read_named(name, folder)
    tree: Any = None
    if text is not None:
        with suppress(ConfigError):
            tree = read_tree_text(text, Path(name).name)
    return tree if isinstance(tree, Mapping) else None


def tree_settings(tree: Tree, framework: str, line: int = 0) -> Iterator[Given]:
    """A setting for each leaf, by its dotted path; Hydra's own settings are left out."""
    leaves = dict(_leaves(tree, ""))
    for name, value in leaves.items():
        for _ in range(_STEPS):
            other = _OF_ANOTHER.fullmatch(value) if isinstance(value, str) else None
            value = leaves.get(other[1], value) if other else value
        text = shortened(json.dumps(value, default=str, ensure_ascii=False), 60)
        yield Given(name, value, line, framework, f"{name}: {text}")


def accelerate_settings(tree: Tree, line: int = 0) -> Iterator[Given]:
    """The settings of accelerate's file; its DeepSpeed and FSDP settings are tables, whose keys
    need no prefix."""
    for name, value in tree.items():
        table = value if isinstance(value, Mapping) else {name: value}
        yield from tree_settings(table, "accelerate", line)


def _leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if str(key).startswith("_") or (not prefix and key in ("defaults", "hydra")):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, str | int | float):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", json.loads(json.dumps(value, default=str, skipkeys=True))
