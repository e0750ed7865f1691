"""Tool calls as Hermes writes them, and a policy that makes them."""

from __future__ import annotations

import json
from typing import Any


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(turns: list[str]) -> Any:
    """A policy that says these turns, and at last what it heard last."""

    def policy(text: str) -> str:
        number = text.count("<|im_start|>assistant") - 1
        heard = text.rsplit("<tool_response>\n", 1)[-1].split("\n</tool_response>")[0]
        return (turns[number] if number < len(turns) else heard) + "<|im_end|>"

    return policy
