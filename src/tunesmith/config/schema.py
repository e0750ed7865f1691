"""What a run file may say. Frozen models, unknown keys refused; a key left out is derived.

``[model] [data] [reward] [algorithm] [rollout] [train] [eval]`` say what is learned. ``[system]`` says how
fast, and never changes what is learned. ``[monitor] [checkpoint]`` say what is kept.
``None`` means "derive it"; ``resolve`` fills such keys in and gives the reason for each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from tunesmith.config.sizes import checked_size

PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[str, AfterValidator(checked_size), Field(description="a size such as '512MB' or '4GB'")]


def _zero_is_off(value: object) -> object:
    return None if value == 0 and not isinstance(value, bool) else value


def _off_is_zero(value: float | None) -> float:
    return value or 0.0


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelSection(Section):
    path: str
    """A directory or a hub name, in Hugging Face format."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of computation. With bfloat16 the optimizer keeps float32 master weights."""
    trust_remote_code: bool = False
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own template."""


class Source(Section):
    """One data source of a mixture."""

    path: str
    """A .jsonl, .json, .parquet or .csv file, a directory, or a Hugging Face dataset name."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the draws, against the other sources' weights; None for all: by their sizes."""
    split: str = "train"
    subset: str | None = None


class DataSection(Section):
    train: str | Source | tuple[str | Source, ...]
    eval: str | Source | tuple[str | Source, ...] | None = None
    prompt: str | None = None
    """Name of the prompt column; None finds it (``prompt``, ``question``, ``instruction``, ``messages``)."""
    completion: str | None = None
    """Name of the completion column (supervised training); None finds it."""
    system_prompt: str | None = None
    chat: bool | None = None
    """Whether text prompts go through the chat template; None: yes if the tokenizer has one."""
    loss_on: Literal["assistant", "completion", "all"] | None = None
    """Which tokens supervised training learns; None: assistant turns, completion, or all, by format."""
    max_prompt_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    """Longest sequence in supervised training."""
    too_long: Literal["error", "skip", "truncate_left", "truncate_right"] = "error"
    skip_bad: bool = False
    shuffle: bool = True
    seed: int | None = None


class RewardSection(Section):
    functions: tuple[str, ...] = ()
    """``file.py:function``, or a built-in: exact_match, numeric_match, regex_format, math."""
    weights: tuple[float, ...] | None = None
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that one call of a reward may take."""
    max_failed_share: Share = 0.1
    """The run stops when more than this share of a step's rollouts failed."""
    answer: str = "answer"
    """The column the built-in rewards compare with."""
    pattern: str | None = None
    """Regular expression of regex_format; with a group, also what exact_match and numeric_match extract."""


class AlgorithmSection(Section):
    name: str = "grpo"
    """A preset: fills in every key below that is left out."""
    advantage: str | None = None
    loss: str | None = None
    aggregation: (
        Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] | None
    ) = None
    clip_low: Annotated[float, Field(ge=0)] | None = None
    clip_high: Annotated[float, Field(ge=0)] | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] | None = None
    kl_in: Literal["loss", "reward"] | None = None
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Adapt ``kl_coef`` so that the KL to the reference stays near this; None: a fixed coefficient."""
    kl_horizon: PositiveInt | None = None
    """Rollouts over which the adaptive coefficient reacts."""
    entropy_coef: float | None = None
    tau_positive: Annotated[float, Field(gt=0)] | None = None
    """Gate temperature of ``sapo`` where the advantage is positive."""
    tau_negative: Annotated[float, Field(gt=0)] | None = None
    ratio_cap: Annotated[float, Field(gt=0)] | None = None
    """Largest ratio that weighs a token in ``dppo_tv``."""
    cov_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of tokens that ``clip_cov`` and ``kl_cov`` hold back."""
    cov_low: float | None = None
    cov_high: float | None = None
    cov_kl_coef: Annotated[float, Field(ge=0)] | None = None
    gamma: Share | None = None
    """Discount per token of ``gae``, ``vapo`` and ``reinforce``."""
    gae_lambda: Share | None = None
    critic_lambda: Share | None = None
    """λ of the returns the critic learns; None: ``gae_lambda``."""
    lambda_alpha: Annotated[float, Field(gt=0)] | None = None
    """``vapo``: λ = 1 − 1/(α·length + 1)."""
    value_clip: Annotated[float, Field(ge=0)] | None = None
    """How far a value may move from the one before the update; 0 is off."""
    decoupled: bool | None = None
    """Let the trainer recompute the log-probabilities before the update; None: if there is a correction."""
    correction: (
        Literal[
            "none",
            "token_truncate",
            "token_clamp",
            "icepop",
            "sequence_truncate",
            "sequence_mask",
            "geometric",
        ]
        | None
    ) = None
    """Weight of each token for the difference between trainer and sampler (needs ``decoupled``)."""
    correction_low: Annotated[float, Field(ge=0)] | None = None
    correction_high: Annotated[float, Field(gt=0)] | None = None
    overlong_buffer: Annotated[int, Field(ge=0)] | None = None
    """Tokens before the limit over which the reward ramps down (DAPO); 0 is off."""
    overlong_factor: float | None = None
    mask_truncated: bool | None = None
    """Leave rollouts that hit the length limit out of the loss."""
    dynamic_filter: bool | None = None
    """Replace groups whose mean score is not strictly between ``filter_low`` and ``filter_high``."""
    filter_low: float = 0.0
    filter_high: float = 1.0
    reward_clip: tuple[float, float] | None = None


class RolloutSection(Section):
    prompts_per_step: PositiveInt = 8
    group_size: PositiveInt = 8
    max_new_tokens: PositiveInt = 512
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that one rollout may take before it counts as failed."""
    seed: int | None = None


class TrainSection(Section):
    steps: PositiveInt | None = None
    """Rollout batches (RL) or optimizer steps (supervised); None: derived from ``epochs``."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    batch_size: PositiveInt | None = None
    """Samples per optimizer step; None: the whole rollout batch (RL) or 32 (supervised)."""
    updates_per_batch: PositiveInt = 1
    """Passes over one rollout batch."""
    lr: Annotated[float, Field(gt=0)] | None = None
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Share = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps; give this or ``warmup_ratio``."""
    warmup_ratio: Share | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[
        Annotated[float, Field(gt=0)] | None,
        BeforeValidator(_zero_is_off),
        PlainSerializer(_off_is_zero),
        Field(description="a number above 0, or 0 for no clipping"),
    ] = 1.0
    """Gradients of a larger norm are scaled down to it; 0 in a run file (None here) is no clipping."""
    seed: int = 0


class EvalSection(Section):
    every: PositiveInt | None = None
    """Steps between evaluations; None: only at the end, if there is an eval set."""
    at_start: bool = True
    samples: PositiveInt = 1
    """Completions per prompt; 1 is greedy, more give pass@k."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """When ``samples`` is more than 1."""
    pass_at: tuple[PositiveInt, ...] | None = None
    max_prompts: PositiveInt | None = None
    metric: str | None = None
    """What the best checkpoint is judged by; None: ``eval/reward`` (RL) or ``eval/loss`` (supervised)."""
    target: float | None = None
    """End the run when an evaluation's ``metric`` is this good."""


class SystemSection(Section):
    device: str | None = None
    threads: PositiveInt | None = None
    max_tokens_per_microbatch: PositiveInt | None = None
    share_prompts: bool = True
    gradient_checkpointing: bool = False
    logprob_chunk: PositiveInt | None = None
    """Rows of the head that are computed at a time."""
    kv_memory: Size | None = None
    """KV memory of the local engine, such as ``512MB`` or ``4GB``."""
    max_running: PositiveInt = 256
    """Requests decoded together at most."""
    max_prefill_tokens: PositiveInt = 8192
    """Prompt tokens prefilled in one forward."""


class MonitorSection(Section):
    sinks: tuple[Literal["tensorboard"], ...] = ()
    """Besides metrics.jsonl, which is always written."""
    progress: bool | None = None
    """Live display; None: when standard output is a terminal."""
    every: PositiveInt = 1
    """Steps between plain progress lines and between points in the sinks; metrics.jsonl has every step."""
    samples: Annotated[int, Field(ge=0)] = 2
    """Rollouts per step that are kept in rollouts.jsonl."""


class CheckpointSection(Section):
    every: PositiveInt | None = None
    """Steps between checkpoints; None: only at the end."""
    keep: PositiveInt = 2
    resume: bool | Path = False
    """True: from the newest checkpoint of ``run_dir``; a path: from that one."""


class RunConfig(Section):
    """What every command shares."""

    run_dir: Path | None = None
    model: ModelSection
    data: DataSection
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    system: SystemSection = SystemSection()
    monitor: MonitorSection = MonitorSection()
    checkpoint: CheckpointSection = CheckpointSection()


class RLConfig(RunConfig):
    """``tunesmith rl``."""

    reward: RewardSection
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()


class SFTConfig(RunConfig):
    """``tunesmith sft``."""
