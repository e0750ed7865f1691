"""OpenAI's requests, checked: ``chat.completions``, ``completions``, and ``responses`` translated
to a chat request.

The run decides how the policy samples. A request's ``max_tokens``, ``stop``, ``n`` and ``logprobs``
apply. ``temperature`` and the like are overridden, and nothing forces the policy to write JSON or
to call a tool; the rollout's notes list these parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    model_validator,
)

from tunesmith.errors import EpisodeError, shortened
from tunesmith.types import Message, as_messages

OVERRIDDEN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "logit_bias",
)  # fmt: skip
NOT_ENFORCED: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
}
"""Parameters that can constrain the policy's answer, with their values that do not. Other values
are noted."""
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "background": (None, False),
}
"""Parameters that can change the form of the answer, with their values that do not."""
PASSED_ON = (
    "temperature", "top_p", "tool_choice", "parallel_tool_calls", "stop", "seed",
    "chat_template_kwargs",
)  # fmt: skip
"""Parameters that a ``responses`` request has in common with a chat request."""
LOGPROBS = "message.output_text.logprobs"
"""The entry of ``include`` that asks for log-probabilities."""
ITEMS = ("message", "function_call", "function_call_output", "reasoning")

Json = dict[str, Any]
Fields = Mapping[str, Any]
"""Of a request or an answer, by name."""
R = TypeVar("R", bound=BaseModel)


class BadRequest(EpisodeError):
    """A request that cannot be answered as intended."""


def parse(kind: type[R], request: Fields) -> R:
    """The request as a ``kind``; a BadRequest that names the parameter if it is malformed or cannot
    be served."""
    for name, allowed in REFUSED.items():
        if request.get(name) not in allowed:
            raise BadRequest(f"'{name}' = {request[name]!r} cannot be served; leave it out")
    try:
        return kind.model_validate(request)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        value = f" is {shortened(repr(problem['input']))}" if place else ""
        raise BadRequest(f"'{place or 'request'}'{value}: {problem['msg']}") from None


def _as_dict(value: Any) -> Any:
    """Agents may send back OpenAI's own objects."""
    dump = getattr(value, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else value


def _as_message(message: Message) -> Message:
    """Chat templates do not know the role ``developer``."""
    if not isinstance(message.get("role"), str):
        raise ValueError("a message has a 'role' and 'content'")
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _text_or_ids(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a list of one prompt is that prompt
    ids = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    if value and (ids or isinstance(value, str)):
        return value
    kinds = "text of at least one character, or a list of token ids"
    raise ValueError(f"it must be {kinds}; one prompt per request")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value or []


Object = Annotated[Json, BeforeValidator(_as_dict)]
Number = Annotated[StrictInt, Field(ge=1)]


class Request(BaseModel):
    """Parameters that chat and text requests have in common."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    limit: Number | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = []

    @model_validator(mode="after")
    def check_text(self) -> Self:
        """Reject text that no tokenizer accepts (half of a surrogate pair), and values that JSON
        cannot express."""
        try:
            json.dumps(self.model_dump(), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the request has text that is not Unicode: {error.reason}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the request is not JSON: {error}") from error
        return self


class ChatRequest(Request):
    messages: Annotated[list[Annotated[Object, AfterValidator(_as_message)]], Field(min_length=1)]
    tools: list[Object] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    chat_template_kwargs: Json | None = None


class TextRequest(Request):
    prompt: Annotated[Any, AfterValidator(_text_or_ids)]
    echo: bool | None = None
    logprobs: int | None = None
    """0 requests those of the sampled tokens only; here any number does."""


class FunctionTool(BaseModel):
    """A tool of a ``responses`` request."""

    type: Annotated[str, Field(pattern="^function$")]
    name: str
    description: str | None = None
    parameters: Json | None = None


class ResponseRequest(BaseModel):
    input: Annotated[list[Object], BeforeValidator(as_messages)] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Annotated[FunctionTool, BeforeValidator(_as_dict)]] | None = None
    text: Json | None = None
    reasoning: Json | None = None
    include: list[Any] | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None

    def as_chat(self, request: Fields, messages: Sequence[Message]) -> Json:
        """The equivalent chat request with these messages, after ``instructions`` as a system
        message."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = self.tools or ()
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in tools]
        text = self.text or {}
        return {
            **{name: request[name] for name in PASSED_ON if request.get(name) is not None},
            "messages": [*system, *messages],
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": text.get("format"),
            "verbosity": text.get("verbosity"),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "logprobs": LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
        }


def messages_of(items: Sequence[Fields]) -> list[Message]:
    """Chat messages from the items of ``input`` or ``output``: messages, function calls and their
    results.

    A turn's text and its function calls become one message, as the policy wrote them.
    """
    messages: list[Message] = []
    in_turn = False
    """Whether the last message is the policy's and can take function calls."""
    for item in items:
        match item.get("type", "message"):
            case "reasoning":
                continue
            case "message":
                content = _content(item.get("content"))
                messages.append({"role": item.get("role"), "content": content})
                in_turn = item.get("role") == "assistant"
            case "function_call":
                if not in_turn:
                    messages.append({"role": "assistant", "content": ""})
                in_turn = True
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = _content(item.get("output"))
                answer = {"tool_call_id": item.get("call_id"), "content": output}
                messages.append({"role": "tool", **answer})
                in_turn = False
            case kind:
                raise BadRequest(f"'{kind}' items are not served; valid: {', '.join(ITEMS)}")
    return messages


def _content(content: Any) -> Any:
    """A chat message's content. Both interfaces hold a part's text under ``text``; a refusal counts
    as text."""
    if not isinstance(content, list | tuple):
        return content
    plain: list[Any] = []
    for raw in content:
        part = _as_dict(raw)
        fields = part if isinstance(part, Mapping) else {}
        text = fields.get("text", fields.get("refusal"))
        plain.append(raw if text is None else {"type": "text", "text": text})
    return plain
