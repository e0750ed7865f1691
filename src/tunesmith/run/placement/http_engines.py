"""Engines behind HTTP: servers started elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.learn.data.tokens import decode
from tunesmith.models.causal_lm import CausalLM
from tunesmith.records.timeline import Timeline
from tunesmith.run.engines.base import Member, RolloutEngine
from tunesmith.run.engines.http.engine import Served, SglangEngine
from tunesmith.run.engines.local.engine import end_of_sequence_ids
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.placement.planes import published
from tunesmith.run.weights.base import Plane
from tunesmith.run.weights.files import FilePlane, shared_directory


def make_http_engine(
    config: RunConfig,
    model: CausalLM,
    report: Callable[[str], None],
    timeline: Timeline | None = None,
) -> RolloutEngine:
    """The servers of ``system.engine_urls`` as one engine."""
    system = config.system
    served = make_served(model, config.model.path)
    plane = weight_files(model, system.engine_directory)
    used = Counter[str]()

    async def start(_: int) -> Member:
        # A lost server may be back, perhaps restarted by hand.
        url = min(system.engine_urls, key=lambda url: used[url])
        used[url] += 1
        leave = partial(used.subtract, [url])
        return SglangEngine(
            url, served, max_running=system.max_running, report=report, on_close=leave
        )

    size = len(system.engine_urls)
    restarts = system.engine_restarts
    return EnginePool(start, plane, size=size, restarts=restarts, report=report, timeline=timeline)


def make_served(model: CausalLM, path: str = "") -> Served:
    """Properties that a server's model must have."""
    tokenizer: Any = model.tokenizer
    config = model.module.config
    return Served(
        path=path or str(config.name_or_path),
        model_type=config.model_type,
        vocab_size=model.head.out_features,
        context=config.get_text_config().max_position_embeddings,
        eos_token_ids=frozenset(end_of_sequence_ids(model)),
        decode=partial(decode, tokenizer),
    )


def weight_files(model: CausalLM, directory: Path | None) -> Plane:
    """Weights in the form of a model directory, which SGLang loads.

    Args:
        directory: one that both trainer and servers see; None: in this machine's memory or on its
            disk.
    """
    tensors = published(model, as_stored=True)
    folder = shared_directory(sum(t.nbytes for _, t in tensors()), directory)
    Path(folder.name).chmod(0o755)  # a server may belong to another user
    model.module.config.save_pretrained(folder.name)
    return FilePlane(tensors, folder)
