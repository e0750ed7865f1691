"""Locating the files that a configuration names, before anything is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tunesmith.config.judges import POLICY, names_text_file
from tunesmith.config.reading.packages import PACKAGES, near_package, package_name
from tunesmith.config.reading.problems import FileProblem, KeyPath, Tree, dotted, leaves
from tunesmith.config.reading.user_functions import check_defined
from tunesmith.errors import ConfigError, closest, shortened
from tunesmith.records.run_dir import newest_checkpoint
from tunesmith.records.standing import STATE_FILE

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
GGUF = ".gguf"

LEFT_OUT = "give a value, or leave it out (on the command line: {}=none)"

Find = Callable[[str, list[Path]], str]
"""Searches several directories for the file that a run file's text names, and returns its path or
name."""


def locate_files(
    data: Tree, run_directory: Path | None, is_override: Callable[[KeyPath], bool]
) -> list[FileProblem]:
    """Make the paths in ``data`` absolute, in place; return a problem for each missing or
    unsuitable file.

    Args:
        run_directory: the directory of the run file.
        is_override: whether a key comes from the command line; if so, the working directory is
            searched first.
    """
    problems: list[FileProblem] = []
    here = [Path.cwd()] if run_directory is None else [run_directory.absolute(), Path.cwd()]
    for holder, path, text in list(leaves(data)):
        keys = ["[]" if isinstance(part, int) else part for part in path]
        named = [*keys[:-1], "{}"] if isinstance(path[-1], str) else keys
        find = _FILES.get(".".join(keys)) or _FILES.get(".".join(named))
        if not isinstance(text, str) or find is None:
            continue
        bases = list(dict.fromkeys(reversed(here) if is_override(path) else here))
        try:
            if not text:
                raise ConfigError(f"it is empty; {LEFT_OUT.format(dotted(path))}")
            holder[path[-1]] = find(text, bases)
        except ConfigError as problem:
            problems.append(FileProblem(path, f"{dotted(path)}: {problem}"))
        # too long a name, not allowed, no such user, NUL
        except (OSError, RuntimeError, ValueError) as error:
            why = f"{dotted(path)} cannot be read as a path: {shortened(str(error))}"
            problems.append(FileProblem(path, why))
    return problems


def _search(text: str, bases: list[Path]) -> Path | None:
    return next((p for base in bases if (p := base / Path(text).expanduser()).exists()), None)


def _missing(text: str, bases: list[Path], hub: str = "") -> ConfigError:
    """Args: hub: an example of a hub name, shown where the text may have been meant as one."""
    folders = list(dict.fromkeys(str((base / Path(text).expanduser()).parent) for base in bases))
    siblings = {
        p.name for folder in folders if Path(folder).is_dir() for p in Path(folder).iterdir()
    }
    close = closest(Path(text).name, siblings, 0.6)
    hint = f" Did you mean '{close}'?" if close else near_package(text)
    unowned = hub and "/" not in text
    other = f", and on the hub names have an owner, such as {hub}" if unowned else ""
    return ConfigError(f"{text} does not exist (looked in {' and '.join(folders)}){other}.{hint}")


def _existing(text: str, bases: list[Path]) -> str:
    path = _search(text, bases)
    if path is None:
        raise _missing(text, bases)
    return str(path)


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file, llama.cpp's, and not a model's directory."""
    return str(path).lower().endswith(GGUF) and not Path(path).expanduser().is_dir()


def find_model(text: str, bases: list[Path], *, with_adapter: bool = False) -> str:
    """A directory, a GGUF file, or the name of a model on the hub.

    Args:
        with_adapter: whether ``lora.path`` can name an adapter on it.
    """
    directory = _search(text, bases)
    if directory is None and is_gguf(text):
        raise _missing(text, bases)
    if directory is None:
        return _hub_name(text, bases, "models", "Qwen/Qwen3-0.6B")
    if is_gguf(directory):
        return str(directory)
    if not directory.is_dir():
        raise ConfigError(f"{text} is a file; name the model's directory, or a GGUF file")
    if not (directory / "config.json").exists():
        directory = _newest_model(directory) or directory
    if (directory / "config.json").is_file():
        return str(directory)
    if (directory / ADAPTER_CONFIG).is_file():
        two = "Name its base here and the adapter as lora.path, or merge the two"
        raise ConfigError(
            f"{directory} holds a LoRA adapter and no whole model. "
            f"{two if with_adapter else 'Merge it with its base'}: tunesmith merge {text} OUT_DIR"
        )
    files = sorted(directory.glob(f"*{GGUF}"))
    if len(files) == 1:
        return str(files[0])
    several = f"; name one of its files: {', '.join(file.name for file in files)}" if files else ""
    raise ConfigError(f"{directory} holds no model: there is no config.json in it{several}")


def _newest_model(directory: Path) -> Path | None:
    """The newest model in a run directory or a checkpoint; None if the directory is neither."""
    checkpoint = directory if (directory / STATE_FILE).is_file() else None
    newest = newest_checkpoint(directory) or checkpoint
    return newest and newest / "model"


def adapter_directory(directory: Path) -> Path:
    """The directory of the adapter in ``directory``: itself, a run's newest, or the only one that
    has its own folder.

    Raises:
        ConfigError: there is none, there are several, or its weights are pickled.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name a LoRA adapter's, or a run's")
    if not (directory / ADAPTER_CONFIG).is_file():
        directory = _newest_model(directory) or directory
    if not (directory / ADAPTER_CONFIG).is_file():
        inside = sorted(found.parent for found in directory.glob(f"*/{ADAPTER_CONFIG}"))
        if len(inside) != 1:
            names = ", ".join(path.name for path in inside)
            several = f"; name one of those in it: {names}" if inside else ""
            raise ConfigError(
                f"{directory} holds no LoRA adapter: there is no {ADAPTER_CONFIG} in it{several}"
            )
        directory = inside[0]
    if not (directory / WEIGHTS).is_file():
        raise ConfigError(
            f"{directory} holds no {WEIGHTS}; pickled weights can run code when loaded. Save the "
            "adapter with peft's save_pretrained, or convert adapter_model.bin: "
            'safetensors.torch.save_file(torch.load("adapter_model.bin", weights_only=True), '
            f'"{WEIGHTS}")'
        )
    return directory


def _checkpoint(text: str, bases: list[Path]) -> str:
    if text == "auto":
        return text
    path = _existing(text, bases)
    if not (Path(path) / "state.json").is_file():
        raise ConfigError(f"{path} is no complete checkpoint: it has no state.json")
    return path


def _data(text: str, bases: list[Path]) -> str:
    """A file, a directory, or the name of a data set on the hub or of a package."""
    path = _search(text, bases)
    if path is None and package_name(text):
        return _of_package(text, bases)
    file, bracket, part = text.removesuffix("]").partition("[")
    if path is None and bracket and file and _search(file, bases):
        split = part if part[:1].isalpha() else f"train[{part}]"
        raise ConfigError(f'write a part as {{ path = "{file}", split = "{split}" }}')
    if path is None:
        return _hub_name(text, bases, "datasets", "openai/gsm8k")
    if path.is_file() and path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty")
    return str(path)


def _of_package(text: str, bases: list[Path]) -> str:
    """A package's name; one that is a directory, with its place."""
    named = package_name(text)
    if named is None or not PACKAGES[named.package].names_directories:
        return text
    return text.replace(named.name, _existing(named.name, bases), 1)


def _hub_name(
    text: str, bases: list[Path], kind: Literal["models", "datasets"], example: str
) -> str:
    if not is_hub_name(text, kind):
        raise _missing(text, bases, example)
    return text


def same_path(value: object) -> Any:
    """A setting's value for comparisons: resolves links and ``..`` in existing paths (also in
    ``file.py:name``)."""
    if isinstance(value, list):
        return [same_path(item) for item in value]
    if not isinstance(value, str) or "/" not in value or "\0" in value:
        return value
    path, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    there = len(path) < 4096 and os.path.lexists(path)
    return f"{os.path.realpath(path)}{colon}{name}" if there else value


def is_hub_name(text: str, kind: Literal["models", "datasets"]) -> bool:
    """Whether a text can be a name on the Hugging Face hub: ``owner/name``, or a known bare name.

    Bare names are from the hub's early years. A mistyped directory looks like one, so only GPT-2
    and names in the hub's cache count.
    """
    is_file = text.lower().endswith(DATA_SUFFIXES)
    if is_file or not _HUB_NAME.fullmatch(text) or ".." in text or "--" in text:
        return False
    if "/" in text or (kind == "models" and text in _BARE_MODELS):
        return True
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = (
        os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    )
    return (Path(cache).expanduser() / f"{kind}--{text}").is_dir()


_HUB_NAME = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
_BARE_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")


def _reference(what: str) -> Find:
    """A ``Find`` for a function or class in the user's code; names of the package are returned
    unchanged."""

    def find(text: str, bases: list[Path]) -> str:
        if ":" in text:
            return _code(text, bases)
        if text.endswith(".py"):
            raise ConfigError(
                f"{text} names no {what}; write {text}:{'name' if what == 'function' else 'Name'}"
            )
        return text

    return find


def _preset(text: str, bases: list[Path]) -> str:
    return _existing(text, bases) if text.endswith(".toml") else _reference("preset")(text, bases)


def _code(text: str, bases: list[Path]) -> str:
    """``file.py:name`` in the user's code; ``package.module:name`` is returned unchanged."""
    file, _, name = text.rpartition(":")
    if not file:
        raise ConfigError(f"{text} names nothing in a file; write file.py:name")
    if package_name(text):
        return _of_package(text, bases)
    if not file.endswith(".py") and "/" not in file:
        return text
    path = _search(file, bases)
    if not path or not path.is_file():
        raise _missing(file, bases)
    check_defined(path, name)
    return f"{path}:{name}"


def _text_or_file(text: str, bases: list[Path]) -> str:
    return _existing(text, bases) if names_text_file(text) else text


_FILES: dict[str, Find] = {
    "run_dir": lambda text, _: str(Path(text).expanduser().absolute()),
    "model.path": partial(find_model, with_adapter=True),
    "model.chat_template": lambda text, bases: text if text == "hermes" else _existing(text, bases),
    "critic.path": find_model,
    "teacher.path": lambda text, bases: text if text == POLICY else find_model(text, bases),
    "lora.path": lambda text, bases: str(adapter_directory(Path(_existing(text, bases)))),
    "system.draft_model": find_model,
    "system.engine_python": _existing,
    "system.engine_directory": lambda text, bases: str(
        _search(text, bases) or Path(text).expanduser().absolute()
    ),
    "rft.few_shot": _existing,
    "rft.answers": _existing,
    "rft.sampler": find_model,
    "checkpoint.resume": _checkpoint,
    **{
        f"data.{name}{inner}": _data
        for name in ("train", "eval")
        for inner in ("", ".path", ".[]", ".[].path")
    },
    "data.map": _code,
    "algorithm.name": _preset,
    **{
        f"algorithm.{key}{inner}": _reference("class")
        for key in ("advantage", "loss", "correction")
        for inner in ("", ".type")
    },
    "reward.functions.[]": _reference("function"),
    "monitor.sinks.[]": _reference("class"),
    "reward.models.[].path": find_model,
    "reward.judge.[].path": find_model,
    "reward.judge.[].rubric": _text_or_file,
    "reward.judge.[].template": _text_or_file,
    "environment.path": _code,
    "environment.path.{}": _code,
    "environment.tools.[]": _code,
    "environment.folder": _existing,
}
"""Every key that may be a path, and the function that locates it; ``[]`` is any item of a list,
``{}`` any key."""
