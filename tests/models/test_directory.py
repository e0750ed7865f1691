"""Odd model directories: every loader and the planner read the same model, or all refuse with the
same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.odd_models import ODD, ONE
from tests.support.tiny import save_model
from tunesmith.errors import ModelError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.sharding import Sharding, run
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.run.specs.base import WeightSource
from tunesmith.run.specs.engines import VllmSpec
from tunesmith.types import Sample

FOREST = build_forest(Batch.of([Sample([5, 9, 30, 77, 8, 20], [False] + [True] * 5)]))
QUICK = (
    "stale shards",
    "an adapter beside",
    "another head of a tied model",
    "nan",
    "a cut file",
    "another shape",
    "links",
)
PLANNED = (
    "a broken generation configuration",
    "an adapter beside",
    "an adapter alone",
    "stale shards",
    "a cut file",
)


@pytest.fixture(scope="module")
def sharding() -> Iterator[Sharding]:
    """Over this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Sharding.over("cpu", 3, 1)
    dist.destroy_process_group()


def loaders(sharding: Sharding) -> dict[str, Callable[[Path], CausalLM]]:
    return {
        "plain": CausalLM.load,
        "sharded": lambda path: CausalLM.load(path, sharding=sharding, trains=False),
        "quantised": lambda path: CausalLM.load(path, quantize="nf4"),
    }


@pytest.mark.parametrize("role", ["model", "draft_model"])
def test_what_only_vllm_reads_has_its_values_checked_too(tmp_path: Path, role: str) -> None:
    """Without a trainer, which would load the same files, and as a draft."""
    good = save_model(tmp_path / "good")
    bad = save_model(tmp_path / "bad")
    ODD["nan"].make(bad)
    settings = {"model": str(good), "draft_model": str(good), role: str(bad)}
    with pytest.raises(ModelError) as refused:
        VllmSpec(settings).check(WeightSource(), print)
    assert all(words in str(refused.value) for words in (*ODD["nan"].refused, str(bad)))


def logprobs(model: CausalLM) -> torch.Tensor:
    with torch.no_grad():
        if model.sharding is None:
            return model.predict(FOREST).logprobs
        return run(model.module, lambda: (model.predict(FOREST).logprobs,))[0]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ODD]
)
def test_every_loader_reads_a_directory_alike(
    tmp_path: Path, sharding: Sharding, name: str
) -> None:
    odd = ODD[name]
    path = tmp_path / "model"
    save_model(path, odd.family, tie_word_embeddings=odd.tied)
    odd.make(path)
    found: dict[str, Any] = {}
    for kind, load in loaders(sharding).items():
        if odd.refused:
            with pytest.raises(ModelError) as refused:
                load(path)
            assert all(words in str(refused.value) for words in odd.refused), (
                kind,
                str(refused.value),
            )
        else:
            found[kind] = logprobs(load(path))
    if name in PLANNED:
        with pytest.raises(ModelError) as refused:
            known_model_facts(str(path))
        assert all(words in str(refused.value) for words in odd.refused)
    if odd.refused:
        return
    for kind in ("sharded",):
        torch.testing.assert_close(found[kind], found["plain"], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["quantised"], found["plain"], rtol=0, atol=0.1)
    facts = known_model_facts(str(path))
    assert facts is not None
    files = [path / ONE] if (path / ONE).exists() else sorted(path.glob("model-0*"))
    assert facts.parameters == sum(t.numel() for file in files for t in load_file(file).values())
