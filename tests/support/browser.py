"""A real headless Chromium, driven by the DevTools protocol
(chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 120
"""Time that a page has for what is awaited."""
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--remote-debugging-port=0",
)


def chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """A tab. ``errors`` is what its console reported, ``requests`` the addresses that it asked
    for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            answer = self._answers.pop(event.get("id"), None)
            if answer:
                answer.set_result(event)
            parameters = event.get("params", {})
            if event.get("method") == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            elif event.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"]))
            elif (
                event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error"
            ):
                self.errors.append(json.dumps(parameters["entry"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in (
                "error",
                "warning",
            ):
                self.errors.append(json.dumps(parameters["args"]))

    async def call(self, method: str, **parameters: Any) -> Any:
        self._calls += 1
        answer = self._answers[self._calls] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._calls, "method": method, "params": parameters})
        event = await asyncio.wait_for(answer, SECONDS)
        assert "error" not in event, event
        return event["result"]

    async def open(self, address: str) -> None:
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value."""
        for _ in range(SECONDS * 20):
            value = await self.run(expression)
            if value:
                return value
            await asyncio.sleep(0.05)
        raise TimeoutError(
            f"{expression} did not come true; the page says: "
            f"{await self.run('document.body.innerText')}"
        )

    async def press(self, key: str) -> None:
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def picture(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser(width: int = 1280, height: int = 800) -> AsyncGenerator[Page]:
    """A tab of a Chromium that is ended with the block."""
    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        process = subprocess.Popen(
            [program, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tab = next(target for target in await answer.json() if target["type"] == "page")
                async with session.ws_connect(
                    tab["webSocketDebuggerUrl"], max_msg_size=0
                ) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    yield page
                    listening.cancel()
        finally:
            process.kill()
            process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> str:
    for _ in range(SECONDS * 10):
        if file.exists() and (lines := file.read_text().splitlines()):
            return lines[0]
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        await asyncio.sleep(0.1)
    raise TimeoutError("Chromium did not start")
