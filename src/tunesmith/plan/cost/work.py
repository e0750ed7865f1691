"""What a step does: how much of each kind of work, by phase. ``seconds.py`` multiplies it by rates.

A run in one process on a CPU is counted as ``Work``, in the kinds whose rates ``tunesmith check
machine`` measures with small models (``tune/machine.py``). All other runs are counted in operations
and bytes (``step_work.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2

from tunesmith.config.engines import ROUNDED_BYTES, EngineWeights
from tunesmith.costs import CostModel
from tunesmith.plan.cost.copies import copy_bytes, rounded_bytes
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import engine_kv, kept_of_request, kv_bytes_per_token
from tunesmith.plan.cost.passes import pass_tokens
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.plan import AnyPlan

Amounts = Mapping[str, float]
"""Units of each kind of work in a phase."""
NARROWER = 1.1
"""Factor on the seconds of reading weights, keys and values for each time that the devices of an
engine double: matrices become narrower. Four B200 take 12.9 ms for each token of 70B (vLLM's pull
request 20759)."""
GRAPH_LAYERS = 8
"""Layers whose kernel launches take as long as those of a decoding step with CUDA graphs,
scheduling included."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step in one process: completions of ``new`` tokens, ``group`` of them for each of
    ``prompts`` prompts."""

    model: ModelFacts
    bytes_per_number: int
    prompts: int
    group: int
    prompt: int
    """Tokens per prompt."""
    new: int
    micro: int
    """Maximum tokens per micro-batch."""
    share: bool = True
    """Whether a group's prompt is computed only once in training."""
    running: int = 256
    """Maximum number of completions decoded together."""
    rounded: EngineWeights = "model"
    """``system.engine_weights``."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def outputs(self) -> int:
        """Elements per token in the outputs of a layer's products."""
        m = self.model
        return 2 * (m.query_width + m.key_width) + 2 * m.hidden_size + 3 * m.intermediate_size

    @property
    def layers(self) -> int:
        """Number of weights in all layers."""
        m = self.model
        width = 2 * (m.query_width + m.key_width) + 3 * m.intermediate_size
        return m.layers * m.hidden_size * width

    @property
    def head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def sampled(self) -> float:
        """Bytes that the engine reads of a weight, for each byte that is trained."""
        return 1 if self.rounded == "model" else ROUNDED_BYTES[self.rounded] / self.bytes_per_number


def work_of(plan: AnyPlan, longest: int) -> Work:
    """A run's step in one process, in which every sample has ``longest`` tokens."""
    model = plan.facts.model
    assert model is not None and plan.memory.microbatch is not None, "it was checked"
    number = plan.devices.bytes_per_number
    micro = plan.memory.microbatch
    rollout = plan.said.rollout if plan.kind.rl else None
    if rollout is None:
        each = plan.kind.sequences
        samples = each * plan.training.samples
        new = max(1, longest // each - 1)
        return Work(model, number, samples, 1, 1, new, micro, share=False)
    new = rollout.max_new_tokens
    return Work(
        model,
        number,
        plan.training.prompts,
        rollout.group_size,
        max(1, longest - new),
        new,
        micro,
        plan.said.system.share_prompts,
        _running(plan, model, plan.training.samples, longest),
        plan.devices.engine_weights,
    )


def _running(plan: AnyPlan, model: ModelFacts, asked: int, tokens: float) -> int:
    """How many of the completions that an engine is ``asked`` for it decodes together: episodes are
    played a few at a time."""
    if plan.lengths.episode is not None:
        asked = min(asked, ceil(plan.said.environment.concurrency / plan.devices.engines))
    kept = kept_of_request(plan, model, tokens)
    kv = engine_kv(plan, model)
    held = int(kv * plan.devices.ranks_per_engine // kept) if kv else asked
    return max(1, min(asked, plan.sampling.running, held))


def amounts(work: Work) -> dict[str, Amounts]:
    """The work of each phase; matrix products are counted in multiplications, attention in
    query-key pairs."""
    forward = _forward(work)
    return {
        "sync": {"calls": 1},
        "prefill": _prefill(work),
        "decode": _decode(work),
        "scoring": forward,
        "forward and backward": forward,
        "optimizer": {
            "weights": work.model.parameters or 0,
            "tensors": 7 * work.model.layers + 2,
            "calls": 1,
        },
    }


def _forward(work: Work) -> Amounts:
    """The work of a pass over all samples, in micro-batches; a backward pass does the same kinds of
    work."""
    m = work.model
    learned = work.samples * work.new
    prompts = work.prompts if work.share else work.samples
    tokens = prompts * work.prompt + learned
    pairs = prompts * work.prompt**2 / 2 + work.samples * work.new * (work.prompt + work.new / 2)
    micro = ceil(tokens / work.micro)
    return {
        "products": tokens * work.layers,
        "head": learned * work.head,
        "numbers": tokens * m.layers * work.outputs,
        "pairs": pairs * m.layers * m.heads,
        "head weights": micro * work.head,
        "sequences": (work.samples + prompts) * m.layers,
        "passes": micro * m.layers,
        "calls": micro,
    }


def _prefill(work: Work) -> Amounts:
    return {
        "products": work.prompts * work.prompt * work.layers,
        "numbers": work.prompts * work.prompt * work.model.layers * work.outputs,
        "weights": work.sampled * work.layers,
        "head weights": work.sampled * work.head,
        "passes": work.model.layers,
        "samples": work.samples,
        "calls": 1,
    }


def _decode(work: Work) -> Amounts:
    m = work.model
    rows = min(work.samples, work.running)
    steps = ceil(work.samples / rows) * work.new
    return {
        "steps": steps,
        "passes": steps * m.layers,
        "weights": work.sampled * steps * (work.layers + work.head),
        "products": steps * rows * work.layers,
        "head": steps * rows * work.head,
        "numbers": steps * rows * m.layers * work.outputs,
        "pairs": steps * rows * (work.prompt + work.new / 2) * m.layers * m.heads,
        "words": steps * rows * m.vocab_size,
        "prepared": work.layers + work.head,  # once for new weights
    }


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a step of training on GPUs."""

    layout: Layout
    tokens: float
    """Computed in all passes over the batch."""
    body: float
    """Operations of the layers, forward and backward."""
    frozen: float
    """Those of gradients for weights that do not train."""
    head: float
    """Operations of the vocabulary head, forward and backward."""
    batches: int
    """Optimizer steps."""
    micro: int
    """Micro-batches of each rank in an optimizer step."""
    trained: int
    """Trained models."""
    coming: float
    """Bytes of the layers' weights that are copied to the GPU for each micro-batch's forward pass,
    and again for its backward pass."""


def parts_of_sample(plan: AnyPlan, tokens: float) -> tuple[float, float]:
    """Of a sample's tokens, those of the prompt, which a group shares, and those that the policy
    writes; in an episode the environment writes the others."""
    if plan.lengths.episode is None:
        new = min(plan.said.new_tokens, tokens)
        return tokens - new, new
    prompt = min(plan.facts.longest or plan.lengths.prompt or 0, tokens)
    new = plan.said.environment.max_turns * plan.said.new_tokens
    return prompt, min(new, tokens - prompt)


def sampling_work(plan: AnyPlan, model: ModelFacts, samples: int, tokens: float) -> Amounts:
    """What each device of an engine does to sample its part of a step."""
    ranks = plan.devices.ranks_per_engine
    engines = plan.devices.engines
    prompt, new = parts_of_sample(plan, tokens)
    rounded = plan.devices.engine_weights
    if rounded == "model":
        weights = copy_bytes(model, plan.devices.bytes_per_number, plan.engine_quantize)
    else:
        weights = rounded_bytes(model.parameters or 0, model.hidden_size, rounded)
    per_token = kv_bytes_per_token(plan, model)
    asked = ceil(samples / engines)
    read = (prompt + tokens) / 2 * per_token
    together = _running(plan, model, asked, tokens)
    steps = max(1.0, asked / together) * new  # a request that ends makes room for the next one
    group = plan.said.rollout.group_size if plan.kind.rl else plan.sampling.n
    prompts = samples / group / engines
    answers = samples / engines * (tokens - prompt - new)
    read_at_once = prompts * prompt + answers
    prefills = max(1, ceil(read_at_once / pass_tokens(plan)))
    own_graphs = plan.decodes_on_gpu and plan.said.system.compile is not False
    graphs = own_graphs or (plan.devices.engine.spans_devices and not plan.vllm.eager)
    split = plan.devices.tensor
    # Each layer's output is summed after its attention and after its products.
    summed = 2 * model.layers * (split > 1)
    numbers = summed * (steps * together + read_at_once) * model.hidden_size
    cost = cost_of(model)
    return {
        "operations": (prompts * cost.prefix(int(prompt)) + answers * cost.linear) / 3 / ranks,
        "bytes read": NARROWER ** log2(ranks)
        * steps
        * (weights + together * (read + 2 * model.state_bytes))
        / ranks,
        "operations of decoding": steps * together * 2 * model.active / ranks,
        "bytes read again": prefills * weights / ranks,
        "passes": steps * (GRAPH_LAYERS if graphs else model.layers),
        "all-reduces": summed * (steps + prefills),
        "bytes all-reduced": 2 * numbers * plan.devices.bytes_per_number * (split - 1) / split,
        # They take little beside recorded steps, as measured on a GPU (``benchmarks.gpu``).
        "tokens handled": steps * together * (not own_graphs),
    }


def cost_of(model: ModelFacts) -> CostModel:
    return CostModel.of_decoder(
        parameters=model.active - model.outside_layers,
        layers=model.attention_layers,
        heads=model.heads,
        head_dim=model.head_dim,
        vocabulary=model.vocab_size,
        hidden=model.hidden_size,
    )
