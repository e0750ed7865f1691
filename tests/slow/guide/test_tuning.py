"""``tunesmith tune`` with real runs, whose times depend on their settings by a reward that
sleeps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import tiny
from tests.support.forks import popen
from tests.support.long import again
from tests.support.tiny_preferences import preference_settings
from tests.support.tiny_runs import rl_settings, sft_settings
from tunesmith.cli.main import app
from tunesmith.config.changing import with_values
from tunesmith.config.commands import DPOConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.guide.tune.arms import Arm, TrialEnded
from tunesmith.guide.tune.intervals import Interval
from tunesmith.guide.tune.proof import compare_gradients
from tunesmith.guide.tune.setup import proof_config, trial_config

REWARD = """\
import json, os, signal, time
from pathlib import Path
from tunesmith.records import run_dir

def slow(completions, **columns):
    opened = [Path(os.path.realpath(file)) for file in Path("/proc/self/fd").iterdir()]
    [here] = {file.parent for file in opened if file.name == run_dir.LOCK}
    settings = json.loads((here / "resolved.json").read_text())["settings"]
    time.sleep(2.0 if settings["system.share_prompts"]["value"] else 0.0)
    if settings["system.max_running"]["value"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text) % 3) for text in completions]
"""
PINNED = (
    "system.threads=1",
    "system.trainer_ranks=1",
    "system.engine_process=false",
    "system.kv_memory=16MB",
    "system.logprob_chunk=64",
    "system.max_prefill_tokens=8192",
    "system.gradient_checkpointing=false",
    "system.max_tokens_per_microbatch=512",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny.save_model(tmp_path / "model")
    (
        tmp_path / "run.toml"
    ).touch()  # arms are given settings, and their paths are relative to this file
    return tmp_path


def test_from_settings_that_die_to_faster_ones(folder: Path) -> None:
    (folder / "slow.py").write_text(REWARD)
    changed = {"system__threads": None, "run_dir": None, "reward__functions": ["slow.py:slow"]}
    said = rl_settings(
        folder, folder / "model", rollout__prompts_per_step=2, rollout__group_size=2, **changed
    )
    tables: dict[str, list[str]] = {}
    for text in said:
        section, _, rest = text.partition(".")
        tables.setdefault(section, []).append(rest.replace("=", " = ", 1))
    tables["system"] = ["max_running = 3"]
    run = folder / "run.toml"
    run.write_text(
        "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in tables.items())
    )
    done = CliRunner().invoke(app, ["tune", str(run), *PINNED, "--minutes", "30"])
    assert done.exit_code == 0, done.output
    found = json.loads((folder / "tuned.json").read_text())
    died, *others = found["trials"]
    assert died["status"] == "died" and died["settings"]["system.max_running"] == 3
    assert [other["settings"] for other in others] == [{"system.share_prompts": False}]
    assert found["changed"] == {"system.share_prompts": False}, done.output
    assert (
        found["gain"]["from"] > 1 and found["gradient"]["distance"] < found["gradient"]["tolerance"]
    )
    written = load_config(RLConfig, folder / "tuned.toml")
    assert not written.system.share_prompts and written.system.max_running is None
    assert (
        written.rollout.group_size == 2
        and written.system.threads == 1
        and written.system.logprob_chunk == 64
    )
    remembered = [json.loads(file.read_text()) for file in (folder / "cache").rglob("*.json")]
    assert len(remembered[0]["trials"]) == len(found["trials"]) and "best" not in remembered[0], (
        "settings were pinned"
    )


@pytest.mark.parametrize(("kind", "other"), [(SFTConfig, "sft"), again(DPOConfig, "dpo")])
def test_the_gradient_is_the_same_with_other_settings(
    kind: type[RunConfig], other: str, folder: Path
) -> None:
    make: Any = sft_settings if other == "sft" else preference_settings
    said = make(*([] if other == "sft" else ["dpo"]), folder, folder / "model")
    config = proof_config(trial_config(load_config(kind, None, said)))
    settings = {
        "system.gradient_checkpointing": True,
        "system.max_tokens_per_microbatch": 40,
        "system.logprob_chunk": 16,
    }
    checkpoints: list[Path] = []
    for each in (config, with_values(config, settings)):
        arm = Arm(each, folder / "run.toml", folder)
        checkpoints.append(arm.finish())
        assert arm.metrics["microbatches"] > 1 or each is config
    proof = compare_gradients(*checkpoints, "float32")
    assert proof.holds and 0 < proof.distance < 1e-4 and proof.numbers > 10_000


def test_a_run_that_does_not_fit_or_is_refused_is_an_outcome(folder: Path) -> None:
    config = trial_config(load_config(SFTConfig, None, sft_settings(folder, folder / "model")))
    for settings, status in (
        ({"system.device_memory": "100KB"}, "memory"),
        ({"system.max_tokens_per_microbatch": 2}, "refused"),
    ):
        arm = Arm(with_values(config, settings), folder / "run.toml", folder)
        with pytest.raises(TrialEnded) as ended:
            arm.step()
        assert ended.value.status == status, ended.value


def test_ctrl_c_ends_the_search_and_the_same_command_goes_on(folder: Path) -> None:
    """The second call finishes the search, and measures nothing again of what the first has
    measured."""
    run = folder / "run.toml"
    lines = [line.partition(".") for line in sft_settings(folder, folder / "model", run_dir=None)]
    tables: dict[str, list[str]] = {}
    for section, _, rest in lines:
        if section != "system":
            tables.setdefault(section, []).append(rest.replace("=", " = ", 1))
    tables["system"] = ["max_tokens_per_microbatch = 24"]
    run.write_text(
        "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in tables.items())
    )
    left = ("system.threads", "system.trainer_ranks", "system.logprob_chunk")
    pinned = [
        text for text in PINNED if text.startswith(left)
    ]  # so that gradient checkpointing is left to try
    command = [sys.executable, "-m", "tunesmith", "tune", str(run), *pinned, "--minutes", "30"]
    with popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        tried = "system.max_tokens_per_microbatch = 24: "
        first = next((line for line in process.stdout if line.startswith(tried)), None)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        code = process.wait(300)
    assert code == 130 and first is not None
    found = json.loads((folder / "tuned.json").read_text())
    assert found["interrupted"] and len(found["trials"]) >= 1
    [file] = (folder / "cache" / "tunesmith" / "tuned").glob("*.json")
    known = json.loads(file.read_text())["trials"]
    assert known[0]["settings"]["system.max_tokens_per_microbatch"] == 24
    again = CliRunner().invoke(app, command[3:])
    assert again.exit_code == 0, again.output
    finished = json.loads((folder / "tuned.json").read_text())
    trials = json.loads(file.read_text())["trials"]
    decided = [
        trial for trial in known if "interval" in trial and Interval(*trial["interval"]).decided
    ]
    # On a busy machine the first call may have decided nothing yet.
    assert all(trial in trials for trial in decided), "what was measured is as it was"
    assert not finished["interrupted"]
    compared = [(trial["best"], trial["values"]) for trial in trials]
    assert all(compared.count((trial["best"], trial["values"])) == 1 for trial in decided), (
        "nothing is measured twice"
    )
    assert len(trials) > len(known)
