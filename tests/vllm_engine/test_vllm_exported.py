"""What a run saves behaves in plain vLLM as in our engine: texts and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_ends import FAMILIES, LONGEST, rigged, template_of
from tests.support.tiny_runs import sft_settings, write_lines
from tunesmith import generate
from tunesmith.run import assembly

vllm: Any = pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

SYSTEM = 'Say "no" {{ x }} {# tools #}.\n\tÜber 🙂'


@pytest.mark.parametrize(
    ("name", "kind"), [("chatml", "byte_level"), ("llama3", "metaspace"), ("two", "byte_level")]
)
def test_plain_vllm_completes_as_our_engine(tmp_path: Path, name: str, kind: str) -> None:
    """A whole model and a merged one, with a template and a system prompt of the run."""
    system = SYSTEM if name != "two" else None
    base = rigged(tmp_path / "base", name, kind, system=system, hidden_size=128)
    (tmp_path / "own.jinja").write_text(template_of(name))
    write_lines(tmp_path / "lines.jsonl", [{"prompt": "a", "completion": "b"}] * 8)
    settings = {
        "model__chat_template": str(tmp_path / "own.jinja"),
        "data__train": str(tmp_path / "lines.jsonl"),
    }
    settings |= {
        "data__chat": None,
        "data__system_prompt": system,
        "train__steps": 1,
        "train__lr": 1e-9,
    }
    whole = assembly.run_sft(None, sft_settings(tmp_path, base, **settings)).checkpoint
    lora = {"lora__rank": 2, "lora__save_merged": True}
    adapter = assembly.run_sft(
        None, sft_settings(tmp_path, base, "lora", **settings, **lora)
    ).checkpoint
    for path in (whole, adapter.with_name("model_merged")):
        llm = vllm.LLM(
            str(path),
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            kv_cache_memory_bytes=2**26,
        )
        [theirs] = llm.chat(
            [{"role": "user", "content": "hi"}],
            vllm.SamplingParams(temperature=0, max_tokens=LONGEST),
            use_tqdm=False,
        )
        [ours] = generate(path, ["hi"], max_new_tokens=LONGEST, temperature=0)
        assert list(theirs.outputs[0].token_ids) == ours.token_ids[0]
        assert theirs.outputs[0].finish_reason == "stop" and theirs.outputs[0].text == ours.text
        tokenizer: Any = llm.get_tokenizer()
        assert (
            tokenizer.convert_ids_to_tokens(ours.token_ids[0])[-len(FAMILIES[name]) :]
            == FAMILIES[name]
        )
        del llm
