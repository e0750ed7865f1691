"""Agents: the user's own loop around the policy. Tokens stay exact, edited histories fork, failures
are typed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.episodes import check_tokens, load, made_task, ok, play
from tunesmith.config.schema import EnvironmentSection
from tunesmith.errors import ConfigError
from tunesmith.learn.environments.loading import check_agents
from tunesmith.types import Status

START = 'START = [{"role": "user", "content": "Go."}]\n'


def counting(text: str) -> str:
    return f"turn {text.count('<|im_start|>assistant')}<|im_end|>"


def agent(body: str, signature: str = "client, **columns") -> str:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return START + (
        f"import asyncio\n\nasync def agent({signature}):\n"
        f"    ask = client.chat.completions.create\n{lines}"
    )


def test_an_agent_speaks_with_the_policy_and_gives_the_reward(
    tokenizer: Any, tmp_path: Path
) -> None:
    code = agent(
        """
reply = await ask(model="any", messages=START, temperature=0.2, max_tokens=50)
choice = reply.choices[0]
assert choice.finish_reason == "stop" and reply.usage.total_tokens > 0 and choice.message.tool_calls is None
messages = [*START, choice.message, {"role": "user", "content": "More."}]
reply = await ask(messages=messages)
return float(reply.choices[0].message.content == answer)
""",
        "client, answer",
    )
    environments = load(tmp_path, code, path="env.py:agent")
    task = made_task(tokenizer, answer="turn 2")
    (rollout,), engine = play(environments, tokenizer, [task], counting)
    check_tokens(ok(rollout), engine)
    assert rollout.reward == 1.0 and len(rollout.records) == 1 and len(rollout.turns) == 2
    assert rollout.token_ids[: len(task.prompt_ids)] == list(task.prompt_ids)
    assert rollout.notes["overridden"] == {"temperature": 0.2}, (
        "the run says how the policy samples"
    )
    assert engine.samplings[0].max_new_tokens == 50 and engine.samplings[0].temperature == 1.0
    assert rollout.messages is not None and [m["role"] for m in rollout.messages] == [
        "assistant",
        "user",
        "assistant",
    ]


def test_an_edited_history_forks_and_nothing_is_learned_twice(
    tokenizer: Any, tmp_path: Path
) -> None:
    code = agent("""
said = list(START)
for _ in range(2):
    reply = await ask(messages=said)
    said += [reply.choices[0].message, {"role": "user", "content": "More."}]
summary = [*START, {"role": "assistant", "content": "(two turns)"}, {"role": "user", "content": "Last."}]
await ask(messages=summary)
return 1.0
""")
    environments = load(tmp_path, code, path="env.py:agent")
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], counting)
    check_tokens(ok(rollout), engine)
    assert [len(record.turns) for record in rollout.records] == [2, 1]
    assert "(two turns)" in tokenizer.decode(rollout.token_ids), "the record that spoke last"
    assert rollout.messages is not None and rollout.messages[0]["content"] == "(two turns)"


def test_two_answers_to_the_same_words_share_their_tokens(tokenizer: Any, tmp_path: Path) -> None:
    """Asked again where the record has gone on, a fork begins with that record's own tokens, as
    context."""
    code = agent("""
first = (await ask(messages=START)).choices[0].message
both = [[*START, first, {"role": "user", "content": text}] for text in ("left", "right")]
await asyncio.gather(*(ask(messages=messages) for messages in both))
return 0.5
""")
    environments = load(tmp_path, code, path="env.py:agent")
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], counting)
    check_tokens(ok(rollout), engine)
    long, fork = sorted(rollout.records, key=lambda record: -len(record.turns))
    assert len(long.turns) == 2 and len(fork.turns) == 1
    shared = long.turns[0].stop
    assert fork.token_ids[:shared] == long.token_ids[:shared] and not any(fork.sampled[:shared])


def test_the_same_words_asked_several_times_at_once_fork(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, agent("""
await asyncio.gather(*(ask(messages=START) for _ in range(3)))
return 1.0
"""), path="env.py:agent")  # fmt: skip
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], counting)
    check_tokens(ok(rollout), engine)
    assert [len(record.turns) for record in rollout.records] == [1, 1, 1]


def test_policy_tokens_are_never_tokenized_again(tokenizer: Any, tmp_path: Path) -> None:
    """A turn written in other tokens than the tokenizer would choose keeps them in the next
    prompt."""
    letters = [i for c in "say so" for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    end = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    assert letters != tokenizer("say so", add_special_tokens=False)["input_ids"]
    code = agent("""
said = list(START)
for _ in range(3):
    said += [(await ask(messages=said)).choices[0].message, {"role": "user", "content": "More."}]
""")
    environments = load(tmp_path, code, path="env.py:agent")

    class Spelling:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: Any, **options: Any) -> Any:
            return (
                {"input_ids": [*letters, *end]} if text == "spell" else tokenizer(text, **options)
            )

    (rollout,), engine = play(environments, Spelling(), [made_task(tokenizer)], lambda _: "spell")
    check_tokens(ok(rollout), engine)
    (record,) = rollout.records
    assert [record.token_ids[t.start : t.stop] for t in record.turns] == [[*letters, *end]] * 3
    assert rollout.reward is None, "reward functions judge it"


def test_tools_of_an_agent_are_told_and_calls_come_as_openai_has_them(
    tokenizer: Any, tmp_path: Path
) -> None:
    code = agent("""
import json
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]
reply = await ask(messages=START, tools=tools, tool_choice="auto")
choice = reply.choices[0]
call = choice.message.tool_calls[0]
assert choice.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "add"
total = sum(json.loads(call.function.arguments).values())
dumped = choice.message.model_dump(exclude_none=True)
said = [*START, dumped, {"role": "tool", "tool_call_id": call.id, "content": str(total)}]
reply = await ask(messages=said, tools=tools)
return float(reply.choices[0].message.content)
""")
    environments = load(tmp_path, code, path="env.py:agent")

    def policy(text: str) -> str:
        assert '"name": "add"' in text
        if "<tool_response>" in text:
            return text.split("<tool_response>\n")[1].split("\n")[0] + "<|im_end|>"
        return '<tool_call>\n{"arguments":{"a":3,  "b":4},"name":"add"}\n</tool_call><|im_end|>'

    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], policy)
    check_tokens(ok(rollout), engine)
    assert rollout.reward == 7.0
    assert len(rollout.records) == 1, (
        "the call stays as the policy wrote it, whatever the template makes of it"
    )


def test_a_call_that_cannot_be_read_stays_in_the_text(tokenizer: Any, tmp_path: Path) -> None:
    code = agent("""
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
choice = (await ask(messages=START, tools=tools)).choices[0]
assert choice.finish_reason == "stop" and choice.message.tool_calls is None
return float(choice.message.content == "<tool_call>{</tool_call>")
""")
    environments = load(tmp_path, code, path="env.py:agent")
    (rollout,), _ = play(
        environments,
        tokenizer,
        [made_task(tokenizer)],
        lambda _: "<tool_call>{</tool_call><|im_end|>",
    )
    assert ok(rollout).reward == 1.0


HASTY = "try: await asyncio.wait_for(ask(messages=START), 0)\nexcept TimeoutError: return 0.0"
NO_CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ('raise RuntimeError("lost")', Status.ENVIRONMENT_FAILED, "RuntimeError: lost"),
        ("return 1.0", Status.ENVIRONMENT_FAILED, "ended without a turn of the policy"),
        (HASTY, Status.ENVIRONMENT_FAILED, "ended without a turn of the policy"),
        (
            "await ask(messages=START)\nreturn 'good'",
            Status.ENVIRONMENT_FAILED,
            "gave 'good' as reward",
        ),
        (
            "while True: await ask(messages=START)",
            Status.ENVIRONMENT_FAILED,
            "(environment.max_turns)",
        ),
        (
            "await ask(messages=START)\nawait asyncio.sleep(99)",
            Status.TIMED_OUT,
            "1 s (rollout.timeout)",
        ),
        (
            "await ask(messages=START, stream=True)",
            Status.ENVIRONMENT_FAILED,
            "'stream' is for the HTTP endpoint",
        ),
        ("await ask(messages=[])", Status.ENVIRONMENT_FAILED, "'messages' is []"),
        (
            "await ask(messages=[{'role': 'user', 'content': 3}])",
            Status.ENVIRONMENT_FAILED,
            "content is int",
        ),
        (
            "await ask(messages=START, max_tokens=0.5)",
            Status.ENVIRONMENT_FAILED,
            "'max_tokens' is 0.5",
        ),
        ("await ask(messages=START, max_tokens=0)", Status.ENVIRONMENT_FAILED, "'max_tokens' is 0"),
        ("await ask(messages=START, stop=5)", Status.ENVIRONMENT_FAILED, "'stop' is 5"),
        (
            f"await ask(messages=[{NO_CALL}])",
            Status.ENVIRONMENT_FAILED,
            "a list of calls with a 'function'",
        ),
    ],
)
def test_what_goes_wrong_in_an_agent(
    body: str, status: Status, words: str, tokenizer: Any, tmp_path: Path
) -> None:
    limit = 1.0 if status is Status.TIMED_OUT else 60.0
    environments = load(tmp_path, agent(body), path="env.py:agent")
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer)], counting, timeout=limit)
    assert rollout.status is status and words in str(rollout.error), rollout.error
    assert rollout.reward is None


def test_a_request_that_is_left_behind_is_not_answered(tokenizer: Any, tmp_path: Path) -> None:
    code = agent("""
asyncio.ensure_future(ask(messages=[*START, *START]))
await ask(messages=START)
return 1.0
""")
    environments = load(tmp_path, code, path="env.py:agent")

    def policy(text: str) -> str:
        return "x" * (50_000 if text.count("Go.") == 2 else 1) + "<|im_end|>"

    long = {"max_new_tokens": 60_000, "max_tokens": 90_000}
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], policy, **long)
    check_tokens(ok(rollout), engine)
    assert len(rollout.records) == 1 and len(engine.exchanges) == 1


@pytest.mark.parametrize("hidden", [False, True])
def test_an_engine_that_fails_is_not_the_agents_fault(
    hidden: bool, tokenizer: Any, tmp_path: Path
) -> None:
    body = "await ask(messages=START)"
    if hidden:
        body = f"try: {body}\nexcept Exception: return 0.0"
    environments = load(tmp_path, agent(body), path="env.py:agent")
    # A script that ends without a token to stop at is an engine's failure.
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer)], lambda _: "endless")
    assert rollout.status is Status.ENGINE_FAILED and "without a stop condition" in str(
        rollout.error
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def agent(client): ...", "with `async def`"),
        ("async def agent(question): ...", "neither 'client' nor 'base_url'"),
        ("def agent(question): ...", "is not an environment"),
        ("agent = 3", "is not an environment"),
        ("class agent:\n    def step(self, action): ...", "has step but no reset"),
        ("class agent:\n    def __init__(self, level): ...\n    def reset(self): ...", "'level'"),
        ("class agent:\n    x = 1", "neither step(action) nor public methods"),
        ("class agent:\n    def act(self, x): ...", "cannot be a tool"),
    ],
)
def test_what_is_no_agent_or_environment_is_refused(code: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, code, path="env.py:agent")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"timeout": 5.0}, "environment.timeout"),
        ({"memory": "1GB"}, "environment.memory"),
        ({"isolation": "process"}, "environment.isolation"),
        ({"isolation": "thread"}, None),
        ({"host": "0.0.0.0"}, "environment.host"),
        ({}, None),
    ],
)
def test_agents_do_not_have_the_settings_of_environments(
    settings: dict[str, Any], refused: str | None, tmp_path: Path
) -> None:
    game = "class Game:\n    def reset(self): ...\n    def step(self, action): ...\n"
    (tmp_path / "env.py").write_text(agent("return 1.0") + game)
    check_agents(
        EnvironmentSection(path={"a": "env.py:agent", "g": "env.py:Game"}, **settings), tmp_path
    )
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_agents(EnvironmentSection(path="env.py:agent", **settings), tmp_path)


def test_agents_need_a_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, agent("return 1.0"), path="env.py:agent")
    with pytest.raises(ConfigError, match="needs a chat template"):
        play(environments, tokenizer, [made_task(tokenizer, chat=False)], counting, chat=False)


def test_rollouts_of_a_task_do_not_share_what_they_change(tokenizer: Any, tmp_path: Path) -> None:
    code = agent("""
history = prompt
reply = await ask(messages=history)
history.append(reply.choices[0].message)
board[0] += 1
return float(len(history) * 10 + board[0])
""", "client, prompt, board")  # fmt: skip
    environments = load(tmp_path, code, path="env.py:agent")
    task = made_task(tokenizer, [{"role": "user", "content": "Go."}], board=[0])
    rollouts, _ = play(environments, tokenizer, [task] * 3, counting)
    assert [r.reward for r in rollouts] == [float((len(task.prompt) + 1) * 10 + 1)] * 3
    assert task.columns["board"] == [0]


GROUPED = """
from tunesmith.learn.environments.steps import StepResult

async def agent(client, fails=()):
    reply = await client.chat.completions.create(messages=START)
    return StepResult(done=True, kept=reply.choices[0].message.content)

async def together(kept):
    assert "bad" not in kept, "it cannot be compared"
    best = max(map(len, kept))
    return [StepResult(None, float(len(one) == best), True, {"size": len(one)}) for one in kept]

agent.score_group = together
"""


@pytest.mark.parametrize("bad", [False, True])
def test_a_group_is_scored_together(bad: bool, tokenizer: Any, tmp_path: Path) -> None:
    answers = iter(["1", "bad" if bad else "22", "333"])
    rollouts, _ = play(
        load(tmp_path, START + GROUPED, path="env.py:agent"), tokenizer, [made_task(tokenizer)],
        lambda _: f"{next(answers)}<|im_end|>", group_size=3,
    )  # fmt: skip
    if bad:
        assert all(rollout.reward is None for rollout in rollouts)
        assert all("cannot be compared" in str(rollout.error) for rollout in rollouts)
    else:
        assert sorted(ok(one).reward or 0.0 for one in rollouts) == [0.0, 0.0, 1.0]
        assert sorted(one.metrics["size"] for one in rollouts) == [1.0, 2.0, 3.0]
        assert all(one.instance is None for one in rollouts), "nothing is kept after scoring"
