"""Tinker's protobuf messages: datums come in them, log-probabilities and samples leave in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import UserError, boundary
from tunesmith.learn.data.batch import Floats
from tunesmith.learn.packages.adapter import Foreign
from tunesmith.run.engines.base import TokenScore
from tunesmith.run.tinker.data import Datum, Datums, Values
from tunesmith.types import Completion

PACKAGE = "tinker.proto.tinker_public_pb2"


def schema() -> ModuleType:
    """The package's messages."""
    return import_module(PACKAGE)


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """``forward`` or ``forward_backward``."""

    model_id: str
    seq_id: int
    backward: bool
    loss: str
    message: Foreign

    @classmethod
    def read(cls, body: bytes) -> ForwardRequest:
        """Raises UserError: it is no such message."""
        message: Foreign = schema().ForwardBackwardRequest()
        with boundary(UserError, "the body is no ForwardBackwardRequest", Exception):
            message.ParseFromString(body)
        backward = not message.forward_only
        return cls(message.model_id, message.seq_id, backward, message.loss_fn, message)

    def config(self) -> dict[str, float | str]:
        """The loss's settings."""
        said = {name: float(value) for name, value in self.message.loss_fn_config.items()}
        values = self.message.loss_fn_config_v2.items()
        return said | {name: getattr(v, v.WhichOneof("value") or "text") for name, v in values}

    def datums(self) -> Datums:
        """Raises UserError: an input cannot be read, or is not text."""
        if not self.message.data:
            raise UserError("the request has no data")
        return Datums([_datum(number, datum) for number, datum in enumerate(self.message.data)])


def _datum(number: int, message: Foreign) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UserError(f"datum {number}: model_input has '{kind}'; only text is served")
        with boundary(UserError, f"datum {number}: model_input cannot be read", ValueError):
            tokens += np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
    inputs: dict[str, Values] = {}
    for name, tensor in message.loss_fn_inputs.items():
        unread = f"datum {number}: {name} cannot be read"
        with boundary(UserError, unread, (ValueError, IndexError)):
            inputs[name] = _values(tensor)
    if "target_tokens" not in inputs:
        raise UserError(f"datum {number} has no target_tokens")
    inputs["target_tokens"] = inputs["target_tokens"].astype(np.int64)
    return Datum(tokens, inputs)


def _values(tensor: Foreign) -> Values:
    messages = schema()
    kinds: dict[int, type[np.generic]] = {
        messages.DTYPE_FLOAT32: np.float32,
        messages.DTYPE_INT64: np.int64,
        messages.DTYPE_INT32: np.int32,
    }
    if tensor.dtype not in kinds:
        raise ValueError(f"the dtype {tensor.dtype} is not served: send float32 or int64")
    kind = kinds[tensor.dtype]
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") != "sparse_csr":
        dense = np.frombuffer(tensor.dense, kind)
        return _wide(dense.reshape(shape) if shape else dense)
    rows = tensor.sparse_csr
    starts = np.frombuffer(rows.crow_indices, np.int64)
    columns = np.frombuffer(rows.col_indices, np.int64)
    values = np.zeros(shape, kind)
    row_of = np.repeat(np.arange(shape[0]), np.diff(starts))
    values[row_of, columns] = np.frombuffer(rows.values, kind)
    return _wide(values)


def _wide(values: NDArray[np.generic]) -> Values:
    return values.astype(np.int64 if values.dtype.kind == "i" else np.float32)


def forward_result(logprobs: Sequence[Floats], metrics: Mapping[str, float]) -> bytes:
    """A ``ForwardBackwardOutput``: each datum's log-probabilities, in the shape of its targets."""
    messages = schema()
    output: Foreign = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for values in logprobs:  # records of their own: shapes may differ
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        data = values.astype(np.float32).tobytes()
        field = record.fields["logprobs"]
        field.data = data
        field.offsets = np.array([0, len(data)], np.int64).tobytes()
        field.dtype = messages.DTYPE_FLOAT32
        field.trailing_shape.extend(values.shape[1:])
    for name, value in metrics.items():
        output.metrics[name] = value
    return output.SerializeToString()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of a prompt's tokens, from one on; None where nothing asked for them."""

    length: int
    """Tokens of the prompt."""
    scores: Sequence[TokenScore]
    """Scores of the last tokens."""
    top: int = 0


def sample_result(
    completions: Sequence[tuple[Completion, Sequence[TokenScore]]],
    top: int,
    prompt: PromptScores | None,
) -> bytes:
    """A ``SampleResponse``.

    Args:
        completions: with the scores of their tokens, if ``top`` alternatives of each were asked
            for.
    """
    messages = schema()
    response: Foreign = messages.SampleResponse()
    for completion, scores in completions:
        stopped = completion.finish_reason == "stop"
        sequence = response.sequences.add(
            stop_reason=messages.STOP_REASON_STOP if stopped else messages.STOP_REASON_LENGTH,
            tokens=np.array(completion.token_ids, np.int32).tobytes(),
            logprobs=np.array(completion.logprobs, np.float32).tobytes(),
        )
        if top:
            _write_top(sequence.topk_sampled_logprobs, len(scores), scores, top)
    if prompt is not None:
        own = np.full(prompt.length, np.nan, np.float32)
        if prompt.scores:
            own[-len(prompt.scores) :] = [score for score, _ in prompt.scores]
        response.prompt_logprobs = own.tobytes()
        if prompt.top:
            _write_top(response.topk_prompt_logprobs, prompt.length, prompt.scores, prompt.top)
    return response.SerializeToString()


def _write_top(message: Foreign, length: int, scores: Sequence[TokenScore], top: int) -> None:
    """Write the alternatives of the last ``len(scores)`` of ``length`` tokens."""
    tokens = np.zeros((length, top), np.int32)
    logprobs = np.full((length, top), -99999.0, np.float32)
    for row, (_, alternatives) in enumerate(scores, length - len(scores)):
        best = sorted(alternatives.items(), key=lambda pair: -pair[1])[:top]
        for rank, (token, logprob) in enumerate(best):
            tokens[row, rank] = token
            logprobs[row, rank] = logprob
    message.token_ids = tokens.tobytes()
    message.logprobs = logprobs.tobytes()
    message.k = top
    message.length = length
