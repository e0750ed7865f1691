"""Task directories of Harbor: what is read of them, and what they score."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.support.command_agents import ASKS
from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import check_tokens, made_task, ok, play
from tests.support.sandboxes import unavailable
from tunesmith.config.sandboxes import Bubblewrap, DockerSandbox, ProcessSandbox
from tunesmith.config.schema import EnvironmentSection, Source
from tunesmith.errors import ConfigError, EpisodeError
from tunesmith.learn.data.sources import read
from tunesmith.learn.environments.loading import load_environments
from tunesmith.learn.packages.harbor import environment, main, oracle, rows

DOCKERFILE = """\
FROM python:3.12-slim
LABEL a=b
WORKDIR /app
ENV GREETING="Hello, world!"
COPY data/ data/
COPY note.txt \\
    ./
"""
TEST = """\
#!/bin/bash
if [ "$(cat hello.txt)" = "$GREETING" ] && [ -f data/a ] && [ "$EXTRA" = "more" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
TOML = """\
schema_version = "1.4"
[task]
name = "org/hello"
[verifier]
timeout_sec = 120.0
[verifier.env]
EXTRA = "${NOT_SET_ANYWHERE:-more}"
[agent]
timeout_sec = 30.0
[environment]
cpus = 1
"""
needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")
SECTION = EnvironmentSection(sandbox=Bubblewrap(), command=("true",))


def made(folder: Path, **files: str) -> Path:
    """A task that asks for a greeting in a file."""
    texts = {
        "task.toml": TOML,
        "instruction.md": "<!-- canary GUID 1 -->\n\nWrite the greeting to hello.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/a": "a",
        "environment/note.txt": "n",
        "tests/test.sh": TEST,
        "solution/solve.sh": '#!/bin/bash\necho "$GREETING" > hello.txt\n',
        **files,
    }
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_tasks_are_read_without_the_package(tmp_path: Path) -> None:
    made(tmp_path / "b")
    made(tmp_path / "a", **{"instruction.md": "Do it."})
    (tmp_path / "README.md").write_text("no task")
    read_rows = list(read(Source(path=f"harbor:{tmp_path}")))
    columns = [row.columns for row in read_rows]  # type: ignore[union-attr]
    assert [each["prompt"] for each in columns] == ["Do it.", "Write the greeting to hello.txt.\n"]
    assert {each["environment"] for each in columns} == {f"harbor:{tmp_path}"}
    assert len(list(rows(str(tmp_path / "b"), "train", {}))) == 1
    task = made_task(byte_level(template("qwen2")), **columns[1])
    given = environment(str(tmp_path)).task_of(SECTION, task)
    assert (given.folder, given.seconds, given.verify_seconds) == ("/app", 30.0, 120.0)
    assert given.environment == {"GREETING": "Hello, world!"}
    assert given.verify_environment == {"EXTRA": "more"} and given.archives.keys() == {
        "/app", "/app/data"
    }  # fmt: skip
    assert given.hidden.keys() == {"/tests"}


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"environment/Dockerfile": "FROM ubuntu\nRUN apt-get install -y gcc"}, "RUN"),
        ({"environment/Dockerfile": "FROM org/own"}, "org/own"),
        ({"environment/Dockerfile": "FROM ubuntu\nCOPY ../x /"}, "COPY"),
        ({"environment/Dockerfile": "FROM ubuntu\nENV PATH=/x:$PATH"}, "PATH"),
        ({"environment/Dockerfile": "FROM ubuntu\nRUN echo 'a\nb'"}, "RUN"),
        ({"task.toml": "[environment]\ndocker_image = 'own:1'"}, "own:1"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "steps"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'"}, "environment"),
        ({"environment/docker-compose.yaml": ""}, "containers"),
        ({"task.toml": "[environment]\nmemory_mb = 2048"}, "2148MB"),
        ({"task.toml": "[environment]\nmemory = '2G'"}, "2148MB"),
        ({"task.toml": "[environment]\nmemory = 'much'"}, "much"),
        ({"task.toml": "[environment.healthcheck]\ncommand = 'true'"}, "healthcheck"),
        ({"task.toml": "[agent]\nuser = 'nobody'"}, "user"),
        ({"task.toml": "[verifier]\nnetwork_mode = 'allowlist'"}, "network"),
        ({"task.toml": "not toml"}, "task.toml|TOML|Expected"),
    ],
)
def test_a_task_that_cannot_be_played_here_is_refused(
    changed: dict[str, str], word: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=word):
        environment(str(made(tmp_path, **changed))).check(SECTION)


def test_what_it_needs_is_said(tmp_path: Path) -> None:
    tasks = environment(str(made(tmp_path)))
    for section, key in (
        (EnvironmentSection(sandbox=Bubblewrap()), "environment.command"),
        (EnvironmentSection(command=("mini",)), "environment.sandbox"),
        (EnvironmentSection(command=("mini",), sandbox=ProcessSandbox()), "environment.sandbox"),
    ):
        with pytest.raises(ConfigError) as refused:
            tasks.check(section)
        assert refused.value.keys == (key,)
    own = "FROM own\n# It's the repository's.\nRUN echo it\\'s\nWORKDIR /repository"
    needy = made(tmp_path / "needy", **{"environment/Dockerfile": own})
    played = environment(str(needy))
    played.check(EnvironmentSection(command=("mini",), sandbox=DockerSandbox()))
    task = made_task(byte_level(template("qwen2")), harbor=str(needy))
    assert played.task_of(SECTION, task).folder == "/repository"
    for wrong in ({"split": "test"}, {"options": {"size": 1}}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            list(read(Source(path=f"harbor:{tmp_path}", **wrong)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"task\.toml"):
        environment(str(tmp_path / "tests"))


@pytest.mark.parametrize("said", ["network_mode = 'no-network'", "allow_internet = false"])
def test_a_task_without_network_is_not_played_with_one(said: str, tmp_path: Path) -> None:
    tasks = environment(str(made(tmp_path, **{"task.toml": f"[environment]\n{said}\n"})))
    tasks.check(SECTION)
    online = SECTION.model_copy(update={"sandbox": Bubblewrap(network=True)})
    with pytest.raises(ConfigError, match="network"):
        tasks.check(online)


@needs_bwrap
def test_the_solution_scores_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "good")
    made(tmp_path / "wrong", **{"solution/solve.sh": "#!/bin/sh\ntrue\n"})
    assert main(str(tmp_path)) == 1
    assert capsys.readouterr().out == "good: 1.0\nwrong: 0.0\n"


@needs_bwrap
def test_rewards_are_numbers_by_name_or_a_failure(tmp_path: Path) -> None:
    json_file = '#!/bin/sh\necho \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json\n'
    half = made(tmp_path / "half", **{"tests/test.sh": json_file})
    assert asyncio.run(oracle(half, SECTION)) == 0.5
    none = made(tmp_path / "none", **{"tests/test.sh": "#!/bin/sh\nexit 0\n"})
    with pytest.raises(EpisodeError, match="no reward"):
        asyncio.run(oracle(none, SECTION))
    early = "#!/bin/sh\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n"
    faked = made(tmp_path / "faked", **{"tests/test.sh": "#!/bin/sh\n", "solution/solve.sh": early})
    with pytest.raises(EpisodeError, match="no reward"):
        asyncio.run(oracle(faked, SECTION))


@pytest.mark.parametrize("kind", ["bubblewrap", "docker"])
def test_an_agent_plays_a_task(kind: str, tmp_path: Path) -> None:
    """It sees the files of the task, and neither its tests nor its solution."""
    why = unavailable(kind)
    if why:
        pytest.skip(why)
    image = {"environment/Dockerfile": f"{DOCKERFILE}RUN touch /made\n"}
    made(tmp_path, **(image if kind == "docker" else {}))
    code = ASKS + (
        "import glob\n"
        "print(sorted(os.listdir('.')), glob.glob('/tests/*'), glob.glob('/solution/*'))\n"
        "open('hello.txt', 'w').write(reply['content'])\n"
    )
    section = EnvironmentSection(
        path=f"harbor:{tmp_path}",
        command=("python3", "-c", code),
        sandbox=DockerSandbox() if kind == "docker" else Bubblewrap(),
    )
    environments = load_environments(section, tmp_path)
    tokenizer = byte_level(template("qwen2"))
    (row,) = rows(str(tmp_path), "train", {})
    rollouts, engine = play(
        environments, tokenizer, [made_task(tokenizer, **row)],  # type: ignore[arg-type]
        lambda text: "Hello, world!<|im_end|>" if "greeting" in text else "no",
        group_size=2,
    )  # fmt: skip
    assert [ok(rollout).reward for rollout in rollouts] == [1.0, 1.0]
    assert rollouts[0].notes["output"] == "['data', 'note.txt'] [] []\n"
    rollouts[0].records += rollouts[1].records
    check_tokens(rollouts[0], engine)


def test_the_package_reads_the_same(tmp_path: Path) -> None:
    harbor = pytest.importorskip("harbor.models.task.task")
    theirs = harbor.Task(made(tmp_path))
    given = environment(str(tmp_path)).task_of(
        SECTION, made_task(byte_level(template("qwen2")), harbor=str(tmp_path))
    )
    assert harbor.Task.is_valid_dir(tmp_path)
    assert next(rows(str(tmp_path), "train", {}))["prompt"] == theirs.instruction
    assert theirs.config.agent.timeout_sec == given.seconds
    assert theirs.config.verifier.timeout_sec == given.verify_seconds
