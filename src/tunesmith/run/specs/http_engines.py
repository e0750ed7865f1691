"""Engines behind HTTP: servers started elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.config.system import SystemSection
from tunesmith.learn.data.tokens import decode
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.plan import AnyPlan
from tunesmith.records.timeline import Timeline
from tunesmith.run.engines.base import Member, RolloutEngine
from tunesmith.run.engines.http.engine import Served, SglangEngine
from tunesmith.run.engines.http.server import LET_GO, PATIENCE
from tunesmith.run.engines.local.engine import end_of_sequence_ids
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.specs.base import EngineSpec, PoolSize, Report, WeightSource
from tunesmith.run.specs.planes import published
from tunesmith.run.weights.base import Plane
from tunesmith.run.weights.directories import shared_directory
from tunesmith.run.weights.files import FilePlane


def served_spec(plan: AnyPlan) -> ServedSpec:
    system: SystemSection = plan.said.system
    return ServedSpec(
        system.engine_urls,
        plan.said.model.path,
        plan.sampling.running,
        system.engine_directory,
        pool=PoolSize(restarts=system.engine_restarts),
    )


@dataclass(frozen=True, slots=True)
class ServedSpec(EngineSpec):
    """Servers that are already running, as one engine."""

    urls: Sequence[str]
    path: str
    """The path of the model that they serve."""
    max_running: int
    directory: Path | None = None
    """A directory that trainer and servers share; None: one in this machine's memory or on its
    disk."""

    def around(
        self, source: WeightSource, report: Report, timeline: Timeline | None
    ) -> RolloutEngine:
        assert source.model is not None, "servers are compared with it"
        served = make_served(source.model, self.path)
        patience = PATIENCE if len(self.urls) == 1 else LET_GO

        async def start(number: int) -> Member:
            """A lost server may be back, perhaps restarted by hand."""
            engine = SglangEngine(
                self.urls[number],
                served,
                max_running=self.max_running,
                patience=patience,
                report=report,
            )
            try:
                await engine.check()
            except BaseException:
                await engine.close()
                raise
            return engine

        return EnginePool(
            start,
            weight_files(source.model, self.directory),
            size=len(self.urls),
            restarts=self.pool.restarts,
            report=report,
            timeline=timeline,
        )


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
