"""Splits of tasks that a package makes from seeds: what a task is determines its split, so that no
task is in two."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import count, islice

from tunesmith.errors import ConfigError, nearest
from tunesmith.learn.packages.adapter import Options

SHARES = {"train": range(6), "validation": range(6, 8), "test": range(8, 10)}
"""Which of ten equal shares of the tasks belong to each split."""
MOST = 2**20
"""The largest number of tasks."""


def check_split(what: str, split: str) -> None:
    """Raise ``ConfigError`` for a split that there is not."""
    if split not in SHARES:
        hint = nearest(split, SHARES)
        raise ConfigError(f"{what} has no split '{split}': {', '.join(SHARES)}.{hint}")


def check_options(what: str, options: Options, valid: Sequence[str]) -> None:
    """Raise ``ConfigError`` for an option that there is not."""
    for option in options:
        if option not in valid:
            raise ConfigError(f"{what} has no option '{option}'.{nearest(option, valid)}")


def is_of(split: str, task: str) -> bool:
    """Whether a task, as text, belongs to a split."""
    return hashlib.blake2b(task.encode(), digest_size=8).digest()[0] % 10 in SHARES[split]


def seeds_of(what: str, split: str, options: Options, size: int) -> Iterator[int]:
    """The seeds of a split from the option ``seed`` (0) on, as many as the option ``size`` says.

    Args:
        what: the package and its generator, for messages.
        size: how many without that option.

    Raises:
        ConfigError: there is no such split, or an option is no whole number.
    """
    check_split(what, split)
    size = number(what, options, "size", size, 1)
    seed = number(what, options, "seed", 0, 0)
    seeds = (each for each in range(seed, seed + 20 * size) if is_of(split, str(each)))
    return islice(seeds, size)


def alike(task: int) -> Iterator[int]:
    """A seed, and those after it of the same split."""
    (split,) = [name for name in SHARES if is_of(name, str(task))]
    return (each for each in count(task) if is_of(split, str(each)))


def number(what: str, options: Options, key: str, default: int, least: int) -> int:
    """A whole number among the options; a ConfigError for anything else."""
    value = options.get(key, default)
    if type(value) is not int or not least <= value <= MOST:
        raise ConfigError(f"{what}: the option '{key}' must be a number from {least} to {MOST}.")
    return value
