"""Scores of whole sequences, by a model in this process or shared by several."""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.backends.passes import Passes
from tunesmith.data.batch import Batch
from tunesmith.errors import DeviceMemoryError
from tunesmith.models.score_model import ScoreModel, whole_sequence


@dataclass(slots=True)
class SequenceScores:
    """Implements ``RewardModel.score_ids``; processes that share the model get the same sequences at the same time.

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
        group = self.passes.group
        rank, world = (group.rank, group.world) if group else (0, 1)
        batch = Batch.of([whole_sequence(ids) for ids in sequences])
        longest = int(batch.lengths.max(initial=0))
        while True:
            cap = max(self.max_tokens, longest)
            packing = self.passes.model.pack_sequences(batch, cap, world)
            try:
                return self.passes.score(packing.for_rank(rank, world, columns=False), "values").tolist()
            except DeviceMemoryError as failure:
                self.max_tokens = max(longest, cap // 2)
                if self.max_tokens == cap:
                    raise DeviceMemoryError(
                        f"a reward model: {failure}, and no pass can be smaller than the longest sequence ({longest} "
                        "tokens). Shorten the sequences, or have more processes share the model: "
                        "system.placement.reward.shards, on Ray"
                    ) from None
                if rank == 0:
                    print(f"{failure}; system.reward_max_tokens lowered from {cap} to {self.max_tokens}", flush=True)
