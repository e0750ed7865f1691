"""``tunesmith migrate`` follows the data of a Python script: what it trains and evaluates on."""

from __future__ import annotations

import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import SUPPORT
from tunesmith.errors import ConfigError
from tunesmith.guide.migrate.convert import Migration, convert
from tunesmith.guide.migrate.read import read_source, read_text
from tunesmith.guide.migrate.settle import settle
from tunesmith.guide.migrate.write import account, run_file

SCRIPTS: list[dict[str, Any]] = tomllib.loads(
    (SUPPORT / "foreign" / "data_sets.toml").read_text(encoding="utf-8")
)["script"]


def migrated(text: str, name: str = "train.py") -> Migration:
    """The migration of the last program in a script."""
    migration = convert(read_text(text, Path(name), {})[-1])
    for problem in settle(migration):
        assert problem.kind == "machine", problem
    return migration


def written(migration: Migration, key: str) -> Any:
    """What the run file says about a key; None if a person has to."""
    entry = migration.entries.get(key)
    return None if entry is None or entry.value == "DATA" else entry.value


def test_there_are_many_public_scripts() -> None:
    assert len(SCRIPTS) >= 45 and len({script["name"] for script in SCRIPTS}) == len(SCRIPTS)
    assert (
        sum("train" in script for script in SCRIPTS) > 35
        and sum("eval" in script for script in SCRIPTS) > 15
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script["name"])
def test_public_scripts_train_and_evaluate_on_what_they_say(script: dict[str, Any]) -> None:
    migration = migrated(script["text"])
    assert written(migration, "data.train") == script.get("train")
    assert written(migration, "data.eval") == script.get("eval")
    assert written(migration, "data.map") == script.get("map")
    steps = [row for row in migration.rows if ".dataset." in row.given.name]
    assert [row.given.name.rpartition(".")[2] for row in steps] == script.get(
        "steps", ["map"] if "map" in script else []
    )
    assert all(row.given.line and row.given.text in "\n".join(account(migration)) for row in steps)
    by_hand = [row.given.name for row in migration.rows if row.kind in ("by hand", "computed")]
    asked = {
        name.removesuffix("_dataset")
        for name in by_hand
        if name in ("train_dataset", "eval_dataset")
    }
    assert asked == set(script.get("asked", ()))
    if "train" not in script:
        assert 'train = "DATA"' in run_file(migration, "train.py")


IMPORTS = "import argparse\nfrom dataclasses import dataclass\nfrom datasets import DatasetDict, load_dataset\n"
LOADED = {
    "each": 'a = load_dataset("openai/gsm8k", "main", split="train")\n'
    'b = load_dataset("openai/gsm8k", name="main", split="test[:200]")\n',
    "dictionary": 'd = load_dataset("openai/gsm8k", "main")\na, b = d["train"], d["test"].select(range(200))\n',
    "list": 'a, b = load_dataset("openai/gsm8k", "main", split=["train", "test[:200]"])\n',
    "function": "def get(split, n=None):\n    d = load_dataset('openai/gsm8k', 'main', split=split)\n"
    "    return d.take(n) if n else d\na, b = get('train'), get('test', n=200)\n",
    "splits": 'd = load_dataset("openai/gsm8k", "main")\n'
    'd = DatasetDict({"x": d["train"], "y": d["test"].select(list(range(200)))})\na, b = d["x"], d["y"]\n',
    "loop": 'd = load_dataset("openai/gsm8k", "main")\nfor k in ["train", "test"]:\n'
    '    d[k] = d[k].shuffle(seed=1)\na, b = d["train"], d["test"].select(range(min(200, len(d["test"]))))\n',
    "argparse": "p = argparse.ArgumentParser()\np.add_argument('--data', default='openai/gsm8k')\n"
    "p.add_argument('-n', '--test-rows', type=int, default=200)\nopts, _ = p.parse_known_args()\n"
    "a = load_dataset(opts.data, 'main', split='train')\n"
    "b = load_dataset(opts.data, 'main', split=f'test[:{opts.test_rows}]')\n",
    "dataclass": "@dataclass\nclass Config:\n    data: str = 'openai/gsm8k'\n    rows: int = 100\n"
    "c = Config(rows=200)\n"
    "a = load_dataset(c.data, 'main')['train']\n"
    "b = load_dataset(c.data, 'main')['test'].select(range(c.rows))\n",
    "class": "class Rows:\n    name = 'openai/gsm8k'\n    def __init__(self, n):\n"
    "        d = load_dataset(self.name, 'main')\n        self.a = d['train']\n"
    "        self.b = self.cut(d['test'], n)\n"
    "    def cut(self, rows, n):\n        return rows.select(range(n))\nr = Rows(200)\na, b = r.a, r.b\n",
}
PASSED = {
    "keywords": "{trainer}(model='org/m', args={config}, train_dataset=a, eval_dataset=b)\n",
    "positions": "{trainer}({places})\n",
    "dictionary": "words = dict(train_dataset=a, eval_dataset=b)\n{trainer}(model='org/m', args={config}, **words)\n",
    "function": "def main(rows, held_out):\n    t = {trainer}('org/m', args={config}, train_dataset=rows,\n"
    "        eval_dataset=held_out)\n    t.train()\nif __name__ == '__main__':\n    main(a, b)\n",
    "subclass": "class Mine({trainer}):\n    def log(self, *args):\n        pass\n"
    "Mine(model='org/m', args={config}, train_dataset=a, eval_dataset=b)\n",
}
TRAINERS = {
    "SFT": "'org/m', {config}, None, a, b",
    "GRPO": "'org/m', None, {config}, a, b",
    "DPO": "'org/m', None, {config}, None, a, b",
}


@pytest.mark.parametrize(
    ("loaded", "passed", "trainer"), list(itertools.product(LOADED, PASSED, TRAINERS))
)
def test_the_data_is_the_same_however_it_is_loaded_and_passed(
    loaded: str, passed: str, trainer: str
) -> None:
    config = f"{trainer}Config(output_dir='o')"
    made = PASSED[passed].format(
        trainer=f"{trainer}Trainer", config=config, places=TRAINERS[trainer].format(config=config)
    )
    text = f"{IMPORTS}from trl import {trainer}Config, {trainer}Trainer\n{LOADED[loaded]}{made}"
    [launch] = read_text(text, Path("train.py"), {})
    entries = convert(launch).entries
    assert entries["data.train"].value == {"path": "openai/gsm8k", "subset": "main"}
    assert entries["data.eval"].value == {
        "path": "openai/gsm8k",
        "split": "test[:200]",
        "subset": "main",
    }
    assert entries["model.path"].value == "org/m"


def script(lines: str) -> str:
    head = "from datasets import *\nfrom trl import SFTConfig, SFTTrainer\n"
    return f"{head}{lines}\nSFTTrainer('org/m', SFTConfig(output_dir='o'), train_dataset=a, eval_dataset=b)\n"


OVERLAPPING = {
    "the same": "a = b = load_dataset('org/d', split='train')",
    "a part": "a = load_dataset('org/d', split='train')\nb = a.select(range(100))",
    "shares": "a = load_dataset('org/d', split='train[:90%]')\nb = load_dataset('org/d', split='train[85%:]')",
    "shares and rows": "a = load_dataset('org/d', split='train[:90%]')\n"
    "b = load_dataset('org/d', split='train[-5000:]')",
    "two files": "a = load_dataset('json', data_files=['x.json', 'y.json'], split='train')\n"
    "b = load_dataset('json', data_files='y.json', split='train')",
    "filters": "d = load_dataset('org/d', split='train')\na = d.filter(lambda r: r['fold'])\n"
    "b = d.filter(lambda r: not r['fold'])",
    "joined": "d = load_dataset('org/d')\na = concatenate_datasets([d['train'], d['test']])\nb = d['test']",
    "a split": "a = load_dataset('org/d', split='train+test')\nb = load_dataset('org/d', split='test')",
}


@pytest.mark.parametrize("lines", OVERLAPPING.values(), ids=OVERLAPPING)
def test_no_run_file_trains_on_what_the_source_evaluates_on(lines: str) -> None:
    with pytest.raises(
        ConfigError, match=r"train_dataset=a \(line \d+\) and eval_dataset=b \(line \d+\)"
    ):
        migrated(script(lines))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.sh",
            "python -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=[b.parquet,a.parquet]",
        ),
        ("run.sh", "trl sft --dataset_name org/d --dataset_test_split train --eval_strategy steps"),
        ("run.sh", "python -m openrlhf.cli.train_sft --data.dataset org/d --eval.dataset org/d"),
        (
            "sft.yaml",
            "dataset_name: org/d\ndataset_train_split: test\ndataset_test_split: test\neval_strategy: steps\n",
        ),
    ],
)
def test_neither_does_one_of_another_source(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="evaluates on"):
        migrated(text, name)


UNKNOWN = {
    "a computed name": "a = load_dataset(chosen(), split='train')",
    "a computed split": "a = load_dataset('org/d', split=chosen())",
    "files by a pattern": "a = load_dataset('json', data_files='learn/data/*.json', split='train')",
    "files on the hub": "a = load_dataset('org/d', data_files='x.json', split='train')",
    "a condition": "if chosen():\n    a = load_dataset('org/d', split='train')\n"
    "else:\n    a = load_dataset('org/e', split='train')",
    "no split": "a = load_dataset('org/d')",
    "indices": "a = load_dataset('org/d', split='train').select(chosen())",
    "a list": "a = Dataset.from_list([{'text': 'x'}])",
    "a part of a filtered one": "a = load_dataset('org/d', split='train').filter(chosen).select(range(10))",
    "an imported function": "from mine import load\na = load('train')",
    "another kind of file": "a = load_dataset('text', data_files='a.txt', split='train')",
    "a shard": "a = load_dataset('org/d', split='train').shard(4, 0)",
    "words that are updated": "w = {'path': 'org/d', 'split': 'train'}\nw.update(chosen())\na = load_dataset(**w)",
    "words under a condition": "w = {'path': 'org/d', 'split': 'train'}\nif chosen():\n    w['split'] = 'test'\n"
    "a = load_dataset(**w)",
    "a recursive function": "def f(n):\n    return f(n)\na = f(1)",
}


@pytest.mark.parametrize("lines", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_followed_is_asked_with_its_line(lines: str) -> None:
    migration = migrated(script(f"b = None\n{lines}"))
    assert written(migration, "data.train") is None
    [row] = [row for row in migration.rows if row.given.name == "train_dataset"]
    assert row.kind in ("computed", "by hand") and row.given.line == len(lines.splitlines()) + 4
    assert "train_dataset=a (line" in run_file(migration, "train.py")


FILES = {
    "one": ("load_dataset('json', data_files='a.jsonl', split='train')", "a.jsonl"),
    "several": (
        "load_dataset('csv', data_files=['a.csv', 'b.csv'], split='train')",
        ["a.csv", "b.csv"],
    ),
    "by split": (
        "load_dataset('parquet', data_files={'train': 'a.parquet', 'test': 'b.parquet'})['train']",
        "a.parquet",
    ),
    "in a folder": (
        "load_dataset('json', data_dir='rows', data_files='a.json')['train']",
        "rows/a.json",
    ),
    "a folder": ("load_dataset('json', data_dir='rows', split='train')", "rows"),
    "a part": (
        "load_dataset('json', data_files='a.jsonl', split='train[10:20]')",
        {"path": "a.jsonl", "split": "train[10:20]"},
    ),
    "of a data set": ("Dataset.from_json('a.jsonl')", "a.jsonl"),
    "saved": ("load_from_disk('saved')", "saved"),
    "saved splits": ("load_from_disk('saved')['dev']", {"path": "saved", "split": "dev"}),
    "weighted": (
        "interleave_datasets([load_dataset('o/a', split='train'), load_dataset('o/b', split='train')], [0.25, 0.75])",
        [{"path": "o/a", "weight": 0.25}, {"path": "o/b", "weight": 0.75}],
    ),
}


@pytest.mark.parametrize(("call", "train"), FILES.values(), ids=FILES)
def test_files_are_named(call: str, train: Any) -> None:
    assert written(migrated(script(f"b = None\na = {call}")), "data.train") == train


def test_a_reward_that_trl_ships_is_ours() -> None:
    text = (
        "from trl import GRPOConfig, GRPOTrainer\nfrom trl.rewards import accuracy_reward, think_format_reward\n"
        "GRPOTrainer('org/m', [{rewards}], GRPOConfig(output_dir='o'), train_dataset='x')\n"
    )
    migration = migrated(text.format(rewards="accuracy_reward"))
    assert migration.entries["reward.functions"].value == ["math"]
    assert migration.entries["reward.answer"].value == "solution"
    [row] = [
        row
        for row in migrated(text.format(rewards="accuracy_reward, think_format_reward")).rows
        if row.given.name == "reward_funcs"
    ]
    assert row.kind == "by hand" and "think_format_reward" in row.text


def test_two_trainers_of_a_script_are_two_programs() -> None:
    text = (
        "from trl import *\nfrom datasets import load_dataset\nsft = SFTConfig(output_dir='a', learning_rate=1e-5)\n"
        "SFTTrainer('org/m', sft, train_dataset=load_dataset('org/a', split='train'))\n"
        "dpo = DPOConfig(output_dir='b', learning_rate=1e-6)\n"
        "DPOTrainer('a', args=dpo, train_dataset=load_dataset('org/b', split='train'))\n"
    )
    first, second = (convert(launch) for launch in read_text(text, Path("both.py"), {}))
    assert (first.command, first.entries["data.train"].value, first.entries["train.lr"].value) == (
        "sft",
        "org/a",
        1e-5,
    )
    assert (
        second.command,
        second.entries["data.train"].value,
        second.entries["train.lr"].value,
    ) == (
        "dpo",
        "org/b",
        1e-6,
    )
    assert second.entries["model.path"].value == "a"


def test_a_cell_that_is_no_python_is_passed_over() -> None:

    code = script("a = load_dataset('org/d', split='train')\nb = None")
    cells = ["!pip install \\\n  trl \\\n  datasets", "%%bash\nls", "this is not python", code]
    text = json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]})
    assert written(migrated(text, "sft.ipynb"), "data.train") == "org/d"


ENDLESS = {
    "text that doubles": "x = 'a'\n" + "x = x + x\n" * 60,
    "text in text": "x = 'a'\n" + "x = f'{x}{x}'\n" * 60,
    "numbers": "x = 10\n" + "x = x * x\n" * 60,
    "lists": "x = [1]\n" + "x = x + x\n" * 60,
    "ranges": "x = list(range(10 ** 12))\ny = sorted(range(10 ** 12))",
    "branches": "\n".join("if q():\n    x = 1\nelse:\n    x = 2" for _ in range(200)),
    "loops": "for i in range(10):\n for j in range(10):\n  for k in range(10):\n   for l in range(10):\n    x = 1",
    "brackets": "x = " + "(" * 150 + ")" * 150,
}


@pytest.mark.parametrize("lines", ENDLESS.values(), ids=ENDLESS)
def test_a_script_without_end_is_read_to_the_end(lines: str) -> None:
    migration = migrated(script(f"b = None\na = load_dataset('org/d', split='train')\n{lines}"))
    assert migration.entries["train.lr"].value == 2e-5


def test_a_script_that_calls_itself_without_end_is_refused() -> None:
    doubling = [
        "def f0(): return 1",
        *(f"def f{n}(): return f{n - 1}(), f{n - 1}()" for n in range(1, 40)),
        "f39()",
    ]
    with pytest.raises(ConfigError, match="too often"):
        migrated(script("a = b = None\n" + "\n".join(doubling)))


def test_a_command_s_options_and_its_file_are_the_script_s_defaults(tmp_path: Path) -> None:
    (tmp_path / "learn.py").write_text(
        "from dataclasses import dataclass\nfrom datasets import load_dataset\n"
        "from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser\n"
        "@dataclass\nclass Rows:\n    rows_name: str = 'org/default'\n    rows_split: str = 'train'\n"
        "model, rows, args = TrlParser((ModelConfig, Rows, GRPOConfig)).parse_args_and_config()\n"
        "data = load_dataset(rows.rows_name, split=rows.rows_split)\n"
        "GRPOTrainer(model=model.model_name_or_path, reward_funcs=[f], args=args, train_dataset=data)\n"
    )
    (tmp_path / "recipe.yaml").write_text(
        "model_name_or_path: org/m\nrows_name: org/mine\nlearning_rate: 3.0e-6\n"
    )
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 2 learn.py --config recipe.yaml --rows_split train[:1%]\n"
    )
    [launch] = read_source(tmp_path / "run.sh", {})
    entries = convert(launch).entries
    assert entries["data.train"].value == {"path": "org/mine", "split": "train[:1%]"}
    assert entries["model.path"].value == "org/m" and entries["train.lr"].value == 3e-6
    assert launch.devices == 2
