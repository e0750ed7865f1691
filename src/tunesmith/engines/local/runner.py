"""Running the model for the engine: prefill, decode, and the logits of the next tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.engines.local.decode_attention import DecodeAttention, Grouping
from tunesmith.engines.local.decode_model import FEW_ROWS, DecodeModel
from tunesmith.engines.local.kv_cache import KVCache, KVLayout
from tunesmith.engines.local.penalties import penalise
from tunesmith.engines.local.prefill_attention import Piece, PrefillAttention
from tunesmith.engines.local.requests import CachedPrompt, Request
from tunesmith.engines.local.sampler import SamplingPlan, sample
from tunesmith.errors import ModelError
from tunesmith.models.attention import AttentionRule
from tunesmith.models.causal_lm import CausalLM, logit_scale
from tunesmith.models.head import bfloat16_operands
from tunesmith.plan.cost import ForwardCost


def text_config(model: CausalLM) -> Any:
    return model.module.config.get_text_config()


class _Probe:
    """An ``AttentionContext`` that notes what each layer's attention hands it."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:  # noqa: ARG002
        self.shapes[layer] = (query.shape[1], key.shape[1], key.shape[2])
        return torch.zeros_like(query)


@torch.inference_mode()
def probe(model: CausalLM) -> tuple[KVLayout, ForwardCost]:
    """What the model's attention needs of the cache, and what a pass costs: seen in one pass over one token.

    On a CPU the cache is float32 for bfloat16 models too: small batched products are three times as fast.

    Raises:
        ModelError: the layers' keys and values differ in shape, or some layers have none.
    """
    context, zero = _Probe(), torch.zeros(1, dtype=torch.int64, device=model.device)
    model.hidden(zero, zero, context)
    shapes, layers = set(context.shapes.values()), len(context.shapes)
    if len(shapes) != 1 or set(context.shapes) != set(range(layers)):
        raise ModelError(
            "the embedded engine needs a model whose layers all keep keys and values of one shape; layers "
            f"of this {type(model.module).__name__} have (heads, key/value heads, head size) {sorted(shapes)}"
        )
    heads, kv_heads, head_dim = shapes.pop()
    head, embedding = model.head.weight, cast(Tensor, model.module.get_input_embeddings().weight)
    weights = sum(p.numel() for p in model.module.parameters())
    weights -= 0 if head is embedding else embedding.numel()
    dtype = torch.float32 if model.device.type == "cpu" else head.dtype
    layout = KVLayout(layers, kv_heads, head_dim, dtype, model.device)
    cost = ForwardCost(
        weight_bytes=weights * head.element_size(),
        weights=weights,
        kv_bytes=layout.token_bytes,
        attention_flops=4 * layers * heads * head_dim,
    )
    return layout, cost


def split_pieces(pieces: Sequence[Piece], max_tokens: int) -> Iterator[list[Piece]]:
    """Forward passes of at most ``max_tokens``; a piece longer than that is cut into chunks."""
    batch: list[Piece] = []
    room = max_tokens
    for piece in pieces:
        for start in range(piece.start, piece.stop, max_tokens):
            stop = min(start + max_tokens, piece.stop)
            if stop - start > room:
                yield batch
                batch, room = [], max_tokens
            chunk = Piece(piece.owner, piece.row, start, stop, piece.prompt_row, piece.prompt_length)
            batch.append(chunk)
            room -= len(chunk)
    if batch:
        yield batch


class Runner:
    """The model on the rows of the cache, and what can be kept while the running rows stay the same."""

    def __init__(self, model: CausalLM, cache: KVCache, max_prefill_tokens: int) -> None:
        self.model = model
        self.cache = cache
        self.max_prefill_tokens = max_prefill_tokens
        self._softcap: float | None = getattr(text_config(model), "final_logit_softcapping", None)
        self._scale = logit_scale(text_config(model))
        self._head: tuple[Tensor, Tensor | None] | None = None
        self._decoder = DecodeModel(model)
        self._grouping: tuple[list[tuple[int, int]], Grouping] | None = None
        self._plan: tuple[list[Request], SamplingPlan] | None = None

    def prefill(
        self, prompts: Sequence[CachedPrompt], admitted: Sequence[Request], running: Sequence[Request]
    ) -> tuple[Tensor, list[Piece]]:
        """Compute ``prompts``, and again what preempted requests wrote before.

        Args:
            prompts: new in the prompt bank.
            admitted: requests that start, or start again.
            running: all requests, by row.

        Returns:
            The hidden states ``[B, d]`` that ``admitted`` draw their next tokens from, and what was computed.
        """
        pieces = [Piece(p, p.row, 0, len(p)) for p in prompts]
        for request in admitted:
            assert request.prompt is not None
            request.cached = len(request.token_ids)
            if request.cached:
                row, prompt = running.index(request), request.prompt
                pieces.append(Piece(request, row, 0, request.cached, prompt.row, len(prompt)))
        resumed: dict[Request, Tensor] = {}
        for owner, end in self.fill(pieces):
            if isinstance(owner, CachedPrompt):
                owner.last_hidden = end
            else:
                resumed[owner] = end
        states = [resumed.get(r, r.prompt.last_hidden if r.prompt else None) for r in admitted]
        return torch.stack([s for s in states if s is not None]), pieces

    def fill(self, pieces: Sequence[Piece]) -> Iterator[tuple[CachedPrompt | Request, Tensor]]:
        """Compute the pieces' keys and values; yields the hidden state ``[d]`` at the end of each, chunk by chunk."""
        for batch in split_pieces(pieces, self.max_prefill_tokens):
            for piece, end in zip(batch, self._forward_pieces(batch), strict=True):
                yield piece.owner, end

    def decode(self, running: Sequence[Request], lengths: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Go on with every row.

        Args:
            running: all requests, by row.
            lengths: own tokens of each row that are cached.
            tokens: of each row those that come next, possibly none.

        Returns:
            Hidden states ``[N, d]`` of the tokens, row by row.
        """
        counts = [len(new) for new in tokens]
        attention = DecodeAttention(self.cache, self._group(running), lengths, counts)
        flat = torch.tensor([t for new in tokens for t in new], device=self.model.device)
        starts = [len(r.prompt_ids) + n for r, n in zip(running, lengths, strict=True)]
        places = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        positions = torch.tensor(places, device=self.model.device)
        alike: list[int] | None = None
        if self.model.lengths is not None:
            alike = [r.prompt.length for r, n in zip(running, counts, strict=True) if r.prompt for _ in range(n)]
        return self._decoder.for_rows(len(places)).hidden(flat, positions, attention, alike)

    def draw(
        self, hidden: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[float]]:
        """Sample a token from each hidden state, and its log-probability.

        Args:
            hidden: ``[N, d]``.
            requests: whose states they are.
            drafted: tokens that each state has read behind those that its request has written. The token drawn depends
                on the state, on what was read before it, and on the request's seed and the token's place.
        """
        logits = penalise(self._logits(hidden), requests, drafted)
        numbers = [r.uniforms[len(r.token_ids) + len(ahead)] for r, ahead in zip(requests, drafted, strict=True)]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        tokens, logprobs = sample(logits, self._sampling_plan(requests, logits), uniforms)
        return tokens.tolist(), logprobs.tolist()

    def refresh(self) -> None:
        """Forget what was derived from the weights."""
        self._decoder.refresh()
        self._head = None

    def _logits(self, hidden: Tensor) -> Tensor:
        """``[B, V]`` float32, never rounded to bfloat16: that would move log-probabilities by up to 0.03.

        On a CPU a bfloat16 model's head is copied in float32, once per version.
        """
        if hidden.device.type == "cpu":
            logits = self._product_on_cpu(hidden)
        else:
            weight, bias = self.model.head.weight, cast("Tensor | None", self.model.head.bias)
            options: dict[str, Any] = {} if hidden.dtype == torch.float32 else {"out_dtype": torch.float32}
            logits = torch.mm(hidden, weight.t(), **options)
            logits = logits if bias is None else logits + bias
        if self._scale != 1:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _product_on_cpu(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            head = self.model.head
            bias = cast("Tensor | None", head.bias)
            self._head = head.weight.float(), None if bias is None else bias.float()
        rounded = hidden.dtype == torch.bfloat16
        with bfloat16_operands(rounded and len(hidden) > FEW_ROWS):
            return F.linear(hidden.float(), *self._head)

    def _forward_pieces(self, pieces: Sequence[Piece]) -> Tensor:
        """``[pieces, d]``: the hidden state at the end of each."""
        device = self.model.device
        tokens = torch.tensor([t for p in pieces for t in p.token_ids], device=device)
        positions = torch.tensor([i for p in pieces for i in p.positions], device=device)
        lengths = None if self.model.lengths is None else [p.length for p in pieces for _ in range(len(p))]
        hidden = self.model.hidden(tokens, positions, PrefillAttention(self.cache, pieces), lengths)
        ends = torch.tensor([len(p) for p in pieces], device=device).cumsum(0) - 1
        return hidden.index_select(0, ends)

    def _group(self, running: Sequence[Request]) -> Grouping:
        key = [(r.prompt.row, len(r.prompt)) for r in running if r.prompt is not None]
        if self._grouping is None or self._grouping[0] != key:
            rows, lengths = [row for row, _ in key], [length for _, length in key]
            layout = self.cache.layout
            self._grouping = (key, Grouping.of(rows, lengths, layout.kv_heads, layout.device))
        return self._grouping[1]

    def _sampling_plan(self, requests: Sequence[Request], logits: Tensor) -> SamplingPlan:
        if self._plan is None or self._plan[0] != list(requests):
            samplings = [r.sampling for r in requests]
            self._plan = (list(requests), SamplingPlan.of(samplings, logits.shape[1], logits.device))
        return self._plan[1]
