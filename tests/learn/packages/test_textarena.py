"""Games of the real package: alone in a worker process, and against the policy itself."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import check_tokens, made_task, ok, play
from tests.support.packages import need
from tests.support.tiny_runs import rl_settings
from tunesmith.config.schema import EnvironmentSection, Source
from tunesmith.errors import ConfigError
from tunesmith.learn.data.sources import SourceRow, read
from tunesmith.learn.environments.loading import EnvironmentSet, load_environments
from tunesmith.learn.packages import textarena
from tunesmith.run.assembly import run_rl
from tunesmith.types import Rollout, Task

TOKENIZER = byte_level(template("qwen2"))
END = "<|im_end|>"


def tasks(name: str, **options: object) -> list[Task]:
    source = Source(path=f"textarena:{name}", options={"size": 2, **options})
    rows = [row.columns for row in read(source) if isinstance(row, SourceRow)]
    return [made_task(TOKENIZER, identity=str(n), **row) for n, row in enumerate(rows)]


def environments(folder: Path, name: str, **section: str) -> EnvironmentSet:
    said = EnvironmentSection(path=f"textarena:{name}", max_turns=20, **section)
    return load_environments(said, folder)


def halving(text: str) -> str:
    """Guesses the number that is in the middle of what is left."""
    low = 0
    high = 21
    hints = re.findall(r"\[(\d+)\]<\|im_end\|>.*?target number is (\w+)", text, re.DOTALL)
    for guess, hint in hints:
        low = int(guess) if hint == "higher" else low
        high = int(guess) if hint == "lower" else high
    return f"[{(low + high) // 2}]{END}"


@need("textarena")
def test_a_game_begins_without_the_draws_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Games of agents begin in threads: whoever has the lock has the global generator."""
    seed = random.seed

    def guarded(*args: object) -> None:
        assert textarena._RANDOM.locked()
        seed(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(random, "seed", guarded)
    textarena.GameTable({"game": "GuessTheNumber-v0", "seed": 1, "players": 1, "options": "{}"})


@need("textarena")
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_game_is_won(isolation: str, tmp_path: Path) -> None:
    state = random.getstate()
    found, engine = play(
        environments(tmp_path, "GuessTheNumber-v0", isolation=isolation),
        TOKENIZER,
        tasks("GuessTheNumber-v0"),
        halving,
        max_tokens=20_000,
    )
    assert len(found) == 2 and len(engine.exchanges) > 2
    for rollout in found:
        assert ok(rollout).reward == 1.0 and rollout.metrics["invalid_move"] == 0.0
    if isolation == "thread":
        assert random.getstate() == state, "the run's own draws are not the game's"


FIRST_MOVES = {
    "2048-v0": "[up]",
    "Blackjack-v0": "[stand]",
    "FifteenPuzzle-v0": "[up]",
    "FrozenLake-v0": "[right]",
    "LightsOut-v0": "[1 1]",
    "Mastermind-v0": "[1 2 3 4]",
    "Minesweeper-v0": "[0 0]",
    "Sudoku-v0": "[1 1 1]",
    "TowerOfHanoi-v0": "[A C]",
    "Secretary-v0": "[continue]",
    "Countdown-v0": "[0 1 +]",
}


@need("textarena")
@pytest.mark.parametrize("game", FIRST_MOVES)
def test_games_are_played_to_their_end_or_the_limit(game: str, tmp_path: Path) -> None:
    section = environments(tmp_path, game, isolation="thread")
    (rollout,), engine = play(
        section,
        TOKENIZER,
        tasks(game, size=1),
        lambda _: FIRST_MOVES[game] + END,
        max_tokens=40_000,
    )
    check_tokens(ok(rollout), engine)
    assert rollout.reward is not None or rollout.metrics["unfinished"] == 1.0


@need("textarena")
def test_the_policy_plays_itself_and_is_trained_on_one_seat(tmp_path: Path) -> None:
    """The opponent leaves three in a row to the first player; only the first player's tokens are
    kept."""

    def moves(text: str) -> str:
        mine = "You are Player 0" in text
        turn = text.count("<|im_start|>assistant") - 1
        return f"[{(0, 1, 2)[turn] if mine else (3, 7, 5)[turn]}]{END}"

    (rollout,), engine = play(
        environments(tmp_path, "TicTacToe-v0"), TOKENIZER, tasks("TicTacToe-v0", size=1), moves
    )
    assert ok(rollout).reward == 1.0
    assert len(rollout.records) == 1 and len(rollout.records[0].turns) == 3
    assert len(engine.exchanges) == 5, "the opponent's two turns are sampled and not kept"


@need("textarena")
def test_a_game_that_ends_before_the_first_turn_is_begun_anew(tmp_path: Path) -> None:
    """The opponent, who begins, makes no valid move twice; then both seats play."""
    tries: list[str] = []

    def moves(text: str) -> str:
        if "You are Player 1" in text or len(tries) > 4:
            return f"[{8 - text.count('<|im_start|>assistant')}]{END}"
        tries.append(text)
        return f"nothing{END}"

    (rollout,), _ = play(
        environments(tmp_path, "TicTacToe-v0"), TOKENIZER,
        tasks("TicTacToe-v0", size=1, seat=1), moves,
    )  # fmt: skip
    assert ok(rollout).turns and len(tries) > 2


@need("textarena")
def test_a_loser_is_paid_less(tmp_path: Path) -> None:
    def moves(text: str) -> str:
        mine = "You are Player 0" in text
        turn = text.count("<|im_start|>assistant") - 1
        return f"[{(3, 7, 5)[turn] if mine else (0, 1, 2)[turn]}]{END}"

    found: list[Rollout]
    found, _ = play(
        environments(tmp_path, "TicTacToe-v0"), TOKENIZER, tasks("TicTacToe-v0", size=1), moves
    )
    assert ok(found[0]).reward in (-1.0, 1.0)


@need("textarena")
def test_tasks_depend_on_seed_and_split_alone() -> None:
    first = [task.columns for task in tasks("FrozenLake-v0", size=6)]
    random.seed(11)
    assert first == [task.columns for task in tasks("FrozenLake-v0", size=6)]
    held = [task.columns["textarena"]["seed"] for task in tasks("FrozenLake-v0[test]", size=6)]
    assert not {row["textarena"]["seed"] for row in first} & set(held)


@need("textarena")
@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("GuessTheNumbers-v0", {}, "GuessTheNumber-v0"),
        ("TicTacToe-v0", {"seat": 2}, "seat"),
        ("GuessTheNumber-v0[tests]", {}, "test"),
    ],
)
def test_what_is_wrong_is_named(name: str, options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        tasks(name, **options)


MIXED = """
[data]
train = [
    { path = "textarena:GuessTheNumber-v0", weight = 1, options = { size = 8 } },
    { path = "textarena:TicTacToe-v0", weight = 1, options = { size = 8 } },
]
[environment]
path = { guess = "textarena:GuessTheNumber-v0", noughts = "textarena:TicTacToe-v0" }
max_turns = 2
"""


@need("textarena")
def test_a_model_trains_on_two_games_by_weight(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(MIXED)
    model = tiny.save_model(tmp_path / "model", max_position_embeddings=4096)
    tiny.tokenizer(template("qwen2")).save_pretrained(model)
    counts = {"rollout__prompts_per_step": 8, "rollout__group_size": 2}
    settings = rl_settings(tmp_path, model, data__chat=True, train__steps=1, **counts)
    own = ("data.train=", "reward.")
    said = [each for each in settings if not each.startswith(own)]
    outcome = run_rl(tmp_path / "run.toml", said)
    text = (outcome.run_dir / "metrics.jsonl").read_text()
    (step,) = [json.loads(line) for line in text.splitlines()]
    assert step["rollouts/failed"] == 0.0 and step["trained_tokens"] > 0
    shares = [step[f"environment/{name}/share"] for name in ("guess", "noughts")]
    assert sum(shares) == 1.0 and min(shares) > 0
    assert {"environment/guess/reward", "environment/noughts/failed"} <= step.keys()
