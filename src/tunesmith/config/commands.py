"""The run files of the commands other than ``rl`` and ``sft``, and the configuration that each
command reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.reading.describe import sections_of, tables_of
from tunesmith.config.schema import (
    RewardSection,
    RLConfig,
    RunConfig,
    SamplingKeys,
    SandboxSection,
    SFTConfig,
)
from tunesmith.config.section import Open, Section
from tunesmith.config.values import PositiveInt, Share, Text, Url

# Reward models and preference optimisation

Weight = Annotated[float, Field(ge=0)]


class RMSection(Section):
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """``logexp`` ignores a margin in the data."""


class ReferenceSection(Section):
    beta: Annotated[float, Field(gt=0)] = 0.1
    """The reward per unit of log-ratio to the reference."""
    precompute_reference: bool = False
    """Score the data with the reference once, before training, instead of keeping a second
    model."""


class DPOSection(ReferenceSection):
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of mislabelled pairs (cDPO)."""
    nll_coef: Weight = 0.0
    """Weight of the chosen answer's mean negative log-probability."""


class KTOSection(ReferenceSection):
    desirable_weight: Weight = 1.0
    undesirable_weight: Weight = 1.0


class PRMSection(Section):
    separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text after each step; the label is predicted at its last token."""
    good: str = "+"
    """The label of a good step; one token."""
    bad: str = "-"


class ScoreConfig(RunConfig):
    """A command that trains a score model; a sample has one token more than its sequence, for the
    prediction."""

    score_model = True


class RMConfig(ScoreConfig):
    command = "rm"
    goal = "pairs"
    rm: RMSection = RMSection()


class DPOConfig(RunConfig):
    command = "dpo"
    goal = "pairs"
    dpo: DPOSection = DPOSection()


class KTOConfig(RunConfig):
    command = "kto"
    goal = "judged"
    kto: KTOSection = KTOSection()


class PRMConfig(ScoreConfig):
    command = "prm"
    goal = "steps"
    prm: PRMSection = PRMSection()


# Batch inference and rejection-sampling fine-tuning


class SamplingSection(SamplingKeys):
    table = "sampling"

    n: Open[PositiveInt] = None
    """Completions per prompt."""
    temperature: Open[Annotated[float, Field(ge=0)]] = None  # pyright: ignore
    """0 is greedy."""


class OutputSection(Section):
    kind: Literal["completions", "best", "pairs", "conditional", "score"] = "completions"
    """What to write: all completions; the best per prompt; best-versus-worst pairs; completions
    with the reward in the prompt; or rewards of completions already in the data."""
    logprobs: bool = False
    """Also write the token ids and their log-probabilities."""
    min_margin: Annotated[float, Field(ge=0)] | None = None
    """``pairs``: the best reward must exceed the worst by more than this."""
    min_reward: float | None = None
    """``best`` and ``pairs``: the best completion must have at least this reward; None: any
    reward."""
    reward_template: str | None = None
    """``conditional``: template of the new prompt, with ``{prompt}`` and ``{reward}``."""
    reward_levels: Annotated[int, Field(ge=2)] | None = None
    """``conditional``: write the reward as one of this many quantile levels, 1 the lowest; None: as
    a number."""


class RFTSection(Section):
    profile: Literal["conservative", "balanced", "aggressive"] = "balanced"
    """Fills in omitted keys of ``[sampling]``, ``[train]``, ``[system]``, ``[monitor]`` and
    ``[checkpoint]``."""
    few_shot: Path | None = None
    """Worked examples placed before each question when sampling the first round; never used in
    training."""
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
    """A ``samples.jsonl`` from an earlier run over the same questions: select and train without
    sampling again."""
    start: Literal["base", "last"] = "base"
    """The model that each round's training starts from."""


class GenerateConfig(RunConfig):
    """``tunesmith generate``; ``data.train`` names the lines to answer."""

    command = "generate"
    supervised = False
    trains = False
    sampling: SamplingSection = SamplingSection()
    reward: RewardSection | None = None
    environment: SandboxSection = SandboxSection()
    output: OutputSection = OutputSection()

    @property
    def sampling_settings(self) -> SamplingSection | None:
        return None if self.output.kind == "score" else self.sampling


class RFTConfig(RunConfig):
    command = "rft"
    supervised = False
    reward: RewardSection
    environment: SandboxSection = SandboxSection()
    sampling: SamplingSection = SamplingSection()
    rft: RFTSection = RFTSection()

    @property
    def sampling_settings(self) -> SamplingSection:
        return self.sampling


SamplingConfig = GenerateConfig | RFTConfig


# Distillation


class TeacherSection(Section):
    path: str
    """A directory or a hub name, or "policy": the policy is its own teacher, with ``prompt``. With
    ``url``, only its tokenizer is read. With other tokens than the student's it scores the text of
    answers (``mode = "on_policy"``)."""
    url: Annotated[
        Url | dict[str, Url] | None, Field(description="a URL, or a table of such by name")
    ] = None
    """The address, up to ``/v1``, of an OpenAI-compatible server of the teacher that scores prompts
    (``echo``), as vLLM and SGLang do; or several by name, chosen by ``column``."""
    model: Annotated[
        Text | dict[str, Text] | None, Field(description="text in quotes, or a table by name")
    ] = None
    """The teacher's name at ``url``; None: ``path``."""
    column: Text = "teacher"
    """The column with the name of a task's teacher, if ``url`` has several."""
    prompt: Text | None = None
    """A data column with the prompt that the teacher sees instead of the student's, such as one
    with the solution."""
    token_env: Text | None = None
    """The environment variable with the key that is sent as ``Authorization: Bearer``."""
    concurrency: PositiveInt = 16
    """Requests at once."""
    deadline: Annotated[float, Field(gt=0)] = 900.0
    """Seconds after which a request that fails again and again ends the run."""

    def by_name(self) -> dict[str, TeacherSection]:
        """The section of each of several teachers."""
        urls = self.url if isinstance(self.url, dict) else {}
        models = self.model if isinstance(self.model, dict) else dict.fromkeys(urls, self.model)
        return {
            name: self.model_copy(update={"url": url, "model": models.get(name)})
            for name, url in urls.items()
        }


class DistillSection(Section):
    mode: Literal["on_policy", "sampled", "offline"] = "on_policy"
    """Reverse KL on the student's samples; forward KL on the student's samples; forward KL on given
    answers."""
    top_k: Open[PositiveInt] = None
    """How many of the teacher's most likely tokens a forward KL compares individually; the rest
    count as one."""
    alpha: Open[Share] = None
    """Offline only: weight of the KL; the given answers' negative log-probability has weight 1 −
    alpha."""


class OnPolicyAlgorithm(AlgorithmSection):
    name: str = "distill"


class SampledAlgorithm(OnPolicyAlgorithm):
    name: str = "reinforce"


class DistillConfig(RLConfig):
    """``mode = "on_policy"``."""

    command = "distill"
    teacher: TeacherSection
    distill: DistillSection = DistillSection()
    algorithm: OnPolicyAlgorithm = OnPolicyAlgorithm()  # pyright: ignore


class SampledDistillConfig(DistillConfig):
    """``mode = "sampled"``: of the algorithm, only ``aggregation`` is used."""

    algorithm: SampledAlgorithm = SampledAlgorithm()  # pyright: ignore


class OfflineDistillConfig(SFTConfig):
    """``mode = "offline"``."""

    command = "distill"
    teacher: TeacherSection
    distill: DistillSection = DistillSection()


def distill_kind(data: Mapping[str, object]) -> type[RunConfig]:
    """The configuration class of a run file's tree, by ``distill.mode``; an invalid mode is refused
    later, on load."""
    section = data.get("distill")
    kinds = {"sampled": SampledDistillConfig, "offline": OfflineDistillConfig}
    return kinds.get(
        str(section.get("mode")) if isinstance(section, Mapping) else "", DistillConfig
    )


_ALL = (
    RLConfig,
    SFTConfig,
    RMConfig,
    DPOConfig,
    KTOConfig,
    PRMConfig,
    DistillConfig,
    GenerateConfig,
    RFTConfig,
)
KINDS: Mapping[str, type[RunConfig]] = {kind.command: kind for kind in _ALL}
"""Configurations by command; ``distill`` has two more, by ``distill.mode``."""


def commands_with(key: str) -> list[str]:
    """The commands whose run files have a given dotted key or section."""
    return [
        name for name, kind in KINDS.items() if key in kind.model_fields or key in all_keys(kind)
    ]


@cache
def all_keys(model: type[BaseModel], prefix: str = "", *, tables: bool = False) -> tuple[str, ...]:
    """Every dotted key of a configuration: ``run_dir``, ``algorithm.loss``,
    ``algorithm.loss.clip_low``, ...

    Args:
        tables: also ``system.vllm``, and keys of tables that are list items or one form of a value:
            ``data.train.weight``.
    """
    keys: dict[str, None] = {}
    for name, field in model.model_fields.items():
        key = prefix + name
        sections = list(sections_of(field.annotation))
        if not sections or (prefix and (tables or sections != [field.annotation])):
            keys[key] = None
        inside = sections if tables or not prefix else tables_of(field.annotation)
        keys |= dict.fromkeys(
            inner for table in inside for inner in all_keys(table, f"{key}.", tables=tables)
        )
    return tuple(keys)
