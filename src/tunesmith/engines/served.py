"""The other side of ``ProcessEngine``: an engine that answers lines of JSON. See there for the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunesmith.engines.base import RolloutEngine
from tunesmith.errors import TunesmithError, UserError
from tunesmith.types import Sampling

Send = Callable[[dict[str, Any]], None]


async def serve(
    engine: RolloutEngine,
    read: Callable[[], Awaitable[bytes]],
    write: Callable[[bytes], None],
    take_weights: Callable[[Path, int], None],
) -> None:
    """Answer until the input ends. ``take_weights`` puts a published file where the engine finds its weights."""
    running: dict[int, asyncio.Task[None]] = {}

    def send(message: dict[str, Any]) -> None:
        write(json.dumps(message).encode() + b"\n")

    send({"ready": True})
    while line := await read():
        message = json.loads(line)
        number: int = message["id"]
        if message["do"] == "cancel":
            if (task := running.get(number)) is not None:
                task.cancel()
            continue
        task = asyncio.create_task(_answer(engine, message, send, take_weights))
        running[number] = task
        task.add_done_callback(lambda _, number=number: running.pop(number, None))
    await engine.close()


async def _answer(
    engine: RolloutEngine, message: dict[str, Any], send: Send, take_weights: Callable[[Path, int], None]
) -> None:
    try:
        result = await _do(engine, message, take_weights)
    except TunesmithError as error:
        send({"id": message["id"], "error": str(error), "user": isinstance(error, UserError)})
    except Exception as error:
        send({"id": message["id"], "error": f"{type(error).__name__}: {error}", "user": False})
    else:
        send({"id": message["id"], "result": result, "stats": asdict(engine.stats())})


async def _do(engine: RolloutEngine, message: dict[str, Any], take_weights: Callable[[Path, int], None]) -> Any:
    match message["do"]:
        case "generate":
            settings = message["sampling"]
            for name in ("stop", "stop_token_ids"):
                settings[name] = tuple(settings[name])
            return asdict(await engine.generate(message["prompt_ids"], Sampling(**settings)))
        case "load_weights":
            take_weights(Path(message["path"]), message["version"])
            return await engine.load_weights(message["version"])
        case "sleep":
            return await engine.sleep()
        case "wake":
            return await engine.wake()
        case "ping":
            return None
        case other:
            raise ValueError(f"there is no request '{other}'")
