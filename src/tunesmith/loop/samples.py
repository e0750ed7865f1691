"""Some rollouts of each step, kept for a person to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tunesmith.loop.session import Session
from tunesmith.types import Rollout, RolloutGroup


def write_samples(
    session: Session,
    decode: Callable[[Sequence[int]], str],
    groups: Sequence[RolloutGroup],
    count: int,
    kind: str = "train",
) -> None:
    """Append a rollout of each of the first ``count`` groups, and every failed one, to rollouts.jsonl."""
    chosen = [g.rollouts[0] for g in groups[:count]]
    written = {id(r) for r in chosen}
    failed = [r for g in groups for r in g.rollouts if r.error is not None and id(r) not in written]
    for rollout in [*chosen, *failed]:
        session.samples.write({"step": session.step, "kind": kind, **_record(rollout, decode)})


def _record(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {
        "task": rollout.task.id,
        "prompt": rollout.task.prompt,
        "completion": decode(rollout.completion_ids),
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "status": rollout.status.value,
        "error": rollout.error,
        "tokens": rollout.num_sampled,
        "finish_reason": rollout.finish_reason,
        **({"notes": rollout.notes} if rollout.notes else {}),
    }
