"""Whether a reply is what the request asked for: JSON of a schema, a call of a tool, one call.

Nothing in a run forces the policy, because training scores what it writes by its own distribution.
So its replies are checked, and an answer says where they are not what was asked for (``unmet``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunesmith.errors import DeadlineExceeded, shortened
from tunesmith.learn.endpoint.asks import Ask, BadRequest, Json
from tunesmith.learn.environments.conversation import Reply
from tunesmith.learn.environments.tools import ToolCall
from tunesmith.learn.usercode.killable import Pool, UserProgram, WorkerError

CHECK_SECONDS = 5.0
_PROGRAM = UserProgram(Path(__file__).with_name("schema_program.py"), "unlike")
_pool = Pool(_PROGRAM, CHECK_SECONDS, workers=2)
"""Starts a process at the first schema, which ends with this one."""


@dataclass(frozen=True, slots=True)
class Unmet:
    """A choice is not what a parameter of the request asked for."""

    index: int
    parameter: str
    reason: str


def check_schema(schema: Json) -> None:
    """Raises BadRequest: it is no JSON schema."""
    try:
        from jsonschema import validators
        from jsonschema.exceptions import SchemaError
    except ModuleNotFoundError:
        return
    try:
        validators.validator_for(schema).check_schema(schema)
    except (SchemaError, RecursionError) as error:
        why = shortened(str(error).partition("\n")[0])
        raise BadRequest(f"'response_format' is no JSON schema: {why}", "response_format") from None


async def problems_of(ask: Ask, replies: Sequence[Reply]) -> list[Unmet]:
    found: list[Unmet] = []
    for index, reply in enumerate(replies):
        called = [call.name for call in reply.calls if isinstance(call, ToolCall)]
        if ask.must_call is not None:
            found += _missing_call(ask.must_call, called, index)
        if not ask.parallel and len(called) > 1:
            reason = f"{len(called)} tools were called in one turn"
            found.append(Unmet(index, "parallel_tool_calls", reason))
        if ask.schema is not None and not called:
            reason = await _unlike(ask.schema, reply.text)
            found += [Unmet(index, "response_format", reason)] if reason else []
    return found


async def _unlike(schema: Json, text: str) -> str:
    try:
        return await _pool.run(schema, text)
    except (DeadlineExceeded, WorkerError) as error:
        return f"not checked against the schema: {error}"


def _missing_call(wanted: str, called: Sequence[str], index: int) -> list[Unmet]:
    if wanted in called or (not wanted and called):
        return []
    instead = f"{', '.join(called)} was called" if called else "no tool was called"
    return [Unmet(index, "tool_choice", instead)]
