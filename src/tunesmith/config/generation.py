"""The run files of batch inference and of rejection-sampling fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tunesmith.config.schema import PositiveInt, RewardSection, RunConfig, SamplingKeys
from tunesmith.config.section import Section, derived


class SamplingSection(SamplingKeys):
    table = "sampling"

    n: PositiveInt = derived()
    """Completions per prompt."""
    temperature: Annotated[float, Field(ge=0)] = derived()
    """0 is greedy."""


class OutputSection(Section):
    kind: Literal["completions", "best", "pairs", "conditional", "score"] = "completions"
    """What to write: all completions; the best per prompt; best-versus-worst pairs; completions with the reward in the
    prompt; or rewards of completions already in the data."""
    logprobs: bool = False
    """Also write the token ids and their log-probabilities."""
    min_margin: Annotated[float, Field(ge=0)] | None = None
    """``pairs``: the best reward must exceed the worst by more than this."""
    min_reward: float | None = None
    """``best`` and ``pairs``: the best completion must have at least this reward; None: any reward."""
    reward_template: str | None = None
    """``conditional``: template of the new prompt, with ``{prompt}`` and ``{reward}``."""
    reward_levels: Annotated[int, Field(ge=2)] | None = None
    """``conditional``: write the reward as one of this many quantile levels, 1 the lowest; None: as a number."""


class RFTSection(Section):
    profile: Literal["conservative", "balanced", "aggressive"] = "balanced"
    """Fills in omitted keys of ``[sampling]``, ``[train]``, ``[system]``, ``[monitor]`` and ``[checkpoint]``."""
    few_shot: Path | None = None
    """Worked examples placed before each question when sampling the first round; never used in training."""
    few_shot_separator: str | None = None
    """Text between the examples in a plain text prompt; sampling stops at it."""
    select: Literal["first", "all", "shortest", "distinct"] = "distinct"
    """Which of a question's correct answers are learned."""
    threshold: float | None = None
    """Minimum reward of a correct answer; None: the sum of the rewards' weights."""
    rounds: PositiveInt = 1
    sampler: str | None = None
    """A directory or a hub name: another, often larger, model that answers the questions."""
    answers: Path | None = None
    """A ``samples.jsonl`` from an earlier run over the same questions: select and train without sampling again."""
    start: Literal["base", "last"] = "base"
    """The model that each round's training starts from."""


class GenerateConfig(RunConfig):
    """``tunesmith generate``; ``data.train`` names the lines to answer."""

    command = "generate"
    supervised = False
    trains = False
    sampling: SamplingSection = SamplingSection()
    reward: RewardSection | None = None
    output: OutputSection = OutputSection()

    @property
    def sampling_settings(self) -> SamplingSection | None:
        return None if self.output.kind == "score" else self.sampling


class RFTConfig(RunConfig):
    command = "rft"
    supervised = False
    reward: RewardSection
    sampling: SamplingSection = SamplingSection()
    rft: RFTSection = RFTSection()

    @property
    def sampling_settings(self) -> SamplingSection:
        return self.sampling


SamplingConfig = GenerateConfig | RFTConfig
