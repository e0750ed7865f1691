"""Real work of made-up small models, phase by phase, to which estimates of this machine's durations
are fitted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.algorithms.objective import Objective, policy_objective
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.attention import ATTENTION_NAME
from tunesmith.models.no_tokenizer import NoTokenizer
from tunesmith.plan.cost.work import Work
from tunesmith.plan.rules.situation import resolved_algorithm
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Completion, Sample, Sampling


@dataclass(slots=True)
class Probe:
    """A model in memory, and the minimum time of each phase so far."""

    work: Work
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    _model: CausalLM = field(init=False, repr=False)
    _backend: TorchBackend[CausalLM] = field(init=False, repr=False)
    _objective: Objective = field(init=False, repr=False)
    _steps: int = 0

    def __post_init__(self) -> None:
        self._model = made_up(self.work)
        self._backend = TorchBackend(self._model, AdamWSettings(), CausalLM.predict)
        said = ["model.path=made/up", "data.train=made/up", 'reward.functions=["exact_match"]']
        config = load_config(RLConfig, None, said)
        self._objective = policy_objective(resolved_algorithm(config, None)[0])

    def step(self) -> None:
        """Take a step; each phase's minimum time counts, since other programs slow some steps
        down."""
        self._steps += 1
        batch = asyncio.run(self._rollouts())
        cap = self.work.micro
        cost = self._backend.cost
        with self._timed("scoring"):
            self._backend.score(Packing.of(batch, cap, cost=cost))
        batch.packings.clear()
        with self._timed("forward and backward"):
            weigh(batch, "token_mean")
            self._backend.forward_backward(Packing.of(batch, cap, cost=cost), self._objective)
        with self._timed("optimizer"):
            self._backend.step(1e-9)

    @contextmanager
    def _timed(self, phase: str) -> Generator[None]:
        began = time.perf_counter()
        yield
        self._took(phase, time.perf_counter() - began)

    def _took(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = min(seconds, self.seconds.get(phase, float("inf")))

    async def _rollouts(self) -> Batch:
        """Sample with a separate engine, whose memory is freed afterwards."""
        work = self.work
        draw = torch.Generator().manual_seed(self._steps)
        size = (work.prompts, work.prompt)
        prompts = torch.randint(work.model.vocab_size, size, generator=draw).tolist()
        attending = replace(
            work.model, attending=None, key_numbers=None, latent=0
        )  # as the layers of ``made_up``
        budget = attending.kv_bytes_per_token(4) * (work.prompt + work.new + 32) * work.samples
        engine = LocalEngine(
            self._model,
            kv_bytes=budget,
            max_running=work.running,
            max_prefill_tokens=work.prompts * work.prompt,
            eos_token_ids=(),
            rounded=work.rounded,
        )
        with self._timed("sync"):
            await engine.load_weights(self._steps)
        asked = [(p, Sampling(work.new, seed=i)) for p in prompts for i in range(work.group)]
        began = time.perf_counter()
        done = await asyncio.gather(*(engine.generate(*each) for each in asked))
        whole = time.perf_counter() - began
        stats = engine.stats()
        self._took("prefill", stats.prefill_seconds)
        self._took("decode", whole - stats.prefill_seconds)
        await engine.close()
        return _batch(prompts, done, work.group)


def made_up(work: Work) -> CausalLM:
    """A Qwen3 with random weights, in the sizes of the work."""
    facts = work.model
    config = cast(Any, Qwen3Config)(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_hidden_layers=facts.layers,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        max_position_embeddings=facts.context or 4096,
        tie_word_embeddings=facts.tied,
        attn_implementation=ATTENTION_NAME,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if work.bytes_per_number == 2 else torch.float32
    module = cast(Any, Qwen3ForCausalLM(config)).to(dtype).eval()
    return CausalLM(module, cast(Any, NoTokenizer()))


def _batch(prompts: list[list[int]], done: list[Completion], group: int) -> Batch:
    """Completions as the learner sees them; half of every group is correct."""
    samples: list[Sample] = []
    for i, completion in enumerate(done):
        prompt = prompts[i // group]
        ids = [*completion.token_ids]
        learned = [False] * len(prompt) + [True] * len(ids)
        samples.append(Sample([*prompt, *ids], learned, i // group))
    batch = Batch.of(samples)
    batch.add("old_logprobs", [logprob for completion in done for logprob in completion.logprobs])
    batch.add("advantages", [1.0 if place % 2 else -1.0 for place in batch.sample.tolist()])
    return batch
