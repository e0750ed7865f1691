"""Rewards that need the run's tokenizer or a reward model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.commands import SamplingConfig
from tunesmith.config.schema import ModelReward, RLConfig
from tunesmith.errors import DeviceMemoryError, ModelError, about
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.learn.rewards.stats import check_reward_model, read_stats
from tunesmith.records.waits import long_wait
from tunesmith.run.placement.models import sharding_of

if TYPE_CHECKING:
    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.models.parallel.sharding import Sharding
    from tunesmith.models.score_model import ScoreModel
    from tunesmith.run.processes.rank_group import RankGroup
    from tunesmith.run.trainers.passes import Passes


def add_rewards(
    rewards: RewardSet,
    config: RLConfig | SamplingConfig,
    tokenizer: Any,
    note: Callable[[str], None],
    remote_model: Callable[[ModelReward], RewardModel] | None = None,
) -> None:
    """Add the remote rewards and reward models, unless they have already been added.

    Args:
        note: receives a sentence about the tokens that each model sees.
        remote_model: starts a reward model in another process; None: it is loaded here.

    Raises:
        ConfigError, ModelError: a reward model cannot be loaded.
    """
    if config.reward is None or len(rewards.functions) == len(rewards.weights):
        return
    if config.reward.remote:
        from tunesmith.learn.rewards.remote import remote_reward

        decode = partial(tokenizer.decode, skip_special_tokens=False)
        for entry in config.reward.remote:
            rewards.add(remote_reward(entry, config.reward.answer, decode))
    if not config.reward.models:
        return
    from tunesmith.learn.data.prompts import with_system
    from tunesmith.learn.rewards.model import model_reward, same_tokens

    for entry in config.reward.models:
        model = remote_model(entry) if remote_model else load_reward_model(config, entry)
        exact = same_tokens(model.tokenizer, tokenizer)
        conversation = partial(with_system, config.data) if model.template else None
        in_thread = remote_model is not None
        rewards.add(
            model_reward(
                entry.name, model, exact=exact, conversation=conversation, in_thread=in_thread
            )
        )
        sees = (
            "the rollouts' own tokens, since its tokenizer is the policy's"
            if exact
            else "prompt and answer tokenized again, since its tokenizer or chat template is not the policy's"
        )
        scale = (
            f"; normalised by mean {model.stats.mean:.4g} and std {model.stats.std:.4g}"
            if model.stats
            else ""
        )
        note(f"reward model '{entry.name}' sees {sees}{scale}")


@about("reward.models")
def load_reward_model(
    config: RLConfig | SamplingConfig, entry: ModelReward, group: RankGroup | None = None
) -> RewardModel:
    """Args: group: the processes that share the model, each of which calls this; None: the model is
    whole here."""
    system = config.system
    with long_wait(f"loading {entry.path}"):
        return make_reward_model(
            entry,
            dtype=config.model.dtype,
            device=system.device,
            max_tokens=system.reward_max_tokens,
            chat=config.data.chat,
            trust_remote_code=config.model.trust_remote_code,
            offload=isinstance(config, RLConfig)
            and config.system.offload_reference
            and group is None,
            sharding=sharding_of(config) if group else None,
            group=group,
        )


def make_reward_model(
    entry: ModelReward,
    *,
    dtype: str,
    device: str,
    max_tokens: int,
    chat: bool | None = None,
    trust_remote_code: bool = False,
    offload: bool = False,
    sharding: Sharding | None = None,
    group: RankGroup | None = None,
) -> RewardModel:
    """Load a trained reward model.

    Args:
        max_tokens: tokens per forward pass.
        offload: keep the model in host memory while it does not score.
        chat: whether text prompts go through the chat template; None: if the tokenizer has one.
        sharding, group: sharding over the processes that share the model; None: the model is whole
            here.

    Raises:
        ConfigError, ModelError: the model is not a reward model, or statistics or a chat template
            are missing.
    """
    import torch

    from tunesmith.learn.data.chat import ChatTemplate
    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.models.score_model import ScoreModel, is_trained
    from tunesmith.run.trainers.passes import Passes

    check_reward_model(entry)
    number_format = getattr(torch, dtype)
    model = ScoreModel.load(
        entry.path,
        dtype=number_format,
        device=device,
        trust_remote_code=trust_remote_code,
        sharding=sharding,
        trains=False,
    )
    if not is_trained(model.module.config):
        raise ModelError(
            f"'{entry.path}' is a language model, not a reward model: its scores would all be 0"
        )
    tokenizer: Any = model.tokenizer
    template = (
        ChatTemplate.of(tokenizer) if chat or (chat is None and tokenizer.chat_template) else None
    )
    stats = read_stats(Path(entry.path)) if entry.normalize else None
    scores = SequenceScores(Passes(model, ScoreModel.predict, group, offload=offload), max_tokens)
    return RewardModel(scores, tokenizer, model.context, template, stats)


@dataclass(slots=True)
class SequenceScores:
    """Implements ``RewardModel.score_ids``; processes that share the model get the same sequences
    at the same time.

    When memory runs out, the token cap shrinks permanently in all of these processes.
    """

    passes: Passes[ScoreModel]
    max_tokens: int
    """Maximum tokens per micro-batch, unless one sequence is longer."""

    def __call__(self, sequences: list[list[int]]) -> list[float]:
        """The score at the last token of each sequence; 0 for those scored by another process.

        Raises:
            DeviceMemoryError: the longest sequence by itself does not fit.
        """
        from tunesmith.models.score_model import whole_sequence

        group = self.passes.group
        rank, world = (group.rank, group.world) if group else (0, 1)
        batch = Batch.of([whole_sequence(ids) for ids in sequences])
        longest = int(batch.lengths.max(initial=0))
        while True:
            cap = max(self.max_tokens, longest)
            packing = pack_sequences(batch, cap, world, self.passes.model.context)
            try:
                return self.passes.score(
                    packing.for_rank(rank, world, columns=False), "values"
                ).tolist()
            except DeviceMemoryError as failure:
                self.max_tokens = max(longest, cap // 2)
                if self.max_tokens == cap:
                    raise DeviceMemoryError(
                        f"a reward model: {failure}, and no pass can be smaller than the longest sequence ({longest} "
                        "tokens). Shorten the sequences, or have more processes share the model: "
                        "system.placement.reward.shards, on Ray"
                    ) from None
                if rank == 0:
                    print(
                        f"{failure}; system.reward_max_tokens lowered from {cap} to {self.max_tokens}",
                        flush=True,
                    )


def pack_sequences(batch: Batch, max_tokens: int, multiple_of: int, context: int | None) -> Packing:
    """Micro-batches of samples from ``whole_sequence``; each prediction is the score of one
    sequence.

    Args:
        context: the number of positions that the model has.
    """
    packing = Packing.of(batch, max_tokens, multiple_of=multiple_of)
    if context is None:
        return packing
    last = context - 1  # the stand-in may have no position
    forests = tuple(
        replace(forest, position_ids=forest.position_ids.clamp(max=last))
        for forest in packing.forests
    )
    return replace(packing, forests=forests)
