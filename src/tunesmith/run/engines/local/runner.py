"""Runs the model for the engine: prefill and decode, and samples the next tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from tunesmith.config.engines import EngineWeights
from tunesmith.costs import ForwardCost
from tunesmith.errors import EngineError, ModelError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest
from tunesmith.models.causal_lm import CausalLM, logit_scale
from tunesmith.models.experts.routing import Routing
from tunesmith.models.forest import PackedLengths
from tunesmith.models.head import fused_logprobs, likeliest
from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.models.kernels.decoding import DecodeRows, Draws, TakesSteps
from tunesmith.models.kernels.latent import Latent
from tunesmith.models.kernels.layers import StatefulLayer
from tunesmith.models.rope import rotated_by
from tunesmith.run.engines.base import TokenScore
from tunesmith.run.engines.local.attention import PoolAttention
from tunesmith.run.engines.local.decode_model import DecodeModel, decoding
from tunesmith.run.engines.local.pool import KVLayout, KVMemory, StatePart
from tunesmith.run.engines.local.requests import (
    CachedPrompt,
    LocalRequest,
    Piece,
    StepBatch,
    split_pieces,
)
from tunesmith.run.engines.local.sampler import SamplingPlan, penalise, sample
from tunesmith.types import Sample

STEPS_TOGETHER = 16
BYTES_TOGETHER = 10**9
"""Of weights that are read in one call, in some ten milliseconds: clients see tokens after it."""


def text_config(model: CausalLM) -> Any:
    return model.module.config.get_text_config()


class _Probe:
    """A context of attention and states that records their shapes in each layer."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.states: dict[int, tuple[StatePart, ...]] = {}
        self.latent = False

    def carry(self, layer: StatefulLayer, x: Tensor) -> Tensor:
        if layer.layer in self.states:
            raise ModelError(
                "the embedded engine keeps one state per decoder layer, and more than one module "
                f"of layer {layer.layer} carries one: use another engine",
                keys=("system.engine",),
            )
        out, state = layer.run(x, PackedLengths([len(x)]), None)
        self.states[layer.layer] = tuple(StatePart(part.shape[1:], part.dtype) for part in state)
        return out

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,  # noqa: ARG002
        rule: AttentionRule,  # noqa: ARG002
    ) -> Tensor:
        self.shapes[layer] = (query.shape[1], key.shape[1], key.shape[2])
        return torch.zeros_like(query)

    def attend_to_latents(
        self,
        layer: int,
        query: Tensor,
        rows: Tensor,
        latent: Latent,
        rule: AttentionRule,  # noqa: ARG002
    ) -> Tensor:
        self.latent = True
        self.shapes[layer] = (query.shape[1], 1, rows.shape[1])
        return query.new_zeros(*query.shape[:2], latent.value_size)


@torch.inference_mode()
def probe(model: CausalLM, *, compiled: bool) -> tuple[KVLayout, ForwardCost]:
    """The layout of the model's KV cache and the cost of a forward pass, from a pass over one
    token.

    Raises:
        ModelError: no layer has keys and values.
    """
    context = _Probe()
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    model.hidden(zero, zero, context)
    places = {layer: place for place, layer in enumerate(sorted(context.shapes))}
    shapes = [context.shapes[layer] for layer in places]
    if not shapes:
        raise ModelError(
            f"the embedded engine needs a model with attention, and no layer of this "
            f"{type(model.module).__name__} attends: use another engine",
            keys=("system.engine",),
        )
    _, kv_heads, head_dim = shapes[0]
    different = [each[1:] for each in shapes] if len({each[1:] for each in shapes}) > 1 else []
    head = model.head.weight
    embedding = cast(Tensor, model.module.get_input_embeddings().weight)
    weights = sum(p.numel() for p in model.module.parameters())
    weights -= 0 if head is embedding else embedding.numel()
    dtype = kv_dtype(model, compiled=compiled)
    shape = (len(shapes), kv_heads, head_dim, dtype, model.device)
    layout = KVLayout(*shape, places, context.states, different, context.latent)
    cost = ForwardCost(
        weight_bytes=weights * head.element_size(),
        weights=weights,
        kv_bytes=layout.token_bytes,
        attention_flops=4 * sum(heads * size for heads, _, size in shapes),
    )
    return layout, cost


def kv_dtype(model: CausalLM, *, compiled: bool) -> torch.dtype:
    """The KV cache's dtype for fastest decoding: the model's, but float32 on a CPU that decodes
    with PyTorch's batched products, which are three times as fast in it.

    The memory plan knows it before anything is compiled, so it does not depend on whether compiling
    succeeds.
    """
    exact = model.device.type == "cpu" and not (compiled and decoding(model))
    return torch.float32 if exact else model.dtype


class Runner:
    """Runs the model on the spans of the pool."""

    def __init__(
        self,
        model: CausalLM,
        memory: KVMemory,
        max_prefill_tokens: int,
        *,
        compiled: bool,
        weights: EngineWeights = "model",
    ) -> None:
        self.model = model
        self._memory = memory
        self._max_prefill_tokens = max_prefill_tokens
        self.records_experts = False
        """Whether requests keep the experts that their tokens choose."""
        self._softcap: float | None = getattr(text_config(model), "final_logit_softcapping", None)
        self._scale = logit_scale(text_config(model))
        self._decode_model = DecodeModel(model, compiled=compiled, weights=weights)
        functions = decoding(model) if compiled else None
        self._steps = None if functions is None else functions.steps()
        self._plan: tuple[list[LocalRequest], SamplingPlan] | None = None
        self.together = self._most_together()
        """The most decode steps in one call."""
        self.called = torch.zeros(1, dtype=torch.int64)
        """Not 0: a call waits for the end of the current step, and no other is taken with it."""

    def _most_together(self) -> int:
        same = self._scale == 1 and self._softcap is None and self.model.lengths is None
        if not same or not isinstance(self._steps, TakesSteps):
            return 1
        read = sum(p.numel() * p.element_size() for p in self.model.module.parameters())
        return min(STEPS_TOGETHER, max(1, BYTES_TOGETHER // read))

    def run(self, batch: StepBatch) -> Tensor:
        """The hidden states ``[B, d]`` from which the requests' next tokens are sampled."""
        if batch.prefill is None:
            return self._decode(batch.requests)
        ends = dict(self.fill(batch.prefill))
        for owner, end in ends.items():
            if isinstance(owner, CachedPrompt):
                owner.last_hidden = end
        for request in batch.requests:
            if request.prompt is not None:
                request.of_prompt = request.prompt.experts
        states = [ends.get(r, r.prompt.last_hidden if r.prompt else None) for r in batch.requests]
        return torch.stack([state for state in states if state is not None])

    def fill(self, pieces: Sequence[Piece]) -> Iterator[tuple[CachedPrompt | LocalRequest, Tensor]]:
        """Compute the pieces' keys and values; yields the hidden state ``[d]`` at the end of each,
        chunk by chunk."""
        vision = self.model.vision
        whole = vision is not None and vision.tower.both_ways
        for batch in split_pieces(pieces, self._max_prefill_tokens, whole_images=whole):
            lengths = torch.tensor([len(piece) for piece in batch], device=self.model.device)
            ends = self._read(batch, self._prefill_model()).index_select(0, lengths.cumsum(0) - 1)
            for piece, end in zip(batch, ends, strict=True):
                yield piece.owner, end

    def _prefill_model(self) -> CausalLM:
        """One policy reads and writes: where decode steps round the weights, prefill does too.

        In float32 on a CPU, compiled products of many rows are faster, too, and a row does not
        depend on those beside it.
        """
        model = self.model
        wide = model.device.type == "cpu" and model.dtype == torch.float32
        compiled = wide and self._steps is not None
        exact = self._decode_model.weights == "model"
        return model if exact and not compiled else self._decode_model.decoder()

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        """The hidden states ``[N, d]`` of a few tokens of each piece, in one pass."""
        return self._read(pieces, self._decode_model.decoder())

    def draw(
        self, logits: Tensor, requests: Sequence[LocalRequest]
    ) -> tuple[list[int], list[float]]:
        """Sample the next token of each request, and its log-probability.

        A token depends on the logits, the tokens before it, the request's seed and its position.

        Raises:
            EngineError: logits are not finite.
        """
        numbers = [r.uniforms[len(r.token_ids)] for r in requests]
        if self._sampling_plan(requests, logits.shape[1]).penalises:
            logits = penalise(logits, requests)
        tokens, logprobs = self.sample(logits, requests, numbers)
        _check_finite(logprobs)
        return tokens, logprobs

    def several(
        self, requests: Sequence[LocalRequest], steps: int
    ) -> list[tuple[list[int], list[float]]] | None:
        """What ``draw`` returns, of up to ``steps`` steps in one call: none follows one in which a
        request ended, or during which the engine was called. None: these are taken one by one.

        Raises:
            EngineError: logits are not finite.
        """
        decoder = self._decode_model.decoder().lean
        if steps < 2 or decoder is None or not isinstance(self._steps, TakesSteps):
            return None
        plan = self._sampling_plan(requests, self.model.head.out_features)
        if plan.penalises or plan.cut_rows is not None or any(r.stop_strings for r in requests):
            return None
        uniforms = [[r.uniforms[len(r.token_ids) + i] for r in requests] for i in range(steps)]
        most = max(len(r.stop_token_ids) for r in requests)
        stops = [[*r.stop_token_ids, *[-1] * (most - len(r.stop_token_ids))] for r in requests]
        draws = Draws(
            plan.temperatures,
            torch.tensor(uniforms, dtype=torch.float64),
            torch.tensor(stops, dtype=torch.int64),
            self.called,
        )
        rows = _decode_rows(requests)
        head = self._decode_model.head()
        drawn = self._steps.several(decoder, head, self._memory.planes, rows, draws)
        if drawn is None:
            return None
        tokens, logprobs = (part.tolist() for part in drawn)
        _check_finite(logprobs[-1])
        return list(zip(tokens, logprobs, strict=True))

    def sample(
        self, logits: Tensor, requests: Sequence[LocalRequest], numbers: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """Sample a token of each request by a number in [0, 1), and its log-probability."""
        plan = self._sampling_plan(requests, logits.shape[1])
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        if self._steps is not None and plan.cut_rows is None:
            tokens, logprobs = self._steps.draw(logits, plan.temperatures, uniforms)
        else:
            tokens, logprobs = sample(logits, plan, uniforms)
        return tokens.tolist(), logprobs.tolist()

    def _sampling_plan(self, requests: Sequence[LocalRequest], vocab_size: int) -> SamplingPlan:
        if self._plan is None or self._plan[0] != list(requests):
            plan = SamplingPlan.of([r.sampling for r in requests], vocab_size, self.model.device)
            self._plan = (list(requests), plan)
        return self._plan[1]

    @torch.inference_mode()
    def score(self, token_ids: list[int], top: int) -> list[TokenScore]:
        """See ``PromptScorer``."""
        sample = Sample(token_ids, [False, *[True] * (len(token_ids) - 1)])
        forest = build_forest(Batch.of([sample])).to(self.model.device)
        if not forest.targets.numel():
            return []
        hidden = self.model.states(forest)
        head = self.model.scaled_head()
        own, _ = fused_logprobs(hidden, head, forest.targets)
        tokens, logprobs = likeliest(hidden, head, top)
        # One source for both: what is likeliest has exactly its own log-probability.
        rows = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        scores: list[TokenScore] = []
        for target, each, row in zip(forest.targets.tolist(), own.tolist(), rows, strict=True):
            alternatives = dict(zip(*row, strict=True))
            scores.append((alternatives.get(target, each), alternatives))
        return scores

    def refresh(self) -> None:
        """Drop prepared weights, and features of images: the weights have changed, or the memory is
        needed elsewhere."""
        self._decode_model.refresh()
        if self.model.vision is not None:
            self.model.vision.forget()
        if self._steps is not None:
            self._steps.refresh()

    def _decode(self, running: Sequence[LocalRequest]) -> Tensor:
        """The hidden states ``[B, d]`` of each request's last token."""
        decoder = self._decode_model.decoder()
        if self._steps is None or decoder.lean is None:
            return self._read([Piece(r, r.cached, r.token_ids[-1:]) for r in running], decoder)
        rows = _decode_rows(running)
        by_row = self.model.lengths is not None
        with rotated_by([r.rotary_length for r in running]) if by_row else nullcontext():
            return self._steps.hidden(decoder.lean, self._memory.planes, rows, by_row=by_row)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[B, V]`` float32, never rounded to bfloat16: that would change log-probabilities by up
        to 0.03."""
        logits = self._decode_model.logits(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _read(self, pieces: Sequence[Piece], model: CausalLM) -> Tensor:
        """``[tokens, d]``: the hidden states of all pieces."""
        tokens = torch.tensor([t for p in pieces for t in p.token_ids], device=model.device)
        positions = self._positions(pieces).to(model.device)
        lengths = None
        if self.model.lengths:
            lengths = [p.prompt.rotary_length for p in pieces for _ in range(len(p))]
        routing = Routing() if self.records_experts else None
        images = None if self.model.vision is None else self.model.vision.blocks(tokens)
        attention = PoolAttention(self._memory, pieces, images)
        hidden = model.hidden(tokens, positions, attention, lengths, routing)
        if routing is not None:
            _record(pieces, routing)
        return hidden

    def _positions(self, pieces: Sequence[Piece]) -> Tensor:
        """The rotary positions of all pieces: ``[T]``, or ``[3, T]`` where prompts have images."""
        vision = self.model.vision
        if vision is None or not vision.tower.by_grid:
            return torch.tensor([i for piece in pieces for i in piece.positions])
        found: list[Tensor] = []
        for piece in pieces:
            prompt = piece.prompt
            if prompt.rotary is None:
                prompt.rotary = vision.prompt_positions(prompt.token_ids)
                prompt.shift = int(prompt.rotary.max()) + 1 - len(prompt)
            at = torch.tensor(piece.positions)
            found.append(at + prompt.shift if piece.prefix else prompt.rotary[:, at])
        return torch.cat([part.expand(3, -1) for part in found], 1)


def _record(pieces: Sequence[Piece], routing: Routing) -> None:
    """Keep the experts that each token chose when it was read first."""
    chosen = routing.experts.flatten(1).cpu()
    for piece, rows in zip(pieces, chosen.split([len(piece) for piece in pieces]), strict=True):
        width = rows.shape[1] * rows.element_size()
        known = len(piece.owner.experts) // width - piece.start
        piece.owner.experts += rows[max(0, known) :].numpy().tobytes()


def _decode_rows(requests: Sequence[LocalRequest]) -> DecodeRows:
    """Each request's last token."""
    return DecodeRows(
        token_ids=[r.token_ids[-1] for r in requests],
        prompts=[r.prompt.span for r in requests if r.prompt],
        prompt_lengths=[len(r.prompt_ids) for r in requests],
        own=[r.span for r in requests],
        written=[r.cached for r in requests],
        positions=[r.shift + len(r.prompt_ids) + r.cached for r in requests],
    )


def _check_finite(logprobs: Sequence[float]) -> None:
    if any(map(math.isnan, logprobs)):
        raise EngineError("the model's logits are not finite: the weights may have diverged")
