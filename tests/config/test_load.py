"""Run files and overrides: what is read, where things are found, and what people are told."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.config.commands import (
    KINDS,
    DistillConfig,
    DPOConfig,
    GenerateConfig,
    OutputSection,
    RFTConfig,
    all_keys,
)
from tunesmith.config.load import find_kind, load_config, read_tree
from tunesmith.config.objects import load_function
from tunesmith.config.presets import find_preset
from tunesmith.config.reading.overriding import parse_override
from tunesmith.config.reading.problems import key_lines, line_of
from tunesmith.config.resolved import settings as resolved_settings
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.config.values import format_size, parse_size
from tunesmith.errors import ConfigError
from tunesmith.guide.names import foreign
from tunesmith.guide.names.foreign import meanings_of, synonyms
from tunesmith.guide.names.unknown import explain_unknown
from tunesmith.plan.rules.checks import check
from tunesmith.records.text import shown_from, shown_path
from tunesmith.records.toml import toml_key, toml_value

NESTED: list[Any] = []
NESTED.append(NESTED)
RUN = """\
[model]
path = "org/model"

[data]
train = "train.jsonl"

[reward]
functions = ["rewards.py:correct"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file with its data and reward; the working directory is another, empty one."""
    here = tmp_path / "project"
    (tmp_path / "elsewhere").mkdir()
    here.mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (here / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    (here / "rewards.py").write_text(
        "def correct(completions, **kw):\n    return [1.0] * len(completions)\n"
    )
    (here / "run.toml").write_text(RUN)
    return here


def load(folder: Path, *overrides: str, more: str = "") -> RLConfig:
    (folder / "run.toml").write_text(RUN + more)
    return load_config(RLConfig, folder / "run.toml", overrides)


def refused(folder: Path, *overrides: str, more: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides, more=more)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_minimal_file_loads_and_its_paths_are_found_beside_it(folder: Path) -> None:
    config = load(folder)
    assert config.data.train == str(folder / "train.jsonl")
    assert config.reward.functions == (f"{folder / 'rewards.py'}:correct",)
    assert config.model.path == "org/model", "a hub name stays one"
    assert config.rollout.group_size == 8


def test_the_working_directory_is_second_for_files_and_first_for_overrides(folder: Path) -> None:
    for name in ("train.jsonl", "own.jsonl"):
        Path(name).write_text("{}\n")
    assert load(folder).data.train == str(folder / "train.jsonl")
    assert load(folder, "data.train=train.jsonl").data.train == str(Path("train.jsonl").absolute())
    mixed = load(folder, 'data.train=["own.jsonl", {path = "train.jsonl", weight = 2}]').data.train
    assert mixed[0] == str(Path("own.jsonl").absolute())  # type: ignore[index]
    assert mixed[1].path == str(Path("train.jsonl").absolute())  # type: ignore[index,union-attr]


def test_files_of_rejection_sampling_are_found_beside_the_run_file(folder: Path) -> None:
    (folder / "large").mkdir()
    (folder / "large/config.json").write_text("{}")
    (folder / "samples.jsonl").write_text("{}\n")
    more = '[rft]\nsampler = "large"\nanswers = "samples.jsonl"\n'
    (folder / "run.toml").write_text(RUN + more + '[system]\nengine_directory = "shared"\n')
    found = load_config(RFTConfig, folder / "run.toml")
    assert found.rft.sampler == str(folder / "large")
    assert found.rft.answers == folder / "samples.jsonl"
    assert found.system.engine_directory == Path("shared").absolute(), "a run makes it"
    (folder / "shared").mkdir()
    found = load_config(RFTConfig, folder / "run.toml", ["rft.answers=none"])
    assert found.system.engine_directory == folder / "shared"
    with pytest.raises(ConfigError, match=r"rft\.answers: sample\.jsonl does not exist"):
        load_config(RFTConfig, folder / "run.toml", ["rft.answers=sample.jsonl"])


def test_a_command_may_be_text_or_words_and_other_single_values_are_lists(folder: Path) -> None:
    text = load(folder, 'environment.command=agent "a b"', "environment.verify=[ -e done ]")
    assert text.environment.command == ("agent", "a b")
    assert text.environment.verify == ("[", "-e", "done", "]")
    words = load(folder, 'environment.command=["agent", "a b"]', "rollout.stop=Q:")
    assert (words.environment.command, words.rollout.stop) == (("agent", "a b"), ("Q:",))


@pytest.mark.parametrize("key", ["data.train", "rollout.stop"])
def test_a_list_whose_quotes_a_shell_took_is_answered_with_them(folder: Path, key: str) -> None:
    message = refused(folder, f"{key}=[a.jsonl, b.jsonl]")
    assert f"{key} is [a.jsonl, b.jsonl]" in message
    assert f'\'{key}=["a.jsonl", "b.jsonl"]\'' in message


def test_a_preset_file_that_was_edited_is_read_again(folder: Path) -> None:
    for loss in ("sapo", "ppo"):
        (folder / "mine.toml").write_text(f'advantage = "grpo"\nloss = "{loss}"\n')
        found = load(folder, more='[algorithm]\nname = "mine.toml"\n')
        assert find_preset(found.algorithm.name).settings["loss"] == loss


def test_run_dir_is_below_the_working_directory(folder: Path) -> None:
    assert load(folder, "run_dir=out/a").run_dir == Path.cwd() / "out" / "a"


def test_overrides_win_and_are_typed(folder: Path) -> None:
    config = load(
        folder,
        "train.lr=1e-6",
        "rollout.group_size=16",
        "system.share_prompts=False",
        "data.system_prompt=Answer briefly.",
        "rollout.stop=['\\n', 'Q:']",
        "train.max_grad_norm=0",
        more="[train]\nlr = 0.5\n",
    )
    assert config.train.lr == 1e-6
    assert config.rollout.group_size == 16
    assert config.system.share_prompts is False
    assert config.data.system_prompt == "Answer briefly."
    assert config.rollout.stop == ("\\n", "Q:"), "single quotes are literal in TOML"
    assert config.train.max_grad_norm == 0.0


def test_everything_may_come_from_overrides(folder: Path) -> None:
    overrides = [
        "model.path=org/m",
        f"data.train={folder / 'train.jsonl'}",
        'reward.functions=["math"]',
    ]
    assert load_config(RLConfig, None, overrides).reward.functions == ("math",)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("a.b=1", ("a", "b"), 1),
        ("a=1e-6", ("a",), 1e-6),
        ("a = true", ("a",), True),
        ("a=True", ("a",), True),
        ("a=text with = sign", ("a",), "text with = sign"),
        ('a="quoted"', ("a",), "quoted"),
        ("a=[1, 2]", ("a",), [1, 2]),
        ("a=2024-01-01", ("a",), "2024-01-01"),
        ("a=", ("a",), ""),
        ("a=1\nb=2", ("a",), "1\nb=2"),
    ],
)
def test_override_values(text: str, key: tuple[str, ...], value: Any) -> None:
    assert parse_override(text) == (key, value)


def test_values_of_a_program_are_taken_as_they_are(folder: Path) -> None:
    own = [
        ("model.path", Path("org/m")),
        ("data.train", folder / "train.jsonl"),
        ("reward.functions", ("math",)),
        ("rollout", {"group_size": np.int64(16), "top_k": None, "stop": ["none"]}),
        ("train.lr", np.float64(0.5)),
        ("data.system_prompt", "none"),
        ("monitor.run_name", "1"),
    ]
    config = load_config(RLConfig, None, [*own, "rollout.top_p=0.5"])
    assert (config.rollout.group_size, config.rollout.top_p) == (16, 0.5)
    assert config.rollout.stop == ("none",)
    assert (config.train.lr, config.data.system_prompt) == (0.5, "none")
    assert config.monitor.run_name == "1"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.lr", object(), ("train.lr", "object")),
        ("train.lr", Decimal(1), ("train.lr", "Decimal")),
        ("train.lr", [None], ("train.lr", "list")),
        ("rollout.stop", NESTED, ("rollout.stop", "nested too deeply")),
        ("train.lr", "True", ("train.lr", "'train.lr=\"True\"'")),
        ("train..lr", 1, ("train..lr=1", "is not an override")),
        ("train.lrr", 1, ("train.lrr", "'lr'")),
    ],
)
def test_values_of_a_program_that_no_setting_takes(
    key: str, value: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SFTConfig, None, ["model.path=o/m", "data.train=o/d", (key, value)])
    assert all(word in str(caught.value) for word in words)


def test_words_for_our_keys_are_words_for_keys_that_there_are() -> None:
    keys = {key for kind in KINDS.values() for key in all_keys(kind, tables=True)}
    for section in {key.partition(".")[0] for key in keys}:
        assert not meanings_of(f"{section}.no_such_word")[1], (
            f"another framework's names swallow all of [{section}]"
        )
    table = tomllib.loads(
        Path(foreign.__file__).with_name("synonyms.toml").read_text(encoding="utf-8")
    )
    assert table.keys() <= keys
    for key, words in table.items():
        for word in words.split():
            name = f"{key.partition('.')[0]}.{word}"
            assert name not in keys and key in synonyms(name)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('system.engine="tgi"', ("'vllm'", "TGI takes", "token ids", '"sglang"')),
        ('system.compile="reduce-overhead"', ("'max-autotune'", "CUDA graph", 'Write "default"')),
    ],
)
def test_values_known_from_elsewhere_are_refused_with_the_reason(
    said: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(RLConfig, None, [said], files=False)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize("text", ["train.lr", "=1", "a..b=1", "--lr 5"])
def test_what_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an override"):
        parse_override(text)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("[train]\nlearning_rat = 1\n", "run.toml, line 10: unknown key train.learning_rat"),
        ("[trian]\n", "line 9: unknown key trian. Did you mean 'train'?"),
        ("[train]\nstep = 5\n", "unknown key train.step. Did you mean 'steps'?"),
        (
            "[train]\ngroup_size = 5\n",
            "unknown key train.group_size; did you mean rollout.group_size?",
        ),
        ("[eval]\ninitial = true\n", "unknown key eval.initial; did you mean eval.at_start?"),
        (
            "[critic]\nlearning_rate = 1\n",
            "unknown key critic.learning_rate; did you mean critic.lr?",
        ),
        ("[train]\nsteps = 0\n", "train.steps is 0; it must be a whole number above 0."),
        ("[train]\nsteps = 1.5\n", "train.steps is 1.5; it must be a whole number above 0."),
        ('[train]\nlr = "1e-4"\n', "a number above 0. Write 1e-4 without quotes."),
        ('[train]\nlr = ".5"\n', "a number above 0. Write 0.5 without quotes."),
        ("[train]\nlr = inf\n", "train.lr is Infinity; it must be a number above 0."),
        ("[train]\nlr = true\n", "train.lr is true; it must be a number above 0."),
        (
            '[train]\nschedule = "cosin"\n',
            "one of 'constant', 'linear', 'cosine'. Did you mean 'cosine'?",
        ),
        ("[train]\nbetas = [0.9]\n", "train.betas is [0.9]; it must be a list of 2"),
        ('[rollout]\nstop = ["x", ""]\n', "rollout.stop[1]: it is empty"),
        (
            "[train]\nbetas = [0.9, 1.0]\n",
            "train.betas[1] is 1.0; it must be a number of at least 0 and below 1.",
        ),
        (
            "[train]\nmax_grad_norm = -1\n",
            "train.max_grad_norm is -1; it must be a number above 0, or 0 for",
        ),
        ("[rollout]\ntop_p = 1.5\n", "it must be a number above 0 and of at most 1."),
        (
            '[system]\nshare_prompts = "true"\n',
            "it must be true or false. Write true without quotes.",
        ),
        ('[system]\nkv_memory = "5 apples"\n', "system.kv_memory: '5 apples' is not a size"),
        (f'[system]\nkv_memory = "{"9" * 400}GB"\n', "is not a size"),
        ("[system]\nkv_memory = 5\n", "system.kv_memory is 5; it must be a size such as '512MB'"),
        (
            '[monitor]\nsinks = "tensorbord"\n',
            "there is no sink 'tensorbord'. Did you mean 'tensorboard'?",
        ),
        (
            "[algorithm]\ncliprange = 0.2\n",
            "is called algorithm.loss.clip_low and algorithm.loss.clip_high here",
        ),
        (
            "[train]\nmicro_batch_size = 4\n",
            "there is no train.micro_batch_size: micro-batches are derived",
        ),
    ],
)
def test_problems_are_told_in_peoples_words(folder: Path, more: str, told: str) -> None:
    message = refused(folder, more=more)
    assert told in message
    assert "pydantic" not in message
    assert "validation error" not in message


@pytest.mark.parametrize(
    ("kind", "path", "told"),
    [
        (GenerateConfig, "output.n", "; did you mean sampling.n?"),
        (GenerateConfig, "path", "; did you mean model.path or lora.path?"),
        (DistillConfig, "teacher.top_k", "; did you mean distill.top_k?"),
        (DistillConfig, "distill.path", "; did you mean teacher.path?"),
        (DistillConfig, "algorithm.top_k", "; did you mean rollout.top_k?"),
        (RLConfig, "lora.target", ". Did you mean 'targets'?"),
        (RLConfig, "algorithm.target", "; did you mean algorithm.kl.target?"),
        (
            RLConfig,
            "trian.every",
            "; did you mean eval.every or monitor.every or checkpoint.every?",
        ),
    ],
)
def test_an_unknown_key_is_answered_from_its_section_first(
    kind: type[RunConfig], path: str, told: str
) -> None:
    (problem,) = explain_unknown(kind, tuple(path.split(".")), 1)
    assert problem.text == f"unknown key {path}{told}"


def test_where_several_other_sections_have_a_key_the_valid_ones_come_first() -> None:
    (problem,) = explain_unknown(GenerateConfig, ("output", "path"), "answers.jsonl")
    valid, similar = problem.text.split(" Similar: ")
    assert (
        valid == f"unknown key output.path. Valid: {', '.join(sorted(OutputSection.model_fields))}."
    )
    assert similar == "model.path, lora.path."


def test_data_of_no_source_is_refused(folder: Path) -> None:
    for key in ("train", "eval"):
        assert f"data.{key} is []; it must be" in refused(folder, f"data.{key}=[]")
    assert "or a list of one or more, each item text in quotes" in refused(folder, "data.train=[]")


def test_a_key_below_which_something_was_said_has_that_override_as_its_place(folder: Path) -> None:
    assert refused(folder, "environment.path.a.b=c").startswith(
        "override 'environment.path.a.b=c': environment.path"
    )
    assert refused(folder, "reward.x.y=1", more="[rollout]\n").startswith(
        "override 'reward.x.y=1': unknown key reward.x"
    )
    assert "line 7: unknown key" not in refused(folder, "reward.x.y=1")


def test_a_section_that_is_no_table(folder: Path) -> None:
    assert "override 'train=3': train is 3; it must be a table" in refused(folder, "train=3")
    assert "so it has no key y" in refused(folder, "train.steps.y=3", more="[train]\nsteps = 5\n")


def test_all_problems_are_listed_at_once_in_the_order_of_the_file(folder: Path) -> None:
    message = refused(
        folder,
        "rollout.temprature=1",
        more="[train]\nlr = -1\nstps = 3\n[rollout]\nnum_generations = 4\n",
    )
    lines = message.splitlines()
    assert lines[0].endswith("run.toml has 4 problems:")
    assert lines[1].strip() == "line 10: train.lr is -1; it must be a number above 0."
    assert lines[2].strip().startswith("line 11: unknown key train.stps.")
    assert lines[3].strip() == "line 13: rollout.num_generations is called rollout.group_size here."
    assert (
        lines[4]
        .strip()
        .startswith("override 'rollout.temprature=1': unknown key rollout.temprature.")
    )


def test_a_problem_inside_a_union_names_its_place_only(folder: Path) -> None:
    (folder / "run.toml").write_text(
        RUN.replace(
            'train = "train.jsonl"',
            'train = [\n  "train.jsonl",\n  {path = "train.jsonl", weight = -1},\n]',
        )
    )
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, folder / "run.toml", [])
    assert str(caught.value).endswith(
        "line 5: data.train[1].weight is -1; it must be a number above 0."
    )


def test_unknown_keys_of_a_source(folder: Path) -> None:
    message = refused(folder, 'data.eval={path="train.jsonl", wight=1}')
    assert message == (
        "override 'data.eval={path=\"train.jsonl\", wight=1}': unknown key data.eval.wight. "
        "Did you mean 'weight'?"
    )


def test_missing_sections(folder: Path) -> None:
    (folder / "run.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, folder / "run.toml", [])
    assert "model is missing" in str(caught.value)
    assert "data is missing" in str(caught.value)


def test_a_reward_has_no_meaning_for_supervised_training(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"line 7: \[reward\] has no meaning in a run file of tunesmith sft"
    ):
        load_config(SFTConfig, folder / "run.toml", [])
    with pytest.raises(
        ConfigError,
        match=(
            r"'algorithm.name=ppo': \[algorithm\] has no meaning in a run file of tunesmith "
            r"generate"
        ),
    ):
        load_config(GenerateConfig, folder / "run.toml", ["algorithm.name=ppo"])
    assert find_kind(folder / "run.toml") is RLConfig
    (folder / "run.toml").write_text('[model]\npath = "x"\n[data]\ntrain = "t"\n')
    assert find_kind(folder / "run.toml") is SFTConfig
    assert find_kind(folder / "run.toml", ["dpo.beta=0.1", "rollout.group_size=4"]) is DPOConfig
    (folder / "run.toml").write_text('[model]\npath = "x"\n[data]\ntrain = "t"\n[rewards]\n')
    assert find_kind(folder / "run.toml") is RLConfig, "a misspelt section tells the command, too"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[model\n", "run.toml, line 1, column 7: not valid TOML"),
        (
            "[model]\npath = org/model\n",
            "run.toml, line 2, column 8: not valid TOML: Invalid value. Text needs quotes",
        ),
        ("[model]\npath = 1\npath = 2\n", "run.toml, line 3, column 9: not valid TOML"),
        ('[model]\npath = "C:\\Users\\me"\n', "has single quotes"),
        ('[reward]\npattern = "\\d+"\n', "has single quotes"),
    ],
)
def test_toml_errors_name_file_line_and_column(folder: Path, text: str, told: str) -> None:
    (folder / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, folder / "run.toml", [])
    assert told in str(caught.value)


def test_a_run_file_of_a_windows_editor_is_read(folder: Path) -> None:
    text = '[model]\r\npath = "org/model"\r\n[data]\r\ntrain = "train.jsonl"\r\n'
    (folder / "run.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(SFTConfig, folder / "run.toml", []).model.path == "org/model"


def test_a_run_file_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"rum.toml does not exist. Did you mean '.*run.toml'"):
        load_config(RLConfig, folder / "rum.toml", [])
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(RLConfig, folder, [])
    (folder / "latin.toml").write_bytes(b'a = "\xe9"')
    with pytest.raises(ConfigError, match=r"cannot read .*latin.toml"):
        load_config(RLConfig, folder / "latin.toml", [])


def test_files_that_are_not_there(folder: Path) -> None:
    assert "data.train: trian.jsonl does not exist (looked in" in refused(
        folder, "data.train=trian.jsonl"
    )
    assert "Did you mean 'train.jsonl'?" in refused(folder, "data.train=trian.jsonl")
    assert "data.eval: ./no does not exist" in refused(folder, "data.eval=./no")
    assert "model.path: ./m does not exist" in refused(folder, "model.path=./m")
    assert "no config.json in it" in refused(folder, f"model.path={folder}")
    assert "chat_template: t.jinja does not exist" in refused(folder, "model.chat_template=t.jinja")
    assert "checkpoint.resume: gone does not exist" in refused(folder, "checkpoint.resume=gone")
    (folder / "empty.jsonl").touch()
    assert "empty.jsonl is empty" in refused(folder, "data.train=empty.jsonl")
    assert load(folder, "data.train=openai/gsm8k").data.train == "openai/gsm8k"


def test_files_of_environments_whose_names_have_a_dot(folder: Path) -> None:
    (folder / "env.py").write_text("class Game: ...\n")
    found = load(folder, 'environment.path={"tic.tac" = "env.py:Game"}')
    assert found.environment.path == {"tic.tac": f"{folder / 'env.py'}:Game"}
    said = refused(folder, 'environment.path={"missing.one" = "nothere.py:Game"}')
    assert "environment.path.missing.one" in said and "nothere.py does not exist" in said


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "model.chat_template='{{% for m in messages %}}{}'".format("x" * 5000),
            "File name too long",
        ),
        ("model.path=~nobody-here/model", "home directory"),
    ],
)
def test_paths_that_no_system_can_look_for(folder: Path, said: str, told: str) -> None:
    message = refused(folder, said)
    assert f"{said.partition('=')[0]} cannot be read as a path: " in message and told in message


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("reward.py:correct", "reward.py does not exist"),
        ("rewards.py:corect", "has no function 'corect'. Did you mean 'correct'?"),
        ("rewards.py", "names no function; write rewards.py:name"),
        ("broken.py:f", "broken.py, line 2 is not valid Python"),
    ],
)
def test_rewards_that_are_not_there(folder: Path, reward: str, told: str) -> None:
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    assert told in refused(folder, f'reward.functions=["{reward}"]')


def test_rewards_may_be_in_an_importable_module(folder: Path) -> None:
    (folder / "scores").mkdir()
    (folder / "scores" / "exact.py").write_text(
        "def same(completions):\n    return [1.0] * len(completions)\n"
    )
    [reference] = load(folder, 'reward.functions=["scores.exact:same"]').reward.functions
    assert reference == "scores.exact:same"
    assert load_function(reference, folder)(["a", "b"]) == [1.0, 1.0]


def test_rewards_may_be_imported_or_assigned(folder: Path) -> None:
    (folder / "many.py").write_text(
        "from os.path import join as f, exists\ng = f\nif True:\n    def h(): ...\n"
    )
    for name in ("f", "exists", "g", "h"):
        load(folder, f'reward.functions=["many.py:{name}"]')
    (folder / "star.py").write_text("from os.path import *\n")
    load(folder, 'reward.functions=["star.py:anything"]')


def test_key_lines() -> None:
    text = """\
top = 1 # comment with [brackets]
[a]
x = \"\"\"
[not.a.table]
y = 2
\"\"\"
"quoted key" = 'x = 3'
b.c = [
  1, # one
  2,
]

[[data.train]]
path = "p"
[[data.train]]
path = "q"
[ spaced . table ]
z = {inner = 1}
"""
    tomllib.loads(text)
    lines = key_lines(text)
    assert lines == {
        ("top",): 1,
        ("a",): 2,
        ("a", "x"): 3,
        ("a", "quoted key"): 7,
        ("a", "b", "c"): 8,
        ("data", "train", 0): 13,
        ("data", "train", 0, "path"): 14,
        ("data", "train", 1): 15,
        ("data", "train", 1, "path"): 16,
        ("spaced", "table"): 17,
        ("spaced", "table", "z"): 18,
    }
    assert line_of(("spaced", "table", "z", "inner"), lines) == 18
    assert line_of(("nowhere",), lines) is None


plain = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
)
values = st.recursive(
    plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3)
)


@settings(deadline=None)
@given(st.text(min_size=0, max_size=8), values)
def test_what_is_written_as_toml_is_read_back(key: str, value: Any) -> None:
    assert tomllib.loads(f"{toml_key(key)} = {toml_value(value)}") == {key: value}


@settings(deadline=None)
@given(st.integers(1, 10**15))
def test_sizes(size: int) -> None:
    assert parse_size(str(size)) == size
    assert abs(parse_size(format_size(size)) - size) <= 0.01 * size + 1


def test_sizes_by_hand() -> None:
    assert [parse_size(s) for s in ("512MB", "1.5 GiB", "4gb", "7")] == [
        512 * 10**6,
        3 * 2**29,
        4 * 10**9,
        7,
    ]
    assert [format_size(s) for s in (131_000_000, 1_614_000_000, 12)] == ["131MB", "1.61GB", "12B"]
    for bad in ("", "MB", "-1MB", "0GB", "1 XB"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(bad)


def test_the_schema_has_a_description_for_every_kind_of_value() -> None:
    from tunesmith.config.reading.describe import describe_at

    for key in all_keys(RLConfig) + all_keys(SFTConfig):
        for kind in (RLConfig, SFTConfig):
            if key in all_keys(kind):
                assert "something else" not in describe_at(kind, tuple(key.split("."))), key


SIDES = [
    ("train.steps=2", "train.epochs", 3),
    ("train.epochs=2", "train.steps", 3),
    ("train.warmup_steps=0", "train.warmup_ratio", 0.1),
    ("train.warmup_ratio=0.1", "train.warmup_steps", 1),
    ("lora.path=adapter", "lora.rank", 8),
    ("lora.rank=4", "lora.path", "adapter"),
]


def file_with(folder: Path, key: str, value: Any) -> Path:
    lines = ['model.path = "org/m"', 'data.train = "org/d"', f"{key} = {toml_value(value)}"]
    (folder / "run.toml").write_text("\n".join(lines))
    return folder / "run.toml"


@pytest.mark.parametrize(("override", "key", "value"), SIDES)
def test_an_override_takes_the_place_of_what_excludes_it_in_the_file(
    tmp_path: Path, override: str, key: str, value: Any
) -> None:
    run = file_with(tmp_path, key, value)
    said = override.partition("=")[0]
    config = load_config(SFTConfig, run, [override], files=False)
    check(config)
    given = resolved_settings(config, given_only=True)
    assert said in given and key not in given
    reasons = read_tree(run, [override])[1].reasons
    assert reasons.keys() == {said} and key in reasons[said] and str(run) in reasons[said]
    if not key.startswith("lora"):
        with pytest.raises(
            ConfigError, match=key
        ):  # both on one side are a contradiction as before
            check(
                load_config(
                    SFTConfig,
                    None,
                    ["model.path=o/m", "data.train=o/d", override, f"{key}={value}"],
                )
            )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.epochs", 2),
        ("train.lr", 0.1),
        ("lora.rank", 8),
        ("data.eval", "org/x"),
        ("data.system_prompt", "x"),
        ("train", {"seed": 3}),
        ("lora", {"rank": 3}),
    ],
)
def test_none_leaves_a_setting_of_the_file_out(tmp_path: Path, key: str, value: Any) -> None:
    run = file_with(tmp_path, key, value)
    given = resolved_settings(load_config(SFTConfig, run, [f"{key}=none"]), given_only=True)
    assert not [name for name in given if name == key or name.startswith(f"{key}.")]


def test_what_was_said_and_then_left_out_displaces_nothing(tmp_path: Path) -> None:
    run = file_with(tmp_path, "train.epochs", 3)
    config = load_config(SFTConfig, run, ["train.steps=2", "train.steps=none"], files=False)
    assert (config.train.steps, config.train.epochs) == (None, 3)


def test_none_is_a_value_where_it_is_one_and_text_in_quotes() -> None:
    base = ["model.path=o/m", "data.train=o/d", 'reward.functions=["math"]']
    config = load_config(
        RLConfig,
        None,
        [*base, "system.cluster=none", "algorithm.correction=none", 'data.prompt="none"'],
    )
    assert (config.system.cluster, config.data.prompt) == ("none", "none")
    assert "correction" in config.algorithm.model_fields_set


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.eval=", "data.eval=none"),
        ("data.eval=[]", "data.eval=none"),
        ("data.eval=None", "data.eval=none"),
        ("data.eval=null", "data.eval=none"),
        ("train.lr=null", "train.lr=none"),
        ("data.evall=none", "data.eval"),
        ("train.learning_rate=none", "train.lr"),
        ("model.path=none", "model.path is missing"),
    ],
)
def test_what_may_be_meant_to_leave_a_key_out_is_answered_with_how(
    override: str, told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(SFTConfig, None, ["model.path=o/m", "data.train=o/d", override])
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "file"),
    [
        ("algorithm.loss=mine.py:Mine", "class Mine(PPO): pass"),
        ("algorithm.name=mine.py:MINE", "MINE = {'loss': 'ppo', 'advantage': 'grpo'}"),
    ],
)
def test_user_code_that_changes_the_directory_moves_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, file: str
) -> None:
    head = "import os\nos.chdir('/')\nfrom tunesmith.learn.algorithms.losses import PPO\n"
    (tmp_path / "mine.py").write_text(head + file)
    monkeypatch.chdir(tmp_path)
    load_config(RLConfig, None, ["model.path=o/m", "data.train=o/d", setting])
    assert Path.cwd() == tmp_path
    with shown_from(str(tmp_path)):
        monkeypatch.chdir("/")
        assert shown_path(tmp_path / "runs") == "runs"
    assert shown_path(tmp_path / "runs") == str(tmp_path / "runs")
