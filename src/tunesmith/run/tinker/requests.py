"""What clients send as JSON. What is not served is refused, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunesmith.errors import UserError, shortened
from tunesmith.records.foreign import parse_json
from tunesmith.records.plain import JsonObject

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
"""A checkpoint's name, which becomes a directory's."""
Number = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Likeliest = Annotated[int, Field(ge=0, le=1024)]
"""How many alternatives to a token are listed."""


class TinkerRequest(BaseModel):
    """A request. Unknown fields are refused, so that none is ignored."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class LoraAsk(TinkerRequest):
    """An adapter. ``alpha`` is 32, as Tinker's."""

    rank: Annotated[int, Field(ge=1)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerAsk(TinkerRequest):
    type: Literal["adamw"] = "adamw"


class CreateModel(TinkerRequest):
    type: Literal["create_model"] = "create_model"
    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraAsk
    user_metadata: Mapping[str, object] | None = None
    optimizer_config: OptimizerAsk = OptimizerAsk()


class Adam(TinkerRequest):
    """AdamW's settings of one step."""

    learning_rate: Annotated[Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Finite, Field(ge=0)] = 1e-12
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    grad_clip_norm: Finite = 0.0


class OfModel(TinkerRequest):
    """A request of a model, with its number."""

    model_id: str
    seq_id: Number


class OptimStep(OfModel):
    type: Literal["optim_step"] = "optim_step"
    adam_params: Adam


class Save(OfModel):
    type: Literal["save_weights"] = "save_weights"
    path: Name | None = None
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None


class SaveForSampler(OfModel):
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    user_metadata: Mapping[str, str] | None = None


class KeepFor(TinkerRequest):
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None


class Load(TinkerRequest):
    """Load a state into a model (``model_id``), or as the first request of a new one
    (``session_id``)."""

    type: Literal["load_weights"] = "load_weights"
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Mapping[str, object] | None = None
    optimizer_config: OptimizerAsk | None = None


class CreateSampler(TinkerRequest):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(TinkerRequest):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Number]


class Prompt(TinkerRequest):
    chunks: list[TextChunk]

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class HowToSample(TinkerRequest):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleAsk(TinkerRequest):
    type: Literal["sample"] = "sample"
    sampling_session_id: str
    seq_id: Number
    prompt: Prompt
    sampling_params: HowToSample
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Likeliest = 0
    topk_sample_logprobs: Likeliest = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


A = TypeVar("A", bound=TinkerRequest)


def parse(kind: type[A], body: bytes | Mapping[str, str]) -> A:
    """A request of its JSON, or of the words of a query.

    Raises:
        UserError: it is no such request; names the field.
    """
    try:
        if isinstance(body, bytes):
            return kind.model_validate_json(body)
        return kind.model_validate(body)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "request"
        value = shortened(repr(problem["input"]))
        raise UserError(f"'{place}' = {value}: {problem['msg']}") from None


def parse_object(body: bytes) -> JsonObject:
    """Raises UserError: the body is no JSON object."""
    try:
        said = parse_json(body)
    except ValueError as error:
        raise UserError(f"the request is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise UserError("the request is not a JSON object")
    return said
