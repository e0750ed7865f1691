"""Games of ``textarena``: for one player in a worker process, for several against the policy.

A game draws from Python's global generator. Each episode has a state of it of its own, so that it
is the same whatever plays beside it.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import islice

from tunesmith.errors import ConfigError, nearest
from tunesmith.learn.endpoint.client import PolicyClient
from tunesmith.learn.environments.conversation import OutOfRoom
from tunesmith.learn.environments.steps import StepResult
from tunesmith.learn.packages.adapter import Foreign, Options, TaskRow
from tunesmith.learn.packages.splits import alike, number, seeds_of
from tunesmith.types import Message

SIZE = 200
OWN_OPTIONS = ("size", "seed", "players", "seat")
MOST_PLAYERS = 6
BEGINNINGS = 8
"""How many games are begun, at most, until the policy's seat has a turn."""
NOT_ALONE = ("QuantumTicTacToe", "MarketEntryGame", "PublicGoodsGame", "SpiteAndMalice")
"""Games for several players that let one begin."""
CONTINUE = "It is your turn."
"""What a player gets to read if the game says nothing."""

_RANDOM = threading.Lock()


def rows(name: str, split: str, options: Options) -> Iterator[TaskRow]:
    """``size`` beginnings of a game (200) from ``seed`` (0) on.

    Among several ``players`` the policy is trained in one ``seat`` (0, who begins). The other
    options are the game's.
    """
    what = f"textarena:{name}"
    seeds = seeds_of(what, split, options, SIZE)
    players = number(what, options, "players", players_of(name), 1)
    seat = number(what, options, "seat", 0, 0)
    if seat >= players:
        raise ConfigError(f"{what}: the option 'seat' must be below {players}, its 'players'.")
    own = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    for each in seeds:
        task = {"game": name, "seed": each, "players": players, "seat": seat}
        task["options"] = json.dumps(own, sort_keys=True)
        yield {"prompt": GameTable(task).read(seat), "textarena": task}


def environment(name: str) -> object:
    """A class for one player, an agent that plays all seats for several."""
    return TextArenaGame if players_of(name) == 1 else self_play


def players_of(name: str) -> int:
    """The smallest number of players that a game takes."""
    first: Exception | None = None
    begin = 2 if name.partition("-")[0] in NOT_ALONE else 1
    for players in range(begin, MOST_PLAYERS + 1):
        try:
            GameTable({"game": name, "seed": 0, "players": players, "options": "{}"})
            return players
        except ConfigError:
            raise
        except Exception as error:  # what a game raises for a wrong number differs
            first = first or error
    raise ConfigError(f"textarena:{name} does not start: {type(first).__name__}: {first}")


class GameTable:
    """A game in progress."""

    def __init__(self, task: Options) -> None:
        package = import_module("textarena")
        known = import_module("textarena.envs.registration").ENV_REGISTRY
        name = str(task["game"])
        if name not in known:
            plain = [each for each in known if each.endswith("-v0")]
            raise ConfigError(f"textarena has no game '{name}'.{nearest(name, plain)}")
        self._random = random.Random(0).getstate()
        with self._drawing():
            random.seed(str(task["seed"]))
            self._game: Foreign = package.make(name, **json.loads(str(task["options"])))
            self._game.reset(num_players=task["players"], seed=task["seed"])
        self._inner = self._game
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env
        self._unread: dict[int, list[str]] = {}

    @contextmanager
    def _drawing(self) -> Generator[None]:
        """Within, the global generator is this game's."""
        with _RANDOM:
            outer = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outer)

    @property
    def player(self) -> int:
        """Whose turn it is."""
        return self._inner.state.current_player_id

    def read(self, player: int) -> str:
        """What the player has not read yet, without its own moves."""
        state = self._inner.state
        new = state.observations.get(player, [])
        state.observations[player] = []
        # Some games give the arguments of what is said in an older order.
        ordered = [said if isinstance(said[0], int) else (said[1], said[2]) for said in new]
        said = [_shown(*each[:2]) for each in ordered if each[0] != player]
        return "\n".join(said) or CONTINUE

    def move(self, text: str) -> bool:
        """Make a move; whether the game is over."""
        with self._drawing():
            done, _ = self._game.step(text)
        return bool(done)

    def outcome(self, player: int) -> StepResult:
        """The player's reward at the end, and numbers that the game keeps about it."""
        state = self._inner.state
        info = state.game_info.get(player, {})
        metrics = {name: float(info.get(name, 0)) for name in ("invalid_move", "turn_count")}
        reward = float((state.rewards or {}).get(player, 0.0))
        return StepResult(reward=reward, done=True, metrics=metrics)


def _shown(who: int, text: str) -> str:
    return text if who < 0 else f"[Player {who}] {text}"


class TextArenaGame:
    """A game for one player."""

    def reset(self, textarena: Mapping[str, object]) -> None:
        self._table = GameTable(textarena)
        self._table.read(0)  # the prompt

    def step(self, action: str) -> StepResult:
        if self._table.move(action):
            return self._table.outcome(0)
        return StepResult(self._table.read(0))


async def self_play(
    client: PolicyClient, opponent: PolicyClient, textarena: Mapping[str, Foreign]
) -> StepResult:
    """A game in which the policy has all seats, and is trained on one. If others end it before this
    one's first turn, of which nothing could be learned, another beginning is played."""
    result = StepResult(done=True)
    for seed in islice(alike(textarena["seed"]), BEGINNINGS):
        result, moved = await _played(client, opponent, {**textarena, "seed": seed})
        if moved:
            break
    return result


async def _played(
    client: PolicyClient, opponent: PolicyClient, textarena: Mapping[str, Foreign]
) -> tuple[StepResult, bool]:
    """A game's outcome for the seat, and whether that had a turn."""
    table = GameTable(textarena)
    talks: dict[int, list[Message]] = {}
    while True:
        player = table.player
        talk = talks.setdefault(player, [])
        talk.append({"role": "user", "content": table.read(player)})
        mind = client if player == textarena["seat"] else opponent
        try:
            reply = await mind.chat.completions.create(messages=talk)
        except OutOfRoom:
            cut = table.outcome(textarena["seat"])
            return replace(cut, metrics={**cut.metrics, "unfinished": 1.0}), True
        text = reply.choices[0].message.content
        talk.append({"role": "assistant", "content": text})
        if table.move(text):
            return table.outcome(textarena["seat"]), textarena["seat"] in talks
