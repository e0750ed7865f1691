"""The questions of RFT in the tokens of the model that answers them, with worked examples where it
needs some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunesmith.config.commands import RFTConfig
from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.config.schema import LoraSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.data.prepare import load_tasks
from tunesmith.learn.data.prompts import PromptEncoder, Shots, read_shots
from tunesmith.plan.derive.generation import SEPARATOR
from tunesmith.plan.kind import kind_of
from tunesmith.plan.plan import Plan
from tunesmith.run.assembly.opening import OpenRun, limited_data
from tunesmith.run.specs.from_plan import load_tokenizer
from tunesmith.types import Task, Tokenizer


@dataclass(frozen=True, slots=True)
class Questions:
    """Tasks to answer, in the tokens of the model that answers them."""

    tokenizer: Tokenizer
    tasks: Sequence[Task]
    fingerprint: str
    shots: str | None = None
    """The text of the file of worked examples that precede each task; None if there are none."""
    separator: str = ""
    """Between worked examples in plain text; sampling stops at it."""


def first_questions(run: OpenRun[RFTConfig, Task]) -> Questions:
    """The first round's questions, after worked examples, tokenized for ``rft.sampler`` or the
    model to train."""
    config = run.config
    tokenizer = run.tokenizer
    train = run.train
    if config.rft.sampler is not None:
        data = limited_data(config)
        tokenizer = load_tokenizer(sampling_from(config, config.rft.sampler))
        train = load_tasks(data, data.train, tokenizer)
    plain = Questions(tokenizer, train.items, train.fingerprint)
    encoder = _encoder(config, plain)
    if encoder is None:
        return plain
    if encoder.template is not None and config.rft.few_shot_separator is not None:
        why = "rft.few_shot_separator has no effect on a chat template; leave it out"
        raise ConfigError(why, keys=("rft.few_shot_separator",))
    return _after_examples(config, plain, encoder)


def held_out_questions(run: OpenRun[RFTConfig, Task], *, trained: bool) -> Questions:
    """The questions of an evaluation.

    A base model, which has no chat template, learns what an answer looks like from the worked
    examples only, or from training. Before training they precede its questions.
    """
    assert run.held_out is not None
    config = run.config
    items = run.held_out.items[: config.eval.max_prompts]
    plain = Questions(run.tokenizer, items, run.held_out.fingerprint)
    encoder = None if trained else _encoder(config, plain)
    return plain if encoder is None or encoder.template else _after_examples(config, plain, encoder)


def _encoder(config: RFTConfig, plain: Questions) -> PromptEncoder | None:
    """Encodes prompts after worked examples; None if there are no examples."""
    if config.rft.few_shot is None:
        return None
    separator = config.rft.few_shot_separator or SEPARATOR
    prompts = [task.prompt for task in plain.tasks]
    return PromptEncoder.of(limited_data(config), plain.tokenizer, prompts, separator)


def _after_examples(config: RFTConfig, plain: Questions, encoder: PromptEncoder) -> Questions:
    file = config.rft.few_shot
    limit = limited_data(config).max_prompt_tokens
    assert file is not None
    shots = read_shots(file, plain.tokenizer)
    return replace(
        plain,
        tasks=[with_shots(task, encoder, shots, limit) for task in plain.tasks],
        shots=file.read_text(encoding="utf-8"),
        separator="" if encoder.template else encoder.separator,
    )


def with_shots(task: Task, encoder: PromptEncoder, shots: Shots, limit: int | None) -> Task:
    """The task with worked examples before it. Training omits them."""
    ids = encoder.ids(task.prompt, task.tools, shots)
    if limit is not None and len(ids) > limit:
        raise DataError(
            f"task {task.id}: with the worked examples of rft.few_shot the prompt has {len(ids)} "
            f"tokens, the limit is {limit}: the model's context less sampling.max_new_tokens, or "
            "data.max_prompt_tokens"
        )
    return replace(task, prompt_ids=tuple(ids))


def planned_from(plan: Plan[RFTConfig], model: Path | str | None) -> Plan[RFTConfig]:
    """The plan of sampling from the model of ``sampling_from``."""
    said = sampling_from(plan.said, model)
    return replace(plan, said=said).with_devices(kind=kind_of(said))


def sampling_from(config: RFTConfig, model: Path | str | None) -> RFTConfig:
    """The configuration of sampling with the base model (None), with an adapter on it, or with
    another whole model."""
    if model is None:
        return config.model_copy(update={"lora": LoraSection(path=config.lora.path)})
    if isinstance(model, Path) and (model / ADAPTER_CONFIG).is_file():
        return config.model_copy(update={"lora": LoraSection(path=model)})
    changed = config.model.model_copy(update={"path": str(model)})
    return config.model_copy(update={"model": changed, "lora": LoraSection()})
