"""Clients of ``tunesmith serve-training``: the real ``tinker`` package."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tunesmith.models.parallel.sharding import local
from tunesmith.records.http_server import LIMITS, listening
from tunesmith.run.placement.adapters_on_base import BaseOnRank, FrozenBase
from tunesmith.run.tinker.server import make_app
from tunesmith.run.tinker.service import TinkerService
from tunesmith.run.tinker.store import Store

tinker: Any = pytest.importorskip("tinker", reason="needs the extra tinker")
KEY = "tml-secret"
SETTINGS = ["model.dtype=float32", "system.kv_memory=32MB"]
PROMPT = [10, 11, 12, 13]


@contextmanager
def serving(base: FrozenBase, directory: Path) -> Generator[str]:
    """The address of a server in a thread of this process."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    addresses: list[str] = []
    ready = threading.Event()

    async def serve() -> None:
        service = TinkerService(base, Store(directory))
        app = make_app(service, "127.0.0.1", KEY)
        async with listening(app, "127.0.0.1", 0, limits=LIMITS, shutdown=1, cancels=True) as port:
            addresses.append(f"http://127.0.0.1:{port}")
            ready.set()
            await stop.wait()
        await service.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


def trainer(service: Any, rank: int = 4, seed: int = 3) -> Any:
    return service.create_lora_training_client(base_model="model", rank=rank, seed=seed).result()


def datum(tokens: Sequence[int], **inputs: Any) -> Any:
    """The targets are the tokens after the first."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},
    )


def supervised(tokens: Sequence[int]) -> Any:
    return datum(tokens, weights=np.ones(len(tokens) - 1, np.float32))


def logprobs(output: Any) -> list[np.ndarray]:
    return [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]


def weights(client: Any, saved: Path, name: str) -> dict[str, torch.Tensor]:
    """The adapter's weights."""
    address = client.save_weights_for_sampler(name).result().path
    return load_file(saved / address.removeprefix("tinker://") / "adapter_model.safetensors")


def sample(client: Any, prompt: list[int] = PROMPT, **options: Any) -> Any:
    how = options.pop("how", {})
    return client.sample(
        prompt=tinker.ModelInput.from_ints(prompt),
        num_samples=options.pop("num_samples", 1),
        sampling_params=tinker.SamplingParams(**{"max_tokens": 6, "stop": [], **how}),
        **options,
    ).result()


def frozen_bytes() -> int:
    """The memory of all frozen weights in this process: of the base and under its adapters."""
    bases = [each for each in gc.get_objects() if isinstance(each, BaseOnRank)]
    models = [base.model for base in bases]
    models += [each.backend.model for base in bases for each in vars(base.adapters).values()]
    every = [
        local(p.detach()) for m in models for p in m.module.parameters() if not p.requires_grad
    ]
    return sum(
        {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in every}.values()
    )


@contextmanager
def command(
    model: Path,
    directory: Path,
    *settings: str,
    launcher: Sequence[str] = (sys.executable, "-m", "tunesmith"),
) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """The command, and its address."""
    line = [*launcher, "serve-training", str(model), *SETTINGS, *settings]
    process = subprocess.Popen(
        [*line, "--port", "0", "--directory", str(directory), "--name", "org/tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TUNESMITH_TRAINING_TOKEN": KEY},
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        yield next(x for x in lines if " at http" in x).split(" at ")[1].split(";")[0], process
    finally:
        process.kill()
        process.wait()
