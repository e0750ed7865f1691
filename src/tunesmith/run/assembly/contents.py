"""Digests of what a run reads from files, by which a continued run notices that they have
changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tunesmith.config.commands import DistillConfig, OfflineDistillConfig, SamplingConfig
from tunesmith.config.continuing import Content
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.learn.data.prepare import Prepared
from tunesmith.plan.plan import AnyPlan
from tunesmith.types import Tokenizer

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
BLOCKS = 64
BLOCK = 4096
"""Blocks, and their bytes, by which a file of weights is recognised: training changes every block
of it."""
_CODE = {
    "reward": ("reward.functions",),
    "environment": ("environment.path", "environment.tools"),
    "algorithm": ("algorithm.",),
}


def contents_of(
    plan: AnyPlan, tokenizer: Tokenizer, train: Prepared[Any], held_out: Prepared[Any] | None
) -> dict[str, Content]:
    """The contents of a run's files, by the names in ``config.verdicts.CONTENTS``."""
    config: RunConfig = plan.said
    found = weights_and_code(plan)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    text = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    found["tokenizer"] = Content(config.model.path, _digest([text.encode()]))
    found["chat_template"] = Content("", _digest([repr(tokenizer.chat_template).encode()]))
    for name, data in (("train", train), ("eval", held_out)):
        if data is not None:
            found[name] = Content(f"data.{name}", data.fingerprint)
    return found


def weights_and_code(plan: AnyPlan) -> dict[str, Content]:
    """Those of its models and of the user's code."""
    config: RunConfig = plan.said
    paths: dict[str, list[str | Path | None]] = {
        "model": [config.model.path],
        "adapter": [config.lora.path],
    }
    if isinstance(config, RLConfig):
        paths["critic"] = [config.critic.path]
    if isinstance(config, RLConfig | SamplingConfig) and config.reward is not None:
        models = (*config.reward.models, *config.reward.judge)
        paths["reward_models"] = [model.path for model in models]
    if isinstance(config, DistillConfig | OfflineDistillConfig):
        paths["teacher"] = [] if plan.kind.self_taught else [config.teacher.path]
    found = {
        name: _of_weights([path for path in some if path])
        for name, some in paths.items()
        if any(some)
    }
    for name, keys in _CODE.items():
        files = sorted(
            {
                file
                for key, value in plan.settings.items()
                if key.startswith(keys)
                for file in _code_files(value)
            }
        )
        if files:
            found[name] = Content(
                " and ".join(map(str, files)), _digest(file.read_bytes() for file in files)
            )
    return found


def _of_weights(paths: list[str | Path]) -> Content:
    parts: list[bytes] = []
    for path in map(Path, paths):
        files = sorted(file for pattern in WEIGHTS for file in path.glob(pattern))
        files = [path] if path.is_file() else files
        parts += [block for file in files for block in _sampled(file)] or [str(path).encode()]
    return Content(" and ".join(map(str, paths)), _digest(parts))


def _sampled(file: Path) -> Iterator[bytes]:
    """A file's size, and blocks of it at even distances, because reading all of it would take
    minutes."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as opened:
        for number in range(BLOCKS):
            opened.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
            yield opened.read(BLOCK)


def _code_files(value: Any) -> Iterator[Path]:
    """The files in a setting's references to the user's code."""
    if isinstance(value, list | tuple):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _code_files(item)
    elif isinstance(value, dict):
        yield from _code_files(list(value.values()))  # pyright: ignore[reportUnknownArgumentType]
    elif (
        isinstance(value, str)
        and ".py:" in value
        and (file := Path(value.rpartition(":")[0])).is_file()
    ):
        yield file


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(hashlib.blake2b(part).digest())
    return digest.hexdigest()
