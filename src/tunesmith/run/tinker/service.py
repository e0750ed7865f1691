"""Sessions, models and samplers of clients."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from tunesmith.errors import UserError
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.run.tinker.base import AdaptableBase, TrainedAdapter
from tunesmith.run.tinker.futures import Futures, RequestLine, Result
from tunesmith.run.tinker.losses import TinkerObjective
from tunesmith.run.tinker.messages import ForwardRequest, forward_result
from tunesmith.run.tinker.requests import (
    Adam,
    CreateModel,
    CreateSampler,
    Load,
    LoraAsk,
    SampleAsk,
    Save,
    SaveForSampler,
)
from tunesmith.run.tinker.samplers import SampledWeights, Samplers
from tunesmith.run.tinker.store import Store, StoredWeights

T = TypeVar("T")
SILENT_SECONDS = 3600.0
"""Without a heartbeat, after which a session's models are dropped."""


class UnknownNameError(UserError):
    """A session, a model, a sampler or a future that this server does not have."""


@dataclass(slots=True)
class ClientSession:
    beat: float = field(default_factory=time.monotonic)
    models: set[str] = field(default_factory=set[str])
    samplers: set[str] = field(default_factory=set[str])


@dataclass(slots=True)
class TrainingModel:
    """A training client's model. It has no adapter until its first request made one."""

    line: RequestLine
    asked: float = field(default_factory=time.time)
    """When its last request came."""
    lora: LoraAsk | None = None
    adapter: TrainedAdapter | None = None


class TinkerService:
    """What ``server`` answers with. Called on one event loop; weights are computed with on one
    other thread."""

    def __init__(self, base: AdaptableBase, store: Store) -> None:
        self.base = base
        self.store = store
        self.futures = Futures()
        self.samplers = Samplers(self._make_engine, base.context, alone=base.alone)
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, TrainingModel] = {}
        self._samplers: dict[str, SampledWeights | None] = {}
        """The weights that each client samples from; None: the base's."""
        self._thread = ThreadPoolExecutor(1, "training")

    async def close(self) -> None:
        await self.samplers.close()
        self._thread.shutdown(cancel_futures=True)

    def open_session(self) -> str:
        self._drop_silent()
        name = str(uuid.uuid4())
        self.sessions[name] = ClientSession()
        return name

    def beat(self, session_id: str) -> None:
        self.session(session_id).beat = time.monotonic()

    def finish(self, session_id: str) -> None:
        """Forget a session, its models and its samplers; what they saved stays."""
        session = self.sessions.pop(session_id, ClientSession())
        for name in session.models:
            self.models.pop(name, None)
        for name in session.samplers:
            self._samplers.pop(name, None)

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for name, session in list(self.sessions.items()):
            if now - session.beat > SILENT_SECONDS:
                self.finish(name)

    def create_model(self, ask: CreateModel) -> str:
        self._check_base(ask.base_model)
        model, name = self._new_model(ask.session_id, ask.model_seq_id)

        async def work() -> Result:
            model.adapter = await self._compute(lambda: self.base.adapter(ask.lora_config))
            model.lora = ask.lora_config
            return {"model_id": name, "type": "create_model"}

        return model.line.submit(0, work)

    def load(self, ask: Load) -> str:
        """Load a saved state into a model, or into a new one."""
        if ask.base_model is not None:
            self._check_base(ask.base_model)
        if ask.session_id is not None and ask.model_seq_id is not None:
            model, name = self._new_model(ask.session_id, ask.model_seq_id)
            number = 0
        elif ask.model_id is not None and ask.seq_id is not None:
            name = ask.model_id
            model = self.model(name)
            number = ask.seq_id
        else:
            raise UserError("send model_id and seq_id, or session_id and model_seq_id")

        async def work() -> Result:
            path, facts = self.store.find(ask.path)
            self._check_base(facts.base_model)
            adapter = model.adapter
            if adapter is None:
                adapter = await self._compute(lambda: self.base.adapter(facts.lora()))
            await self._compute(lambda: adapter.load(path, optimizer=ask.optimizer))
            model.adapter = adapter
            model.lora = model.lora or facts.lora()
            return {"path": ask.path, "model_id": name, "type": "load_weights"}

        return model.line.submit(number, work)

    def forward(self, ask: ForwardRequest) -> str:
        model = self.model(ask.model_id)

        def compute() -> bytes:
            adapter, _ = _ready(model)
            datums = ask.datums()
            objective = TinkerObjective.of(ask.loss, ask.config(), datums)
            run = adapter.forward_backward if ask.backward else adapter.forward
            loss = run(datums, objective)
            return forward_result(datums.split(objective.logprobs), {"loss:sum": loss})

        return model.line.submit(ask.seq_id, lambda: self._compute(compute))

    def step(self, model_id: str, number: int, adam: Adam) -> str:
        model = self.model(model_id)

        async def work() -> Result:
            adapter, _ = _ready(model)
            return {"metrics": dict(await self._compute(lambda: adapter.step(adam)))}

        return model.line.submit(number, work)

    def save(self, ask: Save) -> str:
        model = self.model(ask.model_id)
        name = ask.path or f"state-{ask.seq_id:06d}"

        def compute() -> Result:
            adapter, lora = _ready(model)
            facts = StoredWeights.of(self.base.name, lora, ask.ttl_seconds)
            address = self.store.write(
                ask.model_id, "weights", name, facts, adapter.save, overwrite=ask.overwrite
            )
            return {"path": address, "type": "save_weights"}

        return model.line.submit(ask.seq_id, lambda: self._compute(compute))

    def save_for_sampler(self, ask: SaveForSampler) -> str:
        """Save weights to sample with, under a name, or for a new sampler."""
        model = self.model(ask.model_id)
        name = ask.path or f"sampler-{ask.seq_id:06d}"

        def compute() -> str:
            adapter, lora = _ready(model)
            facts = StoredWeights.of(self.base.name, lora, ask.ttl_seconds)
            return self.store.write(
                ask.model_id, "sampler_weights", name, facts, adapter.save_weights
            )

        async def work() -> Result:
            address = await self._compute(compute)
            said: dict[str, object] = {"path": address, "type": "save_weights_for_sampler"}
            number = ask.sampling_session_seq_id
            if number is not None:
                session = ask.model_id.rpartition(":train:")[0]
                said["sampling_session_id"] = self._new_sampler(session, number, address)
            return said

        return model.line.submit(ask.seq_id, work)

    def refuse(self, model_id: str, number: int, error: UserError) -> str:
        """Give a request's turn to an error, so that later requests do not wait for it."""

        async def work() -> Result:
            raise error

        return self.model(model_id).line.submit(number, work)

    def create_sampler(self, ask: CreateSampler) -> str:
        if ask.model_path is None:
            self._check_base(ask.base_model or self.base.name)
        return self._new_sampler(ask.session_id, ask.sampling_session_seq_id, ask.model_path)

    def sampler(self, name: str) -> SampledWeights | None:
        return _known(self._samplers, name, "sampler")

    def sample(self, ask: SampleAsk) -> str:
        weights = self.sampler(ask.sampling_session_id)
        name = f"{ask.sampling_session_id}:{ask.seq_id}"

        async def work() -> Result:
            self._check_saved(weights)
            return await self.samplers.sample(weights, ask)

        self.futures.start(name, work)
        return name

    def model(self, name: str) -> TrainingModel:
        model = _known(self.models, name, "model")
        model.asked = time.time()
        return model

    def session(self, name: str) -> ClientSession:
        return _known(self.sessions, name, "session")

    def _check_base(self, name: str) -> None:
        if name != self.base.name:
            raise UserError(f"base_model = '{name}' is not served: use '{self.base.name}'")

    def _new_model(self, session_id: str, number: int) -> tuple[TrainingModel, str]:
        session = self.session(session_id)
        name = f"{session_id}:train:{number}"
        model = self.models.get(name) or TrainingModel(RequestLine(name, self.futures))
        self.models[name] = model
        session.models.add(name)
        return model, name

    def _new_sampler(self, session_id: str, number: int, address: str | None) -> str:
        session = self.session(session_id)
        name = f"{session_id}:sample:{number}"
        self._samplers[name] = None if address is None else self._saved(address)
        session.samplers.add(name)
        return name

    def _saved(self, address: str) -> SampledWeights:
        path, facts = self.store.find(address)
        self._check_base(facts.base_model)
        path = path / "model" if (path / "model").is_dir() else path
        return SampledWeights(address, path, facts.time)

    def _check_saved(self, weights: SampledWeights | None) -> None:
        if weights is not None and self._saved(weights.address) != weights:
            raise UserError(
                f"'{weights.address}' holds later weights by now: make another sampling client"
            )

    async def _make_engine(self, weights: SampledWeights | None) -> RolloutEngine:
        def make() -> RolloutEngine:
            self._check_saved(weights)  # nothing is saved meanwhile
            return self.base.engine(weights and weights.path)

        # A new adapter draws from PyTorch's generator, so the two are not made at once.
        return await self._compute(make)

    async def _compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _ready(model: TrainingModel) -> tuple[TrainedAdapter, LoraAsk]:
    if model.adapter is None or model.lora is None:
        raise UserError("the model could not be made: see its first request")
    return model.adapter, model.lora


def _known(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise UnknownNameError(
            f"there is no {what} '{name}' on this server, which may have been restarted: "
            "begin again from the last saved state"
        )
    return table[name]
