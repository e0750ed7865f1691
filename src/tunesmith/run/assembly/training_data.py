"""Reading the data of each command that trains without rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tunesmith.config.commands import (
    DPOConfig,
    KTOConfig,
    OfflineDistillConfig,
    PRMConfig,
    RMConfig,
)
from tunesmith.config.schema import DataSection, RunConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.preference import (
    Comparison,
    Solution,
    load_judged,
    load_pairs,
    load_steps,
)
from tunesmith.learn.data.prepare import Prepared, Sources, load_samples
from tunesmith.learn.data.tokens import encode
from tunesmith.learn.data.trie import num_forest_tokens
from tunesmith.models.embedding_rows import without_row
from tunesmith.types import Sample, Tokenizer


def _load_pairs(
    config: RMConfig | DPOConfig, tokenizer: Tokenizer, data: DataSection, source: Sources
) -> Prepared[Comparison]:
    room = config.system.max_tokens_per_microbatch
    share = config.system.share_prompts
    read = partial(load_pairs, data, source, tokenizer, room=room, share=share)
    if isinstance(config, DPOConfig):
        return read()
    from tunesmith.models.score_model import whole_sequence

    pairs = read(shape=lambda s: whole_sequence(s.token_ids))
    if config.rm.loss == "logexp" and any(item.values["margin"][0] for item in pairs.items):
        raise ConfigError(
            "rm.loss = 'logexp' has no margin, and the data has a column 'margin'; set rm.loss = "
            "'sigmoid', or remove the column",
            keys=("rm.loss",),
        )
    return pairs


def _load_prm(
    config: PRMConfig, tokenizer: Tokenizer, data: DataSection, source: Sources
) -> Prepared[Solution]:
    label_tokens(config, tokenizer)
    return load_steps(
        data, source, tokenizer, config.prm.separator, (config.prm.good, config.prm.bad)
    )


def label_tokens(config: PRMConfig, tokenizer: Tokenizer) -> tuple[int, int]:
    """The token ids of ``prm.good`` and ``prm.bad``.

    Raises:
        ConfigError: one of them is not a single token, or has no row in the model's embedding.
    """
    ids = encode(tokenizer, [config.prm.good, config.prm.bad])
    for key, text, tokens in zip(
        ("good", "bad"), (config.prm.good, config.prm.bad), ids, strict=True
    ):
        if len(tokens) != 1:
            what = (
                f"prm.{key} = '{text}' is {len(tokens)} tokens of this tokenizer; it has to be one"
            )
            raise ConfigError(what, keys=(f"prm.{key}",))
        problem = without_row(tokenizer, tokens)
        if problem:
            raise ConfigError(f"prm.{key}: {problem}", keys=(f"prm.{key}",))
    return ids[0][0], ids[1][0]


def _pair_sizes(config: RMConfig | DPOConfig, item: Comparison) -> tuple[int, int]:
    extra = int(isinstance(config, RMConfig))
    longest = max(len(sample.token_ids) for sample in item.samples) - extra
    return longest, num_forest_tokens(Batch.of(item.samples), share=config.system.share_prompts)


def _single_sizes(_: RunConfig, item: Sample | Comparison) -> tuple[int, int]:
    samples = item.samples if isinstance(item, Comparison) else [item]
    longest = max(len(sample.token_ids) for sample in samples)
    return longest, longest


def _step_sizes(config: PRMConfig, item: Solution) -> tuple[int, int]:
    """Sizes of an item; the last step's pair is the largest, with all tokens and both labels."""
    longest = item.marks[-1] + 1
    return len(item.token_ids), longest + 2 if config.system.share_prompts else 2 * (longest + 1)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """How a command reads its data; both functions also take the configuration."""

    load: Callable[[Any, Tokenizer, DataSection, Sources], Prepared[Any]]
    sizes: Callable[[Any, Any], tuple[int, int]]
    """The sizes of an item; see ``prepare_training``."""
    metric: str = "eval/accuracy"
    """The metric that selects the best checkpoint, unless ``eval.metric`` names another."""


_ANSWERS = TrainingData(
    lambda _, tokenizer, data, source: load_samples(data, source, tokenizer),
    _single_sizes,
    "eval/loss",
)

TRAINING_DATA: dict[type[RunConfig], TrainingData] = {
    SFTConfig: _ANSWERS,
    OfflineDistillConfig: _ANSWERS,
    RMConfig: TrainingData(_load_pairs, _pair_sizes),
    DPOConfig: TrainingData(_load_pairs, _pair_sizes),
    KTOConfig: TrainingData(
        lambda _, tokenizer, data, source: load_judged(data, source, tokenizer), _single_sizes
    ),
    PRMConfig: TrainingData(_load_prm, _step_sizes),
}
