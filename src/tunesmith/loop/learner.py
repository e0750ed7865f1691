"""From samples to optimizer steps: weights, micro-batches, gradients, and what to do when memory is short."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, TypeVar

import numpy as np

from tunesmith.algorithms.aggregation import rollouts_of, weigh
from tunesmith.backends.base import LossFn, TrainBackend
from tunesmith.data.forest import Forest, build_forest, forest_cost
from tunesmith.data.packing import group_tokens, pack
from tunesmith.errors import DeviceMemoryError, DivergedError
from tunesmith.monitor import interrupts
from tunesmith.plan.cost import CostModel
from tunesmith.types import Sample

Metrics = dict[str, float]
SKIPPED_IN_A_ROW = 3
"""Optimizer steps without a finite gradient that end a run."""
T = TypeVar("T")


@dataclass(slots=True)
class Learner:
    """Takes optimizer steps on samples. ``max_tokens`` shrinks when memory runs out and stays shrunk.

    A sequence longer than the shrunk cap still gets a micro-batch of its own; one longer than the cap at the
    start is refused.
    """

    backend: TrainBackend
    objective: LossFn
    aggregation: str
    max_new_tokens: int | None
    learning_rate: Callable[[int], float]
    max_tokens: int
    cost: CostModel
    share_prompts: bool = True
    keep_groups: bool = False
    """Samples of one group share a micro-batch, because the objective compares them."""
    flops_per_second: float | None = None
    """What the device attains, for ``attainable_seconds``; None leaves that out."""
    report: Callable[[str], None] = print
    initial_max_tokens: int = field(init=False)
    """``max_tokens`` at the start."""

    _learned: bool = field(default=False, init=False)
    """Whether an optimizer step has changed the weights."""
    _skipped: int = field(default=0, init=False)
    """Optimizer steps in a row that have not."""

    def __post_init__(self) -> None:
        self.initial_max_tokens = self.max_tokens

    def resume(self, max_tokens: int) -> None:
        """Go on with the cap of a checkpoint, which memory may have lowered, where it is the lower one."""
        if max_tokens < self.max_tokens:
            self.report(f"micro-batches stay at {max_tokens} tokens, as in the checkpoint")
            self.max_tokens = max_tokens
        self._learned = self.backend.optimizer_steps > 0

    def update(
        self, samples: Sequence[Sample], batch_size: int, passes: int, seed: int, group_size: int = 1
    ) -> Metrics:
        """``passes`` times over the samples, ``batch_size`` rollouts to an optimizer step; the steps' mean metrics.

        Where ``batch_size`` is a multiple of ``group_size``, groups stay whole, also those that have lost members.
        """
        steps = [
            self.step(batch)
            for sweep in range(passes)
            for batch in _batches(samples, batch_size, group_size, np.random.default_rng([seed, sweep]))
        ]
        metrics = {name: float(np.mean([s[name] for s in steps])) for name in steps[0]}
        # Totals over the batch; all others are means over its optimizer steps.
        for name in ("microbatches", "trained_tokens", "attainable_seconds", "skipped_steps"):
            if name in metrics:
                metrics[name] *= len(steps)
        return {**metrics, "optimizer_steps": float(len(steps))}

    def step(self, samples: Sequence[Sample]) -> Metrics:
        """One optimizer step; its gradient does not depend on how the samples are packed."""
        metrics = self._accumulate(weigh(samples, self.aggregation, self.max_new_tokens))
        lr = self.learning_rate(self.backend.optimizer_steps)
        interrupts.commit()
        taken = self.backend.step(lr)
        self._check_taken(metrics["loss"], taken)
        return {**metrics, **taken, "lr": lr}

    def _check_taken(self, loss: float, taken: Mapping[str, float]) -> None:
        """A single gradient that is not finite may be a rare accident; the first of a run, or several in a row, is not.

        Raises:
            DivergedError: it was one of those.
        """
        if not taken.get("skipped_steps") and math.isfinite(loss):
            self._learned, self._skipped = True, 0
            return
        self._skipped += 1
        number, numbers = self.backend.optimizer_steps, f"loss {loss:g}, gradient norm {taken['grad_norm']:g}"
        if self._learned and self._skipped < SKIPPED_IN_A_ROW:
            self.report(f"optimizer step {number} was skipped, as its gradient is not finite ({numbers})")
            return
        which = f"{self._skipped} in a row are" if self._learned else "the first one is"
        raise DivergedError(
            f"at optimizer step {number} the gradient is not finite ({numbers}); {which}. Nothing of this step was "
            "saved. Lower train.lr, and look at [algorithm]'s coefficients, the rewards' size and the model's weights"
        )

    def score(self, samples: Sequence[Sample], column: str, *, reference: bool = False) -> list[Sample]:
        """The samples with the log-probabilities of their loss tokens in ``column``, zero elsewhere."""
        found = self.predict(samples, reference=reference)
        return [with_predicted(s, column, one) for s, one in zip(samples, found, strict=True)]

    def predict(
        self, samples: Sequence[Sample], *, reference: bool = False, of: Literal["logprobs", "values"] = "logprobs"
    ) -> list[list[float]]:
        """What the model says at each prediction of each sample: one per loss token, one more where it ``goes_on``."""

        def predicted() -> dict[int, list[float]]:
            found: dict[int, list[float]] = {}
            for forest, predictions in self.backend.score_all(self._forests(samples), reference=reference):
                values = iter(getattr(predictions, of).tolist())
                for index in forest.sample_ids:
                    found[index] = list(islice(values, samples[index].num_loss_tokens + samples[index].goes_on))
            return found

        found = self._retry_smaller(samples, predicted)
        return [found[index] for index in range(len(samples))]

    def evaluate(self, samples: Sequence[Sample]) -> Metrics:
        """The objective on samples as if they were one batch, without a gradient: ``loss`` and its metrics.

        Training drops what is not finite; an evaluation in which the model predicts such a thing is NaN throughout.
        """
        samples = weigh(samples, self.aggregation, self.max_new_tokens)

        def summed() -> Metrics:
            total: Metrics = {"loss": 0.0}
            finite = True
            for forest, predictions in self.backend.score_all(self._forests(samples)):
                found = (predictions.logprobs, predictions.values)
                finite &= all(bool(t.isfinite().all()) for t in found if t is not None)
                loss, metrics = self.objective(forest, predictions)
                for name, value in {"loss": loss, **metrics}.items():
                    total[name] = total.get(name, 0.0) + float(value)
            return total if finite else dict.fromkeys(total, math.nan)

        return self._retry_smaller(samples, summed)

    def _accumulate(self, samples: Sequence[Sample]) -> Metrics:
        """Gradients of all micro-batches, and their metrics, which are sums like the loss itself."""

        def accumulated() -> Metrics:
            # A failed backward leaves some gradients added and some not, so every attempt starts from none.
            self.backend.zero_grad()
            total: Metrics = {"microbatches": 0.0, "trained_tokens": 0.0}
            for forest, metrics in self.backend.forward_backward_all(self._forests(samples), self.objective):
                counts = {"microbatches": 1.0, "trained_tokens": float(forest.num_tokens)}
                if self.flops_per_second is not None:
                    counts["attainable_seconds"] = forest_cost(forest, self.cost) / self.flops_per_second
                for name, value in {**metrics, **counts}.items():
                    total[name] = total.get(name, 0.0) + value
            return total

        return self._retry_smaller(samples, accumulated)

    def _retry_smaller(self, samples: Sequence[Sample], attempt: Callable[[], T]) -> T:
        """Run ``attempt``; when a micro-batch does not fit, halve the cap, keep it so, and start again."""
        while True:
            try:
                return attempt()
            except DeviceMemoryError as error:
                failure = str(error)
            self._halve(failure, self._longest(samples), self._cap(samples))

    def _halve(self, failure: str, longest: int, before: int) -> None:
        self.max_tokens = min(self.max_tokens, max(longest, before // 2))
        if max(longest, self.max_tokens) >= before:
            raise DeviceMemoryError(
                f"{failure}, and no micro-batch can be smaller than the longest "
                f"{'group' if self.keep_groups else 'sequence'} ({longest} tokens). "
                "Set system.gradient_checkpointing=true, lower system.logprob_chunk or shorten the sequences."
            )
        self.report(f"{failure}; max_tokens_per_microbatch lowered from {before} to {self.max_tokens} and kept")

    def _cap(self, samples: Sequence[Sample]) -> int:
        """Tokens of a micro-batch of these: a cap shrunk for shorter sequences gives way to a longer one."""
        return max(self.max_tokens, min(self.initial_max_tokens, self._longest(samples)))

    def _longest(self, samples: Sequence[Sample]) -> int:
        """Tokens that cannot be parted: of the longest sequence or, where groups are kept, of the largest group."""
        if self.keep_groups:
            return group_tokens(samples, share=self.share_prompts)
        return max((len(s.token_ids) for s in samples), default=0)

    def _forests(self, samples: Sequence[Sample]) -> Iterator[Forest]:
        options = {"share": self.share_prompts, "keep_groups": self.keep_groups}
        cap, ranks = self._cap(samples), self.backend.ranks
        for indices in pack(samples, cap, cost=self.cost, multiple_of=ranks, **options):
            interrupts.check()
            yield build_forest(samples, indices, share=self.share_prompts)


def with_predicted(sample: Sample, name: str, values: Sequence[float]) -> Sample:
    """The sample with ``values``, one per loss token, as a column, zero elsewhere."""
    given = iter(values)
    column = [next(given) if learned else 0.0 for learned in sample.loss_mask]
    return replace(sample, columns={**sample.columns, name: column})


def _batches(samples: Sequence[Sample], size: int, group_size: int, rng: np.random.Generator) -> Iterator[list[Sample]]:
    """Cut into optimizer batches of ``size`` rollouts, groups in a random order; all at once where they fit one batch.

    A sample that is of no rollout counts as one. The samples of a rollout stay together.
    """
    owners = rollouts_of(samples)
    if size >= len(set(owners)):
        yield list(samples)
        return
    groups: dict[int, dict[int, list[Sample]]] = {}
    for place, (sample, owner) in enumerate(zip(samples, owners, strict=True)):
        group = groups.setdefault(sample.group if sample.group >= 0 else -1 - place, {})
        group.setdefault(owner, []).append(sample)
    keys = list(groups)
    order = [list(groups[keys[k]].values()) for k in rng.permutation(len(keys))]
    if size % group_size == 0:
        per_batch = size // group_size
        for start in range(0, len(order), per_batch):
            yield [s for group in order[start : start + per_batch] for rollout in group for s in rollout]
        return
    ordered = [rollout for group in order for rollout in group]
    for start in range(0, len(ordered), size):
        yield [s for rollout in ordered[start : start + size] for s in rollout]
