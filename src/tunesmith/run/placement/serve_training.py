"""``tunesmith serve-training``: a model to train and sample from with the ``tinker`` package."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.resolve import resolve
from tunesmith.records.http_server import serve
from tunesmith.run.placement.checking import facts_of_run
from tunesmith.run.placement.serve_reward import token_for
from tunesmith.run.placement.specs import load_tokenizer

if TYPE_CHECKING:
    from tunesmith.run.placement.adapters_on_base import FrozenBase

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


def open_base(path: str, overrides: Sequence[str], name: str | None = None) -> FrozenBase:
    """The base of a model's directory or hub name.

    Args:
        name: what clients call it; None: the hub name, or the directory's last part.

    Raises:
        UserError: settings, files or the machine do not allow it.
    """
    from tunesmith.run.placement.adapters_on_base import FrozenBase

    own = [f"model.path={path}", "data.train=requests", f"lora.rank={RANK}", "system.engine=local"]
    own += ["reward.functions=exact_match", "algorithm.name=reinforce"]
    model = known_model_facts(path)
    context = (model.context if model else None) or DEFAULT_CONTEXT
    new = min(512, context // 2)
    own.append(f"rollout.max_new_tokens={new}")
    config = load_config(RLConfig, None, [*own, *overrides], files=False)
    tokenizer = load_tokenizer(config)
    facts = replace(facts_of_run(config), train_size=256, longest=context - new)
    plan = resolve(config, facts)
    devices = plan.devices
    refused = {
        "model.dtype": devices.dtype == "float16" and "float16 gradients cannot be added up",
        "system": devices.trainer_ranks > 1 and "one process trains here",
        "system.engine": devices.weights_apart and "the engine is Tunesmith's own",
    }
    for key, why in refused.items():
        if why:
            raise ConfigError(f"{key}: {why}", keys=(key,))
    local = Path(path)
    tokenizer_name = str(local.resolve()) if local.is_dir() else path
    own_name = local.name if local.is_dir() else path
    return FrozenBase(plan, tokenizer, name or own_name, tokenizer_name)


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
    base = open_base(path, overrides, options.name)
    asyncio.run(_serve(base, options, token))


async def _serve(base: FrozenBase, options: ServingOptions, token: str | None) -> None:
    from tunesmith.run.tinker.server import make_app
    from tunesmith.run.tinker.service import TinkerService
    from tunesmith.run.tinker.store import Store

    service = TinkerService(base, Store(options.directory))

    def ready(url: str) -> None:
        print(f"training {base.name} at {url}; Ctrl-C stops it", flush=True)

    try:
        await serve(make_app(service, options.host, token), options.host, options.port, ready)
    finally:
        await service.close()
