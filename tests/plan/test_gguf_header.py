"""Damaged GGUF files are refused by what is wrong with them, before anything is loaded."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tunesmith.config.commands import SFTConfig
from tunesmith.config.load import load_config
from tunesmith.errors import ConfigError, ModelError
from tunesmith.plan.facts.gguf import read_header
from tunesmith.plan.facts.hub import known_model_facts

Said = dict[str, str | int]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(values: Said, pieces: int = 0, version: int = 3) -> bytes:
    said = b"".join(
        text(key)
        + (
            struct.pack("<I", 8) + text(value)
            if isinstance(value, str)
            else struct.pack("<II", 4, value)
        )
        for key, value in values.items()
    )
    piece = b"".join(
        text(f"w{number}") + struct.pack("<IQQIQ", 2, 4, 2, 0, 32 * number)
        for number in range(pieces)
    )
    return b"GGUF" + struct.pack("<IQQ", version, pieces, len(values)) + said + piece


LLAMA: Said = {"general.architecture": "llama", "llama.block_count": 1}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
        (header({}, version=1), "version is 1"),
        (header(LLAMA)[:-3], "incomplete"),
        (header(LLAMA, pieces=2), "incomplete"),
        (header({"general.type": "adapter"}) + bytes(64), "general.type = 'adapter'"),
        (header({"split.count": 3}) + bytes(64), "llama-gguf-split"),
        (header({"general.architecture": "t5"}) + bytes(64), r"'t5'.*valid: llama, qwen2"),
        (header(LLAMA) + bytes(64), "llama.embedding_length is None"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "incomplete"),
    ],
)
def test_a_damaged_file(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said) as error:
        known_model_facts(str(path))
    assert str(path) in str(error.value)


def test_weights_are_found(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    start = header(LLAMA, pieces=2)
    path.write_bytes(start + bytes(-len(start) % 32) + bytes(64))
    read = read_header(path)
    assert read.values == LLAMA and read.parameters == 16
    assert read.pieces["w1"].shape == (2, 4)
    assert read.pieces["w1"].start == path.stat().st_size - 32


def test_where_a_file_may_be_named(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    (tmp_path / "a.gguf").touch()

    def path_of(name: str) -> str:
        said = [f"model.path={tmp_path / name}", f"data.train={data}"]
        return load_config(SFTConfig, None, said).model.path

    assert path_of("a.gguf") == path_of(".") == str(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=r"b\.gguf does not exist"):
        path_of("b.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"a\.gguf, b\.gguf"):
        path_of(".")
