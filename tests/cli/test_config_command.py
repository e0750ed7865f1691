"""``tunesmith config`` refuses what the run refuses, and every refusal names the key and where it
stands."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tunesmith
from tests.support.tiny_runs import REWARDS, sums, write_lines
from tunesmith.cli.export import export
from tunesmith.cli.plan import show_config
from tunesmith.cli.serve import serve
from tunesmith.cli.serve_training import serve_training
from tunesmith.config.load import load_config
from tunesmith.config.reading.places import placed
from tunesmith.config.reading.problems import DEEPEST
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, ModelError, Problem, TunesmithError, UserError, about
from tunesmith.guide.names.unknown import all_keys

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
RUN = """\
run_dir = "runs/one"

[model]
path = "model"

[data]
train = "train.jsonl"

[reward]
functions = ["rewards.py:share"]

[rollout]
prompts_per_step = 4
group_size = 4
max_new_tokens = 8

[train]
steps = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(RUN)
    write_lines(tmp_path / "train.jsonl", sums(12))
    return tmp_path


def refusal(*overrides: str) -> str:
    """Refused in words; ``TunesmithError`` is never a traceback."""
    with pytest.raises(TunesmithError) as caught:
        show_config(Path("run.toml"), list(overrides))
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.more
def test_what_the_run_would_do_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_config(Path("run.toml"), [])
    assert "rollout.group_size" in capsys.readouterr().out
    assert not (folder / "runs").exists()


CASES: list[tuple[list[str], list[str]]] = [
    (["reward.functions=exact_mach"], ["reward.functions", "exact_match"]),
    (["reward.functions=regex_format"], ["reward.pattern is missing"]),
    (
        ["reward.functions=regex_format", "reward.pattern=(a"],
        ["reward.pattern", "override 'reward.pattern=(a'"],
    ),
    (['reward.functions=["math","math"]'], ["reward.functions", "more than once"]),
    (["data.max_tokens=5"], ["data.max_tokens", "data.max_prompt_tokens"]),
    (["data.prompt=question"], ["train.jsonl:1", "question", "data.prompt"]),
    (["data.train=empty"], ["empty", "no data file"]),
    (["data.eval="], ["data.eval: it is empty"]),
    (["data.train="], ["data.train: it is empty"]),
    (["run_dir="], ["run_dir: it is empty"]),
    (["run_dir=train.jsonl"], ["run_dir", "train.jsonl is a file"]),
    (["model.path=empty"], ["model.path", "no config.json"]),
    (["model.path=modle"], ["model.path", "Did you mean 'model'?", "owner"]),
    (["checkpoint.resume=true"], ["override 'checkpoint.resume=true'", "no run to resume"]),
    (["system.device=gpu"], ["system.device = 'gpu'"]),
    (["system.device=mps"], ["system.device = 'mps'"]),
    (["system.device=cuda:99"], ["system.device = 'cuda:99'"]),
    (["algorithm.name=GPRO"], ["algorithm.name", "Did you mean"]),
    (["algorithm.name=GRPOO"], ["algorithm.name", "Did you mean 'grpo'?"]),
    (["algorithm=grpo"], ['write algorithm.name="grpo"']),
    (["lora=16"], ["write lora.rank=16"]),
    (["lora=runs/sft"], ['write lora.path="runs/sft"']),
    (["model=model"], ['write model.path="model"']),
    (["model=model", "model.dtype=float32"], ['write model.path="model"']),
    (["data=train.jsonl"], ['write data.train="train.jsonl"']),
    (["reward=rewards.py:share"], ['write reward.functions="rewards.py:share"']),
    (["critic=model"], ['write critic.path="model"']),
    (["environment=game.py:Game"], ['write environment.path="game.py:Game"']),
    (["monitor=wandb"], ['write monitor.sinks="wandb"']),
    (["system=fast"], ['write system.profile="fast"']),
    (["eval=10"], ["write eval.every=10"]),
    (["eval.metric="], ["eval.metric", "empty"]),
    (
        ["data.eval=train.jsonl", "eval.metric=eval/acuracy"],
        ["eval.metric", "Did you mean 'eval/accuracy'?"],
    ),
    (
        ["data.eval=train.jsonl", "eval.metric=eval/reward/shar"],
        ["eval.metric", "eval/reward/share"],
    ),
    (
        ["data.eval=train.jsonl", "eval.metric=eval/pass@4", "eval.samples=2"],
        ["eval.metric", "eval/pass@2"],
    ),
    (["train.seed=1180591620717411303424"], ["train.seed", "too large"]),
    (["train.seed=-1"], ["train.seed", "at least 0"]),
    ([f"train.steps={'9' * 400}"], ["train.steps", "too large"]),
    ([f"train.steps={'9' * 5000}"], ["train.steps"]),
    (["train.lr=1e308"], ["train.lr", "too large"]),
    (["train.lr=nan"], ["train.lr"]),
    (["train.eps=1e-320"], ["train.eps", "too small"]),
    (["rollout.group_size=1000000000000"], ["rollout.group_size", "too large"]),
    (["rollout.group_size=1000000000"], ["rollout.group_size", "line 13"]),
    (["system.threads=1000000000"], ["system.threads"]),
    (["system.kv_memory=1000000GB"], ["system.kv_memory"]),
    (["rollout.stop_token_ids=-1"], ["rollout.stop_token_ids[0]"]),
    (["rollout.stop_token_ids=[2, 300]"], ["rollout.stop_token_ids", "300"]),
    (["data.max_prompt_tokens=64"], ["data.max_prompt_tokens", "64", "56"]),
    (["reward.functions=[rewards.py:share]"], ["'reward.functions=[\"rewards.py:share\"]'"]),
    (["train.batch_size=3"], ["override 'train.batch_size=3'", "lines 13 and 14"]),
    (["train.warmup_steps=9"], ["override 'train.warmup_steps=9'"]),
    (["data.system_prompt=a\0b"], ["data.system_prompt", "NUL"]),
    (["run_dir=a\0b"], ["run_dir", "NUL"]),
    (["run_dir=a\udce9b"], ["run_dir", "UTF-8"]),
    (["data.train=" + "[" * 2000 + "]" * 2000], ["data.train"]),
]


@pytest.mark.parametrize(
    ("overrides", "told"), CASES, ids=[" ".join(said)[:60] for said, _ in CASES]
)
def test_config_refuses_what_cannot_run(
    folder: Path, overrides: list[str], told: list[str]
) -> None:
    message = refusal(*overrides)
    assert all(word in message for word in told), message
    assert not (folder / "runs").exists()


def test_an_adapter_is_told_lora_path_where_there_is_such_a_key(folder: Path) -> None:
    (folder / "lora").mkdir()
    (folder / "lora/adapter_config.json").write_text("{}")
    refused: list[tuple[Callable[[], object], bool]] = [
        (lambda: show_config(Path("run.toml"), ["model.path=lora"]), True),
        (lambda: show_config(Path("run.toml"), ["critic.path=lora"]), False),
        (lambda: serve("lora"), True),
        (lambda: serve_training("lora"), False),
        (lambda: export("lora", gguf="f16"), False),
        (lambda: tunesmith.generate("lora", ["?"]), False),
    ]
    for command, has_key in refused:
        with pytest.raises(TunesmithError) as caught:
            command()
        assert "tunesmith merge lora " in str(caught.value)
        assert ("lora.path" in str(caught.value)) is has_key


def test_arrays_in_arrays_are_refused_and_not_followed(folder: Path) -> None:
    for depth in (DEEPEST, 500, 5000):
        (folder / "run.toml").write_text(f"x = {'[' * depth}{']' * depth}\n{RUN}")
        assert "run.toml" in refusal()


def test_the_line_of_every_setting_in_a_conflict_is_told(folder: Path) -> None:
    (folder / "run.toml").write_text(f"{RUN}batch_size = 3\nepochs = 2\n")
    lines = refusal().splitlines()
    assert lines[0].endswith("run.toml has 2 problems:") or "2 settings" in lines[0]
    both, size = lines[1:]
    assert "lines 18 and 20" in both and "train.steps and train.epochs" in both
    assert "lines 13, 14 and 19" in size and "train.batch_size = 3" in size


def test_a_value_that_is_refused_without_its_key_gets_the_key_that_was_being_read(
    folder: Path,
) -> None:
    with (
        pytest.raises(ConfigError) as raised,
        placed(Path("run.toml"), []),
        about("run_dir"),
        about("model.path"),
    ):
        raise ConfigError(f"cannot read '{folder / 'model'}'")
    (problem,) = raised.value.problems
    assert problem.keys == ("model.path",) and problem.place == "run.toml, line 4 (model.path)"
    assert str(raised.value).startswith("run.toml, line 4 (model.path): cannot read")


def test_places_are_those_of_the_keys_and_never_of_words_in_the_text(folder: Path) -> None:
    (folder / "run.toml").write_text("[train]\nlr = 1e-6\nsteps = 3\n[eval]\nevery = 5\n")
    with pytest.raises(ConfigError) as raised, placed(Path("run.toml"), ["train.seed=1"]):
        raise ConfigError(
            "do not fit",
            keys=("eval.every", "train.seed", "train.lr", "train.steps", "rollout.stop"),
        )
    assert str(raised.value) == "run.toml, lines 2, 3 and 5 and override 'train.seed=1': do not fit"
    with pytest.raises(ConfigError) as raised, placed(Path("run.toml"), []):
        raise ConfigError(
            Problem(("train.lr",), "train.steps is right"), Problem((), "train.steps too")
        )
    assert [problem.place for problem in raised.value.problems] == ["run.toml, line 2", ""]


@pytest.mark.usefixtures("folder")
@pytest.mark.more
def test_one_value_where_a_list_is_meant_is_a_list_of_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_config(
        Path("run.toml"),
        [
            "reward.functions=rewards.py:share",
            "rollout.stop=x",
            "monitor.trace_steps=2",
            "lora.targets=q_proj",
            "lora.rank=2",
        ],
    )
    told = capsys.readouterr().out
    for value in ('["x"]', "[2]", '["q_proj"]', "rewards.py:share"):
        assert value in told


@pytest.mark.usefixtures("folder")
def test_overrides_without_a_run_file_are_told_apart_from_it() -> None:
    with pytest.raises(UserError, match="run_dir=x' is where the run file belongs"):
        show_config(Path("run_dir=x"), [])


def test_the_commands_check_what_config_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command goes through ``check_run``, before it makes its directory."""
    from tunesmith.run import assembly
    from tunesmith.run.assembly import opening
    from tunesmith.run.offline import generate, rft

    def stop(*_: Any, **__: Any) -> Any:
        raise ConfigError("checked")

    monkeypatch.setattr(opening, "check_run", stop)
    texts: dict[Callable[..., Any], str] = {
        assembly.run_rl: RUN,
        assembly.run_sft: '[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\n',
        generate.run_generate: '[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\n',
        lambda path: rft.run_rft(
            "run", path
        ): '[model]\npath="model"\n[data]\ntrain="train.jsonl"\n[reward]\nfunctions=["math"]\n',
    }
    for run, text in texts.items():
        (folder / "run.toml").write_text(text)
        with pytest.raises(ConfigError, match="checked"):
            run(folder / "run.toml")
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", 5),
        ("num_attention_heads", "4"),
        ("num_key_value_heads", 3),
        ("hidden_size", 32.5),
        ("num_hidden_layers", -1),
        ("vocab_size", 10**12),
    ],
)
def test_a_model_whose_sizes_cannot_be_is_refused(folder: Path, key: str, value: Any) -> None:
    (folder / "model/config.json").write_text(json.dumps({**MODEL, key: value}))
    assert "config.json" in refusal()


def test_an_adapter_with_pickled_weights_is_refused_before_it_is_opened(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    (folder / "adapter/adapter_model.bin").touch()
    message = refusal("lora.path=adapter")
    assert "lora.path" in message and "safetensors" in message


def test_a_hub_name_without_a_hub_is_refused_after_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    from tunesmith.models import source

    asked: list[float] = []

    def no_network(_: str, *, timeout: float) -> None:
        asked.append(timeout)
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    unreached = r"no model directory 'nobody/nothing'.*hf download nobody/nothing.*Name or service"
    with pytest.raises(ModelError, match=unreached):
        source.load_tokenizer("nobody/nothing")
    assert asked == [source.HUB_SECONDS]

    def unknown(*_: Any, **__: Any) -> None:
        answer = httpx.Response(404, request=httpx.Request("HEAD", "https://hub"))
        raise huggingface_hub.errors.RepositoryNotFoundError("404", response=answer)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unknown)
    with pytest.raises(ModelError, match="does not give a model of that name"):
        source.load_tokenizer("nobody/nothing")


def test_the_speed_of_memory_is_measured_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from tunesmith.run.trainers import limits

    ones = torch.ones
    sizes = list[int]()

    def short(size: int, *more: int, **settings: Any) -> torch.Tensor:
        if more:
            return ones(64, 64, **settings)
        sizes.append(size)
        if size > 2**20:
            raise RuntimeError("can't allocate memory")
        return ones(size, **settings)

    monkeypatch.setattr(torch, "ones", short)
    assert limits.copy_rate(2**22, "cpu", lambda: None) > 0
    assert sizes == [2**22, 2**21, 2**20]
    monkeypatch.setattr(limits, "memory", lambda: (2**40, 2**28))
    limits.measure_limits.__wrapped__("cpu", "float32")
    assert sizes[3:] == [2**20]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = [key for key in all_keys(RLConfig) if not key.startswith("reward.")]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_value_of_any_key_is_accepted_or_refused_with_its_key(
    folder: Path, said: dict[str, Any]
) -> None:
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in said.items()]
    try:
        load_config(RLConfig, folder / "run.toml", overrides)
    except ConfigError as error:
        assert any(key in str(error) for key in said), error


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, len(RUN)), inserted=st.text(max_size=4), cut=st.integers(0, 5))
def test_a_damaged_run_file_is_accepted_or_refused_with_its_name(
    folder: Path, at: int, inserted: str, cut: int
) -> None:
    (folder / "run.toml").write_text(
        RUN[:at] + inserted + RUN[at + cut :], encoding="utf-8", errors="replace"
    )
    try:
        load_config(RLConfig, folder / "run.toml")
    except ConfigError as error:
        assert "run.toml" in str(error)


@pytest.mark.parametrize(
    ("key", "value"), [("rope_parameters", 5), ("eos_token_id", "x"), ("rms_norm_eps", "bert")]
)
def test_what_transformers_raises_of_an_odd_configuration_is_told_as_the_models(
    folder: Path, key: str, value: Any
) -> None:
    from tunesmith.models import source

    (folder / "model/config.json").write_text(json.dumps({**MODEL, key: value}))
    (folder / "model/tokenizer.json").write_text("{}")
    (folder / "model/model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(ModelError, match="cannot read the configuration of model"):
        source.load_config("model")
