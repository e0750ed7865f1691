"""Episodes of several turns: what is played, what becomes of tokens and rewards, and what of
failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.data_tokenizers import KINDS, byte_level, template
from tests.support.episodes import check_tokens, load, made_task, ok, play
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.environments.rendering import behind
from tunesmith.types import Status

GUESS = """
class Guess:
    def reset(self, secret, **columns):
        self.secret = secret

    {asy}def step(self, action):
        guess = int(action)
        if guess == self.secret:
            return None, 1.0, True
        return ("higher" if guess < self.secret else "lower"), -0.25, False
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level(template("chatml"))


def bisect(text: str) -> str:
    """A policy that guesses well: it reads its own guesses and their answers."""
    low = 0
    high = 16
    turns = text.split("<|im_start|>")
    for said, heard in zip(turns[2::2], turns[3::2], strict=False):
        guess = int(said.removeprefix("assistant\n").removesuffix("<|im_end|>\n"))
        low, high = (guess + 1, high) if "higher" in heard else (low, guess)
    return f"{(low + high) // 2}<|im_end|>"


@pytest.mark.parametrize("asy", ["", "async "])
def test_an_environment_is_played_to_its_end(asy: str, tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, GUESS.format(asy=asy), path="env.py:Guess")
    (rollout,), engine = play(
        environments, tokenizer, [made_task(tokenizer, "0 to 15?", secret=4)], bisect
    )
    assert ok(rollout).reward == 1.0 - 0.25 and len(rollout.records) == 1
    assert tokenizer.decode(rollout.completion_ids) == (
        "8<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )
    assert rollout.metrics == {"turns": 2.0, "forks": 0.0, "unfinished": 0.0}
    assert [turn.reward for turn in rollout.turns] == [-0.25, 1.0]
    assert tokenizer.decode(rollout.answer_ids) == "4<|im_end|>"
    assert rollout.messages == [
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "4"},
    ]
    check_tokens(rollout, engine)


def test_rewards_of_turns_stand_where_the_turns_ended(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, GUESS.format(asy=""), path="env.py:Guess")
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer, secret=4)], bisect)
    # Each turn is a digit and the token that ends the turn.
    assert rollout.records[0].token_rewards == [0.0, -0.25, 0.0, 1.0]


def test_siblings_draw_differently_and_so_do_turns(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, GUESS.format(asy=""), path="env.py:Guess")
    task = made_task(tokenizer, secret=4)
    rollouts, engine = play(environments, tokenizer, [task], bisect, group_size=3)
    assert len({sampling.seed for sampling in engine.samplings}) == 6
    assert {r.reward for r in rollouts} == {0.75}


ECHO = """
class Echo:
    def reset(self, turns, first=None, **columns):
        self.left = turns
        return first

    def step(self, action):
        self.left -= 1
        return f"heard {action!r}", 0.5, not self.left
"""


def thinker(text: str) -> str:
    return f"<think>\nturn {text.count('heard')}\n</think>\n\nsay {text.count('heard')}<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_drops_thinking_forks_the_record(kind: str, tmp_path: Path) -> None:
    """Each turn is sampled in the context that the template renders; nothing is learned twice."""
    tokenizer: Any = KINDS[kind](template("qwen3"))
    environments = load(tmp_path, ECHO, path="env.py:Echo")
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer, turns=3)], thinker)
    check_tokens(ok(rollout), engine)
    assert len(rollout.records) == 3 and rollout.metrics["forks"] == 2.0
    for number, record in enumerate(rollout.records):
        assert len(record.turns) == 1
        prompt, written = tokenizer.decode(record.token_ids).rsplit("<|im_start|>assistant\n", 1)
        assert written == thinker("heard" * number)
        assert "assistant\n<think>" not in prompt and prompt.count("heard") == number
        assert record.token_rewards[-1] == 0.5 and sum(record.token_rewards) == 0.5
    assert rollout.num_sampled == sum(len(written) for _, written in engine.exchanges)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chatml", "qwen2", "llama3", "phi3", "smollm2"])
def test_a_conversation_that_goes_on_is_one_record(kind: str, name: str, tmp_path: Path) -> None:
    """Its text is what the template renders, its tokens are those that were sampled and those put
    behind them."""
    tokenizer: Any = KINDS[kind](template(name))
    end = {"llama3": "<|eot_id|>", "phi3": "<|end|>"}.get(name, "<|im_end|>")
    environments = load(tmp_path, ECHO, path="env.py:Echo")
    task = made_task(tokenizer, turns=3)
    (rollout,), engine = play(
        environments, tokenizer, [task], lambda _: f"Hello there{end}", end=end
    )
    check_tokens(ok(rollout), engine)
    assert len(rollout.records) == 1 and len(rollout.turns) == 3
    assert rollout.messages is not None
    whole = [{"role": "user", "content": "Go."}, *rollout.messages]
    rendered = tokenizer.apply_chat_template(whole[:-1], add_generation_prompt=True, tokenize=False)
    before = rollout.token_ids[: rollout.turns[-1].start]
    text = tokenizer.decode(before, clean_up_tokenization_spaces=False)
    if kind == "metaspace":  # The policy writes a blank before its text there, as such models do.
        text = text.replace(" Hello", "Hello")
        rendered = rendered.replace(" Hello", "Hello")
    assert text == rendered


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tokens", [("<|end|>", "</s>"), ("<|end|>", "<|eot_id|>", "</s>"), ("</s>", "<|end|>")]
)
def test_a_turn_that_stops_at_any_of_its_end_tokens_is_ended_once(
    kind: str, tokens: tuple[str, ...], tmp_path: Path
) -> None:
    """As Cohere's, whose answer and turn end with a token each: the rest of them follows, and no
    token twice."""
    tokenizer: Any = KINDS[kind](template("phi3").replace("<|end|>", "".join(tokens)))
    environments = load(tmp_path, ECHO, path="env.py:Echo")
    learned = tokens.index("</s>") + 1
    for count in range(1, learned + 1):
        written = "Hello there" + "".join(tokens[:count])
        task = made_task(tokenizer, turns=3)
        (rollout,), engine = play(
            environments, tokenizer, [task], lambda _, w=written: w, end=tokens[count - 1]
        )
        check_tokens(ok(rollout), engine)
        assert len(rollout.records) == 1 and len(rollout.turns) == 3
        assert all(message["content"] == "Hello there" for message in (rollout.messages or [])[::2])
        before = tokenizer.decode(rollout.token_ids[: rollout.turns[-1].start])
        assert before.count("Hello there" + "".join(tokens)) == 2 and before.count(
            tokens[0]
        ) == before.count(tokens[-1])


def test_a_turn_that_was_cut_is_ended_for_the_policy(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, ECHO, path="env.py:Echo")
    task = made_task(tokenizer, turns=2)
    (rollout,), engine = play(
        environments, tokenizer, [task], lambda _: "abcdef ghi<|im_end|>", max_new_tokens=7
    )
    check_tokens(ok(rollout), engine)
    assert tokenizer.decode(rollout.completion_ids) == (
        "abcdef <|im_end|>\n<|im_start|>user\nheard 'abcdef '<|im_end|>\n"
        "<|im_start|>assistant\nabcdef "
    )
    assert rollout.finish_reason == "length"


def test_plain_text_is_put_behind_plain_text(tmp_path: Path) -> None:
    tokenizer = byte_level()
    environments = load(tmp_path, ECHO, path="env.py:Echo")
    tools = [
        {"type": "function", "function": {"name": "add"}}
    ]  # of the data; there is no template to tell of them
    task = made_task(tokenizer, "7?", chat=False, turns=2, first=" go ", tools=tools)
    (rollout,), engine = play(environments, tokenizer, [task], lambda _: "ab</s>", chat=False)
    check_tokens(ok(rollout), engine)
    assert tokenizer.decode(rollout.token_ids) == "7? go ab</s>heard 'ab'ab</s>"


@pytest.mark.parametrize(
    ("first", "prompt"),
    [
        (" Now.", "Go. Now."),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Other."}],
            "Other.",
        ),
    ],
)
def test_what_reset_returns_begins_the_conversation(
    first: Any, prompt: str, tokenizer: Any, tmp_path: Path
) -> None:
    environments = load(tmp_path, ECHO, path="env.py:Echo")
    (rollout,), engine = play(
        environments,
        tokenizer,
        [made_task(tokenizer, turns=1, first=first)],
        lambda _: "x<|im_end|>",
    )
    check_tokens(ok(rollout), engine)
    text = tokenizer.decode(rollout.token_ids)
    assert f"user\n{prompt}<|im_end|>" in text and ("system\nBe brief." in text) == isinstance(
        first, list
    )
    assert len(rollout.records) == 1


def test_an_episode_ends_at_the_limit_of_turns_and_keeps_its_rewards(
    tokenizer: Any, tmp_path: Path
) -> None:
    environments = load(tmp_path, ECHO, path="env.py:Echo", max_turns=3)
    (rollout,), _ = play(
        environments, tokenizer, [made_task(tokenizer, turns=99)], lambda _: "x<|im_end|>"
    )
    assert (
        ok(rollout).reward == 1.5
        and rollout.metrics["turns"] == 3.0
        and rollout.metrics["unfinished"] == 1.0
    )


def test_an_episode_ends_where_there_is_no_room_left(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, ECHO, path="env.py:Echo", max_turns=99)
    task = made_task(tokenizer, turns=99)
    (rollout,), engine = play(
        environments, tokenizer, [task], lambda _: "x<|im_end|>", max_tokens=150
    )
    check_tokens(ok(rollout), engine)
    assert rollout.metrics["unfinished"] == 1.0 and len(rollout.token_ids) <= 150
    assert all(
        s.max_new_tokens <= 150 - len(ids)
        for s, (ids, _) in zip(engine.samplings, engine.exchanges, strict=True)
    )
    (rollout,), _ = play(
        environments, tokenizer, [task], lambda _: "x<|im_end|>", max_tokens=len(task.prompt_ids)
    )
    assert rollout.status is Status.ENVIRONMENT_FAILED and "environment.max_tokens" in str(
        rollout.error
    )


FAILING = """
import asyncio, threading, time
from tunesmith.learn.environments.steps import StepResult

class Failing:
    def __init__(self):
        self.how = None

    async def reset(self, how, **columns):
        self.how = how
        if how == "raises in reset":
            raise KeyError("no such level")

    def step(self, action):
        if self.how == "raises":
            raise ValueError("bad move")
        if self.how == "exits":
            raise SystemExit(3)
        if self.how == "hangs":
            threading.Event().wait()
        return RESULTS.get(self.how, ("on", 1.0, False))

RESULTS = {
    "fine": (None, 1.0, True),
    "nothing": None,
    "two": ("x", 1.0),
    "text reward": ("x", "1.0", True),
    "nan": ("x", float("nan"), True),
    "number": (3, 1.0, True),
    "silent": (None, 1.0, False),
    "huge": (None, 10**400, True),
    "metrics": StepResult(None, 1.0, True, {"distance": "far"}),
    "no metrics": StepResult(None, 1.0, True, [1.0]),
}

class Blocking(Failing):
    async def step(self, action):
        if self.how == "hangs":
            await asyncio.sleep(3600)
        if self.how == "blocks":
            time.sleep(2)
        return (None, 1.0, True)

class Unborn:
    def __init__(self):
        raise RuntimeError("no display")

    def reset(self, **columns): ...

    def step(self, action): ...
"""

WRONG = {
    "raises": (Status.ENVIRONMENT_FAILED, "ValueError: bad move"),
    "exits": (Status.ENVIRONMENT_FAILED, "SystemExit: 3"),
    "raises in reset": (Status.ENVIRONMENT_FAILED, "KeyError: 'no such level'"),
    "hangs": (Status.TIMED_OUT, "step did not return within 1 s"),
    "nothing": (Status.ENVIRONMENT_FAILED, "returned None; expected (observation, reward, done)"),
    "two": (Status.ENVIRONMENT_FAILED, "returned ('x', 1.0); expected"),
    "text reward": (Status.ENVIRONMENT_FAILED, "gave '1.0' as reward"),
    "nan": (Status.ENVIRONMENT_FAILED, "gave nan as reward"),
    "number": (Status.ENVIRONMENT_FAILED, "gave 3 as observation"),
    "silent": (Status.ENVIRONMENT_FAILED, "is not done and gave no observation"),
    "huge": (Status.ENVIRONMENT_FAILED, "as reward; expected a finite number"),
    "metrics": (Status.ENVIRONMENT_FAILED, "gave 'far' as metric 'distance'"),
    "no metrics": (Status.ENVIRONMENT_FAILED, "gave [1.0] as metrics"),
}


def test_what_goes_wrong_fails_its_own_rollout_only(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(
        tmp_path, FAILING, path={"plain": "env.py:Failing", "async": "env.py:Blocking"}, timeout=1.0
    )
    hows = (*WRONG, "fine", "never ends")
    tasks = [made_task(tokenizer, identity=how, how=how, environment="plain") for how in hows]
    tasks += [
        made_task(tokenizer, identity=f"async {how}", how=how, environment="async")
        for how in ("hangs", "blocks")
    ]
    tasks += [
        made_task(tokenizer, identity=f"async {n}", how="fine", environment="async")
        for n in range(6)
    ]
    rollouts, _ = play(environments, tokenizer, tasks, lambda _: "x<|im_end|>")
    seen = {r.task.id: r for r in rollouts}
    for how, (status, words) in WRONG.items():
        assert seen[how].status is status and words in str(seen[how].error), (how, seen[how].error)
        assert seen[how].reward is None, "never a zero"
    assert seen["raises"].num_sampled > 0 and "env.py" in str(seen["raises"].error)
    assert ok(seen["fine"]).reward == 1.0
    assert ok(seen["never ends"]).reward == 8.0 and seen["never ends"].metrics["unfinished"] == 1.0
    assert seen["async hangs"].status is seen["async blocks"].status is Status.TIMED_OUT
    assert all(ok(seen[f"async {n}"]).reward == 1.0 for n in range(6)), (
        "one that blocks stops no other"
    )


def test_an_environment_that_cannot_be_made_is_told(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, FAILING, path="env.py:Unborn")
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer)], lambda _: "x<|im_end|>")
    assert rollout.status is Status.ENVIRONMENT_FAILED and "Unborn() raised" in str(rollout.error)
    assert "RuntimeError: no display" in str(rollout.error)


def test_an_episode_has_a_deadline(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, FAILING, path="env.py:Blocking")
    tasks = [made_task(tokenizer, identity=how, how=how) for how in ("hangs", "fine")]
    hung, fine = play(environments, tokenizer, tasks, lambda _: "x<|im_end|>", timeout=1.0)[0]
    assert hung.status is Status.TIMED_OUT and "1 s (rollout.timeout)" in str(hung.error)
    assert hung.num_sampled > 0 and ok(fine).reward == 1.0


def test_only_so_many_episodes_are_played_at_once(tokenizer: Any, tmp_path: Path) -> None:
    code = """
import threading, time
lock, now, most = threading.Lock(), 0, 0

class Counting:
    def reset(self, **columns):
        global now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)

    def step(self, action):
        global now
        with lock:
            now -= 1
        return None, float(most), True
"""
    for limit in (2, 5):
        environments = load(tmp_path, f"# {limit}" + code, path="env.py:Counting")
        rollouts, _ = play(
            environments, tokenizer, [made_task(tokenizer)], lambda _: "x<|im_end|>",
            group_size=12, concurrency=limit,
        )  # fmt: skip
        assert max(r.reward or 0.0 for r in rollouts) == limit


def test_close_is_called_whatever_happened(tokenizer: Any, tmp_path: Path) -> None:
    code = """
closed = []

class Closing:
    def reset(self, how, **columns):
        self.how = how

    def step(self, action):
        if self.how == "raises":
            raise ValueError
        return None, 1.0, True

    async def close(self):
        closed.append(self.how)
        if self.how == "cannot close":
            raise OSError("busy")

async def count(client, **columns):
    await client.chat.completions.create(messages=[{"role": "user", "content": "x"}])
    return float(len(closed))
"""
    environments = load(tmp_path, code, path={"closing": "env.py:Closing", "count": "env.py:count"})
    tasks = [
        made_task(tokenizer, how=how, environment="closing")
        for how in ("fine", "raises", "cannot close")
    ]
    rollouts, _ = play(environments, tokenizer, tasks, lambda _: "x<|im_end|>")
    assert [r.status for r in rollouts] == [Status.OK, Status.ENVIRONMENT_FAILED, Status.OK]
    assert "OSError: busy" in rollouts[2].notes["close"]
    (count,), _ = play(
        environments,
        tokenizer,
        [made_task(tokenizer, environment="count")],
        lambda _: "x<|im_end|>",
    )
    assert ok(count).reward == 3.0


MIXED = GUESS.format(asy="") + ECHO


def test_a_column_says_who_plays_a_task(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(
        tmp_path, MIXED, path={"guess": "env.py:Guess", "echo": "env.py:Echo"}, column="game"
    )
    tasks = [
        made_task(tokenizer, game="guess", secret=4, turns=None),
        made_task(tokenizer, game="echo", turns=3, environment={"any": "value"}),
        made_task(tokenizer, game="single_turn"),
    ]
    guess, echo, single = play(environments, tokenizer, tasks, lambda _: "4<|im_end|>")[0]
    assert ok(guess).reward == 1.0 and ok(echo).reward == 1.5
    assert ok(single).reward is None and len(single.turns) == 1, "reward functions judge it"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"gane": "guess"}, "has no column 'game' (environment.column)"),
        (
            {"game": "guest"},
            "there is no environment 'guest' (environment.path). Did you mean 'guess'?",
        ),
    ],
)
def test_a_task_that_nobody_plays_is_refused(
    columns: dict[str, Any], words: str, tokenizer: Any, tmp_path: Path
) -> None:
    environments = load(
        tmp_path, MIXED, path={"guess": "env.py:Guess", "echo": "env.py:Echo"}, column="game"
    )
    with pytest.raises(DataError) as raised:
        environments.route([made_task(tokenizer, **columns)])
    assert words in str(raised.value)


def test_a_column_that_reset_needs_is_missed_before_anything_is_played(
    tokenizer: Any, tmp_path: Path
) -> None:
    environments = load(tmp_path, GUESS.format(asy=""), path="env.py:Guess")
    with pytest.raises(
        ConfigError, match=r"Guess.reset' needs 'secret', .* Did you mean 'secrets'\?"
    ):
        environments.route([made_task(tokenizer, secrets=3)])


@pytest.mark.parametrize(
    ("there", "full", "rest"),
    [
        ("ab<e>", "ab<e>\nc", "\nc"),
        ("a  b<e>", "a b<e>\nc", "\nc"),
        ("ab \n", "ab \n<e>c", "<e>c"),
        ("a b \n", "ab<e>c", "<e>c"),
        ("ab", "ab", ""),
        ("ab<e>", "ac<e>", None),
        ("abc", "ab", None),
        (" ", "ab", None),
    ],
)
def test_what_stands_behind_a_text(there: str, full: str, rest: str | None) -> None:
    assert behind(there, full) == rest


def test_a_limit_that_no_thread_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.memory"):
        load(tmp_path, "class Guess: ...", path="env.py:Guess", isolation="thread", memory="1GB")
