"""The sections of a run file, as frozen models that refuse unknown keys.

``[model] [lora] [data] [reward] [environment] [algorithm] [critic] [rollout] [train] [eval]``
determine what is learned. ``[system]`` determines how fast, and never changes what is learned.
``[monitor] [checkpoint]`` determine what is kept. An ``Open`` key that is left out is None; the
plan has its value, and a reason for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tunesmith.config.algorithm import AlgorithmSection, CriticSection
from tunesmith.config.judges import JudgeReward
from tunesmith.config.optimizer import AdamW, Optimizer
from tunesmith.config.sandboxes import Sandbox
from tunesmith.config.section import Open, Section
from tunesmith.config.system import SystemSection
from tunesmith.config.values import (
    Beta,
    Command,
    Count,
    GradNorm,
    Memory,
    PositiveInt,
    Rate,
    Seed,
    Share,
    SinkName,
    Size,
    Text,
    Url,
    at_most,
)
from tunesmith.types import VisionTower


class ModelSection(Section):
    path: str
    """A directory or a hub name, in Hugging Face format."""
    dtype: Open[Literal["float32", "bfloat16", "float16"]] = None
    """Dtype of the computation. With 16 bits the optimizer keeps float32 master weights; with
    float16 the loss is scaled too."""
    trust_remote_code: bool = False
    chat_template: Literal["hermes"] | Path | None = None
    """A Jinja file that replaces the tokenizer's own template, or "hermes": ChatML with tools."""
    quantize: Literal["int8", "nf4"] | None = None
    """Store the frozen weights of an adapter's base in 8 or 4 bits (bitsandbytes); needs
    ``lora``."""
    vision_tower: VisionTower = "frozen"
    """What is trained of the tower that sees images: nothing, its projector, or all of it."""
    vision_lr_ratio: Annotated[float, Field(gt=0)] = 1.0
    """Its learning rate, as a multiple of ``train.lr``."""
    router_aux_loss_coef: Annotated[float, Field(ge=0), at_most(10)] = 0.0
    """Weight of a loss that loads the experts of a mixture evenly."""
    router_bias_update_rate: Annotated[float, Field(ge=0), at_most(1)] = 0.0
    """How far each step moves the biases that balance experts without a loss (DeepSeek-V3's
    0.001)."""


class LoraSection(Section):
    """A low-rank adapter (LoRA) trained instead of the model's own weights; enabled by ``rank`` or
    ``path``."""

    rank: PositiveInt | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    targets: Literal["all-linear"] | tuple[Text, ...] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input; supervised training only."""
    path: Path | None = None
    """A saved adapter to continue, with its rank, alpha and targets."""
    save_merged: bool = False
    """Also write the whole model, with the adapter merged in, to each checkpoint."""

    @property
    def on(self) -> bool:
        return self.rank is not None or self.path is not None


class Source(Section):
    """One data source of a mixture."""

    path: str
    """A .jsonl, .json, .parquet or .csv file, a directory, a Hugging Face dataset name, or the name
    of what a package brings, as ``reasoning_gym:chain_sum[test]``."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the draws, relative to the other sources' weights; None for all sources:
    proportional to size."""
    split: Text = "train"
    """A split, or a part of one: ``train[:200]``, ``train[:90%]``."""
    subset: Text | None = None
    revision: Text | None = None
    """Of a data set of the hub: a commit, a tag or a branch."""
    stream: bool = False
    """Read a data set of the hub while it is downloaded, and no more than the part of ``split``."""
    columns: Annotated[dict[str, Text] | None, Field(description="a table")] = None
    """New names of columns, with the names that the source has: ``{ prompt = "problem" }``."""
    options: Annotated[dict[str, Any] | None, Field(description="a table")] = None
    """For a name of a package: what it takes, as ``{ seed = 1, max_terms = 3 }``."""


Sources = Annotated[tuple[str | Source, ...], Field(min_length=1)]


class DataSection(Section):
    train: str | Source | Sources
    eval: str | Source | Sources | None = None
    map: Text | None = None
    """``file.py:function``, which gets each row first and returns its columns, or None to leave it
    out."""
    prompt: Text | None = None
    """Name of the prompt column; None: detected (``prompt``, ``question``, ``instruction``,
    ``messages``)."""
    completion: Text | None = None
    """Name of the completion column (supervised training); None: detected."""
    system_prompt: str | None = None
    chat: bool | None = None
    """Whether text prompts go through the chat template; None: yes if the tokenizer has one."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="a table")] = None
    """Variables passed to the chat template in every rendering, such as ``{ enable_thinking = false
    }``."""
    loss_on: Literal["assistant", "completion", "all"] | None = None
    """Which tokens supervised training learns; None: assistant turns, completion or all, depending
    on the format."""
    max_prompt_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    """Longest sequence in supervised training."""
    too_long: Literal["error", "skip", "truncate_left", "truncate_right"] = "error"
    skip_bad: bool = False
    shuffle: bool = True
    seed: Open[Seed] = None
    curriculum: Literal["success_rate"] | None = None
    """Which prompts come up more often: those that are near half right."""


class ModelReward(Section):
    """A trained reward model: ``[[reward.models]]``."""

    path: str
    """A directory or a hub name: ``AutoModelForSequenceClassification`` with one label."""
    name: Text = "reward_model"
    """The reward's name in the metrics."""
    weight: float = 1.0
    normalize: bool = False
    """Return ``(score - mean) / std``, with mean and std from the model's ``reward_stats.json``."""


class RemoteReward(Section):
    """A reward behind HTTP: ``[[reward.remote]]``."""

    urls: tuple[Url, ...]
    """Servers of the same reward; each request goes to the one with the fewest open requests."""
    name: Text = "remote"
    weight: float = 1.0
    protocol: Literal["tunesmith", "openrlhf"] = "tunesmith"
    batch_size: PositiveInt = 64
    """Maximum number of completions per request."""
    token_env: Text | None = None
    """The environment variable whose value is sent as ``Authorization: Bearer``."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that one attempt may take."""
    retries: Count = 3
    """Retries, with growing pauses, after a failed connection, a timeout or a 5xx response."""


class RewardSection(Section):
    functions: tuple[Text, ...] = ()
    """``file.py:function``, or a built-in: exact_match, numeric_match, regex_format, math,
    code_tests."""
    weights: tuple[float, ...] | None = None
    """Weights of ``functions``; models, remote rewards and judges have their own."""
    models: tuple[ModelReward, ...] = ()
    remote: tuple[RemoteReward, ...] = ()
    judge: tuple[JudgeReward, ...] = ()
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that one call of a reward may take."""
    isolation: Literal["process", "thread"] | None = None
    """Where your functions run: in a process that can be killed, or in the run's own process."""
    memory: Memory | None = None
    """Memory of your functions' process, beyond its imports; None: half of the machine's."""
    max_failed_share: Share = 0.1
    """The run stops if more than this share of a step's rollouts fail."""
    answer: Text = "answer"
    """The column that built-in rewards compare with."""
    tests: Text = "tests"
    """The column with the tests of code_tests."""
    partial_credit: bool = True
    """Whether code_tests gives the share of passed tests, instead of 1 if all pass and else 0."""
    pattern: str | None = None
    """Regular expression for regex_format; if it has a group, exact_match and numeric_match extract
    that group."""

    @property
    def given(self) -> bool:
        """Whether there is any reward."""
        return bool(self.functions or self.named)

    @property
    def named(self) -> tuple[ModelReward | RemoteReward | JudgeReward, ...]:
        """The rewards that have a name and a weight of their own."""
        return (*self.models, *self.remote, *self.judge)

    @property
    def function_names(self) -> list[str]:
        """What the metrics call ``functions``: those with the same name in two files by their full
        references."""
        short = [reference.rpartition(":")[2] for reference in self.functions]
        both = zip(short, self.functions, strict=True)
        return [name if short.count(name) == 1 else whole for name, whole in both]


class SandboxSection(Section):
    """``[environment]`` of commands that reward without playing episodes."""

    sandbox: Sandbox | None = None
    """Where tools, reward functions and programs of the policy run, and their limits; None: in
    processes with a time limit, and programs in "process"."""


class EnvironmentSection(SandboxSection):
    path: Annotated[
        str | dict[str, str] | None, Field(description="'file.py:name', or a table of such by name")
    ] = None
    """The class or agent that plays every task, or several by name, chosen by ``column``."""
    column: Text = "environment"
    """The column with the name of a task's environment, if there are several."""
    command: Command | None = None
    """A program that plays every task as an agent, in ``sandbox``: words, or a text that is split
    into words as a shell does. ``{prompt}`` stands for the task's prompt, which is else its
    standard input."""
    folder: Text | None = None
    """A directory of which the command gets a copy as its working directory."""
    setup: Command | None = None
    """A program that prepares the command's working directory."""
    verify: Command | None = None
    """A program that gives the reward after the command, in the same sandbox: by what it writes to
    the file that ``TUNESMITH_REWARD`` names, else 1 if it ends with exit code 0, and else 0."""
    tools: tuple[Text, ...] = ()
    """``file.py:function`` of functions that the policy may call; they need types and
    docstrings."""
    max_turns: PositiveInt = 8
    """Maximum number of policy turns per episode."""
    max_tokens: PositiveInt | None = None
    """Longest conversation in an episode; None: the prompt and ``max_turns`` turns with answers."""
    timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that one call of ``reset``, ``step`` or a tool may take, or ``setup`` or ``verify``;
    ``rollout.timeout`` limits a whole episode."""
    isolation: Literal["process", "thread"] | None = None
    """Where environments and tools run: each episode in a process that can be killed, or in a
    thread of the run."""
    memory: Memory | None = None
    """Memory of an episode's process, beyond your files' imports; None: half of the machine's."""
    host: Text = "127.0.0.1"
    """The address where agents with their own client reach the policy; for agents on other
    machines, this machine's name or address. Each episode has its own token."""
    concurrency: PositiveInt = 128
    """Episodes played concurrently."""
    bad_call: Literal["tell", "end"] = "tell"
    """After a bad tool call: tell the policy what was wrong, or end the episode."""
    split_special_tokens: bool = True
    """Whether texts of special tokens in what environments and tools answer stay ordinary text, so
    that no tool can forge a turn."""

    @property
    def used(self) -> bool:
        return self.plays or bool(self.tools)

    @property
    def plays(self) -> bool:
        """Whether episodes are played by the user's code, or a program."""
        return self.path is not None or self.command is not None

    @property
    def pays(self) -> bool:
        """Whether episodes end with a reward of their own."""
        return self.path is not None or self.verify is not None


class SamplingKeys(Section):
    """How completions are sampled: the keys that ``[rollout]`` and ``[sampling]`` share."""

    table: ClassVar[str]
    """The section's name in a run file."""

    max_new_tokens: PositiveInt = 512
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or completion, as in
    transformers."""
    min_new_tokens: Count = 0
    """Minimum number of tokens in a completion."""
    stop: tuple[Text, ...] = ()
    stop_token_ids: tuple[Count, ...] = ()
    timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds after which a completion counts as failed."""
    seed: Seed = 0


class RolloutSection(SamplingKeys):
    table = "rollout"

    prompts_per_step: PositiveInt = 8
    group_size: PositiveInt = 8
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """With ``algorithm.dynamic_filter``, prompts tried at once per prompt that is still needed."""
    max_staleness: Count = 0
    """How many steps older the policy that sampled a token may be than the policy being trained; 0
    is synchronous."""
    partial: bool = False
    """With ``max_staleness``, load new weights in the middle of completions instead of waiting for
    them to end."""
    over_generation: Annotated[float, Field(ge=1)] = 1.0
    """With ``max_staleness``, prompts played at once per prompt of a step; the step takes those
    that finish first."""
    queue_size: Open[PositiveInt] = None
    """With ``max_staleness``, no new prompt starts while this many finished ones wait for
    training."""
    seed: Open[Seed] = None  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def samples(self) -> int:
        """Samples in one rollout batch."""
        return self.prompts_per_step * self.group_size


class TrainSection(Section):
    steps: Open[PositiveInt] = None
    """Rollout batches (RL) or optimizer steps (supervised); None: derived from ``epochs``."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data; None: one, unless ``steps`` is given."""
    batch_size: Open[PositiveInt] = None
    """Samples per optimizer step; None: the whole rollout batch (RL) or 32 (supervised)."""
    passes_per_batch: Annotated[int, Field(gt=0), at_most(10_000)] = 1
    """Passes over each rollout batch."""
    optimizer: Optimizer = AdamW()
    """The optimizer: AdamW, or Muon for the layers' matrices with AdamW for everything else."""
    lr: Open[Rate] = None
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Share = 0.0
    warmup_steps: Open[Count] = None
    """Optimizer steps; set this or ``warmup_ratio``."""
    warmup_ratio: Share | None = None
    weight_decay: Annotated[float, Field(ge=0), at_most(100)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0), at_most(1)] = 1e-8
    max_grad_norm: GradNorm = 1.0
    """Gradients with a larger norm are scaled down to it; 0: no clipping."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep a moving average of the weights, updated by ``1 − ema_decay`` of the difference per
    optimizer step."""
    seed: Seed = 0


class EvalSection(Section):
    every: PositiveInt | Literal["epoch"] | None = None
    """Steps between evaluations, or one after each pass over the data; None: only at the end."""
    at_start: bool = True
    samples: PositiveInt = 1
    """Completions per prompt; 1 is greedy, more than 1 give pass@k."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature if ``samples`` is more than 1."""
    pass_at: tuple[PositiveInt, ...] | None = None
    max_prompts: PositiveInt | None = None
    metric: Text | None = None
    """The metric that selects the best checkpoint; None: ``eval/reward`` (RL) or ``eval/loss``
    (supervised)."""
    target: float | None = None
    """End the run once an evaluation's ``metric`` is this good."""
    use_ema: bool = False
    """Evaluate the moving average of the weights (``train.ema_decay``)."""


class MonitorSection(Section):
    """What a run displays and records."""

    sinks: tuple[SinkName, ...] = ()
    """Services or your own classes that also receive the metrics; metrics.jsonl is always
    written."""
    run_name: Text | None = None
    """The run's name in the sinks; None: the name of its directory."""
    project: Text | None = None
    """The project in W&B and trackio, or the experiment in MLflow; None: the service's environment
    variable, else ``tunesmith``."""
    tags: tuple[Text, ...] = ()
    """The run's tags in the sinks."""
    progress: bool | None = None
    """Whether to show progress as a live display; None: if standard output is a terminal."""
    every: PositiveInt = 1
    """Steps between plain progress lines and between points in the sinks; metrics.jsonl has every
    step."""
    verbose: bool = False
    """Whether to print derived settings too that switch something off; ``-v`` on the command
    line."""
    samples: Count = 2
    """Groups per step whose rollouts are kept in rollouts.jsonl; of each evaluation, four times as
    many prompts."""
    tokens: bool = True
    """Whether rollouts.jsonl has the text, the log-probability and the advantage of each token."""
    rollouts_size: Size = "1GB"
    """Maximum total size of rollouts.jsonl and rollouts-older.jsonl; the oldest rollouts are
    dropped."""
    trace_steps: tuple[PositiveInt, ...] = ()
    """Steps whose timeline is written to trace/."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps for which torch's profiler writes operators and kernels to profile/."""
    stall_after: Annotated[float, Field(ge=0)] = 300.0
    """Seconds without progress before the run reports which processes wait for which; 0: never."""


class CheckpointSection(Section):
    every: Open[PositiveInt | Literal["epoch"]] = None
    """Steps between checkpoints, or one after each pass over the data; None: at the end, and every
    ``minutes``."""
    minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes between checkpoints, in addition to ``every``; None: 15 if ``every`` is omitted."""
    keep: PositiveInt = 2
    model_only: bool | Literal["last"] = False
    """Omit the state needed only to resume (optimizer, random state) from every checkpoint, or from
    the last one of a finished run. A checkpoint written after a signal always has it."""
    push_to_hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """The Hugging Face hub repository for the model and its card; created if it does not exist."""
    push: Literal["last", "all"] = "last"
    """Which checkpoints' models are uploaded; "last": only the final one."""
    hub_private: bool = True
    """Whether a newly created repository is private."""
    resume: bool | Literal["auto"] | Path = False
    """True: continue from the newest checkpoint in ``run_dir``; "auto": the same, or start a new
    run if there is none; a path: start from that checkpoint."""


class RunConfig(Section):
    """The sections that all commands share."""

    command: ClassVar[str]
    goal: ClassVar[Literal["rl", "sft", "pairs", "judged", "steps"]] = "sft"
    """The kind of data in each line."""
    supervised: ClassVar[bool] = True
    """Whether the data contains the text to learn, so nothing is sampled."""
    trains: ClassVar[bool] = True
    rl: ClassVar[bool] = False
    """Whether the command samples and trains in one loop."""
    score_model: ClassVar[bool] = False
    """Whether it trains a model with one score instead of a vocabulary head."""

    run_dir: Path | None = None
    model: ModelSection
    data: DataSection
    lora: LoraSection = LoraSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    system: SystemSection = SystemSection()
    monitor: MonitorSection = MonitorSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @property
    def sampling_settings(self) -> SamplingKeys | None:
        """Sampling settings; None if the command samples nothing."""
        return None

    @property
    def samples(self) -> bool:
        """Whether the command samples completions."""
        return self.sampling_settings is not None

    @property
    def new_tokens(self) -> int:
        """Maximum number of tokens in a completion."""
        return self.sampling_settings.max_new_tokens if self.sampling_settings else 0


class RLConfig(RunConfig):
    command = "rl"
    goal = "rl"
    supervised = False
    rl = True
    reward: RewardSection = RewardSection()
    environment: EnvironmentSection = EnvironmentSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    rollout: RolloutSection = RolloutSection()

    @property
    def sampling_settings(self) -> SamplingKeys:
        return self.rollout


class SFTConfig(RunConfig):
    command = "sft"
