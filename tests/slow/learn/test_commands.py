"""Agents that are programs: black boxes in sandboxes, which reach the policy and nothing else.

Kinds whose tools are not installed are skipped with the reason.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_agents import ASKS, PYTHON, VERIFY, WRITES, Seen, one, played
from tests.support.episodes import check_tokens, ok
from tests.support.sandboxes import unavailable
from tunesmith.config.sandboxes import DockerSandbox, ProcessSandbox
from tunesmith.learn.usercode.jail import missing
from tunesmith.types import Status


@pytest.fixture(params=["process", "bubblewrap", "docker"])
def sandbox(request: pytest.FixtureRequest) -> Any:
    kind: str = request.param
    why = unavailable(kind)
    if why:
        pytest.skip(why)
    return {"type": kind, "memory": "1GB"}


def test_a_program_without_the_right_file_scores_less(sandbox: Any) -> None:
    assert (
        one(ASKS + "open('answer.txt', 'w').write('7')", sandbox=sandbox, verify=VERIFY).reward == 0
    )


def test_the_prompt_is_an_argument_or_the_input_and_a_folder_and_setup_come_first(
    sandbox: Any, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "agent.py").write_text(
        WRITES + "print(prompt, open('sub/data').read(), open('made').read())"
    )
    (tmp_path / "sub" / "data").write_text("data")
    task = "import json, os; json.load(open(os.environ['TUNESMITH_TASK']))['answer']"
    setup = [PYTHON, "-c", f"{task}; open('made', 'w').write('made')"]
    says = "say \"$(x)\" 'y' {prompt}"
    for command in (f"{PYTHON} agent.py {{prompt}}", [PYTHON, "agent.py"]):
        seen = Seen()
        rollouts, _ = played(
            "", command=command, prompt=says, folder=str(tmp_path), setup=setup,
            sandbox=sandbox, scorer=seen,
        )  # fmt: skip
        ok(rollouts[0])
        (left,) = seen.played
        assert left.stdout == f"{says} data made\n" and left.exit_code == 0
        assert left.files["answer.txt"] == b"42" and left.files["sub/data"] == b"data"
        assert left.rollout is rollouts[0]


def test_the_command_does_not_see_the_columns(sandbox: Any) -> None:
    code = ASKS + "print(open(os.environ['TUNESMITH_TASK']).read())"
    rollout = one(code, sandbox=sandbox, verify="true")
    assert json.loads(ok(rollout).notes["output"]) == {
        "id": "t", "prompt": "Go.", "messages": [{"role": "user", "content": "Go."}]
    }  # fmt: skip


def test_a_reward_file_holds_a_number_or_numbers(sandbox: Any) -> None:
    for text, reward, metric in (("0.25", 0.25, None), ('{"reward": 2, "tests": 3}', 2.0, 3.0)):
        write = f"import os; open(os.environ['TUNESMITH_REWARD'], 'w').write({text!r})"
        rollout = one(ASKS, sandbox=sandbox, verify=[PYTHON, "-c", write])
        assert ok(rollout).reward == reward and rollout.metrics.get("tests") == metric
    write = "import os; open(os.environ['TUNESMITH_REWARD'], 'w').write('much')"
    rollout = one(ASKS, sandbox=sandbox, verify=[PYTHON, "-c", write])
    assert rollout.status is Status.ENVIRONMENT_FAILED and "much" in str(rollout.error)


def test_a_program_that_fails_is_judged_and_one_that_never_asks_has_failed(sandbox: Any) -> None:
    rollout = one(WRITES + "sys.exit(3)", sandbox=sandbox, verify=VERIFY)
    assert ok(rollout).reward == 1.0 and rollout.metrics["exit_code"] == 3.0
    for given in ({"code": "print('no key')"}, {"code": "", "command": "nothing-such"}):
        rollout = one(**given, sandbox=sandbox, verify="true")
        assert rollout.status is Status.ENVIRONMENT_FAILED and rollout.reward is None
    rollout = one(WRITES, sandbox=sandbox, verify="nothing-such")
    assert rollout.status is Status.ENVIRONMENT_FAILED and "127" in str(rollout.error)
    rollout = one(WRITES, sandbox=sandbox, setup="false", verify="true")
    assert rollout.status is Status.ENVIRONMENT_FAILED and "setup" in str(rollout.error)


def test_a_hang_ends_with_its_children_and_a_flood_is_cut(sandbox: Any) -> None:
    forks = ASKS + "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)"
    rollout = one(forks, sandbox={**sandbox, "seconds": 0.5}, verify="true")
    assert rollout.status is Status.TIMED_OUT and rollout.reward is None
    flood = ASKS + "print('x' * 50_000)"
    rollout = one(flood, sandbox={**sandbox, "output": "10KB"}, verify="true")
    assert ok(rollout).reward == 1.0 and set(rollout.notes["output"]) == {"x"}


def test_what_the_command_left_running_does_not_see_verify(sandbox: Any) -> None:
    waits = (
        "import time\nwhile True:\n    open('answer.txt', 'w').write('42')\n    time.sleep(0.01)"
    )
    code = ASKS + f"import subprocess\nsubprocess.Popen([{PYTHON!r}, '-c', {waits!r}])"
    verify = "import os, time; os.path.exists('answer.txt') and os.remove('answer.txt')"
    verify += "; time.sleep(0.2); raise SystemExit(os.path.exists('answer.txt'))"
    assert ok(one(code, sandbox=sandbox, verify=[PYTHON, "-c", verify])).reward == 1.0


PEEK = """
import glob, socket
seen = []
def attempt(what, call):
    try: call()
    except Exception: return
    seen.append(what)
attempt("run", lambda: open({secret!r}).read())
attempt("variable", lambda: os.environ["SOME_API_KEY"])
attempt("environ", lambda: open("/proc/1/environ").read())
attempt("memory", lambda: open("/proc/1/mem", "rb").read(1))
attempt("pipes", lambda: open("/proc/1/fd/1", "w"))
attempt("net", lambda: socket.create_connection(("127.0.0.1", {port}), 1))
attempt("internet", lambda: socket.create_connection(("192.0.2.1", 80), 0.2))
attempt("written", lambda: open({secret!r} + "2", "w"))
print(seen)
"""


def test_a_command_reaches_the_policy_and_nothing_else(
    sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setenv("SOME_API_KEY", "secret")
    secret = tmp_path / "runs" / "metrics.jsonl"
    secret.parent.mkdir()
    secret.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        values = {"{secret!r}": repr(str(secret)), "{port}": str(other.getsockname()[1])}
        code = PEEK
        for name, value in values.items():
            code = code.replace(name, value)
        rollout = one(ASKS + code, sandbox=sandbox, verify="true")
        assert ok(rollout).notes["output"] == "[]\n"
        kept = one(
            ASKS + "print(os.environ['SOME_API_KEY'])",
            sandbox={**sandbox, "env": ["SOME_API_KEY"]}, verify="true",
        )  # fmt: skip
    assert ok(kept).notes["output"] == "secret\n"


def test_the_clients_of_openai_and_anthropic_find_the_policy() -> None:
    """Without an argument: the address, the key and the model come from the environment."""
    pytest.importorskip("openai")
    if missing():
        pytest.skip(missing())
    code = (
        "import openai, os\n"
        "said = [{'role': 'user', 'content': 'Hi.'}]\n"
        "client = openai.OpenAI()\n"
        "model = os.environ['OPENAI_MODEL']\n"
        "print(client.chat.completions.create(model=model, messages=said).choices[0].message.content)"
    )
    rollouts, engine = played(
        code, command=[sys.executable, "-c", code], verify="true",
        sandbox=ProcessSandbox(memory="4GB", processes=64),
    )  # fmt: skip
    check_tokens(ok(rollouts[0]), engine)
    assert rollouts[0].notes["output"] == "42\n"


def test_a_container_hands_its_socket_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for docker that runs the program as it is, in a directory of its own."""
    tool = tmp_path / "docker"
    tool.write_text(
        f'#!/bin/sh\n[ $1 = version ] && exit\ncd "$(mktemp -d -p {tmp_path})"\n'
        'while [ "$1" != python3 ]; do shift; done\nexec "$@"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rollouts, engine = played(WRITES, sandbox=DockerSandbox(), verify=VERIFY)
    check_tokens(ok(rollouts[0]), engine)
    assert rollouts[0].reward == 1.0


def mini(text: str) -> str:
    """A policy that knows what mini-swe-agent wants."""
    done = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    command = f"echo {done}" if "tool_response" in text else "echo -n 42 > answer.txt"
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>{call}</tool_call><|im_end|>"


def test_mini_swe_agent_plays_as_it_is() -> None:
    pytest.importorskip("minisweagent")
    if missing():
        pytest.skip(missing())
    command = f"env MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors {sys.executable} "
    command += "-m minisweagent --yolo --exit-immediately --model openai/policy --cost-limit 0 "
    rollouts, engine = played(
        "",
        command=command + "--task {prompt}",
        prompt="Write 42 to answer.txt.",
        policy=mini,
        verify=VERIFY,
        sandbox=ProcessSandbox(memory="4GB", processes=64),
    )
    check_tokens(ok(rollouts[0]), engine)
    assert rollouts[0].reward == 1.0, rollouts[0].notes
    assert [len(record.turns) for record in rollouts[0].records if record.turns] == [2]
