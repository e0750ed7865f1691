"""Model directories that hold something unusual: each a change of a tiny model's files, and what
loading it means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.tiny import save_model

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@dataclass(frozen=True, slots=True)
class Odd:
    """``make`` changes a directory; every loader then reads the same weights, or refuses with the
    words ``refused``."""

    make: Callable[[Path], Any]
    refused: tuple[str, ...] = ()
    """Words of the refusal, empty if the model loads."""
    tied: bool = False
    family: str = "llama"


def untouched(_: Path) -> None: ...


def change(path: Path, edit: Callable[[dict[str, Tensor]], Any], name: str = ONE) -> None:
    weights = load_file(path / name)
    edit(weights)
    save_file(weights, path / name, metadata={"format": "pt"})


def configure(path: Path, name: str = "config.json", **values: Any) -> None:
    file = path / name
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({k: v for k, v in {**found, **values}.items() if v is not ...}))


def split(path: Path, *, keep: bool = False) -> None:
    """Two shards with an index."""
    weights = load_file(path / ONE)
    names = sorted(weights)
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, path / file, metadata={"format": "pt"})
    where = {name: file for file, own in parts.items() for name in own}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if not keep:
        (path / ONE).unlink()


def stale(path: Path) -> None:
    """A whole file, and shards of other weights with their index."""
    original = load_file(path / ONE)
    change(path, lambda w: [tensor.mul_(2) for tensor in w.values()])
    split(path, keep=True)
    save_file(original, path / ONE, metadata={"format": "pt"})


def without_shard(path: Path) -> None:
    split(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def pickled(path: Path, *, only: bool = False) -> None:
    weights = {name: tensor * 3 for name, tensor in load_file(path / ONE).items()}
    torch.save(weights, path / "pytorch_model.bin")
    if only:
        (path / ONE).unlink()


def adapter(path: Path) -> None:
    """A trained adapter in the directory of a whole model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(path)


def adapter_only(path: Path) -> None:
    adapter(path)
    (path / ONE).unlink()
    (path / "config.json").unlink()


def renamed(path: Path, rename: Callable[[str], str]) -> None:
    change(path, lambda w: [w.update({rename(name): w.pop(name)}) for name in list(w)])


def linked(path: Path) -> None:
    """The layout of the hub's cache: links into a folder of blobs."""
    blobs = path.with_name(path.name + "-blobs")
    blobs.mkdir()
    for number, file in enumerate(sorted(path.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / blobs.name / str(number))


def set_value(path: Path, name: str, value: float) -> None:
    change(path, lambda w: w[name].view(-1)[5].fill_(value))


def cut(path: Path, size: int) -> None:
    data = (path / ONE).read_bytes()
    (path / ONE).write_bytes(data[:size])


def cast(path: Path, *kinds: torch.dtype) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        for number, name in enumerate(sorted(weights)):
            weights[name] = weights[name].to(kinds[number % len(kinds)])

    change(path, edit)


def beside(path: Path, name: str, data: bytes = b"not weights") -> None:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(data)


def score_model(path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    model.save_pretrained(path)


def copy_weights(path: Path, name: str) -> None:
    """The weights again, of another kind, in a file that is not the model's."""
    weights = {key: tensor * 2 for key, tensor in load_file(path / ONE).items()}
    (path / name).parent.mkdir(exist_ok=True)
    save_file(weights, path / name, metadata={"format": "pt"})


ODD: dict[str, Odd] = {
    "one file": Odd(untouched),
    "one file, tied": Odd(untouched, tied=True),
    "two shards": Odd(split),
    "two shards, tied": Odd(split, tied=True),
    "a missing shard": Odd(without_shard, ("model-00002-of-00002.safetensors",)),
    "stale shards": Odd(stale, (INDEX,)),
    "an index beside one file": Odd(lambda p: split(p, keep=True), (INDEX,)),
    "a broken index": Odd(lambda p: [split(p), (p / INDEX).write_text("{")], (INDEX,)),
    "an index without a map": Odd(lambda p: [split(p), (p / INDEX).write_text("{}")], (INDEX,)),
    "consolidated beside": Odd(lambda p: copy_weights(p, "consolidated.safetensors")),
    "consolidated beside shards": Odd(
        lambda p: [copy_weights(p, "consolidated.safetensors"), split(p)]
    ),
    "only consolidated": Odd(
        lambda p: (p / ONE).rename(p / "consolidated.safetensors"), ("model.safetensors",)
    ),
    "a variant beside": Odd(lambda p: copy_weights(p, "model.fp16.safetensors")),
    "only a variant": Odd(
        lambda p: (p / ONE).rename(p / "model.fp16.safetensors"), ("model.safetensors",)
    ),
    "an original folder": Odd(lambda p: copy_weights(p, "original/model.safetensors")),
    "bin beside": Odd(pickled),
    "only bin": Odd(lambda p: pickled(p, only=True), ("pickled",)),
    "gguf beside": Odd(lambda p: beside(p, "model-q4.gguf")),
    "an adapter beside": Odd(adapter, ("adapter_config.json",)),
    "an adapter alone": Odd(adapter_only, ("adapter",)),
    "an adapter's weights beside": Odd(lambda p: copy_weights(p, "adapter_model.safetensors")),
    "extra weights": Odd(lambda p: change(p, lambda w: w.update(other=torch.zeros(2))), ("other",)),
    "a missing norm": Odd(lambda p: change(p, lambda w: w.pop(NORM)), (NORM,)),
    "a missing head": Odd(lambda p: change(p, lambda w: w.pop(HEAD)), (HEAD,)),
    "a head of a tied model": Odd(
        lambda p: change(p, lambda w: w.update({HEAD: w[EMBEDDING].clone()})), tied=True
    ),
    "another head of a tied model": Odd(
        lambda p: change(p, lambda w: w.update({HEAD: w[EMBEDDING] * 2})),
        (HEAD, "tie_word_embeddings"),
        tied=True,
    ),
    "untied by the configuration alone": Odd(
        lambda p: configure(p, tie_word_embeddings=False), (HEAD,), tied=True
    ),
    "saved from the base model": Odd(
        lambda p: [
            change(p, lambda w: w.pop(HEAD)),
            renamed(p, lambda n: n.removeprefix("model.")),
        ],
        (HEAD,),
    ),
    "saved from the base model, tied": Odd(
        lambda p: renamed(p, lambda n: n.removeprefix("model.")), tied=True
    ),
    "language_model.": Odd(lambda p: renamed(p, lambda n: f"language_model.{n}"), (EMBEDDING,)),
    "more layers": Odd(lambda p: configure(p, num_hidden_layers=3), ("model.layers.2.",)),
    "fewer layers": Odd(lambda p: configure(p, num_hidden_layers=1), ("model.layers.1.",)),
    "float16": Odd(lambda p: cast(p, torch.float16)),
    "bfloat16": Odd(lambda p: cast(p, torch.bfloat16)),
    "mixed dtypes": Odd(lambda p: cast(p, torch.float16, torch.float32, torch.bfloat16)),
    "another dtype in the configuration": Odd(lambda p: configure(p, dtype="bfloat16")),
    "whole numbers": Odd(lambda p: change(p, lambda w: w.update({NORM: w[NORM].long()})), (NORM,)),
    "nan": Odd(lambda p: set_value(p, UP, float("nan")), (UP, ONE)),
    "inf": Odd(lambda p: set_value(p, EMBEDDING, float("-inf")), (EMBEDDING, ONE)),
    "nan in a shard": Odd(
        lambda p: [set_value(p, UP, float("nan")), split(p)], (UP, "of-00002.safetensors")
    ),
    "a cut file": Odd(lambda p: cut(p, -100), (ONE,)),
    "a cut header": Odd(lambda p: cut(p, 20), (ONE,)),
    "an empty file": Odd(lambda p: cut(p, 0), (ONE,)),
    "a pointer of git lfs": Odd(
        lambda p: (p / ONE).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        (ONE, "git lfs"),
    ),
    "another shape": Odd(lambda p: change(p, lambda w: w.update({UP: w[UP][:-1].clone()})), (UP,)),
    "more rows than the configuration": Odd(
        lambda p: configure(p, vocab_size=290), (HEAD, "[290, 32]")
    ),
    "padded rows": Odd(
        lambda p: shutil.copytree(
            save_model(p.with_name("wide"), vocab_size=320), p, dirs_exist_ok=True
        )
    ),
    "links": Odd(linked),
    "a broken link": Odd(
        lambda p: [(p / ONE).unlink(), (p / ONE).symlink_to("gone")], ("model.safetensors",)
    ),
    "a generation configuration": Odd(
        lambda p: configure(p, "generation_config.json", temperature=0.5)
    ),
    "a broken generation configuration": Odd(
        lambda p: (p / "generation_config.json").write_text("{"), ("generation_config.json",)
    ),
    "no generation configuration": Odd(lambda p: (p / "generation_config.json").unlink()),
    "a processor's configuration": Odd(lambda p: configure(p, "preprocessor_config.json", size=3)),
    "no tokenizer": Odd(
        lambda p: [(p / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        ("tokenizer",),
    ),
    "another quantisation": Odd(
        lambda p: configure(p, quantization_config={"quant_method": "gptq", "bits": 4}),
        ("quantization_config", "gptq"),
    ),
    "no architectures": Odd(lambda p: configure(p, architectures=...)),
    "a score model": Odd(score_model, (HEAD,)),
    "a broken configuration": Odd(lambda p: (p / "config.json").write_text("{"), ("config.json",)),
    "no configuration": Odd(lambda p: (p / "config.json").unlink(), ("config.json",)),
}
