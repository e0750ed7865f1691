"""``tunesmith serve-reward``: a reward model or a reward function over HTTP."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config.commands import GenerateConfig
from tunesmith.config.load import load_config
from tunesmith.config.sandboxes import Sandbox
from tunesmith.config.schema import ModelReward, RewardSection
from tunesmith.errors import ConfigError, boundary, nearest
from tunesmith.learn.rewards.loading import NAMES, load_rewards
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.learn.usercode.calls import parameters_of
from tunesmith.plan.plan import MOST_TOKENS
from tunesmith.records.addresses import is_loopback

FUNCTION_SECONDS = 30.0
TOKEN_ENV = "TUNESMITH_REWARD_TOKEN"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the command; None means the default.

    The first five apply to reward models, ``timeout`` and ``sandbox`` to functions.
    """

    max_tokens: int | None = None
    normalize: bool | None = None
    chat: bool | None = None
    dtype: str | None = None
    device: str | None = None
    timeout: float | None = None
    sandbox: str | None = None
    """As ``environment.sandbox`` on a command line."""
    window_ms: float = 5.0
    max_request_mb: float = 16.0
    token_file: Path | None = None


def serve_reward(target: str, host: str, port: int, options: ServeOptions) -> None:
    """Serve a reward until a signal ends the process.

    Raises:
        ConfigError, ModelError: the reward does not exist, an option does not apply, or the address
            cannot be used.
    """
    is_function = target in NAMES or ":" in target or target.endswith(".py")
    rewards = _function(target, options) if is_function else _model(target, options)
    from tunesmith.learn.rewards.server import RewardService, make_app
    from tunesmith.records.http_server import serve

    token = token_for(host, options.token_file, TOKEN_ENV)
    service = RewardService(rewards, options.window_ms / 1000, token)

    def ready(url: str) -> None:
        print(f"serving {target} at {url}/reward (and {url}/health); Ctrl-C stops it", flush=True)

    try:
        asyncio.run(
            serve(make_app(service, int(options.max_request_mb * 2**20)), host, port, ready)
        )
    finally:
        rewards.close()


def _function(target: str, options: ServeOptions) -> RewardSet:
    _refuse(options, ("max_tokens", "normalize", "chat", "dtype", "device"), "a reward function")
    section = RewardSection(functions=(target,), timeout=options.timeout or FUNCTION_SECONDS)
    sandbox = _sandbox(options.sandbox) if options.sandbox else None
    rewards = load_rewards(section, Path.cwd(), sandbox=sandbox)
    (function,) = rewards.functions
    if "completion_ids" in (parameters_of(function.function) or ()):
        raise ConfigError(
            f"'{target}' takes completion_ids, which requests do not have; they have text"
        )
    return rewards


def _sandbox(text: str) -> Sandbox | None:
    needed = "model.path=unread", "data.train=unread"
    said = f"environment.sandbox={text}"
    return load_config(GenerateConfig, None, [*needed, said], files=False).environment.sandbox


def _model(target: str, options: ServeOptions) -> RewardSet:
    _refuse(options, ("timeout", "sandbox"), "a reward model")
    if "/" not in target and not Path(target).exists():
        close = nearest(target, [*NAMES, *(path.name for path in Path.cwd().iterdir())])
        raise ConfigError(
            f"'{target}' is no reward: give a reward model's directory or hub name, a function as "
            "rewards.py:name, or a built-in "
            f"({', '.join(NAMES)}).{close if close.startswith(' Did') else ''}"
        )
    entry = ModelReward(path=target, normalize=bool(options.normalize))
    from tunesmith.learn.rewards.stats import check_reward_model

    check_reward_model(entry)
    import torch
    from transformers.utils import logging

    from tunesmith.learn.rewards.model import model_reward
    from tunesmith.run.specs.scorers import ScorerSpec

    logging.disable_progress_bar()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    spec = ScorerSpec(
        entry,
        options.dtype or "float32",
        device,
        options.max_tokens or MOST_TOKENS[device.partition(":")[0]],
        chat=options.chat,
    )
    rewards = RewardSet({target: 1.0}, FUNCTION_SECONDS)
    rewards.add(model_reward(target, spec.build(), exact=False, in_thread=True))
    return rewards


def _refuse(options: ServeOptions, names: tuple[str, ...], what: str) -> None:
    for name in names:
        value: Any = getattr(options, name)
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning for {what}; leave it out")


def read_token(file: Path | None, variable: str = TOKEN_ENV) -> str | None:
    """The token from ``--token-file`` or the environment; None if there is neither."""
    if file is not None:
        with boundary(ConfigError, f"--token-file: cannot read {file}", (OSError, ValueError)):
            token = file.read_text(encoding="utf-8").strip()
        source = f"--token-file {file}"
    elif (token := os.environ.get(variable)) is not None:
        token = token.strip()
        source = variable
    else:
        return None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{source} holds no token; it is one word of ASCII characters, such as 'openssl rand "
            "-hex 32' prints."
        )
    return token


def token_for(host: str, file: Path | None, variable: str, prefix: str = "") -> str | None:
    """``read_token``; for an address that others reach, one that is made and printed if there is
    none."""
    token = read_token(file, variable)
    if token is None and not is_loopback(host):
        token = prefix + secrets.token_urlsafe(32)
        print(f"token: {token} (made for this start; {variable} or --token-file sets one)")
    return token
