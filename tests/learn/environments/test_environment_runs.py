"""Whole runs with environments: the page's run files, and what is refused before a model loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.data_tokenizers import byte_level, template
from tests.support.documents import ROOT, Block, blocks_of
from tests.support.packages import skip_without_packages
from tests.support.tiny_runs import rl_settings, write_lines
from tunesmith.config.schema import DataSection, EnvironmentSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.prepare import Prepared
from tunesmith.learn.environments.loading import load_environments
from tunesmith.run.assembly import run_rl
from tunesmith.run.assembly.environments import load_run_tasks
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.loop.learner import Learner
from tunesmith.types import Task

PAGE = list(blocks_of(ROOT / "docs" / "environments.md"))
LINES = [{"prompt": "7*6?", "answer": "42", "secret": 3}]
MIXED = next(block.text for block in PAGE if block.language == "json" and '"game"' in block.text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose chat template has a place for tools."""
    path = tiny.save_model(
        tmp_path_factory.mktemp("models") / "model", max_position_embeddings=4096
    )
    tiny.tokenizer(template("qwen2")).save_pretrained(path)
    return path


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [b for b in PAGE if b.language == "toml"], ids=lambda block: str(block.line)
)
def test_the_pages_run_files_run(block: Block, model: Path, tmp_path: Path) -> None:
    skip_without_packages(block.text)
    for code in PAGE:
        if code.language == "python" and (file := re.match(r"# (\w+\.py)\n", code.text)):
            (tmp_path / file[1]).write_text(code.text)
    lines = MIXED.splitlines() if "column" in block.text else [json.dumps(line) for line in LINES]
    (tmp_path / "train.jsonl").write_text("\n".join(lines * 4))
    (tmp_path / "run.toml").write_text(block.text)
    small = {
        "run_dir": str(tmp_path / "run"),
        "model.path": str(model),
        "model.dtype": "float32",
        "train.steps": 1,
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 2,
        "rollout.max_new_tokens": 4,
        "system.threads": 1,
        "rollout.temperature": 0.9,
        "rollout.timeout": 60.0,
    }
    outcome = run_rl(
        tmp_path / "run.toml", [f"{key}={json.dumps(value)}" for key, value in small.items()]
    )
    (step,) = metrics(outcome.run_dir)
    assert step["rollouts/failed"] == 0.0 and step["rollouts"] == 8.0
    assert step["logged/turns"] >= 1.0 and step["trained_tokens"] > 0
    assert abs(step["policy_kl"]) < 1e-6, "the trainer scores every token as it was sampled"


def test_limits_of_prompts_count_the_tools_that_are_told(tmp_path: Path) -> None:
    code = next(block.text for block in PAGE if block.text.startswith("# tools.py"))
    (tmp_path / "tools.py").write_text(code)
    path = str(
        write_lines(tmp_path / "t.jsonl", [{"prompt": "7*6?"}, {"prompt": "7*6? " + "x" * 300}])
    )
    environments = load_environments(EnvironmentSection(tools=("tools.py:times",)), tmp_path)
    tokenizer = byte_level(template("qwen2"))

    def load(**settings: Any) -> Prepared[Task]:
        return load_run_tasks(environments, tokenizer, DataSection(train=path, **settings), path)

    short, long = (len(task.prompt_ids) for task in load().items)
    assert "Multiply two numbers." in tokenizer.decode(load().items[0].prompt_ids)
    assert len(load(max_prompt_tokens=short, too_long="skip").items) == 1
    with pytest.raises(DataError, match=f"the prompt has {long} tokens, the limit is {long - 1}"):
        load(max_prompt_tokens=long - 1)
    cut = load(max_prompt_tokens=long - 9, too_long="truncate_right").items[1]
    assert (
        len(cut.prompt_ids) <= long - 9
        and isinstance(cut.prompt, str)
        and cut.prompt.startswith("7*6? x")
    )


CODE = """
class Letters:
    def reset(self, **columns): ...

    def step(self, action):
        return "." , float(action < "N"), False

class Needs:
    def reset(self, level): ...

    def step(self, action): ...
"""


@pytest.mark.slow
def test_a_run_needs_no_rewards_beside_its_environments(model: Path, tmp_path: Path) -> None:
    """In plain text, with per-turn rewards and a discount, evaluated too."""
    (tmp_path / "env.py").write_text(CODE)
    settings = rl_settings(
        tmp_path, model, reward__functions=None, environment__path=f"{tmp_path / 'env.py'}:Letters",
        environment__max_turns=3, rollout__max_new_tokens=2,
        algorithm__name="reinforce_pp", algorithm__advantage__gamma=0.5,
        data__eval=str(tmp_path / "train.jsonl"), eval__max_prompts=2,
    )  # fmt: skip
    outcome = run_rl(None, settings)
    lines = metrics(outcome.run_dir)
    steps = [line for line in lines if "logged/turns" in line]
    assert [line["logged/turns"] for line in steps] == [3.0] * 3 and steps[0][
        "logged/unfinished"
    ] == 1.0
    assert outcome.evaluations[-1]["eval/reward"] >= 0.0
    shown = [
        json.loads(line) for line in (outcome.run_dir / "rollouts.jsonl").read_text().splitlines()
    ]
    assert all(line["status"] == "ok" and line["reward"] is not None for line in shown)
    derived = json.loads((outcome.run_dir / "resolved.json").read_text())["settings"][
        "environment.max_tokens"
    ]
    assert derived["source"] == "derived" and derived["value"] >= 3 * 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"environment__path": "env.py:Leters"},
            "env.py has no function 'Leters'. Did you mean 'Letters'?",
        ),
        ({"environment__path": "evn.py:Letters"}, "environment.path: evn.py does not exist"),
        ({"environment__path": "env.py"}, "write file.py:name"),
        ({"environment__path": {"a": "env.py:Leters"}}, "environment.path.a: "),
        ({"environment__tools": ["env.py:ad"]}, "environment.tools[0]: "),
        (
            {"environment__max_turns": 3},
            "environment.max_turns has no effect without an environment",
        ),
        (
            {"environment__path": "env.py:Letters", "environment__column": "x"},
            "environment.column has no effect",
        ),
        (
            {"environment__path": "env.py:Letters", "environment__max_turn": 3},
            "environment.max_turn. Did you mean",
        ),
        (
            {"environment__path": "env.py:Letters", "environment__max_turns": 0},
            "a whole number above 0",
        ),
        (
            {"environment__path": {"single_turn": "env.py:Letters"}},
            "the name 'single_turn' is reserved",
        ),
        (
            {"environment__path": "env.py:Letters", "environment__max_tokens": 9999},
            "the model's context of 4096",
        ),
    ],
)
def test_what_is_refused_before_a_model_loads(
    changed: dict[str, Any],
    words: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "env.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    overrides = rl_settings(
        tmp_path, model, **{k: v for k, v in changed.items() if not isinstance(v, dict)}
    )
    for key, table in ((k, v) for k, v in changed.items() if isinstance(v, dict)):
        overrides += [
            f"{key.replace('__', '.')}.{name}={json.dumps(value)}" for name, value in table.items()
        ]
    with pytest.raises(ConfigError) as raised:
        run_rl(None, overrides)
    assert words in str(raised.value)


def test_a_missing_column_is_refused_before_a_model_loads(model: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(CODE)
    path = f"{tmp_path / 'env.py'}:Needs"
    with pytest.raises(
        ConfigError, match=r"Needs.reset' needs 'level', which is not a column of the data"
    ):
        run_rl(None, rl_settings(tmp_path, model, environment__path=path))
    with pytest.raises(DataError, match=r"has no column 'environment' \(environment.column\)"):
        run_rl(None, [*rl_settings(tmp_path, model), f"environment.path.needs={json.dumps(path)}"])


@pytest.mark.slow
def test_training_tokens_are_bit_for_bit_those_of_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the sampler to the optimizer: tokens, log-probabilities, and what is learned of them."""
    exchanges: list[tuple[list[int], list[int], list[float]]] = []
    trained: list[Batch] = []
    generate = LocalEngine.generate
    update = Learner.update

    async def recording(engine: Any, prompt_ids: Any, sampling: Any) -> Any:
        done = await generate(engine, prompt_ids, sampling)
        exchanges.append((list(prompt_ids), list(done.token_ids), list(done.logprobs)))
        return done

    def learning(learner: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        trained.append(batch)
        return update(learner, batch, *rest, **named)

    monkeypatch.setattr(LocalEngine, "generate", recording)
    monkeypatch.setattr(Learner, "update", learning)
    (tmp_path / "env.py").write_text(CODE)
    path = f"{tmp_path / 'env.py'}:Letters"
    changed: dict[str, Any] = {
        "reward__functions": None,
        "environment__path": path,
        "environment__max_turns": 3,
        "train__steps": 2,
    }
    run_rl(None, rl_settings(tmp_path, model, data__chat=True, **changed))
    assert trained and len(exchanges) == 2 * 16 * 3
    for batch in trained:
        sampler = batch.columns["behaviour_logprobs"]
        turns = np.flatnonzero(np.diff(batch.predicted) > 1) + 1
        for places in np.split(
            np.arange(batch.num_predictions), turns
        ):  # the prompt of the next sample parts them too
            begin = batch.offsets[batch.sample[places[0]]]
            (start, stop) = batch.predicted[places[[0, -1]]] + [0, 1]
            prompt = batch.token_ids[begin:start].tolist()
            wrote = batch.token_ids[start:stop].tolist()
            exchanges.remove((prompt, wrote, sampler[places].tolist()))
    assert not exchanges, "every turn is learned once"


@pytest.mark.more
def test_a_run_hands_the_environments_to_its_rewards(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env.py").write_text('''
class Door:
    def reset(self, secret, **columns):
        self.solved = secret

    def knock(self) -> str:
        """Knock."""
        return "come in"
''')
    settings = rl_settings(
        tmp_path,
        model,
        data__train=str(write_lines(tmp_path / "doors.jsonl", LINES)),
        data__chat=None,
        environment__path=f"{tmp_path / 'env.py'}:Door",
        reward__functions=[f"{tmp_path / 'judge.py'}:solved"],
        reward__isolation=None,
        train__steps=1,
    )
    page = blocks_of(ROOT / "docs" / "rewards.md")
    (tmp_path / "judge.py").write_text(
        next(block.text for block in page if "def solved(environments" in block.text)
    )
    run_dir = run_rl(None, settings).run_dir
    (step,) = metrics(run_dir)
    assert step["reward/solved/mean"] == 3.0 and step["rollouts/failed"] == 0.0
    assert "Door object" not in (run_dir / "rollouts.jsonl").read_text()
    said = [line for line in capsys.readouterr().out.splitlines() if "isolation" in line]
    assert len(said) == 2 and all("thread" in line and "environments" in line for line in said)
