"""``tunesmith.generate``: prompts to completions from Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.commands import GenerateConfig, SamplingSection
from tunesmith.config.reading.files import find_model
from tunesmith.config.schema import DataSection, ModelSection, SystemSection
from tunesmith.errors import UserError, boundary, shortened
from tunesmith.learn.data.chat_defaults import set_defaults
from tunesmith.learn.data.prompts import PromptEncoder
from tunesmith.learn.data.sources import SourceRow
from tunesmith.learn.data.values import read_prompt
from tunesmith.models.embedding_rows import without_row
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import Plan
from tunesmith.plan.resolve import resolve
from tunesmith.run.assembly.event_loop import run_async
from tunesmith.run.loop.seeds import derive_seed
from tunesmith.run.offline.answering import window_of
from tunesmith.run.specs.engines import local_engine_for, make_sampling
from tunesmith.run.specs.from_plan import load_tokenizer, model_spec
from tunesmith.types import Completion, FinishReason, Prompt

if TYPE_CHECKING:
    from tunesmith.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class Generation:
    """The completions of one prompt; all lists have ``n`` entries."""

    prompt: Prompt
    texts: list[str]
    """Without special tokens."""
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    """Per token, under the distribution it was sampled from (greedy: at temperature 1)."""
    finish_reasons: list[FinishReason]

    @property
    def text(self) -> str:
        """The first completion."""
        return self.texts[0]

    def __repr__(self) -> str:
        shown = ", ".join(repr(shortened(text)) for text in self.texts[:3])
        more = f", and {len(self.texts) - 3} more" if len(self.texts) > 3 else ""
        return f"Generation({shown}{more}; {', '.join(sorted({*self.finish_reasons}))})"


def generate(
    model: str | Path | CausalLM,
    prompts: Sequence[Prompt],
    *,
    n: int = 1,
    max_new_tokens: int = 512,
    temperature: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    seed: int = 0,
    system_prompt: str | None = None,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    max_running: int = 256,
    max_prefill_tokens: int = 8192,
) -> list[Generation]:
    """Complete prompts as a batch; each gets the completion it would get alone, up to rounding.

    ``max_running`` limits the sequences decoded together, ``max_prefill_tokens`` the tokens
    prefilled together. Sampled completions depend on ``seed`` and the prompt's position.

    Args:
        model: a directory or hub name, or a loaded model.
        prompts: texts, or conversations as lists of messages.
        temperature: 0 is greedy; None: greedy for one completion per prompt, else 1.
        chat: whether texts go through the chat template; None: if the tokenizer has one.
        chat_template_kwargs: variables of the chat template, such as ``{"enable_thinking":
            False}``.

    Raises UserError where a setting or a prompt cannot be used.

    Example:
        >>> tunesmith.generate("Qwen/Qwen2.5-0.5B-Instruct", ["What is 7 times 6?"])[0].text
        '7 times 6 is 42.'
    """
    prompts = _checked(prompts, stop)
    temperature = float(n > 1) if temperature is None else temperature
    with boundary(UserError, "tunesmith.generate", ValueError):
        sampling = SamplingSection(
            n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
            min_p=min_p, repetition_penalty=repetition_penalty, min_new_tokens=min_new_tokens,
            stop=tuple(stop), stop_token_ids=tuple(stop_token_ids), seed=seed,
        )  # fmt: skip
        data = DataSection(
            train="prompts", system_prompt=system_prompt, chat=chat,
            chat_template_kwargs=dict(chat_template_kwargs or {}) or None,
        )  # fmt: skip
        system = SystemSection(max_running=max_running, max_prefill_tokens=max_prefill_tokens)
        name = "a loaded model"
        if isinstance(model, str | Path):
            name = find_model(str(model), [Path.cwd()])
        path = ModelSection(path=name)
        config = GenerateConfig(model=path, data=data, sampling=sampling, system=system)
    if not prompts:
        return []
    return _generate(resolve(config, Facts(read_hardware())), model, prompts)


def _checked(prompts: Iterable[object], stop: object) -> list[Prompt]:
    """Texts and conversations, as from lines of data. UserError for other values, and for a text
    instead of a list."""
    if isinstance(prompts, str):
        raise UserError("prompts is one text; give a list of prompts, even of one")
    if isinstance(stop, str):
        raise UserError(f"stop is one text; give a list, such as [{stop!r}]")
    named = [(f"prompts[{n}]", {"prompt": prompt}) for n, prompt in enumerate(prompts)]
    return [read_prompt(SourceRow("prompts", *row), "prompt") for row in named]


def _generate(
    plan: Plan[GenerateConfig], model: str | Path | CausalLM, prompts: Sequence[Prompt]
) -> list[Generation]:
    config = plan.said
    section = config.sampling
    n = plan.sampling.n
    if isinstance(model, str | Path):
        loaded: CausalLM = model_spec(plan, frozen=True).build(load_tokenizer(config))
        tokenizer: Any = loaded.tokenizer
    else:
        loaded = model
        tokenizer = copy(model.tokenizer)
        set_defaults(tokenizer, system_prompt=None, options=config.data.chat_template_kwargs)
    encoder = PromptEncoder.of(config.data, tokenizer, prompts)
    prompt_ids = [encoder.ids(prompt) for prompt in prompts]
    for place, ids in enumerate(prompt_ids):
        problem = without_row(tokenizer, ids)
        if problem:
            raise UserError(f"prompts[{place}]: {problem}")
    longest = max(map(len, prompt_ids)) + section.max_new_tokens
    engine = local_engine_for(loaded, plan, longest, len(prompts) * n)
    defaults = loaded.module.generation_config
    sampling = make_sampling(section, tokenizer, plan.sampling.temperature, defaults)
    room = asyncio.Semaphore(window_of(plan.sampling.running, n))

    async def complete(place: int) -> list[Completion]:
        seed = derive_seed(section.seed, place)
        draws = [replace(sampling, seed=derive_seed(seed, member)) for member in range(n)]
        async with room:
            ids = prompt_ids[place]
            return await asyncio.gather(*(engine.generate(ids, draw) for draw in draws))

    async def complete_all() -> list[list[Completion]]:
        try:
            return await asyncio.gather(*map(complete, range(len(prompts))))
        finally:
            await engine.close()

    return [
        Generation(
            prompt,
            [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group],
            [c.token_ids for c in group],
            [c.logprobs for c in group],
            [c.finish_reason for c in group],
        )
        for prompt, group in zip(prompts, run_async(complete_all()), strict=True)
    ]
