"""What a run derives reaches the files it writes, and what cannot be written is refused before the
first step."""

from __future__ import annotations

import errno
import json
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import meta
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils.chat_template_utils import _compile_jinja_template

import tunesmith
from tests.support import data_tokenizers as kit
from tests.support import tiny
from tests.support.tiny_ends import (
    FAMILIES,
    LONGEST,
    asked,
    check_alike,
    ends_after,
    rigged,
    template_of,
)
from tests.support.tiny_preferences import RUNS, preference_settings
from tests.support.tiny_runs import rl_settings, sft_settings, write_lines
from tunesmith.errors import ConfigError, ModelError, StorageError, TunesmithError
from tunesmith.learn.data.chat import ChatTemplate, end_of_turn_id
from tunesmith.learn.data.chat_defaults import own_part, set_defaults
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.export import mended, read_back, set_ends
from tunesmith.run import assembly
from tunesmith.run.assembly.session import load_trained
from tunesmith.run.offline.generate import run_generate

QUESTION = [{"role": "user", "content": "1 + 1?"}]
SYSTEM = 'Say "no", \\ or {{ x }} {% endif %} {# tools #}.\n\tÜber 🙂 add_generation_prompt\n'

# Chat templates


@pytest.mark.parametrize(
    "name", ["chatml", "llama3", "qwen2", "qwen3", "phi4", "mistral_v3", "smollm3_marked"]
)
@pytest.mark.parametrize("kind", kit.KINDS)
def test_other_programs_render_with_the_runs_system_prompt(name: str, kind: str) -> None:
    plain, made = (kit.KINDS[kind](kit.template(name)) for _ in range(2))
    set_defaults(made, SYSTEM, None)
    once = made.chat_template
    set_defaults(made, SYSTEM, None)
    assert made.chat_template == once, "a run that starts from a run's model adds nothing again"
    turns = [*QUESTION, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    for messages, prompt in product((QUESTION, turns), (True, False)):
        render = partial(tokenizer_text, messages=messages, prompt=prompt)
        assert render(made) == tokenizer_text(plain, asked(messages, SYSTEM), prompt)
        own = asked(messages, "Mine.")
        assert tokenizer_text(made, own, prompt) == tokenizer_text(plain, own, prompt), (
            "a caller's own comes first"
        )
    before = ChatTemplate.of(plain)
    after = ChatTemplate.of(made)
    for fact in (
        "marks_assistant",
        "has_generation_prompt",
        "takes_tools",
        "turn_end",
        "turn_ends",
    ):
        assert getattr(before, fact) == getattr(after, fact), fact


def tokenizer_text(
    tok: Any, messages: list[dict[str, str]], prompt: bool = True, **options: Any
) -> str:
    return tok.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=False, **options
    )


VALUES: list[Any] = [
    True,
    False,
    7,
    -0.5,
    "a'b\"c\n🙂{{",
    [1, "x", None],
    {"k": [True, {"é": 2.0}]},
    "",
]


@pytest.mark.parametrize("value", VALUES, ids=map(repr, VALUES))
def test_variables_are_defaults_that_a_caller_overrides(value: Any) -> None:
    made = kit.byte_level(
        " {{ given | tojson }}|{% if given is mapping %}m{% endif %}" + kit.template("chatml")
    )
    plain = tokenizer_text(made, QUESTION, given=value)
    other = tokenizer_text(made, QUESTION, given="other")
    set_defaults(made, None, {"given": value})
    assert tokenizer_text(made, QUESTION) == plain
    assert tokenizer_text(made, QUESTION, given="other") == other
    environment = _compile_jinja_template(made.chat_template).environment
    assert "given" in meta.find_undeclared_variables(environment.parse(made.chat_template)), (
        "servers pass only these"
    )


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), object()], ids=["nan", "inf", "object"]
)
def test_values_without_a_form_in_a_template_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs: 'given'"):
        set_defaults(kit.byte_level("{{ given }}"), None, {"given": value})


@pytest.mark.parametrize(
    "start", ["", "\n", "  ", "\n\n  {%- if true %}x{% endif %}", "  {% if true %}x{% endif %}\n"]
)
def test_the_models_own_part_is_rendered_as_before(start: str) -> None:
    made = kit.byte_level(start + kit.template("chatml"))
    own = made.chat_template
    plain = tokenizer_text(made, asked(QUESTION, "S"))
    set_defaults(made, "S", None)
    assert tokenizer_text(made, QUESTION) == plain and own_part(made.chat_template) == own
    named = kit.byte_level()
    named.chat_template = {"default": own, "tool_use": own}
    set_defaults(named, "S", None)
    assert {
        tokenizer_text(named, QUESTION, chat_template=name) for name in ("default", "tool_use")
    } == {plain}


# Generation configurations

INVALID: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {"temperature": 0.6, "top_p": 0.95},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
        ["do_sample"],
    ),
    ({"top_k": 20}, {"do_sample": True, "top_k": 20}, ["do_sample"]),
    ({"min_p": 0.1, "typical_p": 0.9}, {"do_sample": True, "min_p": 0.1}, ["do_sample"]),
    (
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": False, "temperature": None},
        ["temperature"],
    ),
    ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, []),
    (
        {"early_stopping": True, "max_length": 9},
        {"early_stopping": None, "max_length": 9},
        ["early_stopping"],
    ),
    ({"length_penalty": 0.5, "num_beams": 3}, {"length_penalty": 0.5, "num_beams": 3}, []),
    ({"pad_token_id": -1}, {"pad_token_id": None}, ["pad_token_id"]),
    ({"output_scores": True}, {"output_scores": None}, ["output_scores"]),
    (
        {"num_beams": 4, "temperature": 0.3},
        {"num_beams": 4, "do_sample": True, "temperature": 0.3},
        ["do_sample"],
    ),
    (
        {"temperature": 0.6, "length_penalty": 0.5, "eos_token_id": [2, 7], "own": {"a": 1}},
        {"temperature": 0.6, "length_penalty": None, "eos_token_id": [2, 7], "own": {"a": 1}},
        ["do_sample", "length_penalty"],
    ),
    ({"forced_bos_token_id": 3, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, []),
]


@pytest.mark.parametrize(
    ("given", "expected", "told"), INVALID, ids=[str(entry[0]) for entry in INVALID]
)
def test_a_contradictory_generation_config_is_mended_and_told(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any], told: list[str]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    config, changes = mended(GenerationConfig.from_pretrained(tmp_path))
    config.save_pretrained(tmp_path / "written")
    found = GenerationConfig.from_pretrained(tmp_path / "written")
    assert {key: getattr(found, key) for key in expected} == expected
    assert bool(changes) == bool(told) and all(key in str(changes) for key in told)


def test_what_ends_a_completion_is_collected(tmp_path: Path) -> None:
    tiny.save_model(tmp_path)
    model = CausalLM.load(tmp_path)
    model.module.generation_config.eos_token_id = [7, 2]
    strings = ["</answer>", "<|im_start|>", "\n\n"]
    assert (
        set_ends(model.module, model.tokenizer, end_of_turn=4, token_ids=[9, 7], strings=strings)
        is None
    )
    config = model.module.generation_config
    assert config.eos_token_id == [7, 2, 4, 3, 9], (
        "its own, EOS, end of turn, a string that is a token, the run's"
    )
    assert config.stop_strings == ["</answer>", "\n\n"]


# Runs


def slow_unless(quick: bool) -> Any:
    return () if quick else pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            marks=slow_unless(kind == "byte_level" or (kind, name) == ("metaspace", "gemma")),
        )
        for name, kind in product(FAMILIES, kit.KINDS)
    ],
)
def test_a_saved_model_ends_its_turn_in_transformers(tmp_path: Path, name: str, kind: str) -> None:
    rigged(tmp_path / "base", name, kind)
    model = CausalLM.load(tmp_path / "base")
    model.tokenizer.chat_template = template_of(name)
    set_ends(model.module, model.tokenizer, end_of_turn=end_of_turn_id(model.tokenizer))
    model.save(tmp_path / "saved")
    check_alike(*load_trained(tmp_path / "saved"), tmp_path / "saved", "hi", FAMILIES[name])


@pytest.mark.parametrize("name", ["chatml", pytest.param("llama3", marks=pytest.mark.slow)])
def test_what_sft_writes_behaves_like_what_was_trained(tmp_path: Path, name: str) -> None:
    """Plain, as an adapter, and merged; with a template and a system prompt of the run."""
    base = rigged(tmp_path / "base", name, "byte_level", system=SYSTEM)
    (tmp_path / "own.jinja").write_text(template_of(name))
    write_lines(tmp_path / "lines.jsonl", [{"prompt": "a", "completion": "b"}] * 8)
    settings = {
        "model__chat_template": str(tmp_path / "own.jinja"),
        "data__train": str(tmp_path / "lines.jsonl"),
    }
    settings |= {
        "data__chat": None,
        "data__system_prompt": SYSTEM,
        "train__steps": 1,
        "train__lr": 1e-9,
    }
    plain = assembly.run_sft(None, sft_settings(tmp_path, base, **settings))
    check_alike(*plain.load(), plain.checkpoint, "hi", FAMILIES[name])
    lora = {"lora__rank": 2, "lora__save_merged": True}
    adapter = assembly.run_sft(
        None, sft_settings(tmp_path, base, "lora", **settings, **lora)
    ).checkpoint
    merged = adapter.with_name("model_merged")
    check_alike(*load_trained(merged), merged, "hi", FAMILIES[name])
    assembly.run_merge(adapter, tmp_path / "merged")
    check_alike(*load_trained(tmp_path / "merged"), tmp_path / "merged", "hi", FAMILIES[name])
    check_alike(*load_trained(adapter), merged, "hi", FAMILIES[name])
    lines = generated(tmp_path, base, adapter)
    assert lines == [
        tunesmith.generate(merged, ["hi"], max_new_tokens=LONGEST, temperature=0)[0].text
    ]


def generated(folder: Path, base: Path, adapter: Path) -> list[str]:
    """Completions of ``hi`` by ``tunesmith generate`` with an adapter on its base."""
    write_lines(folder / "asked.jsonl", [{"prompt": "hi"}])
    changed = [f"model.path={base}", f"lora.path={adapter}", f"data.train={folder / 'asked.jsonl'}"]
    changed += [
        "model.dtype=float32",
        "sampling.temperature=0",
        f"sampling.max_new_tokens={LONGEST}",
    ]
    done = run_generate(None, [*changed, f"run_dir={folder / 'answers'}"])
    return [json.loads(line)["completion"] for line in done.output.read_text().splitlines()]


def test_what_rl_writes_stops_where_its_rollouts_stopped(tmp_path: Path) -> None:
    base = tiny.save_model(tmp_path / "base", tie_word_embeddings=False, hidden_size=64)
    tok = tiny.tokenizer()
    prompt = tokenizer_text(tok, [{"role": "user", "content": "1+1="}])
    ending = tok("=ok;")["input_ids"]
    ends_after(base, [tok(prompt)["input_ids"]], [*ending, *tok("and more")["input_ids"]])
    stops = {
        "rollout__stop": ["ok;", "<|im_start|>"],
        "rollout__stop_token_ids": [6],
        "data__chat": None,
    }
    run = assembly.run_rl(
        None, rl_settings(tmp_path, base, train__steps=1, train__lr=1e-9, **stops)
    )
    model, tokenizer = run.load()
    assert model.generation_config.stop_strings == ["ok;"]
    assert set(model.generation_config.eos_token_id) == {2, 3, 4, 6}
    check_alike(
        model,
        tokenizer,
        run.checkpoint,
        "1+1=",
        tok.convert_ids_to_tokens(ending),
        tokenizer=tokenizer,
    )


# Rehearsals


def command(name: str, folder: Path, model: Path, **changed: Any) -> Path:
    """Run a command in ``folder`` and return its last model."""
    if name == "sft":
        return assembly.run_sft(
            None, sft_settings(folder, model, "run", train__steps=1, **changed)
        ).checkpoint
    if name == "critic":
        changed |= {"algorithm__name": "ppo"}
    if name in ("rl", "critic"):
        return assembly.run_rl(
            None, rl_settings(folder, model, train__steps=1, **changed)
        ).checkpoint
    return RUNS[name](
        None, preference_settings(name, folder, model, train__steps=1, **changed)
    ).checkpoint


COMMANDS = ["sft", "rl", "critic", *RUNS]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_writes_a_base_with_a_contradictory_generation_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    tiny.save_model(tmp_path / "model")
    given = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [2], "bos_token_id": 1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(given))
    saved = command(name, tmp_path, tmp_path / "model")
    if name == "rm":
        return
    found = GenerationConfig.from_pretrained(saved)
    assert (found.temperature, found.top_p, found.do_sample, found.eos_token_id) == (
        0.6,
        0.95,
        True,
        [2, 4],
    )
    assert capsys.readouterr().out.count("generation_config.json") == 1


def no_space(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))


def a_disk_that_cannot_flush(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("os.fsync", flush)


def a_template_with_no_file_name(path: Path, _: pytest.MonkeyPatch) -> None:
    file = path / "model" / "tokenizer_config.json"
    own = [{"name": name, "template": tiny.CHATML} for name in ("default", "../../up")]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": own}))
    (path / "model" / "chat_template.jinja").unlink()


def a_tokenizer_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("slow tokenizers of this class have no save_vocabulary")

    monkeypatch.setattr(
        type(AutoTokenizer.from_pretrained(path / "model")), "_save_pretrained", fail
    )


def weights_that_are_shared_without_being_tied(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = CausalLM.load.__func__

    def shared(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        layers = model.module.model.layers
        layers[1].mlp.down_proj.weight = layers[0].mlp.down_proj.weight
        model.runner.bind()
        return model

    monkeypatch.setattr(CausalLM, "load", classmethod(shared))


FAULTS = {
    no_space: StorageError,
    a_disk_that_cannot_flush: StorageError,
    a_template_with_no_file_name: ModelError,
    a_tokenizer_that_cannot_be_written: ModelError,
    weights_that_are_shared_without_being_tied: ModelError,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["sft", "rl"])
def test_what_could_not_be_saved_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    tiny.save_model(tmp_path / "model")
    fault(tmp_path, monkeypatch)
    with pytest.raises(TunesmithError) as caught:
        command(name, tmp_path, tmp_path / "model")
    assert isinstance(caught.value, FAULTS[fault]) and caught.value.exit_code == 2
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or '"step": 1' not in metrics.read_text()
    assert not list((tmp_path / "run").rglob("*rehearsal*"))


def test_a_rehearsal_writes_no_weights(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "model")
    model = CausalLM.load(tmp_path / "model")
    assert model.rehearse(tmp_path / "tried") is None
    files = {file.name: file.stat().st_size for file in (tmp_path / "tried").iterdir()}
    assert (
        files.pop("model.safetensors")
        < 4096
        < (tmp_path / "model" / "model.safetensors").stat().st_size
    )
    model.save(tmp_path / "saved")
    assert set(files) == {file.name for file in (tmp_path / "saved").iterdir()} - {
        "model.safetensors"
    }


def other_template(tok: Any) -> None:
    tok.chat_template = "{{ 1 }}"


def other_token(tok: Any) -> None:
    tok.add_tokens(["<new>"])


def other_end(tok: Any) -> None:
    tok.eos_token = "<pad>"


def other_encoding(tok: Any) -> None:
    from tokenizers import normalizers

    tok.backend_tokenizer.normalizer = normalizers.Lowercase()


@pytest.mark.parametrize("change", [other_template, other_token, other_end, other_encoding])
def test_a_tokenizer_that_reads_back_as_another_is_noticed(tmp_path: Path, change: Any) -> None:
    tiny.save_model(tmp_path)
    tok = AutoTokenizer.from_pretrained(tmp_path)
    assert read_back(tmp_path, tok, trust_remote_code=False) is None
    change(tok)
    assert read_back(tmp_path, tok, trust_remote_code=False)
