"""``tunesmith serve-training``: a model to train and sample from with the ``tinker`` package."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, StorageError, boundary
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.records.addresses import check_address
from tunesmith.records.http_server import serve
from tunesmith.run.assembly.checking import facts_of_run
from tunesmith.run.assembly.serve_reward import token_for
from tunesmith.run.placement.choosing import ranks_without_cluster
from tunesmith.run.specs.engines import local_gpus
from tunesmith.run.specs.from_plan import engine_spec, load_tokenizer, model_spec, tokenizer_spec
from tunesmith.run.specs.models import PredictSpec

if TYPE_CHECKING:
    from tunesmith.run.placement.adapters_on_base import BaseSpec, FrozenBase

TOKEN_ENV = "TUNESMITH_TRAINING_TOKEN"
PREFIX = "tml-"
"""The SDK sends no key that begins otherwise."""
DEFAULT_CONTEXT = 4096
"""Where the model does not say."""
RANK = 32
"""The adapter's, for which memory is planned."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options of the command."""

    host: str
    port: int
    name: str | None
    """What clients call the model; None: as ``open_base`` does."""
    directory: Path
    """Where clients' states and weights are saved."""
    token_file: Path | None


@contextmanager
def open_base(
    path: str, overrides: Sequence[str], name: str | None = None, directory: Path = Path()
) -> Generator[FrozenBase]:
    """The base of a model's directory or hub name, in this process or on the ranks that are
    started for it.

    Args:
        name: what clients call it; None: the hub name, or the directory's last part.
        directory: where clients' states are saved.

    Raises:
        UserError: settings, files or the machine do not allow it.
    """
    from tunesmith.run.placement.adapters_on_base import BaseFacts, FrozenBase, OneRank
    from tunesmith.run.trainers.ranked import Ranks

    plan = plan_of(path, overrides)
    tokenizer = load_tokenizer(plan.said)
    local = Path(path)
    tokenizer_name = str(local.resolve()) if local.is_dir() else path
    own_name = local.name if local.is_dir() else path
    most = plan.memory.microbatch
    assert most is not None, "the plan is of a run that trains"
    base = BaseFacts(name or own_name, tokenizer_name, most)
    spec = base_spec(plan)
    make = partial(FrozenBase, spec=spec, engine=engine_spec(plan), facts=base, tokenizer=tokenizer)
    if not plan.devices.engines_apart:
        yield make(OneRank(spec.build(tokenizer=tokenizer)))
        return
    with ranks_without_cluster(plan, tokenizer, directory) as placement:
        ranks = Ranks(placement.ranks(spec, plan.devices.trainer_ranks))
        own = local_gpus(plan.devices).get("rollout")
        if own is not None:  # before this process uses any
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own[0])
        yield make(ranks)


def plan_of(path: str, overrides: Sequence[str]) -> AnyPlan:
    """As for reinforcement learning of an adapter.

    Raises:
        ConfigError: as ``open_base``.
    """
    own = [f"model.path={path}", "data.train=requests", f"lora.rank={RANK}", "system.engine=local"]
    own += ["reward.functions=exact_match", "algorithm.name=reinforce", "system.engines=1"]
    own += ["system.sequence_parallel.size=1", "system.offload_optimizer=false"]
    model = known_model_facts(path)
    context = (model.context if model else None) or DEFAULT_CONTEXT
    new = min(512, context // 2)
    own.append(f"rollout.max_new_tokens={new}")
    config = load_config(RLConfig, None, [*own, *overrides], files=False)
    facts = replace(facts_of_run(config), train_size=256, longest=context - new)
    plan = resolve(config, facts)
    _check(plan)
    return plan


def _check(plan: AnyPlan) -> None:
    """Refuse what a run could do and this server cannot."""
    devices = plan.devices
    refused = {
        "model.dtype": devices.dtype == "float16" and "float16 gradients cannot be added up",
        "system.cluster": devices.cluster != "none" and "the ranks are on this machine",
        "system": devices.machines > 1 and "all ranks are on one machine here",
        "system.engine": devices.engine.third_party and "the engine is Tunesmith's own",
        "system.engines": devices.engines > 1 and "one device samples here",
        "system.sequence_parallel": devices.sequence > 1 and "a rank reads whole datums here",
        "system.expert_parallel_size": devices.expert_parallel > 1
        and "ranks share experts here as all weights: system.zero_stage",
        "system.offload_optimizer": plan.memory.offload_optimizer
        and "adapters' optimizers stay on the device",
    }
    for key, why in refused.items():
        if why:
            raise ConfigError(f"{key}: {why}", keys=(key,))


def base_spec(plan: AnyPlan) -> BaseSpec:
    """The base, as the trainer of a run with an adapter would have it."""
    from tunesmith.run.placement.adapters_on_base import BaseSpec

    memory = plan.memory
    model = replace(model_spec(plan), frozen=True, lora=None, ends=None)
    tokenizer = tokenizer_spec(plan.said)
    predict = PredictSpec(chunk=plan.said.system.logprob_chunk)
    return BaseSpec(model, tokenizer, predict, memory.checkpointing, memory.offload_activations)


def serve_training(path: str, overrides: Sequence[str], options: ServingOptions) -> None:
    """Serve a model for training until SIGTERM or Ctrl-C.

    Raises:
        UserError: as ``open_base``, the address cannot be used, or ``tinker`` is not installed.
    """
    if find_spec("tinker") is None:
        raise ConfigError("serve-training needs the package: pip install 'tunesmith[tinker]'")
    token = token_for(options.host, options.token_file, TOKEN_ENV, PREFIX)
    if token is not None and not token.startswith(PREFIX):
        raise ConfigError(f"the token must begin with '{PREFIX}': the tinker package demands it")
    check_address(options.host, options.port)
    kept = options.directory
    with boundary(StorageError, f"cannot write to {kept}; choose another --directory", OSError):
        kept.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=kept).close()
    with open_base(path, overrides, options.name, kept) as base:
        asyncio.run(serve_base(base, options, token))
        base.ranks.check()


async def serve_base(base: FrozenBase, options: ServingOptions, token: str | None) -> None:
    """Serve until SIGTERM or Ctrl-C, or until a rank is lost."""
    from tunesmith.run.tinker.server import make_app
    from tunesmith.run.tinker.service import TinkerService
    from tunesmith.run.tinker.store import Store

    service = TinkerService(base, Store(options.directory))
    lost = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ended(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lost.set)

    for far in base.ranks.replicas:
        far.ended.add_done_callback(ended)

    def ready(url: str) -> None:
        print(f"training {base.name} at {url}; Ctrl-C stops it", flush=True)

    app = make_app(service, options.host, token)
    try:
        await serve(app, options.host, options.port, ready, lost)
    finally:
        await service.close()
