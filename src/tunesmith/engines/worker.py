"""The other side of ``ProcessEngine``: an engine that answers lines of JSON. See there for the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from tunesmith.engines.base import RolloutEngine
from tunesmith.errors import TunesmithError, UserError
from tunesmith.types import Sampling
from tunesmith.weights.base import Offer

TakeWeights = Callable[[Offer], Awaitable[None]]
"""Puts offered weights where the engine finds them; other requests are answered meanwhile."""


@dataclass(frozen=True, slots=True)
class EngineWorker:
    """An engine to which requests come one by one, as calls."""

    engine: RolloutEngine
    take_weights: TakeWeights

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """What came of one message."""
        return await answer(self.engine, message, self.take_weights)

    async def close(self) -> None:
        await self.engine.close()


async def serve(
    engine: RolloutEngine,
    read: Callable[[], Awaitable[bytes]],
    write: Callable[[bytes], None],
    take_weights: TakeWeights,
) -> None:
    """Answer until told to close, or until the input ends."""
    running: dict[int, asyncio.Task[None]] = {}

    def send(message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # who asks is gone, which the input tells too
            write(json.dumps(message).encode() + b"\n")

    async def reply(message: dict[str, Any]) -> None:
        send(await answer(engine, message, take_weights))

    send({"ready": True})
    while line := await read():
        message = json.loads(line)
        if message["do"] == "close":
            break
        number: int = message["id"]
        if message["do"] == "cancel":
            if (task := running.get(number)) is not None:
                task.cancel()
            continue
        task = running[number] = asyncio.create_task(reply(message))
        task.add_done_callback(lambda _, number=number: running.pop(number, None))
    await engine.close()


async def answer(engine: RolloutEngine, message: dict[str, Any], take_weights: TakeWeights) -> dict[str, Any]:
    """Do what one message asks; what came of it."""
    try:
        result = await _do(engine, message, take_weights)
    except TunesmithError as error:
        return {"id": message["id"], "error": str(error), "user": isinstance(error, UserError)}
    except Exception as error:
        return {"id": message["id"], "error": f"{type(error).__name__}: {error}", "user": False}
    return {"id": message["id"], "result": result, "stats": asdict(engine.stats())}


async def _do(engine: RolloutEngine, message: dict[str, Any], take_weights: TakeWeights) -> Any:
    match message["do"]:
        case "generate":
            settings = message["sampling"]
            for name in ("stop", "stop_token_ids"):
                settings[name] = tuple(settings[name])
            return asdict(await engine.generate(message["prompt_ids"], Sampling(**settings)))
        case "interrupt":
            return await engine.interrupt()
        case "load_weights":
            await take_weights(message["offer"])
            return await engine.load_weights(message["version"])
        case "sleep":
            return await engine.sleep(message["level"])
        case "wake":
            return await engine.wake()
        case "ping":
            return None
        case other:
            raise ValueError(f"there is no request '{other}'")
