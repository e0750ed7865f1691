"""Secrets in settings are neither printed nor written, data is private, and the run still uses the
real ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.machine_facts import CPU
from tunesmith.cli.guard import guarded
from tunesmith.cli.main import app
from tunesmith.config.continuing import changes
from tunesmith.config.load import load_config
from tunesmith.config.resolved import print_resolved, save_resolved
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, EngineError
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve
from tunesmith.records.metrics import JsonLines
from tunesmith.records.run_dir import how_to_continue, shown_command
from tunesmith.run.loop.checkpoint import Checkpoints
from tunesmith.run.offline.lines import claim

URL = "http://user:S3CRET@host:80/r?key=T0KEN"
SETTINGS = [
    "model.path=org/m",
    "data.train=org/d",
    f'reward.remote=[{{urls = ["{URL}"]}}]',
    "system.cluster=ray",
    'system.ray_runtime_env={env_vars = {WANDB = "S3CRET"}, config = {api_key = "T0KEN"}}',
]


def clean(text: str) -> bool:
    return "S3CRET" not in text and "T0KEN" not in text


def test_settings_are_shown_and_saved_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = resolve(load_config(RLConfig, None, SETTINGS), Facts(CPU))
    assert resolved.said.reward.remote[0].urls == (URL,)  # the run has the real one
    print_resolved(resolved.listing, all_of_it=True)
    save_resolved(resolved.listing, tmp_path)
    told = capsys.readouterr().out
    assert "http://***@host:80/r?key=***" in told and clean(told)
    for name in ("config.toml", "resolved.json"):
        file = tmp_path / name
        assert "***@host" in file.read_text() and clean(file.read_text())
        assert file.stat().st_mode & 0o077 == 0
    found = changes(resolved.listing, {}, tmp_path)
    assert not found.refused and not found.told


def test_a_hidden_secret_is_refused_where_a_real_one_is_needed(tmp_path: Path) -> None:
    resolved = resolve(load_config(RLConfig, None, SETTINGS), Facts(CPU))
    save_resolved(resolved.listing, tmp_path)
    with pytest.raises(ConfigError, match=r"reward.remote\[0\].urls\[0\].*write the real one"):
        load_config(RLConfig, tmp_path / "config.toml")


def test_messages_have_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, None, [*SETTINGS, f"system.engine_urls={URL}", f"train.lr={URL}"])
    errors: list[Exception] = [caught.value, EngineError(f"{URL} is down"), RuntimeError(URL)]
    for error in errors:

        def fail(error: Exception = error) -> None:
            error.add_note(f"see {URL}")
            raise error

        with pytest.raises(BaseException):  # noqa: B017
            guarded(fail)()
    told = capsys.readouterr()
    assert "***@host" in told.err and clean(told.err + told.out)


@pytest.mark.parametrize(
    "override",
    [
        'system.ray_runtime_env={env_vars={A="S3CRET"}}',
        "system.ray_runtime_env.env_vars.A=S3CRET",
        'system.ray_runtime_env={config={api_key="S3CRET"}}',
        "system.vllm.extra.hf_token=S3CRET",
        'reward.remote=[{urls=["http://u:S3CRET@h/"], token_env="T0KEN", retry=1}]',
        "system.engine_urls=http://u:S3CRET@h/",
        "system.engine_urls=http://u:a S3CRET@h/",
    ],
)
def test_refusals_show_no_secret_of_an_override(override: str, tmp_path: Path) -> None:
    """Neither by ``config`` nor in a job's script whose mode lets others read it."""
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\npath = "org/m"\n[data]\ntrain = "org/d"\n[reward]\nfunctions = ["math"]\n'
    )
    shown = CliRunner().invoke(app, ["config", str(run), override])
    assert shown.exit_code == 2 and "S3CRET" not in shown.output, shown.output
    launched = CliRunner().invoke(
        app, ["launch", "slurm", str(run), override, "-o", str(tmp_path / "job.sh")]
    )
    assert "S3CRET" not in launched.output
    if launched.exit_code == 0:
        assert (tmp_path / "job.sh").stat().st_mode & 0o077 == 0 and "secrets" in launched.output


def test_a_command_is_shown_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a model card on the hub, and in how to continue."""
    dotted = [
        "system.vllm.extra.hf_token=T0KEN",
        "system.ray_runtime_env.env_vars.WANDB=S3CRET",
        "x.password='T0KEN'",
    ]
    plain = [
        "train.lr=1e-5",
        "data.train=my data.jsonl",
        "data.max_tokens=5",
        'rollout.stop=["=", "T"]',
    ]
    shown = shown_command(["tunesmith", "rl", *SETTINGS, *dotted, *plain])
    assert clean(shown), shown
    words = shlex.split(shown)
    assert "system.vllm.extra.hf_token=***" in words and words[-4:] == plain
    monkeypatch.setattr("sys.argv", ["tunesmith", "rl", *dotted])
    assert clean(how_to_continue(tmp_path))


def test_what_holds_data_is_private_and_weights_are_as_other_new_files(tmp_path: Path) -> None:
    JsonLines(tmp_path / "rollouts.jsonl", private=True).close()
    assert (tmp_path / "rollouts.jsonl").stat().st_mode & 0o077 == 0

    def write(directory: Path) -> None:
        (directory / "model.safetensors").touch(mode=0o600)

    (tmp_path / "usual").touch()
    saved = Checkpoints(tmp_path, 1).save(1, {}, write, None)
    assert (saved / "model.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_an_output_was_begun_with_is_compared_by_what_paths_mean(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "r.py").touch()
    out = tmp_path / "completions.jsonl"
    out.touch()

    def begun_with(model: str, functions: Any, url: str = URL) -> None:
        claim(
            out,
            {
                "model.path": model,
                "reward.functions": functions,
                "reward.remote": [{"urls": [url]}],
            },
            tmp_path / "run",
        )

    begun_with(f"{tmp_path}/model", [f"{tmp_path}/r.py:f"])
    begun_with(f"{tmp_path}/link", [f"{tmp_path}/model/../r.py:f"])
    begun_with(f"{tmp_path}/model/../model", [f"{tmp_path}/r.py:f"], URL.replace("S3CRET", "new"))
    with pytest.raises(ConfigError, match=r"model\.path"):
        begun_with(f"{tmp_path}/other", [f"{tmp_path}/r.py:f"])
    note = (tmp_path / ".completions.source.json").read_text()
    assert clean(note) and json.loads(note)["model.path"] == f"{tmp_path}/model"
