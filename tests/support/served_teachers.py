"""A teacher behind an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM


def served(path: Path) -> web.Application:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        ids = torch.tensor([body["prompt"]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        best = logprobs[:-1].topk(body["logprobs"])
        ranked = [
            {f"token_id:{token}": value for token, value in zip(tokens, values, strict=True)}
            for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        said = {"token_logprobs": [None, *own, -1], "top_logprobs": [None, *ranked, {}]}
        return web.json_response({"choices": [{"logprobs": said}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete)])
    return app
