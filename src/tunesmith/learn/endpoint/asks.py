"""What a client asks of the policy, checked, in one form for all interfaces: that of
``chat.completions`` and ``completions``, to which the others translate.

In an episode the run decides how the policy samples. A request's ``max_tokens``, ``stop``, ``n``
and ``logprobs`` apply. ``temperature`` and the like are overridden and noted. Nothing forces the
policy to write JSON or to call a tool: whether it did is checked afterwards (``checks``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

from tunesmith.errors import EpisodeError, nearest, shortened
from tunesmith.types import Message, Tools

OVERRIDDEN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "logit_bias", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "allowed_token_ids", "bad_words",
)  # fmt: skip
UNOFFERED = "unoffered_tools"
"""Tools of a request that the policy is not told of, because their provider would run them."""
NOT_ENFORCED: Mapping[str, tuple[object, ...]] = {
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "guided_json": (None,),
    UNOFFERED: (None, []),
}
"""Parameters that can constrain the policy's answer, with their values that do not. Other values
are noted."""
REFUSED: Mapping[str, tuple[object, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "background": (None, False),
    "conversation": (None,),
    "mcp_servers": (None, []),
    "container": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
}
"""Parameters that can change the form of the answer, with their values that do not."""
MOST_PROMPTS = 1024

Json = dict[str, Any]
Fields = Mapping[str, Any]
"""The fields of a request or an answer, by name."""
R = TypeVar("R", bound=BaseModel)


class BadRequest(EpisodeError):
    """A request that cannot be answered as intended.

    Args:
        param: the parameter that is the reason, if it is one.
    """

    def __init__(self, problem: str, param: str | None = None) -> None:
        super().__init__(problem)
        self.param = param


class UnknownModel(BadRequest):
    """A request names a model that is not served."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asks of the policy."""

    messages: Sequence[Message] = ()
    prompts: Sequence[str | list[int]] = ()
    """Texts or token ids to continue, instead of messages; they skip the chat template."""
    tools: Tools = None
    may_call: bool = True
    """Whether tool calls in the policy's text are found, instead of being left as text."""
    must_call: str | None = None
    """A tool that the policy is to call; empty: any."""
    parallel: bool = True
    """Whether a turn may have several calls."""
    schema: Json | None = None
    """A JSON schema of the policy's text."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    """Choices of each prompt."""
    echo: bool = False
    logprobs: int | None = None
    """How many alternatives to list beside the log-probability of each token; None: neither."""
    options: Fields | None = None
    """Variables for the chat template, over those of the run."""
    sampling: Fields = field(default_factory=dict[str, Any])
    """What it says about sampling, by OpenAI's names."""
    unenforced: Fields = field(default_factory=dict[str, Any])
    """Parameters that constrain the answer."""

    @property
    def choices(self) -> int:
        return self.n * max(1, len(self.prompts))

    def prompt(self, choice: int) -> str | list[int]:
        """The text or token ids that a choice continues."""
        return self.prompts[choice // self.n]


def parse(kind: type[R], request: Fields) -> R:
    """The request as a ``kind``; a BadRequest that names the parameter if it is malformed or cannot
    be served."""
    for name, allowed in REFUSED.items():
        if request.get(name) not in allowed:
            given = shortened(repr(request[name]))
            raise BadRequest(f"'{name}' = {given} cannot be served; leave it out", name)
    try:
        return kind.model_validate(request)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        value = f" is {shortened(repr(problem['input']))}" if place else ""
        why = f"'{place or 'request'}'{value}: {problem['msg']}"
        raise BadRequest(why, place or None) from None


def as_dict(value: object) -> Any:
    """Agents may send back OpenAI's own objects."""
    dump = getattr(value, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else value


def _as_message(message: Message) -> Message:
    """Chat templates do not know the role ``developer``."""
    if not isinstance(message.get("role"), str):
        raise ValueError("a message has a 'role' and 'content'")
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _as_tool(tool: Json) -> Json:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if _is_function(tool) and not (name and isinstance(name, str)):
        raise ValueError("a tool is {'type': 'function', 'function': {'name': NAME, ...}}")
    return tool


def _is_function(tool: Json) -> bool:
    return tool.get("type", "function") == "function"


def _texts_or_ids(value: Any) -> Any:
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"{len(prompts)} prompts: a request may have {MOST_PROMPTS}")
    for prompt in prompts:
        ids = isinstance(prompt, list) and all(type(one) is int and one >= 0 for one in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            kinds = "text of at least one character, or a list of token ids"
            raise ValueError(f"each prompt must be {kinds}")
    return prompts


def _as_list(value: object) -> Any:
    return [value] if isinstance(value, str) else value or []


Object = Annotated[Json, BeforeValidator(as_dict)]
Number = Annotated[StrictInt, Field(ge=1)]
_LIMIT = AliasChoices("max_completion_tokens", "max_tokens")


class Request(BaseModel):
    """Parameters that chat and text requests have in common."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    limit: Number | None = Field(None, validation_alias=_LIMIT)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = []
    guided_json: Any = None

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

    def common(self, request: Fields) -> Json:
        """The fields of an ``Ask`` that these parameters fill."""
        binding = [name for name, free in NOT_ENFORCED.items() if request.get(name) not in free]
        return {
            "max_tokens": self.limit,
            "stop": tuple(self.stop),
            "n": self.n or 1,
            "sampling": {k: request[k] for k in OVERRIDDEN if request.get(k) is not None},
            "unenforced": {name: request[name] for name in binding},
        }


class ChatRequest(Request):
    messages: Annotated[list[Annotated[Object, AfterValidator(_as_message)]], Field(min_length=1)]
    tools: list[Annotated[Object, AfterValidator(_as_tool)]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Object | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Json | None = None

    def as_ask(self, request: Fields) -> Ask:
        """Raises BadRequest: ``tool_choice`` or ``response_format`` cannot be understood."""
        schema = schema_of(self.response_format, self.guided_json)
        tools = self.tools or []
        others = [tool["type"] for tool in tools if not _is_function(tool)]
        return Ask(
            messages=self.messages,
            tools=[tool for tool in tools if _is_function(tool)] or None,
            may_call=self.tool_choice != "none",
            must_call=self._must_call(),
            parallel=self.parallel_tool_calls is not False,
            schema=schema,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            options=self.chat_template_kwargs,
            **self.common({**request, UNOFFERED: others} if others else request),
        )

    def _must_call(self) -> str | None:
        """``Ask.must_call``. OpenAI has three spellings of it, Anthropic's are translated."""
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        functions = [tool.get("function") for tool in self.tools or ()]
        names = [str(f.get("name")) for f in functions if isinstance(f, Mapping)]
        if choice in ("required", "any") and names:
            return ""
        named = choice.get("function", choice) if isinstance(choice, Mapping) else None
        name = named.get("name") if isinstance(named, Mapping) else None
        if isinstance(name, str) and name in names:
            return name
        valid = "'auto', 'none', 'required', or {'type': 'function', 'function': {'name': NAME}}"
        known = f"the tools are {', '.join(names)}" if names else "there are no 'tools'"
        hint = nearest(name, names) if isinstance(name, str) else ""
        given = shortened(repr(choice))
        why = f"'tool_choice' = {given}: valid are {valid}; {known}.{hint}"
        raise BadRequest(why, "tool_choice")


class TextRequest(Request):
    prompt: Annotated[Any, AfterValidator(_texts_or_ids)]
    limit: Annotated[StrictInt, Field(ge=0)] | None = Field(None, validation_alias=_LIMIT)
    """With 0 nothing is written, and the prompt is scored."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """How many alternatives to list; OpenAI's 0 requests the sampled tokens only."""

    def as_ask(self, request: Fields) -> Ask:
        """Raises BadRequest: as for a chat request, or nothing is asked."""
        if self.limit == 0 and not self.echo:
            how = "set 'echo' and 'logprobs'"
            raise BadRequest(f"'max_tokens' = 0 scores the prompt alone: {how}", "max_tokens")
        return Ask(
            prompts=self.prompt,
            echo=bool(self.echo),
            schema=schema_of(None, self.guided_json),
            logprobs=None if request.get("logprobs") is False else self.logprobs,
            **self.common(request),
        )


def schema_of(response_format: Fields | None, guided: object = None) -> Json | None:
    """The JSON schema that an answer is to have.

    Raises:
        BadRequest: the format is not one of OpenAI's, or holds no schema.
    """
    if guided is not None:
        schema = guided
    else:
        kind = (response_format or {}).get("type", "text")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind != "json_schema":
            valid = "text, json_object, json_schema"
            why = f"'response_format.type' = {kind!r} is not served; valid: {valid}"
            raise BadRequest(why, "response_format")
        form = response_format or {}
        inner = form.get("json_schema", form)  # ``responses`` has it without this level
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, dict):
        why = f"'response_format' has no 'schema' object: {shortened(repr(schema))}"
        raise BadRequest(why, "response_format")
    return schema
