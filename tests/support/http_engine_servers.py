"""A local stand-in for an SGLang server, with a real tiny model behind it.

Requests and answers have the shapes of SGLang 0.5.23 (``srt/entrypoints/http_server.py``,
``srt/managers/{io_struct,tokenizer_manager,schedule_batch}.py``, ``srt/layers/sampler.py``), and so
does its behaviour: which settings it refuses, what it ignores, which token ends a completion, what
an abort answers. It is no proof that the server itself does so.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.http_servers import running


class Writer:
    """A model that writes one token at a time, each from the whole sequence."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.eos: set[int] = {self.tokenizer.eos_token_id}

    def load(self, directory: Path) -> None:
        [file] = directory.glob("*.safetensors")
        self.model.load_state_dict(load_file(file))

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(ids)])).logits[0, -1]

    def draw(self, scores: torch.Tensor, key: Any) -> int:
        """By the Gumbel trick, with noise that depends on nothing but ``key``."""
        digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
        noise = torch.rand(
            len(scores), generator=torch.Generator().manual_seed(int.from_bytes(digest))
        )
        return int((scores - noise.clamp(1e-9, 1 - 1e-9).log().neg().log()).argmax())


Trouble = Callable[[web.Request, Any], Awaitable[web.StreamResponse | None]]
"""What a test makes of a request before the server sees it; None leaves it to the server."""


@dataclass
class _Request:
    output_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    aborted: bool = False


class Sglang:
    """SGLang: ``url`` while it is served, and what it was asked."""

    url = ""

    def __init__(self, path: Path, *, context: int = 128, deterministic: bool = True) -> None:
        self.writer = Writer(path)
        self.context = context
        self.deterministic = deterministic
        self.model_type: str = self.writer.model.config.model_type
        self.trouble: Trouble | None = None
        self.asked: list[tuple[str, Any]] = []
        self.aborts: list[str] = []
        self.requests: dict[str, _Request] = {}
        self.may_run = asyncio.Event()
        self.holds_at: int | None = None
        """Tokens of a completion after which it is held until it is aborted, once."""
        self._draws = 0
        self.restart()

    def restart(self) -> None:
        """With the weights it was launched with."""
        self.weight_version = "default"
        self.writer = Writer(self.writer.path)
        self.may_run.set()

    def asked_for(self, name: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == name]

    def app(self) -> web.Application:
        app = web.Application()
        for path in (
            "generate",
            "abort_request",
            "pause_generation",
            "update_weights_from_disk",
            "continue_generation",
        ):
            app.router.add_post(f"/{path}", self._handle)
        for path in ("model_info", "server_info"):
            app.router.add_get(f"/{path}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        name = request.path[1:]
        self.asked.append((name, body))
        if self.trouble is not None and (made := await self.trouble(request, body)) is not None:
            return made
        return await getattr(self, f"_{name}")(body)

    async def _model_info(self, _: Any) -> web.Response:
        return web.json_response(
            {
                "model_path": str(self.writer.path),
                "is_generation": True,
                "weight_version": self.weight_version,
                "model_type": self.model_type,
            }
        )

    async def _server_info(self, _: Any) -> web.Response:
        most = self.context - 1 - 5
        found = {
            "enable_deterministic_inference": self.deterministic,
            "max_req_input_len": most,
            "version": "0.5.23",
        }
        return web.json_response(found)

    async def _pause_generation(self, body: Any) -> web.Response:
        assert body == {"mode": "abort"}
        self.may_run.clear()
        self.holds_at = None
        while self.requests:
            for request in self.requests.values():
                request.aborted = True
            await asyncio.sleep(0)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, _: Any) -> web.Response:
        self.may_run.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, body: Any) -> web.Response:
        try:
            assert (Path(body["model_path"]) / "config.json").exists()
            self.writer.load(Path(body["model_path"]))
        except Exception as error:
            failed = {
                "success": False,
                "message": f"Failed to update weights: {error}.",
                "num_paused_requests": 0,
            }
            return web.json_response(failed, status=400)
        self.weight_version = body["weight_version"]
        return web.json_response(
            {"success": True, "message": "Succeeded to update.", "num_paused_requests": 0}
        )

    async def _abort_request(self, body: Any) -> web.Response:
        self.aborts.append(body.get("rid"))
        for name, request in self.requests.items():
            request.aborted |= name == body.get("rid") or body.get("abort_all", False)
        return web.Response()

    async def _generate(self, body: Any) -> web.Response:
        ids = body["input_ids"]
        settings = body["sampling_params"]
        if (
            not ids
            or len(ids) >= self.context
            or settings["max_new_tokens"] + len(ids) > self.context
        ):
            message = (
                f"Requested token count exceeds the model's maximum context length of "
                f"{self.context} tokens."
            )
            return web.json_response({"error": {"message": message}}, status=400)
        await self.may_run.wait()
        request = self.requests[body["rid"]] = _Request()
        try:
            reason = await self._write(ids, settings, request)
        finally:
            del self.requests[body["rid"]]
        pairs = [[p, i, None] for p, i in zip(request.logprobs, request.output_ids, strict=True)]
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "weight_version": self.weight_version,
            "completion_tokens": len(pairs),
            "cached_tokens": 0,
            "output_token_logprobs": pairs,
        }
        text = self.writer.tokenizer.decode(request.output_ids)
        return web.json_response(
            {"text": text, "output_ids": request.output_ids, "meta_info": meta}
        )

    async def _write(self, ids: list[int], settings: Any, request: _Request) -> dict[str, Any]:
        self._draws += 1
        drawn = settings.get("sampling_seed", 42) if self.deterministic else f"free {self._draws}"
        temperature = settings["temperature"] or 1.0  # and top_k = 1
        limit = min(settings["max_new_tokens"], self.context - 1 - len(ids) - 1)
        while not request.aborted:
            if len(request.output_ids) == self.holds_at:
                await asyncio.sleep(0.001)
                continue
            so_far = [*ids, *request.output_ids]
            scores = (self.writer.logits(so_far) / temperature).log_softmax(-1)
            greedy = settings["temperature"] == 0
            token = (
                int(scores.argmax()) if greedy else self.writer.draw(scores, (drawn, len(so_far)))
            )
            request.output_ids.append(token)
            request.logprobs.append(float(scores[token]))
            await asyncio.sleep(0)
            if len(request.output_ids) >= limit:
                return {"type": "length", "length": limit}
            if not settings["ignore_eos"] and token in self.writer.eos | set(
                settings.get("stop_token_ids", ())
            ):
                return {"type": "stop", "matched": token}
            text = self.writer.tokenizer.decode(request.output_ids)
            matched = next((s for s in settings.get("stop", ()) if s in text), None)
            if matched:
                return {"type": "stop", "matched": matched}
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    with running(server.app()) as server.url:
        yield server
