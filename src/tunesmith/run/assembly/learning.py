"""Facts about a run that ``doctor/learning.py`` needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from tunesmith.config.schema import RewardSection
from tunesmith.learn.data.preference import Comparison
from tunesmith.learn.data.reading import Prepared
from tunesmith.models.vision.processing import image_rows
from tunesmith.models.vision.rows import FIRST_ROW
from tunesmith.plan.facts.hardware import usable_cpus
from tunesmith.plan.length import optimizer_steps
from tunesmith.plan.plan import AnyPlan
from tunesmith.records.facts import RunFacts
from tunesmith.types import Task, Tokenizer

LOOKED_AT = 200
"""The number of items in which unknown tokens are counted."""


def learning_facts(
    plan: AnyPlan, tokenizer: Tokenizer, data: Prepared[Any], held_out: Sequence[object]
) -> RunFacts:
    """Facts from a plan, its training data and its evaluation items."""
    items = data.items
    counts = data.report.counts
    said = plan.said
    lr = plan.training.lr
    kinds = {content_of(item) for item in items}
    tested = list(map(content_of, held_out))
    facts = RunFacts(
        reach=lr * optimizer_steps(said, plan.training, len(items)),
        lr=lr,
        unknown=unknown_share(tokenizer, items),
        train_size=len(items),
        eval_size=len(tested) or None,
        repeated=1 - len(kinds) / max(1, len(items)),
        seen=sum(item in kinds for item in tested) / max(1, len(tested)),
        too_long=counts["too_long"] / max(1, counts["read"]),
        bad=counts["bad"] / max(1, counts["read"]),
        source_share=max(data.shares) if len(data.shares) > 1 else None,
        threads_per_core=plan.devices.computing_threads / usable_cpus(),
    )
    algorithm = plan.algorithm
    if algorithm is None:
        return facts
    needs = algorithm.needs
    by_turn = said.environment.used and algorithm.advantage.by_turn
    shaped = bool(algorithm.overlong) or algorithm.stop_properly is not None
    return replace(
        facts,
        rollouts=True,
        rewarded=not plan.kind.distils,
        from_total=not (by_turn or shaped or "reward_weights" in needs),
        compares_group="group" in needs,
        full_reward=_full_reward(said.reward) if not said.environment.used else None,
        frozen_steps=said.critic.freeze_actor_steps,
        temperature=said.rollout.temperature,
        max_new_tokens=said.rollout.max_new_tokens,
    )


def unknown_share(tokenizer: Tokenizer, items: Iterable[object]) -> float:
    """Share of unknown tokens (the tokenizer's unk token) in the first prompts or samples."""
    unknown: int | None = tokenizer.unk_token_id
    tokens = [token for item in islice(items, LOOKED_AT) for token in _tokens(item)]
    return tokens.count(unknown) / len(tokens) if unknown is not None and tokens else 0.0


def image_facts(tokenizer: object, items: Sequence[object]) -> dict[str, float]:
    """Facts about the images of the training data; none without any."""
    rows = image_rows(tokenizer)
    if not rows or not items:
        return {}
    of_lines = [
        (sum(t >= FIRST_ROW for t in tokens), len(tokens)) for tokens in map(_tokens, items)
    ]
    return {
        "image_rows": sum(count for count, _ in of_lines) / len(of_lines),
        "rows_of_image": sum(map(len, rows.all)) / len(rows),
        "image_share": max(count / max(1, length) for count, length in of_lines),
    }


def content_of(item: Any) -> int:
    """A hash that is equal for equal items. It reads every token: many prompts begin and end with
    the same instructions, and the rows of each image have ids of their own."""
    if isinstance(item, Task):
        rest = "" if item.environment == "single_turn" else repr(item.columns)
        return hash((rest, item.prompt_ids))
    samples = item.samples if isinstance(item, Comparison) else (item,)
    return hash(tuple(tuple(s.token_ids) for s in samples))


def _tokens(item: Any) -> Sequence[int]:
    if isinstance(item, Task):
        return item.prompt_ids
    return (item.samples[0] if isinstance(item, Comparison) else item).token_ids


def _full_reward(section: RewardSection) -> float | None:
    """The total reward if every function returns 1; None for models and servers, which have no
    maximum."""
    if not section.functions or section.models or section.remote:
        return None
    return sum(w for w in section.weights or [1.0] * len(section.functions) if w > 0)
