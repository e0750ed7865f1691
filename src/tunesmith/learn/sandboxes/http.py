"""``sandbox = "http"``: programs on a server with Sandbox Fusion's interface (``run_code``)."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex

import aiohttp

from tunesmith.config.sandboxes import HttpSandbox
from tunesmith.config.values import parse_size
from tunesmith.learn.sandboxes.base import SandboxError, SandboxJob, SandboxOutcome, at_once
from tunesmith.learn.usercode.calls import PerLoop
from tunesmith.records.http_client import (
    BadAnswer,
    Unavailable,
    one_line,
    open_session,
    request_patiently,
    token_in,
)
from tunesmith.records.redact import redact

PATIENCE_SECONDS = 30.0
"""Seconds after which a server that fails again and again is given up."""
WAITING_SECONDS = 60.0
"""Seconds that a request may wait for its turn on the server, in addition to the program's."""


class HttpRunner:
    """Sends each program to a server, which limits its memory and its time.

    What the server does not take (``processes``, ``files``) is the server's own.
    """

    def __init__(self, section: HttpSandbox) -> None:
        self._section = section
        self._token = token_in(section.token_env)
        self._places = PerLoop(lambda: asyncio.Semaphore(at_once(section)))

    async def run(self, job: SandboxJob) -> SandboxOutcome:
        section = self._section
        files = {name: base64.b64encode(text.encode()).decode() for name, text in job.files.items()}
        body = {
            "code": shlex.join(job.command) if job.command else job.code,
            "language": "bash" if job.command else "python",
            "stdin": job.stdin,
            "run_timeout": section.program_seconds,
            "memory_limit_MB": max(1, parse_size(section.memory) // 2**20),
            "files": files,
        }
        data = json.dumps(body).encode()
        seconds = section.program_seconds + WAITING_SECONDS
        async with self._places.here, open_session(seconds, self._token) as session:
            return self._outcome(await self._answer(session, data))

    def close(self) -> None:
        """Does nothing: no connection stays open between programs."""

    async def _answer(self, session: aiohttp.ClientSession, data: bytes) -> object:
        most = 16 * parse_size(self._section.output) + 2**16
        url = self._section.url
        try:
            return await request_patiently(session, url, data, most, deadline=PATIENCE_SECONDS)
        except (BadAnswer, Unavailable) as error:
            raise SandboxError(redact(str(error))) from None

    def _outcome(self, answer: object) -> SandboxOutcome:
        most = parse_size(self._section.output)
        match answer:
            case {"run_result": {"status": "TimeLimitExceeded"}}:
                return SandboxOutcome("timed_out")
            case {"run_result": {"return_code": int() as code, "stdout": out, "stderr": errors}}:
                texts = [text if isinstance(text, str) else "" for text in (out, errors)]
                ended = "flooded" if max(map(len, texts)) > most else "ended"
                return SandboxOutcome(ended, code, stdout=texts[0][:most], stderr=texts[1][:most])
            case _:
                shown = one_line(json.dumps(answer))
                raise SandboxError(redact(f"{self._section.url} answered {shown}"))
