"""From a batch to optimizer steps: weights, micro-batches, gradients, and what to do when memory is
short."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunesmith.errors import LESS_MEMORY, DeviceMemoryError, DivergedError
from tunesmith.learn.algorithms.aggregation import weigh, with_shares
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Batch, Floats, Ints
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.learn.data.packing import group_tokens
from tunesmith.models.forest import forest_cost
from tunesmith.records import interrupts
from tunesmith.run.loop.teacher import ALIGNED
from tunesmith.run.trainers.base import Metrics, Quantity, TrainBackend

TRAINING = "max_tokens"
SCORING = "scoring_max_tokens"
SETTINGS = {TRAINING: "max_tokens_per_microbatch", SCORING: "scoring_max_tokens"}
"""The setting of each cap."""
SKIPPED_IN_A_ROW = 3
"""Consecutive optimizer steps without a finite gradient that end a run."""
TOTALS = ("microbatches", "trained_tokens", "attainable_seconds", "skipped_steps")
"""Metrics that add up over the optimizer steps of an update; all others are means."""
NONFINITE = "nonfinite_tokens"


@dataclass(slots=True)
class Learner:
    """Takes optimizer steps on batches. The ``caps`` shrink when memory runs out and stay shrunk.

    A sequence longer than a shrunk cap still gets a micro-batch by itself; one longer than the cap
    at the start is refused.
    """

    backend: TrainBackend
    aggregation: str
    max_new_tokens: int | None
    learning_rate: Callable[[int], float]
    max_tokens: int
    """Tokens per micro-batch, at the start."""
    scoring_max_tokens: int | None = None
    """Tokens per micro-batch without gradients, at the start; None: always the same as with
    gradients."""
    share_prompts: bool = True
    keep_groups: bool = False
    """Samples of one group share a micro-batch, because the objective compares them."""
    group_size: int = 1
    """Rollouts sampled per group. Where ``batch_size`` is a multiple of it, groups stay in one
    optimizer batch."""
    flops_per_second: float | None = None
    """The rate that the device attains, for ``attainable_seconds``; None leaves that metric out."""
    report: Callable[[str], None] = print
    caps: dict[str, int] = field(init=False)
    """The current tokens per micro-batch, by the name of the field that has those at the start."""
    _learned: bool = field(default=False, init=False)
    """Whether an optimizer step has changed the weights."""
    _retries: int = field(default=0, init=False)
    """How often memory ran out since the last update."""
    _scored: tuple[float, float] = field(default=(0.0, 0.0), init=False)
    """Seconds of scoring inside the current ``time_scoring``, and the least possible."""
    _skipped: int = field(default=0, init=False)
    """Consecutive optimizer steps that have not changed the weights."""

    def __post_init__(self) -> None:
        self.caps = {TRAINING: self.max_tokens}
        if self.scoring_max_tokens is not None:
            self.caps[SCORING] = self.scoring_max_tokens

    def state(self) -> dict[str, int]:
        """The caps that were lowered because memory ran out, and from which values."""
        lowered = {name: cap for name, cap in self.caps.items() if cap < getattr(self, name)}
        return lowered | {f"{name}/from": getattr(self, name) for name in lowered}

    def resume(self, caps: Mapping[str, Any]) -> None:
        """Take over what was lowered before, unless more memory is planned now."""
        for name, cap in self.caps.items():
            if caps.get(name, cap) < cap <= caps.get(f"{name}/from", cap):
                self.caps[name] = caps[name]
                self.report(f"{SETTINGS[name]} stays at {caps[name]} tokens, as in the checkpoint")
        self._learned = self.backend.optimizer_steps > 0

    def update(
        self,
        batch: Batch,
        objective: Objective,
        *,
        batch_size: int | None = None,
        passes: int = 1,
        seed: int = 0,
    ) -> Metrics:
        """Minimise ``objective``: ``passes`` times over the batch, ``batch_size`` rollouts per
        optimizer step.

        The gradient of an optimizer step does not depend on how its samples are packed.

        Returns:
            The metrics averaged over the optimizer steps, and totals for those in ``TOTALS``.
        """
        steps: list[Metrics] = []
        size = batch_size or batch.num_samples
        for sweep in range(passes):
            draw = np.random.default_rng([seed, sweep])
            for part in optimizer_batches(batch, size, self.group_size, draw):
                weigh(part, self.aggregation, self.max_new_tokens)
                steps.append(self._step(part, objective))
        means = {name: float(np.mean([s[name] for s in steps])) for name in steps[0]}
        totals = {name: means[name] * len(steps) for name in TOTALS if name in means}
        if self._retries:
            totals["memory_retries"] = float(self._retries)
            self._retries = 0
        return {**means, **totals, "optimizer_steps": float(len(steps))}

    def score(
        self,
        batch: Batch,
        of: Quantity = "logprobs",
        *,
        reference: bool = False,
        ends: bool = False,
        longer: bool = False,
    ) -> Floats:
        """The quantity ``of`` at each prediction, ``[N]``, from the model or the frozen reference.

        Args:
            ends: append the quantity after the last token of each sample: ``[N + S]``.
            longer: sequences may exceed the cap, which is then as long as the longest.
        """
        started = time.perf_counter()
        while True:
            packing = self._packing(batch, SCORING, longer=longer)
            asked = packing.with_ends() if ends else packing
            try:
                scores = self.backend.score(asked, of, reference=reference)
                break
            except DeviceMemoryError as failure:
                self._lower_cap(batch, SCORING, failure)
        # Forward only: a third of a step.
        least = self._work(packing).get("attainable_seconds", 0.0) / 3
        seconds = time.perf_counter() - started
        self._scored = (self._scored[0] + seconds, self._scored[1] + least)
        return scores

    @contextmanager
    def time_scoring(self) -> Generator[Metrics]:
        """On exit, the dict has the seconds of scoring inside, and the least that the device could
        have taken; it stays empty if there was none."""
        metrics: Metrics = {}
        self._scored = (0.0, 0.0)
        yield metrics
        seconds, least = self._scored
        if seconds:
            metrics["scoring_seconds"] = seconds
            if self.flops_per_second is not None:
                metrics["attainable_seconds/scoring"] = least

    def evaluate(self, batch: Batch, objective: Objective) -> Metrics:
        """An objective's ``loss`` and metrics on a batch, without a gradient.

        Training drops values that are not finite; if the model predicts one in an evaluation, all
        metrics are NaN.
        """
        weigh(batch, self.aggregation, self.max_new_tokens)
        while True:
            packing = self._packing(batch, SCORING)
            try:
                return with_shares(self.backend.evaluate(packing, objective))
            except DeviceMemoryError as failure:
                self._lower_cap(batch, SCORING, failure)

    def _step(self, batch: Batch, objective: Objective) -> Metrics:
        """Take an optimizer step; retry with smaller micro-batches while memory runs out, and with
        a smaller loss scale while float16 gradients overflow."""
        while True:
            packing = self._packing(batch, TRAINING)
            try:
                summed = self.backend.forward_backward(packing, objective)
            except DeviceMemoryError as failure:
                self._lower_cap(batch, TRAINING, failure)
                continue
            metrics = with_shares(summed) | self._work(packing)
            if NONFINITE in metrics:  # an objective sees only what the new weights make of tokens
                metrics[NONFINITE] += lost_tokens(batch)
            lr = self.learning_rate(self.backend.optimizer_steps)
            interrupts.commit()
            step = dict(self.backend.step(lr))
            if step.pop("overflowed", 0.0) and math.isfinite(metrics["loss"]):
                self.backend.give_up()
                continue
            self._check_step(metrics["loss"], step)
            return {**metrics, **step, "lr": lr}

    def _check_step(self, loss: float, step: Mapping[str, float]) -> None:
        """Accept a single non-finite gradient as a rare accident, but not the first of a run, or
        several in a row.

        Raises:
            DivergedError: it was the first, or one of several in a row.
        """
        if not step.get("skipped_steps") and math.isfinite(loss):
            self._learned = True
            self._skipped = 0
            return
        self._skipped += 1
        numbers = f"loss {loss:g}, gradient norm {step['grad_norm']:g}"
        number = self.backend.optimizer_steps
        broken = f"the gradient of optimizer step {number} is not finite ({numbers})"
        if self._learned and self._skipped < SKIPPED_IN_A_ROW:
            self.report(f"{broken}; this step was skipped")
            return
        which = f"{self._skipped} in a row are" if self._learned else "the first one is"
        raise DivergedError(
            f"{broken}; {which}. Nothing of this step was saved. Lower train.lr, and look at "
            "[algorithm]'s coefficients, the rewards' size and the model's weights"
        )

    def _work(self, packing: Packing) -> Metrics:
        work = {"microbatches": float(len(packing)), "trained_tokens": float(packing.num_tokens)}
        if self.flops_per_second is not None:
            cost = self.backend.cost
            operations = sum(forest_cost(forest, cost) for forest in packing.forests)
            work["attainable_seconds"] = operations / self.flops_per_second
        return work

    def _packing(self, batch: Batch, name: str, *, longer: bool = False) -> Packing:
        """The batch in micro-batches. Args: name: the cap's, one of ``SETTINGS``."""
        cap = self._cap(batch, name)
        return Packing.of(
            batch,
            max(cap, self._longest(batch)) if longer else cap,
            share=self.share_prompts,
            keep_groups=self.keep_groups,
            multiple_of=self.backend.ranks,
            cost=self.backend.cost,
        )

    def _cap(self, batch: Batch, name: str) -> int:
        """The current cap; a longer sequence raises one that was lowered on shorter ones."""
        name = name if name in self.caps else TRAINING
        return max(self.caps[name], min(getattr(self, name), self._longest(batch)))

    def _lower_cap(self, batch: Batch, name: str, failure: DeviceMemoryError) -> None:
        """Halve the cap with which memory ran out.

        Raises:
            DeviceMemoryError: no micro-batch can be smaller.
        """
        name = name if name in self.caps else TRAINING
        before = self._cap(batch, name)
        longest = self._longest(batch)
        self._retries += 1
        lowered = self.caps[name] = min(self.caps[name], max(longest, before // 2))
        if max(longest, lowered) >= before:
            raise DeviceMemoryError(
                f"{failure}, and no micro-batch can be smaller than the longest "
                f"{'group' if self.keep_groups else 'sequence'} ({longest} tokens). "
                f"Try, in this order: {'; '.join(LESS_MEMORY)}"
            ) from None
        self.report(f"{failure}; {SETTINGS[name]} lowered from {before} to {lowered} and kept")

    def _longest(self, batch: Batch) -> int:
        """Tokens that have to stay together: of the longest sequence or, where groups are kept, the
        largest group."""
        if self.keep_groups:
            return group_tokens(batch, share=self.share_prompts)
        return int(batch.lengths.max(initial=0))


def lost_tokens(batch: Batch) -> int:
    """Tokens that are not learned from because a value of theirs is not finite. A teacher with
    another tokenizer leaves out some on purpose; these do not count."""
    lost = ~batch.finite
    if ALIGNED in batch.columns:
        lost &= np.isfinite(batch.columns["ref_logprobs"])
    return int(lost.sum())


def optimizer_batches(
    batch: Batch, size: int, group_size: int, draw: np.random.Generator
) -> Iterator[Batch]:
    """Split into optimizer batches of ``size`` rollouts, groups in a random order; a batch that
    fits is yielded whole.

    The samples of a rollout stay together; groups do where ``size`` is a multiple of
    ``group_size``.
    """
    if size >= batch.num_rollouts:
        yield batch
        return
    groups = _number(np.where(batch.group >= 0, batch.group, -1 - batch.owners))
    places = draw.permutation(groups.max() + 1).argsort()  # of each group in the random order
    place = places[groups]
    order = np.lexsort((np.arange(batch.num_samples), _number(batch.owners), place))
    whole = size % group_size == 0
    units = place if whole else batch.owners
    number = _number(units[order]) // (size // group_size if whole else size)
    for cut in np.split(order, np.flatnonzero(np.diff(number)) + 1):
        yield batch.take(cut)


def _number(values: Ints) -> Ints:
    """Distinct values numbered from 0 in order of first appearance."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return first.argsort().argsort()[inverse]
