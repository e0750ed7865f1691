"""The spec of a reward model, and how it scores sequences. Torch is imported on use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunesmith.config.schema import ModelReward
from tunesmith.errors import DeviceMemoryError, ModelError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.rewards.stats import check_reward_model, read_stats
from tunesmith.records.waits import long_wait
from tunesmith.run.specs.base import ALONE, Seat
from tunesmith.run.specs.models import sharding_over

if TYPE_CHECKING:
    from tunesmith.learn.data.micro_batches import Packing
    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.models.score_model import ScoreModel
    from tunesmith.run.trainers.passes import Passes


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """A trained reward model, whole or sharded over processes."""

    entry: ModelReward
    dtype: str
    device: str
    max_tokens: int
    """Tokens per forward pass."""
    chat: bool | None = None
    """Whether text prompts go through the chat template; None: if the tokenizer has one."""
    trust_remote_code: bool = False
    offload: bool = False
    """Whether it is in host memory while it does not score, if it is whole."""
    copies: int = 1
    shards: int = 1
    """Processes that share each copy, if it has its own processes."""
    restarts: int = 0
    shares: Literal[True] = True

    def build(self, seat: Seat = ALONE) -> RewardModel:
        """Load the model.

        Raises:
            ConfigError, ModelError: it is not a reward model, or statistics or a chat template are
                missing.
        """
        import torch

        from tunesmith.learn.data.chat import ChatTemplate
        from tunesmith.learn.rewards.model import RewardModel
        from tunesmith.models.score_model import ScoreModel, is_trained
        from tunesmith.run.trainers.passes import Passes

        path = self.entry.path
        check_reward_model(self.entry)
        with long_wait(f"loading {path}"):
            model = ScoreModel.load(
                path,
                dtype=getattr(torch, self.dtype),
                device=self.device,
                trust_remote_code=self.trust_remote_code,
                sharding=sharding_over(self.device, 3, self.shards) if seat.group else None,
                trains=False,
            )
        if not is_trained(model.module.config):
            raise ModelError(
                f"'{path}' is a language model, not a reward model: its scores would all be 0"
            )
        tokenizer: Any = model.tokenizer
        chat = tokenizer.chat_template if self.chat is None else self.chat
        template = ChatTemplate.of(tokenizer) if chat else None
        stats = read_stats(Path(path)) if self.entry.normalize else None
        offload = self.offload and seat.group is None
        passes = Passes(model, ScoreModel.predict, seat.group, offload=offload)
        scores = SequenceScores(passes, self.max_tokens)
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
            own = packing.for_rank(rank, world, columns=False)
            try:
                return self.passes.score(own, "values").tolist()
            except DeviceMemoryError as failure:
                self.max_tokens = max(longest, cap // 2)
                if self.max_tokens == cap:
                    raise DeviceMemoryError(
                        f"a reward model: {failure}, and no pass can be smaller than the longest "
                        f"sequence ({longest} tokens). Shorten the sequences, or have more "
                        "processes share the model: system.placement.reward.shards, on Ray"
                    ) from None
                if rank == 0:
                    lowered = f"lowered from {cap} to {self.max_tokens}"
                    print(f"{failure}; system.reward_max_tokens {lowered}", flush=True)


def pack_sequences(batch: Batch, max_tokens: int, multiple_of: int, context: int | None) -> Packing:
    """Micro-batches of samples from ``whole_sequence``; each prediction is the score of one
    sequence.

    Args:
        context: the number of positions that the model has.
    """
    from tunesmith.learn.data.micro_batches import Packing

    packing = Packing.of(batch, max_tokens, multiple_of=multiple_of)
    if context is None:
        return packing
    last = context - 1  # the stand-in may have no position
    forests = tuple(
        replace(forest, position_ids=forest.position_ids.clamp(max=last))
        for forest in packing.forests
    )
    return replace(packing, forests=forests)
