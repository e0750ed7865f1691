"""Documents and examples say what is so: run files load, code runs, commands parse, links lead
somewhere."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import shutil
import tomllib
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.support import tiny
from tests.support.docs_tables import PAGES, with_tables
from tests.support.documents import (
    DOCUMENTS,
    ROOT,
    Block,
    anchors,
    blocks,
    blocks_of,
    commands,
    key_tables,
    links,
)
from tests.support.key_tables import check_row
from tests.support.machine_facts import CPU
from tests.support.packages import skip_without_packages
from tests.support.tiny_preferences import lines_of
from tests.support.tiny_rewards import save_reward_model
from tests.support.tiny_runs import write_lines
from tunesmith.config.choice import Choice
from tunesmith.config.commands import GenerateConfig, RFTConfig
from tunesmith.config.engines import engine_kinds
from tunesmith.config.judges import Criterion, JudgeReward
from tunesmith.config.load import find_kind, load_config
from tunesmith.config.reading.overriding import parse_override
from tunesmith.config.schema import ModelReward, RemoteReward, RLConfig, Source
from tunesmith.config.section import Section
from tunesmith.learn.data.prepare import peek
from tunesmith.learn.environments.loading import check_environment
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import check
from tunesmith.records.progress import COLUMNS
from tunesmith.run.assembly.environments import check_run_rewards

EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/prepare.py"))


def named(block: Block) -> str:
    return block.name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every file that run files in the documents name, beside a tiny model."""
    folder = tmp_path_factory.mktemp("documents")
    tiny.save_model(folder / "model", max_position_embeddings=4096)
    save_reward_model(folder / "reward_model", stats=(0.0, 1.0))
    line = {"prompt": "7*6=", "answer": "42", "completion": "42"}
    for name in ("train", "held_out", "easy", "hard", "examples", "val", "few_shot"):
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    for command, name in (("dpo", "pairs"), ("kto", "judged"), ("prm", "steps")):
        for file in (name, f"{name}_held_out"):
            write_lines(folder / f"{file}.jsonl", lines_of(command, 2))
    functions = [
        name
        for block in blocks("python")
        for name, made in run(block).items()
        if isinstance(made, FunctionType)
    ]
    for block in blocks("python"):
        file = re.match(r"# (\w+\.py)\n", block.text)
        if file:  # a file of the reader's own, that run files name
            (folder / file[1]).write_text(block.text)
    code = "".join(
        f"def {name}(completions, **columns):\n    return [0.0] * len(completions)\n"
        for name in functions
    )
    (folder / "rewards.py").write_text(code)
    return folder


def resolved(path: Path, *overrides: str) -> AnyPlan:
    """What ``tunesmith config`` does, and the look at the data and rewards that a run begins
    with."""
    config = load_config(find_kind(path, overrides), path, overrides)
    check(config)
    if isinstance(config, RLConfig):
        check_run_rewards(config, path.parent)
        check_environment(config.environment, path.parent)
    peek(config.data, config.data.train, config.goal)
    model = Path(config.model.path)
    facts = read_model_facts(model) if model.is_dir() else None
    return resolve(config, Facts(CPU, facts))


@pytest.mark.parametrize("block", blocks("toml"), ids=named)
def test_run_files_load_and_resolve(block: Block, place: Path) -> None:
    (place / "run.toml").write_text(block.text)
    skip_without_packages(block.text)
    resolved(place / "run.toml")


def test_what_the_front_page_shows_as_derived_is_derived(place: Path) -> None:
    here = {block.language: block.text for block in reversed(list(blocks_of(ROOT / "README.md")))}
    (place / "run.toml").write_text(here["toml"])
    derived = {d.key: (d.value, d.reason) for d in resolved(place / "run.toml").reasons}
    shown = [b.text for b in blocks_of(ROOT / "README.md") if b.text.startswith("algorithm.")]
    assert len(shown) == 1
    for line in shown[0].splitlines():
        key, value, reason = line.split(maxsplit=2)
        assert derived[key] == (json.loads(value), reason.strip())


RUNS = [
    (path, example)
    for example in EXAMPLES
    for path in ([ROOT / "README.md"] if example.name == "arithmetic" else [])
]
RUNS += [(example / "README.md", example) for example in EXAMPLES]


@pytest.mark.parametrize(("page", "example"), RUNS, ids=lambda path: path.name)
def test_printed_runs_have_the_columns_and_settings_of_now(page: Path, example: Path) -> None:
    """Columns are those of progress lines; settings, steps and learning rate are the run file's."""
    run_file = tomllib.loads((example / "rl.toml").read_text())
    labels = {label for label, _ in COLUMNS.values()}
    for line in "".join(
        block.text for block in blocks_of(page) if block.language == "text"
    ).splitlines():
        step = re.match(r"step (\d+)/(\d+)  ", line)
        if step:
            shown = dict(part.rsplit(" ", 1) for part in line[step.end() :].split("  "))
            assert set(shown) <= labels, line
            assert int(step[2]) == run_file["train"]["steps"]
            if int(step[1]) == int(step[2]) and "schedule" not in run_file["train"]:
                assert float(shown["lr"]) == run_file["train"]["lr"]
        elif line.startswith("evaluation after step"):
            assert "failed 0" not in line, "printed only where some failed"
        elif line.endswith("  as you said"):
            key, value, _ = line.split(maxsplit=2)
            section, _, name = key.partition(".")
            assert json.loads(value) == run_file[section][name], line
        elif line.startswith("system.kv_memory"):
            assert line.endswith(f"in {run_file['model']['dtype']}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_run_files_of_the_examples_load_and_resolve(example: Path, tmp_path: Path) -> None:
    """On the files that the example makes; the warm start's checkpoint is where ``rl.toml`` looks
    for it."""
    here = tmp_path / example.name
    shutil.copytree(example, here, ignore=shutil.ignore_patterns("runs", "model", "*.jsonl"))
    load_module(here / "prepare.py")["main"]()
    start = tomllib.loads((here / "rl.toml").read_text())["model"]["path"]
    sft = resolved(here / "sft.toml")
    assert sft.said.run_dir is not None
    steps = f"checkpoints/step-{sft.steps:06d}/model"
    assert Path(start) == sft.said.run_dir.relative_to(Path.cwd()) / steps, (
        "rl.toml begins where sft.toml ends"
    )
    shutil.copytree(here / "model", here / start)
    resolved(here / "rl.toml")


def load_module(path: Path) -> dict[str, Any]:
    import runpy

    return runpy.run_path(str(path), run_name="module")


def run(block: Block) -> dict[str, Any]:
    """What a block of Python defines. One that needs a model, a file or a service of the reader's
    is compiled only."""
    code = compile(block.text, block.name, "exec")
    names: dict[str, Any] = {}
    if not re.search(r"from_pretrained|from trl |tunesmith\.[a-z]+\(", block.text):
        exec(code, names)
    return names


@pytest.mark.parametrize("block", blocks("python"), ids=named)
def test_python_runs(block: Block) -> None:
    """Reward functions in it give a number per completion."""
    lists: dict[str, Any] = {
        "prompts": ["7*6=", "1+1="],
        "completions": ["42", "3"],
        "answer": ["42", "2"],
    }
    for name, function in run(block).items():
        if (
            isinstance(function, FunctionType)
            and "completions" in inspect.signature(function).parameters
        ):
            scores = function(**lists)
            scores = asyncio.run(scores) if inspect.iscoroutine(scores) else scores
            assert len(scores) == 2 and all(isinstance(s, float) for s in scores), name


@pytest.mark.parametrize("block", blocks("json"), ids=named)
def test_json_lines_are_json(block: Block) -> None:
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


@pytest.mark.parametrize(("where", "arguments"), commands())
def test_commands_parse(where: str, arguments: list[str]) -> None:
    """The subcommand exists, its options are known, and every override is a setting with a valid
    value."""
    import typer

    from tunesmith.cli.main import app

    subcommands: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009
    assert arguments[0] in subcommands, where
    parsed = subcommands[arguments[0]].make_context(arguments[0], list(arguments[1:])).params
    for text in parsed.get("overrides") or ():
        (section, *key), value = parse_override(text)
        fields = {**GenerateConfig.model_fields, **RFTConfig.model_fields, **RLConfig.model_fields}
        assert section in fields, f"{where}: {text}"
        if key:
            kind: Any = fields[section].annotation
            for part in reversed(key[1:]):
                value = {part: value}
            kind.model_validate({**required(kind), key[0]: value})


def required(section: type[Section]) -> dict[str, Any]:
    return {name: "x" for name, field in section.model_fields.items() if field.is_required()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    # README.md links by address: PyPI shows it too, where relative links lead nowhere.
    for target in links(document):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{document.name} links to {target}"


def test_the_index_leads_to_every_page() -> None:
    """By links, for readers of the repository, and by the menu of the site."""
    index = ROOT / "docs" / "index.md"
    pages = {path.stem for path in index.parent.glob("*.md")} - {"index"}
    menu = re.findall(r"^([\w-]+)$", index.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(pages)
    assert {Path(target).stem.lower() for target in links(index)} == pages


def test_every_setting_is_documented_as_it_is() -> None:
    tables = key_tables(ROOT / "docs" / "configuration.md")
    sections: dict[str, type[Section]] = {
        "A source": Source,
        "A reward model": ModelReward,
        "A remote reward": RemoteReward,
        "A judge": JudgeReward,
        "A criterion": Criterion,
    }
    for name, field in RLConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            sections[f"[{name}]"] = field.annotation
            sections |= {
                f"[{name}.{key}]": inner for key, inner in tables_in(field.annotation).items()
            }
    assert set(tables) == {*sections, "Top level"}
    assert [row.key for row in tables["Top level"]] == ["run_dir"]
    for heading, section in sections.items():
        inner = tables_in(section)
        assert [row.key for row in tables[heading]] == [
            k for k in section.model_fields if k not in inner
        ], heading
        for row in tables[heading]:
            check_row(heading, row, section)


def tables_in(section: type[Section]) -> dict[str, type[Section]]:
    """Tables of plain values inside a section."""

    def sections(of: type[Section]) -> dict[str, type[Section]]:
        kinds = {key: field.annotation for key, field in of.model_fields.items()}
        tables = {
            key: kind
            for key, kind in kinds.items()
            if isinstance(kind, type) and issubclass(kind, Section)
        }
        return {key: kind for key, kind in tables.items() if not issubclass(kind, Choice)}

    return {key: inner for key, inner in sections(section).items() if not sections(inner)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_tables_are_the_registries(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python -m tests.support.docs_tables"


def test_the_reading_path_is_the_order_of_calls() -> None:
    """Each function of docs/architecture.md's first table is in its file and names the next one."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    path = re.findall(r"^\| `([\w.]+)` \| \[`([\w/]+\.py)`\]", page, re.MULTILINE)
    assert (
        path[0] == ("rl", "cli/train.py")
        and ("run", "run/loop/rl.py") in path
        and path[-1][1] == "learn/algorithms/losses.py"
    )
    for (function, file), (called, next_file) in pairwise(path):
        # an objective or a loss is called as an object: objective(...), self.loss(...)
        name = (
            next_file.rpartition("/")[2]
            if called.endswith("__call__")
            else called.rpartition(".")[2]
        )
        found = names_in(file, function)
        assert name in found or any(
            name.startswith(n) for n in found if n in ("objective", "loss")
        ), called
    names_in(path[-1][1], path[-1][0])


def names_in(file: str, function: str) -> set[str]:
    """Names, attributes and texts in the body of a function, such as ``update`` or
    ``Learner.update``."""
    node: ast.AST = ast.parse((ROOT / "src" / "tunesmith" / file).read_text(encoding="utf-8"))
    for part in function.split("."):
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part)
    used = (
        getattr(n, "id", None) or getattr(n, "attr", None) or getattr(n, "value", None)
        for n in ast.walk(node)
    )
    return {text for text in used if isinstance(text, str)}


def test_only_the_listed_files_ask_for_an_engine_by_name() -> None:
    """Others ask for a property of ``EngineKind``, so that a new engine misses none of them."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = set(
        re.findall(
            r"`([\w/]+\.(?:py|toml))`", page.partition("### A new engine")[2].partition("\n## ")[0]
        )
    )
    name = f"[\"']({'|'.join(engine_kinds())})[\"']"
    code = (
        rf"\bengine(_kind|\.name)?\b *(==|!=|(not )?in) *[(\[{{]?{name}|[\"']engine[\"']: *{name}"
    )
    package = ROOT / "src" / "tunesmith"
    asking = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(code, path.read_text(encoding="utf-8"))
    }
    assert {
        "plan/rules/vllm.py",
        "plan/rules/engines.py",
        "records/doctor/speed.py",
    } <= asking
    assert asking <= listed


def test_documents_name_no_place_of_one_machine() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert "/tmp/" not in text and "/work/" not in text and "/home/" not in text, document.name


def test_every_built_in_reward_has_its_row() -> None:
    from tunesmith.learn.rewards.loading import NAMES

    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = page.split("## Built-in rewards", 1)[1].split("\n\n", 2)[1]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(NAMES)
