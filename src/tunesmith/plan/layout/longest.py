"""The longest sequence with which a run fits its devices, in any layout that its settings allow."""

from __future__ import annotations

from bisect import bisect_right

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.plan.cost.memory import LEAST_TOKENS
from tunesmith.plan.derive.savings import fits_somehow
from tunesmith.plan.kind import sequences_of
from tunesmith.plan.layout.layouts import layouts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.replacing import replace
from tunesmith.plan.rules.checks import contradictions

MOST = 1 << 24
FINENESS = 64
"""The longest length is found up to this fraction of it."""


def longest_that_fits(plan: AnyPlan, most: int = MOST) -> int | None:
    """Tokens of the longest sample, at most ``most``, with which some layout fits; None if not even
    the shortest does.

    Args:
        plan: a run whose processes and memory are open (``reopened``).
    """
    able = [each for each in layouts(plan) if not any(contradictions(each.of(plan), settled=False))]

    def lacks_memory(tokens: int) -> bool:
        there = replace(plan, training=replace(plan.training, longest=tokens))
        return not any(fits_somehow(layout.of(there)) for layout in able)

    longest = LEAST_TOKENS
    if longest > most or lacks_memory(longest):
        return None
    while 2 * longest <= most and not lacks_memory(2 * longest):
        longest *= 2
    step = max(LEAST_TOKENS, longest // FINENESS)
    lengths = range(longest, min(2 * longest, most) + 1, step)
    return lengths[bisect_right(lengths, False, key=lacks_memory) - 1]


def length_setting(config: RunConfig, tokens: int, prompt: int) -> tuple[str, int]:
    """The key and value with which the longest sample of a run that trains has ``tokens`` tokens;
    a pair has them in two sequences.

    Args:
        prompt: tokens of the longest prompt, if the run samples.
    """
    match config:
        case RLConfig(environment=environment) if environment.used:
            return "environment.max_tokens", tokens
        case RunConfig(sampling_settings=sampling) if sampling is not None:
            return f"{sampling.table}.max_new_tokens", tokens - prompt
        case _:
            return "data.max_tokens", tokens // sequences_of(config)
