"""Damaged scripts of other frameworks: each is migrated with an account of every setting, or
refused in words."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from tests.support.migrated_sources import (
    ACCELERATED,
    ASYNC,
    GRPO,
    OLD_PPO,
    OPENRLHF,
    SFT_OPENRLHF,
    SFT_VERL,
    STATESET,
    VERL,
)
from tunesmith.errors import ConfigError
from tunesmith.guide.migrate.convert import convert
from tunesmith.guide.migrate.read import read_text
from tunesmith.guide.migrate.settle import settle
from tunesmith.guide.migrate.write import account, run_file

SEED = int(os.environ.get("TRIES_SEED", "0"))
COUNT = int(os.environ.get("TRIES_COUNT", "2000"))
SLOW = 30.0
"""Seconds that no answer may take."""
SOURCES = {
    **dict.fromkeys((ACCELERATED, ASYNC, OPENRLHF, SFT_OPENRLHF, SFT_VERL, VERL), "run.sh"),
    **dict.fromkeys((GRPO, OLD_PPO, STATESET), "run.py"),
}
PIECES = [
    '"',
    "'",
    "$(",
    "${",
    "`",
    "\\",
    "\n",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "=",
    "--",
    "#",
    "<<EOF\n",
    "\0",
    "é",
    "1e999",
]
VALUES = [
    "-1",
    '"',
    "null",
    "[]",
    "{a: 1}",
    "nan",
    "inf",
    "1e400",
    "'x y'",
    "9" * 24,
    "${x:-${y:-",
    "True",
    "none",
]


def damaged(text: str, chance: random.Random) -> str:
    for _ in range(chance.randint(1, 6)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.randrange(200))
        match chance.randrange(4):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:start] + chance.choice(PIECES) + text[start:]
            case 2:
                text = text[:start] + text[start:end] * chance.randint(2, 5) + text[end:]
            case _:
                text = text.replace(
                    chance.choice(["1", "True", "8", "grpo", "0.2", "=", "org/base"]),
                    chance.choice(VALUES),
                    3,
                )
    return text


def test_damaged_sources_are_migrated_or_refused_in_words() -> None:
    chance = random.Random(SEED)
    for _ in range(COUNT):
        source, name = chance.choice(list(SOURCES.items()))
        text = damaged(source, chance)
        begun = time.monotonic()
        try:
            launches = read_text(text, Path(name), {})
        except ConfigError as error:
            assert str(error)
            continue
        for launch in launches:
            migration = convert(launch)
            settle(migration)
            run_file(migration, name)
            assert len(list(account(migration))) >= len(migration.rows) == len(launch.settings)
        assert time.monotonic() - begun < SLOW, text
