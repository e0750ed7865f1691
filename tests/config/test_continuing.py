"""A continued run refuses, or tells the effect of, each change of a setting or file that is part of
what is learned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.tiny import CHATML, save_model
from tests.support.tiny_runs import rl_settings, sft_settings, sums, write_lines
from tunesmith.config.changing import with_values
from tunesmith.config.commands import KINDS, OfflineDistillConfig, SampledDistillConfig, all_keys
from tunesmith.config.continuing import MOVABLE, Content, changes
from tunesmith.config.load import load_config
from tunesmith.config.resolved import Listing, save_resolved, settings
from tunesmith.config.schema import RLConfig
from tunesmith.config.verdicts import CONTENTS, SETTINGS, verdict_of
from tunesmith.errors import CheckpointError
from tunesmith.learn.algorithms.kl import KLController
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.said import open_plan
from tunesmith.run import assembly
from tunesmith.run.assembly.contents import contents_of

ALL = (*KINDS.values(), SampledDistillConfig, OfflineDistillConfig)
KEYS = sorted({key for kind in ALL for key in all_keys(kind, tables=True)})


def test_every_setting_has_exactly_one_entry() -> None:
    named = [key for verdict in SETTINGS for key in verdict.keys.split()]
    assert len(named) == len(set(named))
    assert all(bool(verdict.effect) == (verdict.kind == "effect") for verdict in SETTINGS)
    assert all(verdict_of(key) for key in KEYS), "each key has an entry, or a table around it has"
    assert all(any(key == name or key.startswith(name) for key in KEYS) for name in named), (
        "no entry is of nothing"
    )
    assert all(
        said.key.partition(".")[0] in RLConfig.model_fields | {"teacher": 0}
        for said in CONTENTS.values()
    )


REQUIRED = ["model.path=o/m", "data.train=o/d", "teacher.path=o/t", 'reward.functions=["math"]']


def resolved_of(key: str) -> Listing:
    """A configuration with the key, not derived any further."""
    kind = next(kind for kind in ALL if key in settings(_config(kind)))
    return Listing(settings(_config(kind)), {}, ())


def _config(kind: Any) -> Any:
    known = [said for said in REQUIRED if said.partition(".")[0] in kind.model_fields]
    return load_config(kind, None, known)


@pytest.mark.parametrize("key", sorted({key for kind in ALL for key in settings(_config(kind))}))
def test_a_change_of_any_setting_is_refused_told_or_does_not_matter(
    tmp_path: Path, key: str
) -> None:
    resolved = resolved_of(key)
    save_resolved(resolved, tmp_path)
    file = tmp_path / "resolved.json"
    saved = json.loads(file.read_text())
    saved["settings"][key]["value"] = "before"
    file.write_text(json.dumps(saved))
    found = changes(resolved, {}, tmp_path)
    kind = verdict_of(key).kind
    lines = {"refused": found.refused, "effect": found.told, "speed": found.told}.get(kind, [])
    assert [*found.refused, *found.told] == lines and len(lines) == (
        kind in ("refused", "effect", "speed")
    )
    assert all(line.startswith(f'{key}: "before" → ') for line in lines)


def test_a_run_is_continued_by_the_command_that_began_it(tmp_path: Path) -> None:
    kinds = [*KINDS.values()]
    for begun in kinds:
        save_resolved(Listing(settings(_config(begun)), {}, ()), tmp_path)
        for kind in kinds:
            found = changes(Listing(settings(_config(kind)), {}, ()), {}, tmp_path)
            assert bool(found.refused) == (kind is not begun), (begun, kind)


def test_the_command_of_a_run_is_known_by_its_name_where_that_is_recorded(tmp_path: Path) -> None:
    listing = Listing(settings(_config(RLConfig)), {}, (), command="rl")
    save_resolved(listing, tmp_path)
    assert not changes(listing, {}, tmp_path).refused
    [refused] = changes(replace(listing, command="polish"), {}, tmp_path).refused
    assert refused.startswith("tunesmith rl began this run")


@pytest.mark.parametrize("key", MOVABLE.replace("algorithm.", "algorithm.loss").split())
def test_files_whose_contents_are_compared_may_be_moved(tmp_path: Path, key: str) -> None:
    def told(then: str, now: str) -> list[str]:
        listing = resolved_of(key)
        kept = {**listing.values, key: [{"path": then}, "math"]}
        save_resolved(replace(listing, values=kept), tmp_path)
        kept = {**listing.values, key: [{"path": now}, "math"]}
        return changes(replace(listing, values=kept), {}, tmp_path).told

    assert not told("/old/place/mine.py:one", "/new/mine.py:one")
    for other in ("/old/place/mine.py:two", "/old/place/others.py:one", "mine.py/one"):
        assert len(told("/old/place/mine.py:one", other)) == 1


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_a_change_of_any_file_is_refused_or_told(tmp_path: Path, name: str) -> None:
    resolved = resolved_of("model.path")
    save_resolved(resolved, tmp_path, {name: "1"})
    assert changes(resolved, {name: Content("a file", "1")}, tmp_path) == changes(
        resolved, {}, tmp_path
    )
    found = changes(resolved, {name: Content("a file", "2")}, tmp_path)
    lines = found.refused if CONTENTS[name].refused else found.told
    assert len(lines) == 1 == len(found.refused + found.told) and lines[0].startswith(
        CONTENTS[name].key
    )
    assert not changes(resolved, {name: Content("a file", "2")}, tmp_path / "new").told


def test_only_an_adapted_coefficient_continues() -> None:
    for target, coef in ((None, 0.2), (6.0, 0.1)):
        controller = KLController(0.2, target)
        controller.load_state_dict({"coef": 0.1})
        assert controller.coef == coef


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _template(folder: Path) -> None:
    (folder / "model/chat_template.jinja").write_text(CHATML + " ")


def _tokens(folder: Path) -> None:
    file = folder / "model/tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|im_ends|>"))


def _weights(folder: Path) -> None:
    save_model(folder / "model", seed=7)


SFT: list[tuple[dict[str, Any], Callable[[Path], Any] | None, str]] = [
    ({"lora__alpha": 64}, None, "lora.alpha"),
    ({"lora__rank": 8}, None, "lora.rank"),
    ({"data__system_prompt": "Be brief.", "data__chat": True}, None, "data.system_prompt"),
    ({"data__seed": 3}, None, "data.seed"),
    ({"train__optimizer": "adamw", "data__loss_on": "all"}, None, "data.loss_on"),
    ({}, _write("examples.jsonl", '{"prompt": "a", "completion": "b"}\n'), "data.train"),
    ({}, _template, "model.chat_template"),
    ({}, _tokens, "model.path"),
    ({}, _weights, "model.path"),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter's run of two steps."""
    folder = tmp_path_factory.mktemp("begun")
    model = save_model(folder / "model")
    assembly.run_sft(None, sft_settings(folder, model, train__steps=2, lora__rank=4))
    return folder


@pytest.mark.parametrize(("changed", "edit", "key"), SFT)
@pytest.mark.more
def test_what_the_checkpoint_does_not_go_with_is_refused_before_a_model_is_loaded(
    begun: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    edit: Callable[[Path], Any] | None,
    key: str,
) -> None:
    from tunesmith.models.causal_lm import CausalLM

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(CausalLM, "load", load)
    before = {
        file: file.read_bytes() for file in (*begun.glob("*.jsonl"), *(begun / "model").iterdir())
    }
    saved = (begun / "sft/resolved.json").read_bytes()
    try:
        if edit:
            edit(begun)
        said = {"train__steps": 4, "lora__rank": 4, "checkpoint__resume": True, **changed}
        with pytest.raises(CheckpointError) as refused:
            assembly.run_sft(None, sft_settings(begun, begun / "model", **said))
    finally:
        for file, data in before.items():
            file.write_bytes(data)
        (begun / "model/chat_template.jinja").unlink() if edit is _template else None
    assert key in str(refused.value) and "model.path" in str(refused.value), "with the remedy"
    assert (begun / "sft/resolved.json").read_bytes() == saved, "the run stays what it was"


@pytest.mark.slow
def test_what_changes_from_now_on_is_told_and_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model")
    kl = {"algorithm__kl__coef": 0.1, "data__eval": None}
    assembly.run_rl(None, rl_settings(tmp_path, model, train__steps=1, **kl))
    capsys.readouterr()
    moved = tmp_path / "moved"
    (tmp_path / "model").rename(moved)
    (tmp_path / "rewards.py").write_text(
        (tmp_path / "rewards.py").read_text().replace('"N"', '"Q"')
    )
    write_lines(tmp_path / "held_out.jsonl", sums(2))
    said: dict[str, Any] = {
        "train__steps": 2,
        "algorithm__kl__coef": 0.2,
        "rollout__temperature": 0.9,
        "train__lr": 1e-3,
    }
    said |= {
        "system__threads": 2,
        "data__eval": str(tmp_path / "held_out.jsonl"),
        "checkpoint__resume": True,
    }
    assembly.run_rl(None, rl_settings(tmp_path, moved, **said))
    lines = (
        capsys.readouterr()
        .out.partition("; from step 1 on:")[2]
        .partition("run directory")[0]
        .splitlines()
    )
    told = {line.strip().partition(": ")[0] for line in lines if line.startswith("  ")}
    assert told == {
        "algorithm.kl.coef",
        "rollout.temperature",
        "train.lr",
        "train.steps",
        "system.threads",
        "reward.functions",
        "eval.every",
    }
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert next(step["lr"] for step in steps if step["step"] == 2 and "lr" in step) == 1e-3


def test_a_digest_of_weights_sees_a_change_and_not_a_move(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(chat_template=None, get_vocab=dict)
    data = cast(Any, SimpleNamespace(fingerprint="x"))
    digests: list[str] = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = save_model(tmp_path / name, seed=seed)
        config = with_values(_config(RLConfig), {"model.path": str(folder)})
        plan = open_plan(config, Facts(read_hardware()))
        digests.append(contents_of(plan, tokenizer, data, None)["model"].digest)
    assert digests[0] == digests[1] != digests[2]
